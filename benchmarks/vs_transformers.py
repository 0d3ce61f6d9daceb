"""Compares the engine with `generate` of transformers: the same model shape, card and requests, in one run.

    python benchmarks/vs_transformers.py --out benchmarks/results/vs_transformers-h100.json

Baton runs first, through engine/llm.py, and frees the device before transformers loads. Each side has a warm-up call;
transformers has another one before its static batches. Prompts are random and unique, so no prefix is cached. Weights
are random unless --model names a directory with weights; the speed does not depend on them. The result file is written
after every row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.support import report
from benchmarks.support.engine_driver import Prompts
from benchmarks.support.limits import free_memory
from benchmarks.support.report import timed
from benchmarks.support.shapes import SHAPES, config_directory
from common.types import SamplingParams
from engine.config import EngineConfig
from engine.llm import LLM

METRICS = """
Each ratio is the time of transformers over the time of Baton, from the call to the last token.

- ratio_batch1, ratio_batch64: a batch of 1 or 64 prompts of 128 tokens with 128 output tokens each, greedy, without
  early stops; median of --repeats.
- ratio_continuous256: 256 requests with 128 input tokens and 16 to 512 output tokens (uniform, fixed seed), all queued
  at the start. Baton runs them in one call. transformers runs static batches of 16 in order of arrival, each until its
  longest request is done.

