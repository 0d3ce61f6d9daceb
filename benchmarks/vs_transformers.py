"""Compares the engine with `generate` of transformers: the same model shape, card and requests, in one run.

    python benchmarks/vs_transformers.py --out benchmarks/results/vs_transformers-h100.json

Baton runs first, through engine/llm.py, and frees the device before transformers loads. Each side has a warm-up call;
transformers has another one before its static batches. Prompts are random and unique, so no prefix is cached. Weights
are random unless --model names a directory with weights; the speed does not depend on them. The result file is written
after every row.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.support import report
from benchmarks.support.shapes import SHAPES
from common.types import SamplingParams
from engine.config import EngineConfig
from engine.llm import LLM

METRICS = """
Each ratio is the time of transformers over the time of Baton, from the call to the last token.

- ratio_batch1, ratio_batch64: a batch of 1 or 64 prompts of 128 tokens with 128 output tokens each, greedy, without
  early stops; median of --repeats.
- ratio_continuous256: 256 requests with 128 input tokens and 16 to 512 output tokens (uniform, fixed seed), all queued
  at the start. Baton runs them in one call. transformers runs static batches of 16 in order of arrival, each until its
  longest request is done. Only requested tokens count; both sides get the same requests.

--static-batches N measures the first N static batches only. The time of all batches is then scaled by their steps (a
batch has as many steps as its longest output), and the result file records this.
"""

BARS = {"ratio_batch1": 6.0, "ratio_batch64": 6.0, "ratio_continuous256": 24.0}
#: Fewest output tokens of a request of ratio_continuous256.
SHORTEST = 16
Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class OfflineBatch:
    """Requests that are queued together."""

    name: str
    prompts: Prompts
    #: Output tokens of each request.
    outputs: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.outputs)


@dataclass(slots=True)
class BatchTimes:
    """Seconds of a batch with Baton (ours) and transformers (theirs)."""

    name: str
    requests: int
    tokens: int
    ours_s: float
    theirs_s: float | None = None
    #: Seconds of the measured static batches, before scaling.
    theirs_measured_s: float | None = None
    ratio: float | None = None


@dataclass(slots=True)
class ComparisonResult:
    """The results so far."""

    out: Path | None
    settings: dict[str, Any]
    rows: list[BatchTimes] = field(default_factory=list)

    def save(self) -> None:
        """Writes the result file."""
        metrics = {f"ratio_{row.name}": round(row.ratio, 3) for row in self.rows if row.ratio is not None}
        rows = [asdict(row) for row in self.rows]
        report.write(
            self.out, "vs_transformers", metrics, "torch", "triton", "transformers", rows=rows, **self.settings
        )


class Workload:
    """Unique random requests, the same for both sides."""

    def __init__(self, vocab_size: int, args: argparse.Namespace) -> None:
        self._rng = random.Random(0)
        self._vocab_size = vocab_size
        self._args = args
        self.warm_up = self._batch("warm-up", [4, 4])
        self.fixed = {
            size: [self._batch(f"batch{size}", [args.output] * size) for _ in range(args.repeats)]
            for size in (1, args.batch)
        }
        mixed = [self._rng.randint(min(SHORTEST, args.longest), args.longest) for _ in range(args.requests)]
        self.mixed = self._batch(f"continuous{args.requests}", mixed)

    def _batch(self, name: str, outputs: list[int]) -> OfflineBatch:
        length = self._args.prompt
        return OfflineBatch(name, [self._rng.choices(range(self._vocab_size), k=length) for _ in outputs], outputs)


def timed(work: Callable[[], Any]) -> float:
    """Returns the seconds until the device has finished the work."""
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def ours(llm: LLM, batch: OfflineBatch) -> float:
    """Runs a batch with Baton. Returns the seconds."""
    params = [SamplingParams(temperature=0.0, max_tokens=tokens) for tokens in batch.outputs]
    completions: list[Any] = []
    seconds = timed(
        lambda: completions.extend(llm.generate(batch.prompts, params, ignore_eos=True, show_progress=False))
    )
    for completion, tokens in zip(completions, batch.outputs, strict=True):
        if len(completion.ids) != tokens:
            raise SystemExit(f"a request of {batch.name} ended early: {completion.error}")
    return seconds


def theirs(model: Any, batch: OfflineBatch) -> float:
    """Runs a static batch with transformers, all rows as long as the longest. Returns the seconds."""
    longest = max(batch.outputs)
    ids = torch.tensor(batch.prompts, device=model.device)

    def work() -> None:
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=longest)
        assert output.shape[1] == ids.shape[1] + longest

    with torch.inference_mode():
        return timed(work)


def measure_ours(llm: LLM, work: Workload, result: ComparisonResult) -> None:
    ours(llm, work.warm_up)
    for batches in work.fixed.values():
        add(result, batches[0], statistics.median(ours(llm, batch) for batch in batches))
    add(result, work.mixed, ours(llm, work.mixed))


def add(result: ComparisonResult, batch: OfflineBatch, seconds: float) -> None:
    result.rows.append(BatchTimes(batch.name, len(batch.prompts), batch.tokens, seconds))
    result.save()
    print(f"ours          {batch.name:<14} {seconds:8.2f} s {batch.tokens / seconds:9.1f} tokens/s", flush=True)


def measure_theirs(model: Any, work: Workload, result: ComparisonResult, args: argparse.Namespace) -> None:
    theirs(model, work.warm_up)
    *fixed, mixed = result.rows
    for row, batches in zip(fixed, work.fixed.values(), strict=True):
        finish(result, row, statistics.median(theirs(model, batch) for batch in batches))
    static = [
        OfflineBatch(f"static {start}", work.mixed.prompts[start:end], work.mixed.outputs[start:end])
        for start, end in ((start, start + args.rows) for start in range(0, args.requests, args.rows))
    ]
    chosen = static[: args.static_batches or len(static)]
    theirs(model, chosen[0])  # warm-up: these outputs are longer than all before, so transformers allocates memory
    measured = 0.0
    for number, batch in enumerate(chosen, 1):
        seconds = theirs(model, batch)
        measured += seconds
        print(f"transformers  static batch {number} of {len(static)}: {seconds:.2f} s", flush=True)
    steps, all_steps = (sum(max(batch.outputs) for batch in batches) for batches in (chosen, static))
    mixed.theirs_measured_s = measured
    result.settings |= {"static_batches": len(static), "static_batches_measured": len(chosen)}
    result.settings |= {"static_scaled": len(chosen) < len(static), "static_steps": all_steps}
    finish(result, mixed, measured * all_steps / steps)


def finish(result: ComparisonResult, row: BatchTimes, seconds: float) -> None:
    row.theirs_s = seconds
    row.ratio = seconds / row.ours_s
    result.save()
    print(f"transformers  {row.name:<14} {seconds:8.2f} s {row.tokens / seconds:9.1f} tokens/s", flush=True)


def load_theirs(model_dir: Path, dummy: bool, device: torch.device, dtype: torch.dtype) -> Any:
    if dummy:
        with torch.device(device):
            model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).to(device)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def table(result: ComparisonResult) -> None:
    print(f"\n{'':<16}{'requests':>9}{'tokens':>9}{'ours':>12}{'transformers':>14}{'ratio':>8}{'bar':>6}")
    for row in result.rows:
        assert row.theirs_s is not None
        bar = BARS.get(f"ratio_{row.name}")
        rates = f"{row.tokens / row.ours_s:>9.0f} /s{row.tokens / row.theirs_s:>11.1f} /s"
        print(f"{row.name:<16}{row.requests:>9}{row.tokens:>9}{rates}{row.ratio:>8.2f}{bar or '':>6}")
    if result.settings["static_scaled"]:
        print(
            f"static batches: {result.settings['static_batches_measured']} of {result.settings['static_batches']} "
            f"measured, the rest scaled by steps"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=METRICS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument(
        "--model", type=Path, help="model directory instead of --shape; weights are random if it has none"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of both sides; 0: all")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="output tokens of ratio_batch*")
    parser.add_argument("--batch", type=int, default=64, help="size of the second batch")
    parser.add_argument("--requests", type=int, default=256, help="requests of ratio_continuous*")
    parser.add_argument("--longest", type=int, default=512, help="most output tokens of ratio_continuous*")
    parser.add_argument("--rows", type=int, default=16, help="requests of a static batch")
    parser.add_argument("--repeats", type=int, default=3, help="runs of ratio_batch*")
    parser.add_argument("--static-batches", type=int, default=0, help="measure only the first N (0: all)")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        model_dir = args.model or Path(directory)
        if args.model is None:
            (model_dir / "config.json").write_text(json.dumps(SHAPES[args.shape].config))
        dummy = not any(model_dir.glob("*.safetensors"))
        config: dict[str, Any] = {
            "device": args.device,
            "load_format": "dummy" if dummy else "auto",
            "max_seqs": max(args.requests, args.batch),
            "max_model_len": args.prompt + max(args.output, args.longest),
            "threads": args.threads,
        }
        device = EngineConfig(model_dir=model_dir, **config).resolve_device()
        dtype = EngineConfig(model_dir=model_dir, **config).resolve_dtype(device)
        settings = {k: v for k, v in vars(args).items() if k not in ("out", "model")}
        model_name = args.shape if args.model is None else args.model.resolve().name
        result = ComparisonResult(
            args.out, {"model": model_name, "dtype": dtype, "random_weights": dummy, "settings": settings}
        )
        llm = LLM(model_dir, **config)
        work = Workload(llm.engine.vocab_size, args)
        measure_ours(llm, work, result)
        del llm
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        measure_theirs(load_theirs(model_dir, dummy, device, getattr(torch, dtype)), work, result, args)
    table(result)
    print(f"{time.perf_counter() - began:.0f} s in total")


if __name__ == "__main__":
    main()
