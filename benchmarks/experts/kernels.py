"""Checks and times the kernels of a mixture of experts on a GPU, with the candidates for their tiles.

    python benchmarks/experts/kernels.py --shape qwen3 --rows 1 64

One row of the table is one candidate: microseconds of a layer (median over replays of a CUDA graph that goes through
several layers, so that no weight comes from the L2 cache), the bytes of the experts it reads over this time, and the
part of the measured copy rate. `gate_up` and `down` of few rows are timed together. The error is that of random inputs
against float64.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.support.limits import copy_seconds
from engine.kernels.experts import grouped, layer, vector
from engine.kernels.experts.routing import RoutingRule, norm_and_route, route, sort_copies
from engine.kernels.experts.weight import ExpertWeight, fp8_weight, int4_weight, mxfp4_weight, plain_weight
from engine.kernels.gemm import gemv
from engine.kernels.norm import rms_norm
from tests.rigs.engine.experts import ExpertCase
from tests.rigs.engine.paged import error

DEVICE = torch.device("cuda")
#: Experts, experts of a token, hidden size, intermediate size of an expert, activation of gpt-oss.
SHAPES = {"qwen3": (128, 8, 2048, 768, False), "gpt-oss": (32, 4, 2880, 2880, True)}
REPLAYS = 12


def random_expert_weight(kind: str, experts: int, outputs: int, inputs: int) -> ExpertWeight:
    if kind == "mxfp4":
        numbers = torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8, device=DEVICE)
        return mxfp4_weight(numbers, torch.randint(118, 122, (experts, outputs, inputs // 32), device=DEVICE).byte())
    if kind == "int4":
        numbers = torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8, device=DEVICE)
        scales = torch.full((experts, outputs, inputs // 128), 2.0**-8, device=DEVICE)
        return int4_weight(numbers, scales, torch.full_like(scales, 8, dtype=torch.uint8))
    weight = torch.randn(experts, outputs, inputs, device=DEVICE, dtype=torch.bfloat16) / inputs**0.5
    if kind == "fp8":
        return fp8_weight(
            (weight * 64).to(torch.float8_e4m3fn), torch.full((experts, outputs, 1), 1 / 64, device=DEVICE)
        )
    return plain_weight(weight)


def random_layer(shape: str, kind: str) -> layer.ExpertLayer:
    experts, top_k, hidden, inner, gpt_oss = SHAPES[shape]
    bias = torch.zeros(experts, 2 * inner, device=DEVICE, dtype=torch.bfloat16) if gpt_oss else None
    return layer.ExpertLayer(
        router=torch.randn(experts, hidden, device=DEVICE, dtype=torch.bfloat16) / hidden**0.5,
        rule=RoutingRule(top_k),
        gate_up=random_expert_weight(kind, experts, 2 * inner, hidden),
        down=random_expert_weight(kind, experts, hidden, inner),
        router_bias=torch.zeros(experts, device=DEVICE, dtype=torch.bfloat16) if gpt_oss else None,
        gate_up_bias=bias,
        down_bias=torch.zeros(experts, hidden, device=DEVICE, dtype=torch.bfloat16) if gpt_oss else None,
        gpt_oss=gpt_oss,
    )


def graph_seconds(runs: Sequence[Callable[[], object]]) -> float:
    """Returns the median seconds of one of the runs, captured one after the other."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times[2:]) / len(runs)


def measure_gemv(rate: float) -> None:
    """Prints the time of the attention's products of one row, for some shapes of a program of `gemv`."""
    for n, k, normed in ((5120, 2048, True), (2048, 4096, False), (5120, 2880, True), (2880, 4096, False)):
        weights = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) for _ in range(8)]
        x, out = (torch.randn(1, size, device=DEVICE, dtype=torch.bfloat16) for size in (k, n))
        options: dict[str, Any] = {"norm": x[0]} if normed else {"residual": out}
        blocks = (2048,) if k % 2048 == 0 else (2048, 1024)
        for shape, block in itertools.product(((2, 8), (2, 4), (4, 4), (4, 8), (8, 8), (1, 4)), blocks):
            runs = [lambda w=w, a=shape, b=block: gemv(x, w, out=out, shape=a, block=b, **options) for w in weights]  # noqa: B023
            seconds = graph_seconds(runs)
            print(
                f"gemv {n}x{k} {seconds * 1e6:6.2f} us {2 * n * k / seconds / rate:6.1%} rows, warps {shape} {block}",
                flush=True,
            )


