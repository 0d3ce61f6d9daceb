"""Measures mixtures of experts: the shapes of Qwen3-30B-A3B and gpt-oss-20b with random weights on one GPU.

    python benchmarks/moe.py --out benchmarks/results/moe-h200.json

The measurements are those of benchmarks/engine.py. Each metric stands beside its limit (bytes over the measured copy
rate) and beside published figures of other engines with their source. The result file is written after every engine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.engine import EngineBench
from benchmarks.support import report
from benchmarks.support.engine_driver import Prompts, engine_settings
from benchmarks.support.limits import Ceilings, ceilings, free_memory
from benchmarks.support.shapes import QUANTIZATIONS, SHAPES, BenchmarkShape, config_directory
from engine.config import EngineConfig
from engine.llm import for_throughput
from engine.models import loader
from engine.models.spec import NotNative

METRICS = """
Metrics:

- qwen3_30b_a3b_1x128_ms, qwen3_30b_a3b_64x1024_ms, gpt_oss_20b_1x128_ms: time of a decode step, as decode_ms_RxC of
  benchmarks/engine.py. gpt-oss has MXFP4 experts, the others are bf16.
- qwen3_30b_a3b_fp8_1x128_ms: the same with --weights fp8.
- ratio_vs_transformers_path: time of a 1x128 step of Qwen3-30B-A3B that our engine computes by the modules of
  transformers over the time of our decoder, in this run.
- qwen3_30b_a3b_awq_1x128_ms: the same with layers and experts in 4 bits, in AWQ's form.
- gpt_oss_20b_offline_tok_s: output tokens per second of offline requests with 1,000 input and 1,000 output tokens. All
  requests (640, see the rows of the result) start together and run together from their first token to their last, and
  the time includes their prompts. At 10,000 tokens/s they take a minute, of which steps with all rows are the larger
  part.
