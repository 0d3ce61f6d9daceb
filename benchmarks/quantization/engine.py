"""Measures engines with quantised dummy weights against bfloat16 on one card, for the shapes of `benchmarks/engine.py`.

    python benchmarks/quantization/engine.py --out benchmarks/results/quant-h200.json
    python benchmarks/quantization/engine.py --only fp8 awq --out benchmarks/results/quant-h200.json

Each run adds its engines to the result file, because one command on a lent card may not last as long as all of them.
An engine that fails is named in the file (`failed`) and the next one is measured. `--tiny` checks on a CPU that the
script works.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.engine import EngineBench
from benchmarks.support import report
from benchmarks.support.engine_driver import Prompts
from benchmarks.support.limits import Ceilings, ceilings, free_memory
from benchmarks.support.shapes import QUANTIZATIONS, SHAPES, BenchmarkShape, config_directory, llama
from engine.config import EngineConfig
from engine.llm import for_throughput

METRICS = """
Metrics (8B shape; ms are medians of a step, or of the time to a first token):

- fp8_1x128_ms, awq_1x128_ms, gptq_1x128_ms: decode of one row. fp8 is --weights fp8; its KV is bfloat16.
- fp8_kv8_64x1024_ms: decode of 64 rows with a KV cache of e4m3.
- fp8_prefill_8192_ms: time to the first token of 8,192 tokens.
- w4_ratio_16_rows: awq, decode of 16 rows over one row, both with a context of 128 tokens.
- w4_prefill_ratio: awq over bfloat16, the worst time to first token.
- fp8_offline_tok_s: 256 requests of 1,000 tokens with 1,000 output tokens each, fp8 with a KV cache of e4m3.
- fp8_70b_step_ms: decode of one row of the 70B shape.
- slower_than_bf16_shapes: shapes at which awq, gptq or blocks takes more than 1.03 times as long as bfloat16.
"""
SLOWER = 1.03
RATED = ("awq", "gptq", "blocks")
BASE = SHAPES["llama-3.1-8b"]
POINTS = replace(
    BASE,
    decode=((1, 128), (16, 128), *BASE.decode[1:]),
    handed=(2048, 8192),
    offline=(256, 1000, 1000),
    steps=24,
    repeats=3,
)
TINY = replace(
    SHAPES["tiny"],
    config=llama(256, 128, 256, layers=2, heads=4, kv_heads=2, context=1024, torch_dtype="float32"),
    decode=((1, 128), (16, 128)),
)


@dataclass(frozen=True, slots=True)
class Variant:
    """An engine of the benchmark."""

    parts: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    quantization: str | None = None
    shape: BenchmarkShape = POINTS
    itemsize: float = 1.07  #: Bytes of a weight of the 8B shape, with scales and a head in bfloat16.


VARIANTS = {
    "bf16": Variant(("decode", "ttft", "handed"), itemsize=2.0),
    "awq": Variant(("decode", "ttft", "handed"), {}, "awq", itemsize=0.62),
    "fp8": Variant(("decode", "ttft"), {"weights": "fp8"}),
    "fp8_kv8": Variant(
        ("decode", "offline"),
        {"weights": "fp8", "kv_dtype": "fp8_e4m3"},
        shape=replace(POINTS, decode=((1, 128), (64, 1024))),
    ),
    "gptq": Variant(("decode", "ttft"), {}, "gptq", itemsize=0.62),
    "blocks": Variant(("decode", "ttft", "handed"), {}, "fp8-blocks"),
    "fp8_70b": Variant(
        ("decode",),
        {"weights": "fp8", "max_seqs": 16},
        shape=replace(SHAPES["llama-3.1-70b"], decode=((1, 128),), steps=24, repeats=2),
        itemsize=1.02,
    ),
}


def measure(name: str, variant: Variant, ceiling: Ceilings) -> dict[str, float]:
    """Returns the metrics of one engine."""
    shape, table = variant.shape, report.MetricTable()
    config = shape.config
    if variant.quantization is not None:
        config = config | {"quantization_config": QUANTIZATIONS[variant.quantization]}
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "block_size": shape.block_size,
        "max_seqs": max(shape.offline[0], *(rows for rows, _ in shape.decode)),
        "max_model_len": max(*shape.ttft, *(2 * context for _, context in shape.decode)) + 512,
    } | dict(variant.settings)
    bench = EngineBench(shape, ceiling, table, Prompts(config["vocab_size"]), sampled=False)
    with config_directory(config) as model_dir:
        engine_config = EngineConfig(model_dir=model_dir, **settings)
        for parts, one in (
            ([part for part in variant.parts if part != "offline"], engine_config),
            ([part for part in variant.parts if part == "offline"], for_throughput(engine_config)),
        ):
            if parts:
                print(f"--- {name} {' '.join(parts)}", flush=True)
                bench.measure(one, parts, variant.itemsize)
                free_memory()
    return table.metrics


def _is_first_token(key: str) -> bool:
    return key.startswith("ttft_ms_")


def summary(engines: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns the metrics of the benchmark that the measured engines allow."""
    found: dict[str, float | None] = {}
    for name in ("fp8", "awq", "gptq"):
        found[f"{name}_1x128_ms"] = engines.get(name, {}).get("decode_ms_1x128")
    found["fp8_kv8_64x1024_ms"] = engines.get("fp8_kv8", {}).get("decode_ms_64x1024")
    found["fp8_prefill_8192_ms"] = engines.get("fp8", {}).get("ttft_ms_8192")
    found["fp8_offline_tok_s"] = engines.get("fp8_kv8", {}).get("offline_out_tok_s")
    found["fp8_70b_step_ms"] = engines.get("fp8_70b", {}).get("decode_ms_1x128")
    awq, base = engines.get("awq"), engines.get("bf16")
    if awq:
        found["w4_ratio_16_rows"] = round(awq["decode_ms_16x128"] / awq["decode_ms_1x128"], 4)
    if base and awq:
        ratios = [awq[key] / value for key, value in base.items() if _is_first_token(key)]
        found["w4_prefill_ratio"] = round(max(ratios), 4)
    if base and all(name in engines for name in RATED):
        slower = 0
        for name in RATED:
            for key, value in engines[name].items():
                timed = key.startswith(("decode_ms", "handed_ms", "busy_ms")) or _is_first_token(key)
                if timed and key in base and value > SLOWER * base[key]:
                    slower += 1
        found["slower_than_bf16_shapes"] = slower
    return {key: value for key, value in found.items() if value is not None}


