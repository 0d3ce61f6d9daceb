"""Selects the kernels of products with quantised weights on this card, and writes `engine/kernels/quantized/tables.py`.

    python benchmarks/quantization/tune.py --write engine/kernels/quantized/tables.py --out FILE

A candidate is timed where it will run: in a CUDA graph of layers of Llama-3.1-8B, of which every product but one has
the method selected so far, so that the ends of kernels and the loads before them count. Each candidate is compared with
the product over the dequantised weight first. Kernels are compiled beforehand by several processes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.quantization.products import EPS, OfflineHopper, plain_layer, weight_of
from benchmarks.support import report
from benchmarks.support.limits import device_seconds
from engine.kernels.gemm import MAX_SKINNY_ROWS
from engine.kernels.norm import rms_norm
from engine.kernels.quantized import tables
from engine.kernels.quantized.dequantize import dequantize
from engine.kernels.quantized.device_weight import DeviceWeight
from engine.kernels.quantized.linear import quantized_linear
from engine.kernels.quantized.product import Tile
from engine.kernels.quantized.split import can_split
from engine.kernels.quantized.tables import Entry, Method

#: Matrices of a layer: outputs, inputs and what follows the product. Matrices of a class have one method.
MATRICES = {
    "qkv": (6144, 4096, "norm"),
    "out": (4096, 4096, "residual"),
    "gate_up": (28672, 4096, "gated"),
    "down": (4096, 14336, "residual"),
}
CLASSES = {"many": ("gate_up",), "few": ("out", "down"), "middle": ("qkv",)}
LAYERS = 6  # More bytes than the L2 cache holds.
ROWS = {"int4 zeros": (8, 16, 32, 64, 128), "fp8": (8, 16, 32, 64), "int4": (8, 16, 32, 64, 128)}
NAMES = {"int4 zeros": "INT4_ZEROS", "int4": "INT4", "fp8": "BYTES"}
Tables = dict[str, tuple[Entry, ...]]
Layer = dict[str, DeviceWeight]


def few_rows(rows: int, *, bytes_: bool) -> list[Tile]:
    """Returns the candidates for up to 16 rows."""
    m, stages = rows, 4 if bytes_ else 2
    if bytes_:
        split = [(16, 4, 4), (16, 4, 16), (16, 4, 32), (16, 8, 32), (32, 4, 32)]
        whole = [Tile(m, 64, 128, 4, 5, lines=16), Tile(m, 64, 128, 4, 4, splits=2)]
        return [Tile(m, n, 128, warps, stages, split=True, lines=lines) for n, warps, lines in split] + whole
    found = []
    for sums in (True, False):
        split = [(16, 4, 4), (16, 4, 16), (16, 8, 16), (32, 4, 16)] if sums else [(16, 4, 16), (32, 4, 4)]
        found += [Tile(m, n, 128, warps, stages, split=True, lines=lines, sums=sums) for n, warps, lines in split]
    found += [Tile(m, 64, 128, 4, 3, lines=16, sums=True), Tile(m, 64, 128, 4, 3, lines=16)]
    if m == 16:
        found += [Tile(m, 64, 64, 4, 3, splits=4, sums=True), Tile(m, 64, 64, 4, 4, splits=2, sums=True)]
    return found


def candidates(kind: str, rows: int) -> list[Method]:
    """Returns the methods that are timed for this number of rows."""
    if rows <= 16:
        return list(few_rows(rows, bytes_=kind == "fp8"))
    if kind == "fp8":
        return ["wide", Tile(rows, 64, 128, 4, 3, splits=4), Tile(rows, 64, 128, 4, 3, splits=2)]
    found: list[Method] = []
    if rows <= 32:
        found += [Tile(32, 64, 64, 4, 3, splits=4, sums=True), Tile(32, 64, 128, 4, 3, sums=True)]
        found += [Tile(32, 64, 128, 4, 3), Tile(32, 64, 64, 4, 4, splits=2, sums=True)]
    elif rows <= 64:
        found += [Tile(64, 64, 64, 4, 3, splits=parts, sums=True) for parts in (1, 2, 4)]
        found += [Tile(64, 64, 32, 4, 4, splits=parts, scaled=True) for parts in (1, 4)]
    else:
        found += [Tile(128, 64, 64, 4, 2, splits=parts, sums=True) for parts in (1, 4)]
        found += [Tile(64, 64, 64, 4, 3, splits=parts, sums=True) for parts in (1, 2)]
        found += [Tile(128, 64, 32, 4, 3, splits=parts, scaled=True) for parts in (1, 4)]
        found += [Tile(128, 128, 32, 8, 2, scaled=True), "scratch"]
    return found


def usable(method: Method, weights: list[DeviceWeight]) -> bool:
    """Returns whether the kernel of the method has all weights, and not another one instead of it."""
    return not (isinstance(method, Tile) and method.split) or all(can_split(weight, method) for weight in weights)


def current(kind: str) -> tuple[Entry, ...]:
    table: tuple[Entry, ...] = getattr(tables, NAMES[kind])
    return table


def entry_of(table: tuple[Entry, ...], rows: int) -> Entry:
    return next(entry for entry in table if rows <= entry.rows)


def linear(name: str, x: Tensor, weight: DeviceWeight, method: Method, norm: Tensor, out: Tensor | None) -> Tensor:
    end = MATRICES[name][2]
    if end == "residual":
        return quantized_linear(x, weight, residual=out, out=out, method=method)
    return quantized_linear(x, weight, norm=norm[: x.shape[1]], eps=EPS, gated=end == "gated", method=method)


def attention(qkv: Tensor, norm: Tensor) -> Tensor:
    """Stands for the kernels between qkv and out: three short ones."""
    y = qkv[:, :4096]
    for early in (False, False, True):
        y = rms_norm(y, norm[:4096], EPS, early=early)
    return y


def forward(x: Tensor, layers: list[Layer], methods: dict[str, Method], norm: Tensor) -> None:
    for layer in layers:
        qkv = linear("qkv", x, layer["qkv"], methods["qkv"], norm, None)
        linear("out", attention(qkv, norm), layer["out"], methods["out"], norm, x)
        hidden = linear("gate_up", x, layer["gate_up"], methods["gate_up"], norm, None)
        linear("down", hidden, layer["down"], methods["down"], norm, x)


def plain_forward(x: Tensor, layers: list[dict[str, Tensor]], norm: Tensor) -> None:
    for layer in layers:
        qkv = plain_layer(x, layer["qkv"], "norm", norm[:4096], x)
        plain_layer(attention(qkv, norm), layer["out"], "residual", norm, x)
        hidden = plain_layer(x, layer["gate_up"], "gated", norm[:4096], x)
        plain_layer(hidden, layer["down"], "residual", norm, x)


def microseconds(run: Callable[[], object]) -> float:
    """Returns the median time of a layer in a replayed graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(2):
        graph.replay()
    times = sorted(device_seconds(graph.replay, torch.device("cuda")) for _ in range(9))
    return times[len(times) // 2] / LAYERS * 1e6


def plain_times(all_rows: list[int]) -> dict[int, float]:
    """Returns the microseconds of a layer in bfloat16, for each entry of the tables."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    norm = torch.ones(14336, device=device, dtype=dtype)
    layers = [
        {name: torch.randn(n, k, device=device, dtype=dtype) / 64 for name, (n, k, _) in MATRICES.items()}
        for _ in range(LAYERS)
    ]
    times = {}
    for rows in all_rows:
        x = torch.randn(1 if rows == 8 else rows, 4096, device=device, dtype=dtype)
        times[rows] = round(microseconds(partial(plain_forward, x, layers, norm)), 1)
    return times


def error_of(name: str, weight: DeviceWeight, method: Method, rows: int, norm: Tensor) -> float:
    """Returns the relative difference to the product over the dequantised weight."""
    results = []
    for way in (method, "scratch"):
        torch.manual_seed(rows)
        x = torch.randn(rows, weight.inputs, device="cuda", dtype=torch.bfloat16)
        out = torch.zeros(rows, weight.outputs, device="cuda", dtype=torch.bfloat16)
        results.append(linear(name, x, weight, way, norm, out).float())  # type: ignore[arg-type]
    return float((results[0] - results[1]).norm() / results[1].norm())


def compile_ahead(kind: str, rows: int, name: str) -> None:
    """Compiles the candidates of one matrix without a GPU, into Triton's cache."""
    import triton

    from engine.kernels import pdl

    n, k, _ = MATRICES[name]
    small = weight_of(kind, 256, 512, torch.device("cpu"))
    numbers = torch.empty(n, small.numbers.shape[1] * k // 512, dtype=small.numbers.dtype)
    groups = k // 128 if small.group else 1
    weight = replace(small, numbers=numbers, scales=torch.empty(groups, n, dtype=small.scales.dtype), inputs=k)
    triton.runtime.driver.set_active(OfflineHopper())
    run = triton.runtime.jit.JITFunction.run
    triton.runtime.jit.JITFunction.run = lambda self, *a, **o: run(self, *a, **(o | {"warmup": True}))
    pdl.supports_pdl = lambda device: True
    shown = 1 if rows == 8 else rows
    x, norm = torch.empty(shown, k, dtype=torch.bfloat16), torch.ones(k).bfloat16()
    try:
        if rows == ROWS[kind][0]:
            dequantize(weight)
        if kind == "fp8" and rows <= MAX_SKINNY_ROWS:
            residual = torch.empty(shown, n, dtype=torch.bfloat16)
            plain_layer(x, torch.empty(n, k, dtype=torch.bfloat16), MATRICES[name][2], norm, residual)
        for method in dict.fromkeys((*candidates(kind, rows), *entry_of(current(kind), rows)[1:])):
            if not isinstance(method, Tile) or not usable(method, [weight]):
                continue
            out = torch.empty(shown, n, dtype=torch.bfloat16)
            try:
                linear(name, x, weight, method, norm, out)
            except Exception as error:  # reported again when it is timed
                print(f"compile {kind} {name} {method}: {str(error)[:200]}", flush=True)
    finally:
        triton.runtime.jit.JITFunction.run = run


def tune(kind: str, limit: float, plain: dict[int, float], found: dict[str, Any]) -> tuple[Entry, ...]:
    """Returns the table of a form of weights. Rows for which no time is left keep their entry."""
    table = current(kind)
    device, norm = torch.device("cuda"), torch.ones(14336, device="cuda", dtype=torch.bfloat16)
    layers = [{name: weight_of(kind, n, k, device) for name, (n, k, _) in MATRICES.items()} for _ in range(LAYERS)]
    for rows in ROWS[kind]:
        if time.perf_counter() > limit:
            print(f"no time for {kind} {rows}", flush=True)
            continue
        shown = 1 if rows == 8 else rows
        x = torch.randn(shown, 4096, device=device, dtype=torch.bfloat16)
        entry = entry_of(table, rows)
        best = {name: getattr(entry, part) for part, names in CLASSES.items() for name in names}
        least = first = microseconds(partial(forward, x, layers, best, norm))
        times: dict[str, float] = {"before": round(first, 1)}
        for part, names in CLASSES.items():
            for method in candidates(kind, rows):
                weights = [layers[0][name] for name in names]
                if not usable(method, weights) or method == best[names[0]]:
                    continue
                tried = best | dict.fromkeys(names, method)
                label = method if isinstance(method, str) else text_of(method)
                try:
                    error = max(error_of(name, layers[0][name], method, shown, norm) for name in names)
                    if not error < (0.1 if method == "wide" else 0.02):
                        print(f"WRONG {kind} {rows} {part} {label}: {error:.1e}", flush=True)
                        continue
                    micros = microseconds(partial(forward, x, layers, tried, norm))
                except Exception as error:  # Triton and ptxas raise many classes; the candidate is reported
                    print(f"FAILED {kind} {rows} {part} {label}: {str(error)[:300]}", flush=True)
                    continue
                times[f"{part} {label}"] = round(micros, 1)
                if micros < 0.995 * least:
                    least, best = micros, tried
        chosen = Entry(rows, best["out"], best["qkv"], best["gate_up"])
        table = tuple(chosen if one.rows == rows else one for one in table)
        found[f"{kind} {rows}"] = times | {"after": round(least, 1), "bf16": plain[rows]}
        print(f"{kind} {shown}: {first:.1f} -> {least:.1f} us a layer, {least / plain[rows]:.3f} of bf16", flush=True)
        near = sorted(times.items(), key=lambda item: item[1])[:6]
        print("    " + "; ".join(f"{label} {micros}" for label, micros in near), flush=True)
    return table


def text_of(method: Method) -> str:
    """Returns the method as source text."""
    if isinstance(method, str):
        return f'"{method}"'
    defaults = Tile._field_defaults
    more = [f"{name}={getattr(method, name)!r}" for name in defaults if getattr(method, name) != defaults[name]]
    return f"Tile({', '.join([*map(str, method[:5]), *more])})"


def source_of(made: Tables) -> str:
    """Returns the source of the module with these tables; its head is kept."""
    source = Path(tables.__file__).read_text()
    text = source[: source.index("\n\nINT4: Table")] + "\n"
    for name, table in made.items():
        text += f"\n{name}: Table = (\n"
        for entry in table:
            rows = "ANY" if entry.rows == tables.ANY else str(entry.rows)
            text += f"    Entry(\n        {rows},\n"
            text += "".join(f"        {text_of(method)},\n" for method in entry[1:]) + "    ),\n"
        text += ")\n"
    return text


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--write", type=Path, help="the module to write")
    parser.add_argument("--processes", type=int, default=15, help="processes that compile kernels")
    parser.add_argument("--kinds", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--limit", type=float, default=110.0, help="seconds after which no measurement begins")
    args = parser.parse_args()
    began = time.perf_counter()
    jobs = [(kind, rows, name) for kind in args.kinds for rows in ROWS[kind] for name in MATRICES]
    jobs.sort(key=lambda job: len(candidates(job[0], job[1])), reverse=True)  # the longest first
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(compile_ahead, *job) for job in jobs]):
            if (error := done.exception()) is not None:
                print(f"a compiling process failed: {str(error)[:300]}", flush=True)
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    plain = plain_times(sorted({rows for kind in args.kinds for rows in ROWS[kind]}))
    print(f"bf16: {plain}", flush=True)
    found: dict[str, Any] = {}
    made: Tables = {name: getattr(tables, name) for name in ("INT4", "INT4_ZEROS", "BYTES", "BYTES_ONLY")}
    for kind in args.kinds:
        made[NAMES[kind]] = tune(kind, began + args.limit, plain, found)
        torch.cuda.empty_cache()
        few = [entry for entry in made["BYTES"] if entry.rows <= 16]
        made["BYTES_ONLY"] = (*few, *(entry for entry in made["BYTES_ONLY"] if entry.rows > 16))
        if args.write is not None:
            args.write.write_text(source_of(made))
        report.write(args.out, "quant-tune", {}, "torch", "triton", microseconds=found)
    print(f"{time.perf_counter() - began:.0f} s in total")


if __name__ == "__main__":
    main()