"""

PUBLISHED = [
    {
        "metric": "gpt_oss_20b_offline_tok_s",
        "value": 13858,
        "what": "TensorRT-LLM, 1 x H200, TP1, 1000 in, 1000 out, output tokens/s at maximum load",
        "source": "TensorRT-LLM perf-overview.md at 03e27c7d",
    },
    {
        "metric": "gpt_oss_20b_offline_tok_s",
        "value": 11557,
        "what": "TensorRT-LLM, 1 x H100, as above",
        "source": "TensorRT-LLM perf-overview.md at 03e27c7d",
    },
    {
        "metric": "gpt_oss_20b_offline_tok_s",
        "value": 33149,
        "what": "vLLM 0.10.2, 1 x H100, prompt and output tokens/s together, medium prompts, 147 ms per token",
        "source": "gpustack performance-lab",
    },
    {
        "metric": "qwen3_30b_a3b_1x128_ms",
        "value": 9.6,
        "what": "vLLM, 1 x A100, milliseconds per token at batch 1",
        "source": "tt-inference-server issue 340",
    },
]
PARTS = ("qwen3", "fp8", "gpt-oss", "offline", "transformers", "awq")


@contextmanager
def transformers_path() -> Iterator[None]:
    """In the block, models load through the modules of transformers, as those do that have no native code."""

    def not_native(*_: Any) -> None:
        raise NotNative("measured through transformers")

    with mock.patch.object(loader, "parse_spec", not_native):
        yield


class MoeBench:
    """Runs engines one after the other and collects their metrics."""

    def __init__(self, out: Path | None, settings: dict[str, Any]) -> None:
        self._out, self._settings = out, settings
        self._ceiling: Ceilings | None = None  # of the card, measured once
        self.metrics: dict[str, float] = {}
        self.rows: list[dict[str, Any]] = []

    def engine(
        self, name: str, shape: BenchmarkShape, part: str, *, native: bool = True, weights: str | None = None
    ) -> dict[str, float]:
        """Measures one part of the engine benchmark on an engine. Returns the metrics of that benchmark."""
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "block_size": shape.block_size,
            "max_seqs": shape.offline[0] if part == "offline" else max(rows for rows, _ in shape.decode),
            "max_model_len": 2048 if part == "offline" else 2 * max(context for _, context in shape.decode) + 512,
        }
        settings |= {} if weights is None else {"weights": weights}
        with nullcontext() if native else transformers_path(), config_directory(shape.config) as model_dir:
            config = EngineConfig(model_dir=model_dir, **(settings | self._settings))
            device = config.resolve_device()
            dtype = getattr(torch, config.resolve_dtype(device))
            self._ceiling = self._ceiling or ceilings(shape, device, dtype)
            free_memory()
            table = report.MetricTable()
            bench = EngineBench(shape, self._ceiling, table, Prompts(shape.config["vocab_size"]))
            itemsize = 1 if weights == "fp8" else dtype.itemsize
            bench.measure(for_throughput(config) if part == "offline" else config, [part], itemsize)
        free_memory()
        self.rows += [{"engine": name, **row} for row in table.rows]
        return table.metrics

    def add(self, **metrics: float) -> None:
        """Adds metrics and writes the result file."""
        for name, value in metrics.items():
            self.metrics[name] = round(value, 4)
            beside = ", ".join(f"{row['value']} ({row['what']})" for row in PUBLISHED if row["metric"] == name)
            print(f"{name:<32}{value:>10.3f}  {beside}", flush=True)
        packages = "torch", "triton", "transformers"
        report.write(self._out, "moe", self.metrics, *packages, rows=self.rows, published=PUBLISHED)


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.arguments(__doc__, METRICS)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="parts to run")
    parser.add_argument("--engine", metavar="NAME=VALUE", nargs="+", default=[], help="fields of EngineConfig")
    parser.add_argument("--requests", type=int, help="number of offline requests")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    bench = MoeBench(args.out, engine_settings(args.engine))
    qwen3, gpt_oss = SHAPES["qwen3-30b-a3b"], SHAPES["gpt-oss-20b"]
    one = replace(qwen3, decode=((1, 128),))
    if args.requests:
        gpt_oss = replace(gpt_oss, offline=(args.requests, *gpt_oss.offline[1:]))
    if "qwen3" in args.only:
        found = bench.engine("qwen3-30b-a3b", qwen3, "decode")
        bench.add(qwen3_30b_a3b_1x128_ms=found["decode_ms_1x128"], qwen3_30b_a3b_64x1024_ms=found["decode_ms_64x1024"])
    if "fp8" in args.only:
        found = bench.engine("qwen3-30b-a3b, fp8", one, "decode", weights="fp8")
        bench.add(qwen3_30b_a3b_fp8_1x128_ms=found["decode_ms_1x128"])
    if "gpt-oss" in args.only:
        bench.add(gpt_oss_20b_1x128_ms=bench.engine("gpt-oss-20b", gpt_oss, "decode")["decode_ms_1x128"])
    if "offline" in args.only:
        found = bench.engine("gpt-oss-20b, offline", gpt_oss, "offline")
        bench.add(gpt_oss_20b_offline_tok_s=found["offline_out_tok_s"])
    if "transformers" in args.only:
        found = bench.engine("qwen3-30b-a3b, transformers", one, "decode", native=False)
        if ours := bench.metrics.get("qwen3_30b_a3b_1x128_ms"):
            bench.add(ratio_vs_transformers_path=found["decode_ms_1x128"] / ours)
    if "awq" in args.only:
        awq = replace(one, config=one.config | {"quantization_config": QUANTIZATIONS["awq"]})
        found = bench.engine("qwen3-30b-a3b, awq", awq, "decode")
        bench.add(qwen3_30b_a3b_awq_1x128_ms=found["decode_ms_1x128"])
    print(f"{time.perf_counter() - began:.0f} s in total")


if __name__ == "__main__":
    main()
