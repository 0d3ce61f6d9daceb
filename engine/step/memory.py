"""How many KV blocks fit on a GPU, measured before the pool exists: the largest step is run and its graphs are captured
over a pool of one block, and the pool gets what is left.

This process takes at most its share of the card, and never what is not free: others on the same card keep what they
have. What a graph takes beside torch's memory is the driver's, and is read off the card's free memory: engines that
start on one card take turns (`device.card_turn`).
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
from engine.step.warm_up import StepRows

S = TypeVar("S")

RESERVED_BYTES = 256 << 20  # bytes left free: what the driver takes later, and what does not fit between allocations
EXTRA_BLOCKS = 2  # of a pool, see KVPool


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one device. total, others: the card, and what other processes and the driver hold; share: of total that
    this process may take; weights: with all that the engine keeps beside them; activations: of the largest step, at its
    peak; graphs: captured ones.
    """

    total: int
    other_processes: int
    share: float
    weights: int
    activations: int
    graphs: int

    @property
    def available(self) -> int:
        """For the KV pool; negative when nothing is left."""
        own = self.weights + self.activations + self.graphs
        return min(int(self.total * self.share), self.total - self.other_processes - RESERVED_BYTES) - own

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
    one: Callable[[], KVPool],
    device: torch.device,
    *,
    share: float,
    graphs: str | None,
    step: StepRows,
) -> MemoryUse:
    """What an engine takes on a CUDA device; its weights are loaded. build: a runner over a pool; one: a pool of one
    block; graphs: what to change where there is no memory for them, None where there are none; step: the largest.
    ConfigError when there is no memory for any of it.
    """
    trial = one()
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
    """Blocks of a KV pool; ConfigError that says who has the memory when there is not room for a few."""
    blocks = use.available // layout.block_bytes - EXTRA_BLOCKS
    if blocks < 2:
        left = (
            f"{format_bytes(max(0, use.available))} left"
            if use.available > 0
            else f"{format_bytes(-use.available)} too much"
        )
        raise ConfigError(
            f"no room for KV blocks ({format_bytes(layout.block_bytes)} each): {use.summary()}; {left}",
            field="gpu_memory_utilization",
        )
    return blocks


def _all_graph_bytes(runner: ModelRunner, device: torch.device) -> int:
    assert runner.decode_step is not None
    total = _graph_bytes(runner.decode_step.shapes, runner.decode_step.capture, device)
    if runner.prompt_step is not None:
        total += _graph_bytes(runner.prompt_step.shapes, runner.prompt_step.capture, device)
    if runner.draft_graphs is not None:
        total += _graph_bytes(runner.draft_graphs.shapes, runner.draft_graphs.capture, device)
    return total


def _graph_bytes(shapes: Sequence[S], capture: Callable[[Sequence[S]], None], device: torch.device) -> int:
    """Of all shapes, from the three largest: the first brings the memory that all share, each later one a little: what
    either of the next two took, as somebody who runs on this card may have taken some meanwhile.
    """
    free = [_free(device)]
    for shape in (*shapes, shapes[-1], shapes[-1])[:3]:
        capture([shape])
        free.append(_free(device))
    took = [max(0, before - after) for before, after in itertools.pairwise(free)]
    return took[0] + min(took[1:]) * (len(shapes) - 1)


def _free(device: torch.device) -> int:
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
