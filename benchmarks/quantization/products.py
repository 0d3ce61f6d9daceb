"""Checks and times the products with quantised weights against bfloat16, for each number of rows.

    python benchmarks/quantization/products.py --out benchmarks/results/quant-products-h200.json

A time is the median of CUDA graph replays over as many weights as miss the L2 cache, and includes the kernels that
belong to the layer (norm, SiLU x mul, residual add, quantisation of inputs). Matrices are those of Llama-3.1-8B. The
ratio table divides the time of the fastest candidate by the time of the bfloat16 layer. Kernels are compiled beforehand
by several processes.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.support import report
from benchmarks.support.limits import device_seconds
from engine.kernels.gemm import MAX_SKINNY_ROWS, MIN_SWIGLU_ROWS, gemm_swiglu, gemv, skinny_gemm
from engine.kernels.norm import rms_norm, silu_mul
from engine.kernels.quantized.device_weight import DeviceWeight, prepare
from engine.kernels.quantized.linear import quantized_linear
from engine.kernels.quantized.product import Tile
from engine.kernels.quantized.tables import Method
from engine.quantization.weight import QuantizedWeight, pack_nibbles

EPS = 1e-5
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
SHAPES = ((6144, 4096, "norm"), (4096, 4096, "residual"), (28672, 4096, "gated"), (4096, 14336, "residual"))
KINDS = ("int4 zeros", "fp8", "int4", "fp8 blocks", "int8")

TILES4: dict[int, list[dict[str, Any]]] = {
    8: [
        {"rows": 8, "outputs": 16, "words": 128, "warps": 4, "stages": 2, "split": True},
        {"rows": 8, "outputs": 16, "words": 128, "warps": 4, "stages": 2, "split": True, "lines": 16},
        {"rows": 8, "outputs": 16, "words": 128, "warps": 4, "stages": 2, "split": True, "sums": True},
        {"rows": 8, "outputs": 32, "words": 128, "warps": 4, "stages": 2, "split": True},
        {"rows": 8, "outputs": 64, "words": 128, "warps": 4, "stages": 3, "lines": 16},
        {"rows": 8, "outputs": 64, "words": 128, "warps": 4, "stages": 3, "splits": 4},
    ],
    16: [
        {"rows": 16, "outputs": 16, "words": 128, "warps": 4, "stages": 2, "split": True},
        {"rows": 16, "outputs": 64, "words": 128, "warps": 4, "stages": 3},
        {"rows": 16, "outputs": 64, "words": 128, "warps": 4, "stages": 2, "splits": 4},
        {"rows": 16, "outputs": 16, "words": 128, "warps": 4, "stages": 2, "split": True, "sums": True},
        {"rows": 16, "outputs": 64, "words": 64, "warps": 4, "stages": 3, "splits": 4, "sums": True},
    ],
    32: [
        {"rows": 32, "outputs": 64, "words": 128, "warps": 4, "stages": 3},
        {"rows": 32, "outputs": 64, "words": 64, "warps": 4, "stages": 3, "splits": 4},
        {"rows": 32, "outputs": 64, "words": 64, "warps": 4, "stages": 3, "splits": 4, "sums": True},
    ],
    64: [
        {"rows": 64, "outputs": 64, "words": 64, "warps": 4, "stages": 3},
        {"rows": 64, "outputs": 64, "words": 64, "warps": 4, "stages": 3, "splits": 4},
        {"rows": 64, "outputs": 64, "words": 64, "warps": 4, "stages": 3, "splits": 4, "sums": True},
        {"rows": 64, "outputs": 64, "words": 64, "warps": 4, "stages": 3, "sums": True},
    ],
    128: [
        {"rows": 64, "outputs": 64, "words": 64, "warps": 4, "stages": 3, "splits": 2},
        {"rows": 128, "outputs": 64, "words": 32, "warps": 4, "stages": 3, "splits": 4},
        {"rows": 128, "outputs": 64, "words": 64, "warps": 4, "stages": 2, "splits": 4, "sums": True},
        {"rows": 64, "outputs": 64, "words": 64, "warps": 4, "stages": 3, "sums": True},
    ],
    256: [
        {"rows": 128, "outputs": 64, "words": 32, "warps": 4, "stages": 3, "splits": 2},
        {"rows": 128, "outputs": 128, "words": 32, "warps": 8, "stages": 2, "scaled": True, "splits": 2},
    ],
    1 << 30: [{"rows": 128, "outputs": 128, "words": 32, "warps": 8, "stages": 2, "scaled": True}],
}
TILES8: dict[int, list[dict[str, Any]]] = {
    8: [
        {"rows": 8, "outputs": 16, "words": 128, "warps": 4, "stages": 4, "split": True},
        {"rows": 8, "outputs": 16, "words": 128, "warps": 4, "stages": 4, "split": True, "lines": 16},
        {"rows": 8, "outputs": 16, "words": 128, "warps": 8, "stages": 2, "split": True, "lines": 16},
        {"rows": 8, "outputs": 64, "words": 128, "warps": 4, "stages": 5, "splits": 4},
    ],
    16: [
        {"rows": 16, "outputs": 32, "words": 128, "warps": 4, "stages": 3, "split": True},
        {"rows": 16, "outputs": 32, "words": 128, "warps": 4, "stages": 3, "split": True, "lines": 16},
        {"rows": 16, "outputs": 64, "words": 128, "warps": 4, "stages": 4, "splits": 4},
    ],
    32: [
        {"rows": 32, "outputs": 64, "words": 128, "warps": 4, "stages": 4, "splits": 2},
        {"rows": 32, "outputs": 64, "words": 128, "warps": 4, "stages": 4, "splits": 4},
    ],
    64: [
        {"rows": 64, "outputs": 64, "words": 128, "warps": 4, "stages": 3, "splits": 2},
        {"rows": 64, "outputs": 64, "words": 128, "warps": 4, "stages": 3, "splits": 4},
    ],
    128: [
        {"rows": 128, "outputs": 64, "words": 128, "warps": 4, "stages": 3, "splits": 4},
        {"rows": 64, "outputs": 64, "words": 128, "warps": 4, "stages": 3, "splits": 2},
    ],
    1 << 30: [{"rows": 128, "outputs": 128, "words": 128, "warps": 8, "stages": 3}],
}


def candidates(kind: str, rows: int) -> list[Method]:
    """Returns the ways that are timed for this number of rows."""
    tiles = TILES4 if kind.startswith("int4") else TILES8
    found: list[Method] = [Tile(**sizes) for sizes in next(t for most, t in tiles.items() if rows <= most)]
    if rows >= 8192:
        found = []
    if kind in ("fp8", "fp8 blocks", "int8"):
        found += ["wide"] if rows >= 32 else []
    return found + (["scratch"] if rows >= 128 else [])


def weight_of(kind: str, n: int, k: int, device: torch.device) -> DeviceWeight:
    """Returns random numbers with random scales, which are powers of two times a few bits."""
    blocks, groups = kind == "fp8 blocks", k // 128 if kind.startswith("int4") or kind == "fp8 blocks" else 1
    scales = (torch.rand(n // 128 if blocks else n, groups, device=device) + 0.5).half().float() / 1024
    activations: Any = {"fp8": "token", "fp8 blocks": "group", "int8": "token"}.get(kind, "none")
    if kind.startswith("int4"):
        numbers = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
        zeros = torch.randint(4, 12, (n, groups), dtype=torch.uint8, device=device) if "zeros" in kind else None
        return prepare(QuantizedWeight("int4", numbers, scales, zeros, group_size=128), torch.bfloat16)
    if kind == "int8":
        numbers = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
        weight = QuantizedWeight("int8", numbers, scales, activations=activations, group_size=k)
    else:
        numbers = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
        weight = QuantizedWeight(
            "fp8", numbers, scales * 64, block=blocks, activations=activations, group_size=128 if blocks else k
        )
    return prepare(weight, torch.bfloat16)


def layer(x: Tensor, weight: DeviceWeight, end: str, norm: Tensor, residual: Tensor, method: Method | None) -> Tensor:
    if end == "residual":
        return quantized_linear(x, weight, residual=residual, out=residual, method=method)
    return quantized_linear(x, weight, norm=norm, eps=EPS, gated=end == "gated", method=method)


def plain_layer(x: Tensor, weight: Tensor, end: str, norm: Tensor, residual: Tensor) -> Tensor:
    """The layer in bfloat16, as `FusedOps` computes it."""
    rows, gated = len(x), end == "gated"
    if end == "residual":
        if rows == 1:
            return gemv(x, weight, residual=residual, out=residual)
        if rows <= MAX_SKINNY_ROWS:
            return skinny_gemm(x, weight, residual=residual, out=residual)
        return residual.addmm_(x, weight.t())
    if rows == 1:
        return gemv(x, weight, norm=norm, eps=EPS, gated=gated)
    x = rms_norm(x, norm, EPS)
    if rows <= MAX_SKINNY_ROWS:
        return skinny_gemm(x, weight, gated=gated)
    if gated and rows >= MIN_SWIGLU_ROWS:
        return gemm_swiglu(x, weight)
    y = torch.nn.functional.linear(x, weight)
    return silu_mul(y) if gated else y


def seconds(launch: Callable[[int], object], weights: int, rows: int) -> float:
    """Returns the median seconds of a launch in a replayed graph of launches over all weights."""
    launches = weights if rows <= 512 else 2
    for i in range(2):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i)
    graph.replay()
    times = sorted(device_seconds(graph.replay, torch.device("cuda")) for _ in range(7 if rows <= 512 else 3))
    return times[len(times) // 2] / launches


class OfflineHopper:
    """A Triton driver for a machine without a GPU: kernels compile for a card with compute capability 9.0."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def compile_ahead(kind: str, n: int, k: int, end: str) -> tuple[str, float]:
    """Compiles the kernels of one layer without a GPU, into Triton's cache."""
    import triton

    from engine.kernels import pdl
    from engine.kernels.quantized.dequantize import dequantize
    from engine.kernels.quantized.product import product
    from engine.kernels.quantized.split import split_product

    began = time.perf_counter()
    triton.runtime.driver.set_active(OfflineHopper())
    run = triton.runtime.jit.JITFunction.run
    triton.runtime.jit.JITFunction.run = lambda self, *a, **o: run(self, *a, **(o | {"warmup": True}))
    try:
        pdl.supports_pdl = lambda device: True
        weight = weight_of(kind, n, k, torch.device("cpu"))
        dequantize(weight)
        done = set()
        for rows in ROWS:
            for method in candidates(kind, rows):
                if isinstance(method, Tile) and (method, rows == 1) not in done:
                    done.add((method, rows == 1))
                    x = torch.zeros(rows, k, dtype=torch.bfloat16)
                    residual = torch.zeros(rows, n, dtype=torch.bfloat16) if end == "residual" else None
                    try:
                        run_tile = split_product if method.split else product
                        run_tile(x, weight, method, residual=residual, out=residual, gated=end == "gated")
                    except Exception as error:  # reported again when it is timed
                        print(f"compile {kind} {n}x{k} {method}: {str(error)[:300]}", flush=True)
    finally:
        triton.runtime.jit.JITFunction.run = run
    return f"{kind} {n}x{k}", time.perf_counter() - began


