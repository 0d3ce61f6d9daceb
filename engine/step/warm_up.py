"""Before the first request: the steps that a GPU runs, and how many KV blocks fit beside them.

One step of each kind compiles kernels and builds cuDNN plans, so that no request waits for that. Kernels are compiled
once for the process; cuDNN plans are built once for each thread. The largest step measures memory.

    +----------+-------------+--------+---------------------+---------------------------+
    | weights  | activations | graphs |      KV blocks      |  other processes, driver  |
    +----------+-------------+--------+---------------------+---------------------------+
    |<------- gpu_memory_utilization x total -------------->|

The largest step is run and its graphs are captured over a pool of one block. The KV pool gets the rest of this process'
share of the GPU, but never memory that is not free: other processes keep theirs. Part of a graph's memory belongs to
the driver and shows only in the free memory of the GPU, so engines that start on one GPU measure one after the other
(`device.gpu_start_lock`).
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from common.errors import ConfigError
from common.kv_layout import KVLayout
from engine.device import format_bytes, require_memory
from engine.kv.kv_pool import KVPool
from engine.step.runner import ModelRunner
from engine.step.step_tensors import StepRows

S = TypeVar("S")
MAX_PLAN_TOKENS = 16384  # Longest prompt with plans: one for each chunk length and prefix length
PLAN_QUANTUM = 1024  # Lengths with plans are multiples of this
MAX_EQUAL_PROMPTS = 8  # 2, 4, ... up to this many whole prompts of one length have a plan.
RESERVED_BYTES = 256 << 20  # Stays free for later allocations of the driver and for fragmentation
EXTRA_BLOCKS = 2  # Blocks of a pool that hold no sequence, see KVPool


def largest_step(most_tokens: int, max_seqs: int, max_len: int, drafts: int = 0, max_drafts: int = 0) -> StepRows:
    """Returns the step of `most_tokens` with the largest activations: all slots sample, and most have `drafts` drafts.

    The remaining tokens are a chunk that ends the longest sequence, of `max_len`, and then prompts in the other slots.
    """
    rows, drafting = min(max_seqs, most_tokens), 0
    if 0 < drafts < max_len:
        drafting = min(max_drafts // drafts, rows - 1, (most_tokens - rows) // drafts)
    spare = most_tokens - rows - drafting * drafts
    chunk = min(spare + 1, max_len)
    spare -= chunk - 1
    others: list[tuple[int, int]] = []
    for _ in range(rows - 1 - drafting):
        more = min(spare, max_len - 1)
        others.append((0, 1 + more))
        spare -= more
    return [(0, 1 + drafts)] * drafting + others[::-1] + [(max_len - chunk, chunk)]


def kernel_steps(most_tokens: int, max_seqs: int, max_len: int, drafts: int = 0) -> list[StepRows]:
    """Returns one step of each kind within the limits; running them compiles all kernels."""
    steps: list[StepRows] = [
        [(0, 1), (5, 1)],
        # Rows with drafts and ends of prompts, one step for each padded query length.
        *([(0, count), (7, count)] for count in {2, 3, 5, 1 + drafts}),
        # Short and long chunks beside a row that decodes.
        [(0, 1), (0, 16), (16, 40)],
        [(0, 1), (0, 1040), (48, 900)],
        [(0, 1), (1040, 1040)],
        [(0, 600)] * 4,
        # Prompts with separate attention for their ends, by the padded number of prompts; two and four are above.
        [(0, 1040)],
        [(0, 140)] * 8,
    ]
    return _within_limits(steps, most_tokens, max_seqs, max_len)


def cudnn_plan_steps(
    most_tokens: int, shared_tokens: int, max_seqs: int, max_len: int, last_tokens: int = 0
) -> list[StepRows]:
    """Returns the steps within the limits that build all cuDNN plans when they run.

    They are prompts of up to `most_tokens`, chunks of longer prompts, equal prompts of together up to `shared_tokens`,
    and last chunks of up to `last_tokens` of prompts that are handed off.
    """
    lengths = range(PLAN_QUANTUM, min(most_tokens, MAX_PLAN_TOKENS) + 1, PLAN_QUANTUM)
    steps: list[StepRows] = [[(0, length)] for length in lengths]
    if shared_tokens % PLAN_QUANTUM == 0:
        chunks = range(shared_tokens, MAX_PLAN_TOKENS - shared_tokens + 1, shared_tokens)
        steps += [[(start, shared_tokens)] for start in chunks]
    steps += [
        [(start, new)]
        for new in range(PLAN_QUANTUM, last_tokens + 1, PLAN_QUANTUM)
        for start in range(PLAN_QUANTUM, MAX_PLAN_TOKENS - new + 1, PLAN_QUANTUM)
    ]
    for length in lengths:
        count = 2
        while count <= MAX_EQUAL_PROMPTS and count * length <= shared_tokens:
            steps.append([(0, length)] * count)
            count *= 2
    return _within_limits(steps, most_tokens, max_seqs, max_len)


def _within_limits(steps: list[StepRows], most_tokens: int, max_seqs: int, max_len: int) -> list[StepRows]:
    return [
        rows
        for rows in steps
        if len(rows) <= max_seqs
        and sum(new for _, new in rows) <= most_tokens
        and max(start + new for start, new in rows) <= max_len
    ]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one GPU."""

    total: int
    other_processes: int  # Held by other processes and the driver
    share: float  # Part of `total` that this process may take, 0 to 1
    weights: int  # Weights and all buffers of the engine beside them
    activations: int  # Peak of the largest step
    graphs: int  # All captured graphs

    @property
    def available(self) -> int:
        """Bytes for the KV pool; negative if nothing is left."""
        used = self.weights + self.activations + self.graphs
        return min(int(self.total * self.share), self.total - self.other_processes - RESERVED_BYTES) - used

    def summary(self) -> str:
        parts = {
            "weights and buffers": self.weights,
            "activations of the largest step": self.activations,
            "CUDA graphs": self.graphs,
            "other processes and the driver": self.other_processes,
        }
        taken = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        return f"gpu_memory_utilization {self.share:g} of {format_bytes(self.total)}; {taken}"