def main() -> None:
    parser = report.arguments(__doc__, METRICS)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="engines to measure")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no engine begins")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU, in every variant")
    args = parser.parse_args()
    began = time.perf_counter()
    earlier = args.out is not None and args.out.exists()
    engines = json.loads(args.out.read_text())["engines"] if earlier else {}
    variants = {name: replace(v, shape=TINY) for name, v in VARIANTS.items()} if args.tiny else VARIANTS
    device, dtype = (torch.device("cpu"), torch.float32) if args.tiny else (torch.device("cuda", 0), torch.bfloat16)
    ceiling = ceilings(TINY if args.tiny else BASE, device, dtype)
    free_memory()
    print(f"{report.card()}: {ceiling}", flush=True)
    failed: dict[str, str] = {}
    for name in args.only:
        if time.perf_counter() - began > args.limit:
            print(f"no time for {name}", flush=True)
            continue
        try:
            engines[name] = measure(name, variants[name], ceiling)
        except (Exception, SystemExit) as error:  # an engine fails in many ways; the others are measured
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"[:500]
        free_memory()
        report.write(args.out, "quant", summary(engines), "torch", "triton", engines=engines, failed=failed)
        print(f"{time.perf_counter() - began:.0f} s", flush=True)
    if "bf16" in engines:
        for name, found in engines.items():
            pairs = ((key, engines["bf16"].get(key), value) for key, value in found.items())
            shown = " ".join(f"{key} {value / base:.3f}" for key, base, value in pairs if base and "_ms_" in key)
            print(f"{name} over bf16: {shown}")
    report.show(summary(engines))
    if failed:
        raise SystemExit(f"failed: {failed}")


if __name__ == "__main__":
    main()
