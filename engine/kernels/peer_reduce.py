"""One-shot all-reduce of a short vector over peer memory: each rank reads the parts of all ranks and adds them itself.

The vector is cut into chunks, one for each program. Program i of a rank talks to program i of every other rank:

    part --copy--> own buffer[parity]
    flags[i][rank] of every rank = epoch            release: my chunk is there
    wait until own flags[i][r] >= epoch for all r   acquire: all chunks are there
    part = sum of all ranks' buffers, in the order of the ranks, in float32

The epoch counts launches on the device, so a CUDA graph replays the kernel. It is an int32 that wraps
around: 8,000 sums a second pass 2^31 after three days. Two halves of the buffer alternate. A rank that has reached
epoch n + 1 has read all chunks of epoch n, so a half is written again only after all have read it. All ranks add in one
order, so all have the same bits. The kernel never uses NVLink multicast.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MAX_BYTES = 512 << 10  #: Longest vector. Above it the two-phase algorithms of NCCL move fewer bytes.
MAX_PROGRAMS = 64
MAX_RANKS = 8
CHUNK = 1024  #: Smallest number of elements of a program.
#: Bytes of a rank's buffer: the halves, then flags int32 [MAX_PROGRAMS, MAX_RANKS], then epochs int32 [MAX_PROGRAMS].
FLAGS_OFFSET = 2 * MAX_BYTES
EPOCHS_OFFSET = FLAGS_OFFSET + 4 * MAX_PROGRAMS * MAX_RANKS
BUFFER_BYTES = EPOCHS_OFFSET + 4 * MAX_PROGRAMS


def supports(part: Tensor) -> bool:
    """Returns whether the kernel can reduce this tensor."""
    return part.is_contiguous() and 0 < part.nbytes <= MAX_BYTES


def one_shot_all_reduce(part: Tensor, addresses: Tensor, rank: int, size: int) -> None:
    """Replaces `part` by the sum over all ranks.

    Args:
        part: contiguous, of the same shape and dtype on all ranks, at most MAX_BYTES.
        addresses: int64 [size], where this process sees the buffer of each rank. The buffers were zeroed before.
    """
    count = part.numel()
    chunk = max(CHUNK, triton.next_power_of_2(triton.cdiv(count, MAX_PROGRAMS)))
    _one_shot_kernel[(triton.cdiv(count, chunk),)](
        part, addresses, count, RANK=rank, SIZE=size, CHUNK=chunk, HALF=MAX_BYTES, FLAGS=FLAGS_OFFSET,
        EPOCHS=EPOCHS_OFFSET, STRIDE=MAX_RANKS, BLOCK=min(chunk, 4096), num_warps=8,
    )  # fmt: skip


@triton.jit
def _one_shot_kernel(
    part, addresses, count,
    RANK: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, HALF: tl.constexpr, FLAGS: tl.constexpr,
    EPOCHS: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    dtype = part.dtype.element_ty
    own = tl.load(addresses + RANK)
    epochs = (own + EPOCHS).to(tl.pointer_type(tl.int32)) + program
    epoch = tl.load(epochs) + 1
    half = (epoch & 1).to(tl.int64) * HALF
    first = program * CHUNK
    for start in range(0, CHUNK, BLOCK):
        at = first + start + tl.arange(0, BLOCK)
        values = tl.load(part + at, mask=at < count)
        tl.store((own + half).to(tl.pointer_type(dtype)) + at, values, mask=at < count)
    tl.debug_barrier()  # all threads have written before one of them releases
    for other in tl.static_range(SIZE):
        flags = (tl.load(addresses + other) + FLAGS).to(tl.pointer_type(tl.int32)) + program * STRIDE
        tl.atomic_xchg(flags + RANK, epoch, sem="release", scope="sys")
    own_flags = (own + FLAGS).to(tl.pointer_type(tl.int32)) + program * STRIDE
    for other in tl.static_range(SIZE):
        seen = tl.atomic_add(own_flags + other, 0, sem="acquire", scope="sys")
        while epoch - seen > 0:  # the difference is right when the epochs wrap around
            seen = tl.atomic_add(own_flags + other, 0, sem="acquire", scope="sys")
    tl.debug_barrier()  # no thread reads before all flags are seen
    for start in range(0, CHUNK, BLOCK):
        at = first + start + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for other in tl.static_range(SIZE):
            theirs = (tl.load(addresses + other) + half).to(tl.pointer_type(dtype))
            total += tl.load(theirs + at, mask=at < count, cache_modifier=".cv").to(tl.float32)
        tl.store(part + at, total.to(dtype), mask=at < count)
    tl.store(epochs, epoch)
