"""How many KV blocks fit on a GPU, measured before the pool exists.

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
from typing import Any, TypeVar

import torch

from common.errors import ConfigError
from common.kv_layout import KVLayout
from engine.device import format_bytes, require_memory
from engine.kv.kv_pool import KVPool
from engine.step.runner import ModelRunner
from engine.step.warm_up import StepRows

S = TypeVar("S")

#: Stays free for later allocations of the driver and for fragmentation.
RESERVED_BYTES = 256 << 20
#: Blocks of a pool that hold no sequence, see KVPool.
EXTRA_BLOCKS = 2


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
    build: Callable[[KVPool], ModelRunner],
    trial_pool: Callable[[], KVPool],
    device: torch.device,
    *,
    share: float,
    graphs: str | None,
    step: StepRows,
) -> MemoryUse:
    """Measures the memory of an engine with loaded weights on a CUDA device.

    Args:
        build: Makes a runner over a pool.
        trial_pool: Makes a pool of one block.
        graphs: Advice for the error if graphs do not fit; None if the engine captures none.
        step: The largest step.

    Raises:
        ConfigError: The activations or the graphs do not fit.
    """
    trial = trial_pool()
    runner = build(trial)
    torch.cuda.synchronize(device)
    weights = torch.cuda.memory_allocated(device) - trial.data.nbytes
    torch.cuda.reset_peak_memory_stats(device)
    with require_memory("the activations of the largest step", "gpu_memory_utilization"):
        runner.warm_up(step, 0)
        torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - trial.data.nbytes - weights
    captured = 0
    if graphs is not None:
        with require_memory("CUDA graphs", "max_seqs", graphs):
            captured = _all_graph_bytes(runner, device)
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
    """Returns the number of blocks of the KV pool.

    Raises ConfigError with the use of the memory if fewer than two blocks fit.
    """
    blocks = use.available // layout.block_bytes - EXTRA_BLOCKS
    if blocks < 2:
        balance = f"{format_bytes(abs(use.available))} {'left' if use.available > 0 else 'too much'}"
        raise ConfigError(
            f"no room for KV blocks ({format_bytes(layout.block_bytes)} each): {use.summary()}; {balance}",
            field="gpu_memory_utilization",
        )
    return blocks


def _all_graph_bytes(runner: ModelRunner, device: torch.device) -> int:
    steps: tuple[Any, ...] = (runner.decode_step, runner.prompt_step, runner.draft_graphs)
    return sum(_graph_bytes(step.shapes, step.capture, device) for step in steps if step is not None)


def _graph_bytes(shapes: Sequence[S], capture: Callable[[Sequence[S]], None], device: torch.device) -> int:
    """Estimates the bytes of all graphs from three captures.

    The first graph, the largest, allocates the memory that all share. Each later graph adds a little. The smaller of
    the next two measurements is used for it, because another process may allocate memory during one of them.
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