def touched_bytes(layers: Sequence[layer.ExpertLayer], normed: Sequence[Tensor]) -> float:
    """Returns the mean bytes of the experts that a layer reads."""
    total = 0.0
    for one, x in zip(layers, normed, strict=True):
        chosen = route(layer.router_logits(x, one.router, one.router_bias), one.rule)[1].unique().numel()
        total += (one.gate_up.nbytes + one.down.nbytes) * chosen / len(one.router)
    return total / len(layers)


#: Outputs and warps of a program, of gate and up and of down. The first pair is varied in either place.
VECTOR_TILES = {
    "mxfp4": [(8, 4), (4, 4), (8, 8), (16, 8), (4, 2), (4, 1)],
    "other": [(4, 4), (2, 4), (8, 4), (4, 8), (8, 8), (2, 2), (4, 2)],
}


def grouped_candidates(kind: str, block: int) -> Iterator[tuple[grouped.Tile, grouped.Tile]]:
    if kind in ("mxfp4", "int4"):
        warps = 4 if block <= 32 else 8
        tiles = [(block, 64, 128, 4, warps), (block, 128, 128, 4, 8), (block, 128, 128, 3, 4), (block, 64, 128, 2, 4)]
    elif block <= 32:
        tiles = [(block, 64, 128, 4, 4)]
    else:
        tiles = [(block, 128, 64, 3, 8), (block, 64, 64, 4, 4)]
    yield from ((tile, tile) for tile in tiles)
    if kind not in ("mxfp4", "int4"):
        yield tiles[0], (block, 128, 128 if block <= 32 else 64, 3 if block <= 32 else 4, 4 if block <= 32 else 8)