--static-batches N measures the first N static batches only. Their time is then scaled by the steps of all batches (a
batch has as many steps as its longest output), and the result file records this.
"""

SHORTEST = 16  # Fewest output tokens of a request of ratio_continuous256.


@dataclass(frozen=True, slots=True)
class OfflineBatch:
    """Requests that are queued together."""

    name: str
    prompts: list[list[int]]
    outputs: list[int]  # Output tokens of each request.


@dataclass(slots=True)
class BatchTimes:
    """Seconds of a batch with Baton (ours) and transformers (theirs)."""

    name: str
    requests: int
    tokens: int
    ours_s: float
    theirs_s: float | None = None
    theirs_measured_s: float | None = None  # Seconds of the measured static batches, before scaling.
    ratio: float | None = None


@dataclass(slots=True)
class ComparisonResult:
    out: Path | None
    settings: dict[str, Any]
    rows: list[BatchTimes] = field(default_factory=list)

    def add_ours(self, batch: OfflineBatch, seconds: float) -> None:
        self.rows.append(BatchTimes(batch.name, len(batch.prompts), sum(batch.outputs), seconds))
        self._save("ours", self.rows[-1], seconds)

    def add_theirs(self, row: BatchTimes, seconds: float) -> None:
        row.theirs_s, row.ratio = seconds, seconds / row.ours_s
        self._save("transformers", row, seconds)
        print(f"ratio         {row.name:<14} {row.ratio:8.2f}", flush=True)

    def _save(self, side: str, row: BatchTimes, seconds: float) -> None:
        """Prints the times of one side and writes the result file."""
        print(f"{side:<13} {row.name:<14} {seconds:8.2f} s {row.tokens / seconds:9.1f} tokens/s", flush=True)
        metrics = {f"ratio_{row.name}": round(row.ratio, 3) for row in self.rows if row.ratio is not None}
        more = {"rows": [asdict(row) for row in self.rows], **self.settings}
        report.write(self.out, "vs_transformers", metrics, "torch", "triton", "transformers", **more)


class Workload:
    """Unique random requests, the same for both sides."""

    def __init__(self, vocab_size: int, args: argparse.Namespace) -> None:
        prompts = Prompts(vocab_size)

        def batch(name: str, outputs: list[int]) -> OfflineBatch:
            return OfflineBatch(name, prompts.make(len(outputs), args.prompt), outputs)

        self.warm_up = batch("warm-up", [4, 4])
        self.fixed = [
            [batch(f"batch{size}", [args.output] * size) for _ in range(args.repeats)] for size in (1, args.batch)
        ]
        mixed = [prompts.rng.randint(min(SHORTEST, args.longest), args.longest) for _ in range(args.requests)]
        self.mixed = batch(f"continuous{args.requests}", mixed)


def on_device(work: Callable[[], Any]) -> tuple[float, Any]:
    """Runs the work. Returns the seconds until the device has finished it, and the result."""
    finish = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    seconds, (result, _) = timed(lambda: (work(), finish()))
    return seconds, result


def ours(llm: LLM, batch: OfflineBatch) -> float:
    """Runs a batch with Baton. Returns the seconds."""
    params = [SamplingParams(temperature=0.0, max_tokens=tokens) for tokens in batch.outputs]
    options = {"ignore_eos": True, "show_progress": False}
    seconds, completions = on_device(lambda: llm.generate(batch.prompts, params, **options))
    for completion, tokens in zip(completions, batch.outputs, strict=True):
        if len(completion.ids) != tokens:
            raise SystemExit(f"a request of {batch.name} ended early: {completion.error}")
    return seconds


def theirs(model: Any, batch: OfflineBatch) -> float:
    """Runs a static batch with transformers, all rows as long as the longest. Returns the seconds."""
    longest = max(batch.outputs)
    ids = torch.tensor(batch.prompts, device=model.device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": longest}
    with torch.inference_mode():
        seconds, output = on_device(lambda: model.generate(ids, **options))
    assert output.shape[1] == ids.shape[1] + longest
    return seconds


def measure_ours(llm: LLM, work: Workload, result: ComparisonResult) -> None:
    ours(llm, work.warm_up)
    for batches in work.fixed:
        result.add_ours(batches[0], statistics.median(ours(llm, batch) for batch in batches))
    result.add_ours(work.mixed, ours(llm, work.mixed))


def measure_theirs(model: Any, work: Workload, result: ComparisonResult, args: argparse.Namespace) -> None:
    theirs(model, work.warm_up)
    *fixed, mixed = result.rows
    for row, batches in zip(fixed, work.fixed, strict=True):
        result.add_theirs(row, statistics.median(theirs(model, batch) for batch in batches))
    prompts, outputs, rows = work.mixed.prompts, work.mixed.outputs, args.rows
    parts = [slice(at, at + rows) for at in range(0, args.requests, rows)]
    static = [OfflineBatch(f"static {part.start}", prompts[part], outputs[part]) for part in parts]
    chosen = static[: args.static_batches or len(static)]
    theirs(model, chosen[0])  # warm-up: these outputs are longer than all before, so transformers allocates memory
    measured = 0.0
    for number, batch in enumerate(chosen, 1):
        measured += (seconds := theirs(model, batch))
        print(f"transformers  static batch {number} of {len(static)}: {seconds:.2f} s", flush=True)
    steps, all_steps = (sum(max(batch.outputs) for batch in batches) for batches in (chosen, static))
    mixed.theirs_measured_s = measured
    result.settings |= {"static_batches": len(static), "static_batches_measured": len(chosen)}
    result.settings |= {"static_scaled": len(chosen) < len(static), "static_steps": all_steps}
    result.add_theirs(mixed, measured * all_steps / steps)
    if len(chosen) < len(static):
        print(f"static batches: {len(chosen)} of {len(static)} measured, the rest scaled by steps")


def load_theirs(model_dir: Path, dummy: bool, device: torch.device, dtype: torch.dtype) -> Any:
    if dummy:
        with torch.device(device):
            model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).to(device)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.arguments(__doc__, METRICS)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--model", type=Path, help="model directory instead of --shape (random weights without any)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of both sides; 0: all")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="output tokens of ratio_batch*")
    parser.add_argument("--batch", type=int, default=64, help="size of the second batch")
    parser.add_argument("--requests", type=int, default=256, help="requests of ratio_continuous*")
    parser.add_argument("--longest", type=int, default=512, help="max output tokens of ratio_continuous*")
    parser.add_argument("--rows", type=int, default=16, help="requests of a static batch")
    parser.add_argument("--repeats", type=int, default=3, help="runs of ratio_batch*")
    parser.add_argument("--static-batches", type=int, default=0, help="measure only the first N (0: all)")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    source = config_directory(SHAPES[args.shape].config) if args.model is None else nullcontext(args.model)
    with source as model_dir:
        dummy = not any(model_dir.glob("*.safetensors"))
        options: dict[str, Any] = {
            "device": args.device,
            "load_format": "dummy" if dummy else "auto",
            "max_seqs": max(args.requests, args.batch),
            "max_model_len": args.prompt + max(args.output, args.longest),
            "threads": args.threads,
        }
        config = EngineConfig(model_dir=model_dir, **options)
        device = config.resolve_device()
        dtype = config.resolve_dtype(device)
        settings = {k: v for k, v in vars(args).items() if k not in ("out", "model")}
        model_name = args.shape if args.model is None else args.model.resolve().name
        more = {"model": model_name, "dtype": dtype, "random_weights": dummy, "settings": settings}
        result = ComparisonResult(args.out, more)
        llm = LLM(model_dir, **options)
        work = Workload(llm.engine.vocab_size, args)
        measure_ours(llm, work, result)
        del llm
        free_memory()
        measure_theirs(load_theirs(model_dir, dummy, device, getattr(torch, dtype)), work, result, args)
    print(f"{time.perf_counter() - began:.0f} s in total")


if __name__ == "__main__":
    main()