def reference(x: Tensor, weight: QuantizedWeight, norm: Tensor | None, residual: Tensor | None, gated: bool) -> Tensor:
    x = x.double()
    if norm is not None:
        x = x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()
    y = x @ weight.dequantize(torch.float64).T
    if gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual.double()


def check(began: float, limit_s: float) -> int:
    """Compares the ways with float64 on the card, until limit_s seconds after `began`. Returns the failures."""
    device, failures = torch.device("cuda"), 0
    torch.manual_seed(1)
    for dtype in (torch.bfloat16, torch.float16):
        for kind, group, zeros in (
            ("int4", 128, True),
            ("fp8", -128, False),
            ("fp8", 0, False),
            ("int8", 0, False),
            ("int4", 128, False),
            ("int4", 32, True),
        ):
            n, k = 512, 2048
            groups = k // abs(group) if group else 1
            scales = (torch.rand(n // 128 if group < 0 else n, groups, device=device) + 0.5).half().float() / 128
            low: Any = {"int4": (0, 16, torch.uint8), "int8": (-128, 128, torch.int8)}.get(kind)
            numbers = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
            if low:
                numbers = torch.randint(low[0], low[1], (n, k), device=device).to(low[2])
            numbers = pack_nibbles(numbers) if kind == "int4" else numbers
            zero = torch.randint(low[0], low[1], (n, groups), device=device).to(low[2]) if zeros else None
            activations: Any = "none" if zeros or kind == "int4" else "group" if group < 0 else "token"
            whole = QuantizedWeight(
                kind,  # type: ignore[arg-type]
                numbers,
                scales,
                zero,
                block=group < 0,
                activations=activations,
                group_size=abs(group) or k,
            )
            weight = prepare(whole, dtype)
            norm = torch.rand(k, device=device).to(dtype) + 0.5
            for rows, method in (
                (5, Tile(8, 16, 128, 4, 2, True)),
                (60, Tile(64, 64, 64, 4, 3, splits=4)),
                (6, Tile(8, 16, 128, 4, 2, True, sums=True)),
                (60, Tile(64, 64, 64, 4, 3, splits=4, sums=True)),
                (300, Tile(128, 128, 32, 8, 2, False, True)),
                (200, "wide"),
                (50, Tile(64, 64, 64, 4, 3)),
                (200, "scratch"),
            ):
                if time.perf_counter() - began > limit_s:
                    print(f"no time for {dtype} {kind} {group} {method}", flush=True)
                    return failures
                if method == "wide" and activations == "none":
                    continue
                for end in ("gated", "residual"):
                    x = torch.randn(rows, k, device=device).to(dtype)
                    out = torch.full((rows, n // 2 if end == "gated" else n), float("nan"), device=device, dtype=dtype)
                    residual = out.normal_().clone() if end == "residual" else None
                    want = reference(x, whole, None if end == "residual" else norm, residual, end == "gated")
                    name = f"{dtype} {kind} group {group} zeros {zeros} {rows} rows {method} {end}"
                    try:
                        got = quantized_linear(
                            x,
                            weight,
                            norm=None if end == "residual" else norm,
                            eps=EPS,
                            residual=None if residual is None else out,
                            gated=end == "gated",
                            out=out,
                            method=method,  # type: ignore[arg-type]
                        )
                        torch.cuda.synchronize()
                    except Exception as error:  # Triton and ptxas raise many classes; the candidate is reported
                        failures += 1
                        print(f"FAILED {name}: {str(error)[:400]}", flush=True)
                        continue
                    error = float((got.double() - want).norm() / want.norm())
                    limit = 6e-2 if method == "wide" else 6e-3
                    if not error < limit:
                        failures += 1
                        print(f"WRONG {name}: error {error:.1e}", flush=True)
    return failures


def measure(kind: str, n: int, k: int, end: str, plain: dict[int, float]) -> dict[str, Any]:
    """Times all candidates of one matrix. Returns {rows: {method: microseconds}}."""
    device = torch.device("cuda")
    count = max(2, min(40, int(2.5e8 // (n * k // (2 if kind.startswith("int4") else 1)))))
    weights = [weight_of(kind, n, k, device) for _ in range(count)]
    norm = torch.ones(k, device=device, dtype=torch.bfloat16)
    results: dict[str, Any] = {}
    for rows in ROWS:
        x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
        residual = torch.zeros(rows, n, device=device, dtype=torch.bfloat16)
        times: dict[str, float] = {}
        for method in candidates(kind, rows):
            name = method if isinstance(method, str) else ",".join(str(int(number)) for number in method)
            try:
                launch = lambda i, m=method: layer(x, weights[i % count], end, norm, residual, m)  # noqa: B023, E731
                times[name] = round(seconds(launch, count, rows) * 1e6, 2)
            except Exception as error:  # Triton and ptxas raise many classes; the candidate is reported
                print(f"FAILED {kind} {n}x{k} {rows} rows {name}: {str(error)[:300]}", flush=True)
        results[str(rows)] = times
    return results


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--processes", type=int, default=14, help="processes that compile kernels")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--limit", type=float, default=230.0, help="seconds after which no measurement begins")
    args = parser.parse_args()
    began = time.perf_counter()
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(compile_ahead, kind, *shape) for shape in SHAPES for kind in args.kinds]
        for job in as_completed(jobs):
            try:
                job.result()
            except Exception:  # Triton and ptxas raise many classes; the candidate is reported
                traceback.print_exc()
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    table: dict[str, Any] = {}
    plain: dict[str, dict[int, float]] = {}
    for n, k, end in SHAPES:
        count = max(2, min(16, int(5e8 // (2 * n * k))))
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        norm = torch.ones(k, device="cuda", dtype=torch.bfloat16)
        for rows in ROWS:
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            residual = torch.zeros(rows, n, device="cuda", dtype=torch.bfloat16)
            launch = partial(lambda i, w, x, r: plain_layer(x, w[i % len(w)], end, norm, r), w=weights, x=x, r=residual)  # noqa: B023
            plain.setdefault(f"{n}x{k}", {})[rows] = round(seconds(launch, count, rows) * 1e6, 2)
        del weights
    print(
        "\nbf16, microseconds\n"
        + "\n".join(f"{s:<12}" + " ".join(f"{t:8.1f}" for t in r.values()) for s, r in plain.items())
    )
    print(f"bf16 after {time.perf_counter() - began:.0f} s", flush=True)
    for kind in args.kinds:
        if time.perf_counter() - began > args.limit:
            print(f"no time for {kind}")
            continue
        print(f"\n{kind}: rows " + " ".join(map(str, ROWS)), flush=True)
        for n, k, end in SHAPES:
            shape = f"{n}x{k}"
            found = table.setdefault(kind, {})[shape] = measure(kind, n, k, end, plain[shape])
            torch.cuda.empty_cache()
            for rows, times in found.items():
                best = sorted(times.items(), key=lambda item: item[1])[:3]
                shown = "  ".join(f"{name} {micros / plain[shape][int(rows)]:.2f}" for name, micros in best)
                print(f"    {rows:>4}: {shown}")
            ratios = [min(t.values(), default=9e9) / plain[shape][int(r)] for r, t in found.items()]
            print(f"{shape:<12}" + " ".join(f"{ratio:5.2f}" for ratio in ratios), flush=True)
            report.write(args.out, "quant-products", {}, "torch", "triton", plain=plain, candidates=table)
    failures = check(began, args.limit)
    print(f"{time.perf_counter() - began:.0f} s in total, {failures} failures")
    metrics = {"failures": failures, "took_s": round(time.perf_counter() - began)}
    report.write(args.out, "quant-products", metrics, "torch", "triton", plain=plain, candidates=table)


if __name__ == "__main__":
    main()
