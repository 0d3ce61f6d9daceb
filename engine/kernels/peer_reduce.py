"""One-shot all-reduce and broadcast of short vectors over peer memory: each rank reads the other ranks' buffers.

The vector is cut into chunks, one for each program. Program i of a rank talks to program i of every other rank:

    part --copy--> own buffer[half]                 of a broadcast only on its source
    flags[i][rank] of every rank = epoch            release: my chunk is there
    wait until own flags[i][r] >= epoch for all r   acquire: all chunks are there
    part = sum of all ranks' buffers, in the order of the ranks, in float32; of a broadcast the source's buffer

The epoch of a program counts its launches on the device, so a CUDA graph replays the kernel. It is an int32 that wraps
around: 8,000 sums a second pass 2^31 after three days. The halves of the buffer alternate from launch to launch, for
all programs together: vectors of different lengths have different chunks, and a chunk must not meet one of the launch
before. A rank whose launch n + 1 has ended knows that all ranks have ended launch n, so launch n + 2 may write to the
half of launch n. All ranks add in one order, so all have the same bits. The kernel never uses NVLink multicast.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

MAX_BYTES = 512 << 10  #: Longest vector. Above it the two-phase algorithms of NCCL move fewer bytes.
MAX_PROGRAMS = 64
MAX_RANKS = 8
CHUNK = 1024  #: Smallest number of elements of a program.
#: Bytes of a rank's buffer: the halves, then flags int32 [MAX_PROGRAMS, MAX_RANKS], epochs int32 [MAX_PROGRAMS], and
#: the number of the next half, int32 [MAX_PROGRAMS], for each program.
FLAGS_OFFSET = 2 * MAX_BYTES
EPOCHS_OFFSET = FLAGS_OFFSET + 4 * MAX_PROGRAMS * MAX_RANKS
HALVES_OFFSET = EPOCHS_OFFSET + 4 * MAX_PROGRAMS
BUFFER_BYTES = HALVES_OFFSET + 4 * MAX_PROGRAMS
SOURCE = 0  #: The rank whose tensor `one_shot_broadcast` copies.


def supports(part: Tensor) -> bool:
    """Returns whether the kernel can reduce or broadcast this tensor."""
    return part.is_contiguous() and 0 < part.nbytes <= MAX_BYTES


def one_shot_all_reduce(part: Tensor, addresses: Tensor, rank: int, size: int) -> None:
    """Replaces `part` by the sum over all ranks.

    Args:
        part: contiguous, of the same shape and dtype on all ranks, at most MAX_BYTES.
        addresses: int64 [size], where this process sees the buffer of each rank. The buffers were zeroed before.
    """
    _launch(part, addresses, rank, size, source=-1)


def one_shot_broadcast(tensor: Tensor, addresses: Tensor, rank: int, size: int) -> None:
    """Replaces `tensor` by that of the rank SOURCE. The arguments are those of `one_shot_all_reduce`."""
    _launch(tensor, addresses, rank, size, source=SOURCE)


def released_flags(epochs: np.ndarray) -> np.ndarray:
    """Returns flags, int32 [MAX_PROGRAMS, MAX_RANKS], with which a rank waits for no rank in the next 2^30 launches.

    epochs: int32 [MAX_PROGRAMS], the rank's epochs.
    """
    released = (epochs.astype(np.int64) + (1 << 30)).astype(np.int32)  # wraps around as the epochs do
    flags: np.ndarray = np.repeat(released[:, None], MAX_RANKS, axis=1)
    return flags


def _launch(part: Tensor, addresses: Tensor, rank: int, size: int, *, source: int) -> None:
    count = part.numel()
    chunk = max(CHUNK, triton.next_power_of_2(triton.cdiv(count, MAX_PROGRAMS)))
    _one_shot_kernel[(triton.cdiv(count, chunk),)](
        part, addresses, count, RANK=rank, SIZE=size, SOURCE=source, CHUNK=chunk, HALF=MAX_BYTES, FLAGS=FLAGS_OFFSET,
        EPOCHS=EPOCHS_OFFSET, HALVES=HALVES_OFFSET, PROGRAMS=MAX_PROGRAMS, STRIDE=MAX_RANKS, BLOCK=min(chunk, 4096),
        num_warps=8,
    )  # fmt: skip


@triton.jit
def _one_shot_kernel(
    part, addresses, count,
    RANK: tl.constexpr, SIZE: tl.constexpr, SOURCE: tl.constexpr, CHUNK: tl.constexpr, HALF: tl.constexpr,
    FLAGS: tl.constexpr, EPOCHS: tl.constexpr, HALVES: tl.constexpr, PROGRAMS: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    dtype = part.dtype.element_ty
    own = tl.load(addresses + RANK)
    epochs = (own + EPOCHS).to(tl.pointer_type(tl.int32)) + program
    epoch = tl.load(epochs) + 1
    halves = (own + HALVES).to(tl.pointer_type(tl.int32))
    number = tl.load(halves + program)
    half = number.to(tl.int64) * HALF
    first = program * CHUNK
    if SOURCE < 0 or SOURCE == RANK:
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
        if SOURCE < 0:
            total = tl.zeros([BLOCK], dtype=tl.float32)
            for other in tl.static_range(SIZE):
                theirs = (tl.load(addresses + other) + half).to(tl.pointer_type(dtype))
                total += tl.load(theirs + at, mask=at < count, cache_modifier=".cv").to(tl.float32)
            tl.store(part + at, total.to(dtype), mask=at < count)
        elif SOURCE != RANK:
            theirs = (tl.load(addresses + SOURCE) + half).to(tl.pointer_type(dtype))
            tl.store(part + at, tl.load(theirs + at, mask=at < count, cache_modifier=".cv"), mask=at < count)
    tl.store(epochs, epoch)
    # The other programs' numbers are of use in later launches only, so each has one writer in this launch.
    programs = tl.arange(0, PROGRAMS)
    mine = programs % tl.num_programs(0) == program
    tl.store(halves + programs, tl.zeros([PROGRAMS], tl.int32) + 1 - number, mask=mine)