def check(kind: str) -> None:
    """Prints errors of bf16 layers of odd sizes in both paths."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    sizes = {"experts": 12, "hidden": 288, "inner": 160}
    for gpt_oss in (False, True):
        options = {"dtype": torch.bfloat16, "gpt_oss": gpt_oss, **sizes}
        case = ExpertCase.make(kind, RoutingRule(3), DEVICE, generator, **options)
        shown = []
        for tokens, few in ((1, 99), (5, 99), (5, 0), (40, 0), (300, 0)):
            x = torch.randn(tokens, sizes["hidden"], generator=generator, device=DEVICE).bfloat16()
            got = layer.mixture(x, case.layer, case.norm, case.eps, max_few=few)
            again = layer.mixture(x, case.layer, case.norm, case.eps, max_few=few)
            normed = rms_norm(x, case.norm, case.eps)
            rows = torch.randperm(tokens, device=DEVICE)[:12]
            repeats = "" if torch.equal(got, again) else " DIFFERS"
            shown.append(f"{error(got[rows], expected_of(case, x[rows], normed[rows])):.1e}{repeats}")
        print(
            f"error {kind:<9} gpt_oss {gpt_oss!s:<5} rows 1, 5 few | 5, 40, 300 grouped: {' '.join(shown)}", flush=True
        )


def expected_of(case: ExpertCase, x: Tensor, normed: Tensor) -> Tensor:
    """Returns the expected result with the experts that the kernels choose for rounded inputs."""
    one = case.layer
    weights, experts = route(layer.router_logits(normed, one.router, one.router_bias), one.rule)
    out = torch.zeros(len(x), x.shape[1], dtype=torch.float64, device=DEVICE)
    for t, exact in enumerate(case.normed(x)):
        for weight, expert in zip(weights[t].double(), experts[t].tolist(), strict=True):
            out[t] += weight * case.expert(expert, exact)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--kinds", nargs="+", default=["plain", "fp8", "int4", "mxfp4"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 64, 256, 2048])
    parser.add_argument("--seconds", type=float, default=200.0, help="candidates begin only within this time")
    parser.add_argument("--gemv", action="store_true", help="measure products of one row, too")
    parser.add_argument("--check", action="store_true", help="print errors first")
    args = parser.parse_args()
    began = time.perf_counter()
    if args.check:
        for kind in (*args.kinds, "fp8_block"):
            check(kind)
        print(f"checked after {time.perf_counter() - began:.0f} s", flush=True)
    rate = 2 * (2 << 30) / copy_seconds(2 << 30, DEVICE)
    print(f"copy {rate / 1e9:.0f} GB/s", flush=True)
    if args.gemv:
        measure_gemv(rate)
    for shape, kind in itertools.product(args.shape, args.kinds):
        if (kind == "mxfp4") != (shape == "gpt-oss"):
            continue
        measure(shape, kind, args.rows, rate, began + args.seconds)
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - began:.0f} s in total")


def measure(shape: str, kind: str, all_rows: Sequence[int], rate: float, until: float) -> None:
    layers = [random_layer(shape, kind) for _ in range(4)]
    for rows in all_rows:
        measure_rows(shape, kind, layers, rows, rate, until)


def measure_rows(
    shape: str, kind: str, layers: Sequence[layer.ExpertLayer], rows: int, rate: float, until: float
) -> None:
    """Prints a line for each candidate."""
    _, top_k, hidden, _, _ = SHAPES[shape]
    xs = [torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16) for _ in layers]
    nbytes = touched_bytes(layers, xs)
    norm = torch.ones(hidden, device=DEVICE, dtype=torch.bfloat16)

    def show(name: str, run: Callable[[Tensor, layer.ExpertLayer], object]) -> None:
        if time.perf_counter() > until:
            return
        runs = [lambda x=x, one=one: run(x, one) for x, one in zip(xs, layers, strict=True)] * (2 if rows < 256 else 1)
        try:
            seconds = graph_seconds(runs)
        except Exception as problem:  # Triton and ptxas raise many classes; the candidate is reported
            print(f"{shape} {kind} {rows:5d} {name}: {str(problem).splitlines()[0][:90]}", flush=True)
            return
        print(f"{shape} {kind} {rows:5d} {seconds * 1e6:8.1f} us {nbytes / seconds / rate:6.1%}  {name}", flush=True)

    show("layer as chosen", lambda x, one: layer.mixture(x, one, norm, 1e-6, residual=x))
    shared = {"gpt_oss": layers[0].gpt_oss, "native": True}
    logits = {id(one): layer.router_logits(x, one.router, one.router_bias) for x, one in zip(xs, layers, strict=True)}
    routed = {id(one): route(logits[id(one)], one.rule) for one in layers}
    show("route", lambda x, one: route(logits[id(one)], one.rule))
    few: list[Any] = []
    if rows * top_k <= 32:
        for shape_of_program in ((2, 4), (2, 8), (1, 4), (4, 8)):
            show(
                f"norm and route {shape_of_program}",
                lambda x, one, s=shape_of_program: norm_and_route(
                    x, norm, 1e-6, one.router, one.rule, bias=one.router_bias, shape=s
                ),
            )
        first, *others = VECTOR_TILES.get(kind, VECTOR_TILES["other"])
        few = [(first, first), *((tile, first) for tile in others), *((first, tile) for tile in others)]
    for tiles in few:
        show(
            f"vector {tiles}",
            lambda x, one, tiles=tiles: vector.vector_rows(
                x, *routed[id(one)], one.gate_up, one.down, gate_up_bias=one.gate_up_bias, down_bias=one.down_bias,
                residual=x, tiles=tiles, **shared,
            ),
        )  # fmt: skip
    mean = grouped.block_rows(rows * top_k, len(layers[0].router), layers[0].gate_up.kind)
    for block in sorted({mean, 16} if rows <= 64 else {mean, max(mean // 2, 16)}):
        copies = {key: sort_copies(chosen[1], len(layers[0].router), block) for key, chosen in routed.items()}
        for pair in grouped_candidates(kind, block):
            show(
                f"grouped {pair[0]} {pair[1][1:]}",
                lambda x, one, pair=pair, copies=copies: grouped.many_rows(
                    x, *routed[id(one)], copies[id(one)], one.gate_up, one.down, residual=x, tiles=pair,
                    gate_up_bias=one.gate_up_bias, down_bias=one.down_bias, **shared,
                ),
            )  # fmt: skip
    show("route and sort", lambda x, one: sort_copies(route(logits[id(one)], one.rule)[1], len(one.router), mean))


if __name__ == "__main__":
    main()