def measure_memory(
    build: Callable[[KVPool], ModelRunner],  # Makes a runner over a pool
    trial_pool: Callable[[], KVPool],  # Makes a pool of one block, and of all recurrent states
    device: torch.device,
    *,
    share: float,
    graphs: str | None,  # Advice for the error if graphs do not fit; None if the engine captures none
    step: StepRows,  # The largest step
) -> MemoryUse:
    """Measures the memory of an engine with loaded weights on a CUDA device; ConfigError if it does not fit."""
    trial = trial_pool()
    runner = build(trial)
    torch.cuda.synchronize(device)
    weights = torch.cuda.memory_allocated(device) - trial.blocks.nbytes
    torch.cuda.reset_peak_memory_stats(device)
    with require_memory("the activations of the largest step", "gpu_memory_utilization"):
        runner.warm_up(step, 0)
        torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - trial.blocks.nbytes - weights
    captured = 0
    if graphs is not None:
        with require_memory("CUDA graphs", "max_seqs", graphs):
            captured = sum(_graph_bytes(step.shapes, step.capture, device) for step in runner.captured_steps)
    del runner, trial
    free = _free(device)
    total = torch.cuda.mem_get_info(device)[1]
    return MemoryUse(
        total=total,
        other_processes=total - free - torch.cuda.memory_reserved(device),
        share=share,
        weights=weights,
        activations=activations,
        graphs=captured,
    )


def blocks_that_fit(use: MemoryUse, layout: KVLayout) -> int:
    """Returns the number of blocks of the KV pool; ConfigError with the use of the memory if fewer than two fit."""
    blocks = use.available // layout.block_bytes - EXTRA_BLOCKS
    if blocks < 2:
        balance = f"{format_bytes(abs(use.available))} {'left' if use.available > 0 else 'too much'}"
        raise ConfigError(
            f"no room for KV blocks ({format_bytes(layout.block_bytes)} each): {use.summary()}; {balance}",
            field="gpu_memory_utilization",
        )
    return blocks


def _graph_bytes(shapes: Sequence[S], capture: Callable[[Sequence[S]], None], device: torch.device) -> int:
    """Estimates the bytes of all graphs from three captures.

    The first graph, the largest, allocates the memory that all share. Each later one adds a little: the smaller of the
    next two measurements, because another process may allocate memory during one of them.
    """
    free = [_free(device)]
    for shape in (*shapes, shapes[-1], shapes[-1])[:3]:
        capture([shape])
        free.append(_free(device))
    took = [max(0, before - after) for before, after in itertools.pairwise(free)]
    return took[0] + min(took[1:]) * (len(shapes) - 1)


def _free(device: torch.device) -> int:
    """Returns free bytes of the GPU, after this process has returned all unused memory to the driver."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
