"""Compares the kernels of adapters with float64 on a GPU, and times their tiles at the sites of an 8B model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.adapters.rows import max_tiles
from engine.adapters.triton_rows import pack_rows, tile_of, tiles_start
from engine.kernels.adapters import products
from engine.kernels.adapters.products import ShrinkShape, SlotWeights

HIDDEN, INNER, RANK, SLOTS = 4096, 14336, 16, 16
#: Inputs, outputs of the parts, norm before, SiLU x mul after.
SITES: dict[str, tuple[int, tuple[int, ...], bool, bool]] = {
    "qkv": (HIDDEN, (4096, 1024, 1024), True, False),
    "out": (HIDDEN, (HIDDEN,), False, False),
    "gate_up": (HIDDEN, (INNER, INNER), True, True),
    "down": (INNER, (HIDDEN,), False, False),
}
SHRINKS = ((16, 256, 2, 16), (16, 512, 2, 8), (16, 1024, 2, 4), (16, 1024, 2, 16), (32, 256, 2, 16), (32, 512, 2, 8))
PREFILL_SHRINKS = ((64, 64, 4, 8), (64, 128, 3, 8), (64, 128, 3, 16), (32, 128, 3, 8), (32, 128, 4, 8), (16, 128, 3, 8))
BLOCKS = (32, 64, 128, 256)
ROWS = ((1, 1), (16, 16), (64, 16), (2048, 1))
REPLAYS = 20


class Case:
    """One site with random weights in all slots."""

    def __init__(self, site: str, rows: int, used: int, device: torch.device) -> None:
        self.k, self.outputs, self.norms, self.gated = SITES[site]
        self.rows, self.tile, parts = rows, tile_of(rows), len(self.outputs)
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        sizes = [parts * RANK * self.k, *(RANK * outputs for outputs in self.outputs)]
        places = list(itertools.accumulate(sizes, initial=0))
        numbers = torch.randn(SLOTS, places[-1], **options) * 0.05
        entry = torch.tensor([0, *[RANK] * parts, *[0] * (3 - parts), *places[1:-1], *[0] * (4 - parts)])
        scales = torch.rand(SLOTS, 1, 3, device=device) + 0.5
        self.weights = SlotWeights(numbers, entry.to(device).expand(SLOTS, 1, 8).contiguous(), scales, RANK)
        self.places = places
        self.slots = np.arange(rows) * 7 % used
        if rows > 4:
            self.slots[3] = -1
        packed = torch.from_numpy(pack_rows(self.slots, rows, self.tile, SLOTS)).to(device)
        self.order, self.tiles = packed[:rows], packed[tiles_start(rows) :]
        assert len(self.tiles) == 3 * max_tiles(rows, self.tile, SLOTS)
        self.x = torch.randn(rows, self.k, **options)
        self.norm = torch.rand(self.k, **options) + 0.5 if self.norms else None
        self.base = torch.randn(rows, sum(self.outputs), **options)

    def shrink(self, shape: tuple[int, int, int, int] | None = None) -> tuple[Tensor, Tensor | None]:
        place: dict[str, Any] = {"norm": self.norm, "site": 0, "parts": len(self.outputs), "tile": self.tile}
        return products.shrink(
            self.x, self.weights, self.order, self.tiles, shape=shape and ShrinkShape(*shape), **place
        )

    def expand(self, states: tuple[Tensor, Tensor | None], out: Tensor, block: int | None = None) -> None:
        place: dict[str, Any] = {"site": 0, "tile": self.tile, "outputs": self.outputs, "gated": self.gated}
        place |= {"squares": states[1], "eps": 1e-5, "inputs": self.k, "block": block}
        base = self.base if self.gated else out
        products.expand(states[0], self.weights, base, out, self.order, self.tiles, **place)

    def output(self) -> Tensor:
        return self.base[:, : self.outputs[0]].clone() if self.gated else self.base.clone()

    def reference(self) -> Tensor:
        """Returns the result in float64."""
        x = self.x.double()
        if self.norm is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.norm.double()
        out = self.base.double()
        for slot in range(SLOTS):
            rows = torch.from_numpy(np.flatnonzero(self.slots == slot)).to(x.device)
            numbers = self.weights.numbers[slot].double()
            a = numbers[: self.places[1]].view(-1, self.k)
            column = 0
            for part, outputs in enumerate(self.outputs):
                b = numbers[self.places[1 + part] : self.places[2 + part]].view(outputs, RANK)
                states = x[rows] @ a[part * RANK : (part + 1) * RANK].T
                out[rows, column : column + outputs] += states @ b.T * self.weights.scales[slot, 0, part].double()
                column += outputs
        if self.gated:
            gate, up = out.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate) * up
        return out


def replay_us(work: Callable[[], object], device: torch.device) -> float:
    """Returns microseconds of the work in a CUDA graph, the best of three."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(REPLAYS):
                work()
    times = []
    for _ in range(4):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1e3 / REPLAYS)
    return min(times[1:])


def check_and_time(device: torch.device, rows: Sequence[tuple[int, int]] = ROWS) -> None:
    """Prints the error of each site, and the times of the candidates, the selected shape first."""
    for count, used in rows:
        for site in SITES:
            case = Case(site, count, used, device)
            out, expected = case.output(), case.reference()
            case.expand(case.shrink(), out)
            error = float((out.double() - expected).norm() / expected.norm())
            assert error < 0.01, f"{site} of {count} rows: relative error {error}"
            if device.type != "cuda":
                print(f"{site:8}{count:5} rows  error {error:.1e}", flush=True)
                continue
            shapes = PREFILL_SHRINKS if case.tile > 16 else SHRINKS
            shrinks = [(shape, _time(case, shape, device)) for shape in (None, *shapes)]
            states = case.shrink()
            expands = [(block, _time_expand(case, states, out, block, device)) for block in (None, *BLOCKS)]
            listed = "  ".join(f"{shape or 'now'}:{us:.1f}" for shape, us in shrinks)
            blocks = "  ".join(f"{block or 'now'}:{us:.1f}" for block, us in expands)
            print(
                f"{site:8}{count:5} rows  error {error:.1e}\n    shrink us  {listed}\n    expand us  {blocks}",
                flush=True,
            )


def _time(case: Case, shape: tuple[int, int, int, int] | None, device: torch.device) -> float:
    try:
        return replay_us(lambda: case.shrink(shape), device)
    except Exception as error:  # a tile that is too large for this card
        print(f"    {shape}: {str(error).splitlines()[0]}")
        return float("inf")


def _time_expand(
    case: Case, states: tuple[Tensor, Tensor | None], out: Tensor, block: int | None, device: torch.device
) -> float:
    return replay_us(lambda: case.expand(states, out, block), device)
