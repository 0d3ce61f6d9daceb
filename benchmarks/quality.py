"""Measures what quantisation costs in quality: perplexity and top-1 agreement on a small set of texts.

The texts are in benchmarks/support/quality_texts.txt: stories, facts, code, a recipe, a letter, about 1,400 tokens. By
default the demo model, SmolLM2-135M, is compared with itself in each format that Baton reads, in float32 on a CPU. The
weights are rounded to nearest (`benchmarks.support.quantized_files`), so a calibrated checkpoint is better than this.

    python benchmarks/quality.py --out benchmarks/results/quality.json
    python benchmarks/quality.py --base DIR --other DIR --dtype bfloat16     # a pair of your own
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support import report
from benchmarks.support.quantized_files import E4M3, FORMATS, LINEARS, write
from cli.demo.model import demo_model
from common.types import SamplingParams, ValidRequest
from engine.llm import LLM
from engine.schedule.outputs import StepResult

METRICS = """
Metrics of each format NAME, against the unquantised model:
  NAME_perplexity     exp of the mean negative log-probability of the texts' tokens; base_perplexity: of the base
  NAME_agreement      share of positions where both models find the same token the most likely
  NAME_logprob_error  mean absolute difference of the log-probabilities of the texts' tokens
bf16 is the base in bfloat16. weights-fp8 and weights-int8 are the setting --weights; weights-fp8-bf16 is compared with
bf16.
"""
TEXTS = Path(__file__).parent / "support" / "quality_texts.txt"
GROUP_SIZE = 64  # SmolLM2 has 576 inputs, which 128 does not divide.
STATIC = {"ct-fp8-tensor", "autofp8", "modelopt"}  #: Formats with scales of inputs, which need samples.
ROUNDINGS: dict[str, dict[str, Any]] = {
    "weights-fp8": {"weights": "fp8"},
    "weights-int8": {"weights": "int8"},
    "bf16": {"dtype": "bfloat16"},
    "weights-fp8-bf16": {"weights": "fp8", "dtype": "bfloat16"},
}


@dataclass(frozen=True)
class Scores:
    """What a model says of the texts' tokens, the first one of each text left out."""

    logprobs: list[float]
    best: list[int]  #: The most likely token at each position.

    @property
    def perplexity(self) -> float:
        return math.exp(-statistics.fmean(self.logprobs))


def texts_of(model_dir: Path) -> list[tuple[int, ...]]:
    """Returns the token ids of the texts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return [tuple(tokenizer.encode(text).ids) for text in TEXTS.read_text(encoding="utf-8").split("---\n")]


def scores(model_dir: Path, texts: list[tuple[int, ...]], **settings: Any) -> Scores:
    """Runs the model over the texts."""
    engine = LLM(model_dir, max_model_len=512, kv_memory=128 << 20, **settings).engine
    params, found = SamplingParams(max_tokens=1, prompt_logprobs=1), Scores([], [])

    def on_step(result: StepResult) -> None:
        for output in result.outputs:
            if (part := output.prompt_logprobs) is not None:
                found.logprobs.extend(part.logprobs)
                found.best.extend(part.top_ids)

    for number, ids in enumerate(texts):
        engine.add(engine.new_sequence(ValidRequest(str(number), engine.layout.model, ids, params)))
        while engine.has_work:
            engine.step(on_step)
    engine.close()
    return found


def input_scales(model_dir: Path, texts: list[tuple[int, ...]]) -> dict[str, float]:
    """Returns the scale of each layer's inputs for static formats, from their largest number on the texts."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    largest: dict[str, float] = {}

    def note(name: str, x: torch.Tensor) -> None:
        largest[name] = max(largest.get(name, 0.0), float(x.abs().max()))

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in LINEARS:
            module.register_forward_pre_hook(lambda _, args, name=name: note(name, args[0]))
    with torch.inference_mode():
        for ids in texts:
            model(torch.tensor([ids]))
    return {name: value / E4M3 for name, value in largest.items()}


def compare(table: report.MetricTable, name: str, base: Scores, other: Scores) -> None:
    """Adds the metrics of one pair."""
    equal = [a == b for a, b in zip(base.best, other.best, strict=True)]
    errors = [abs(a - b) for a, b in zip(base.logprobs, other.logprobs, strict=True)]
    table.add(f"{name}_perplexity", other.perplexity, f"base {base.perplexity:.3f}")
    table.add(f"{name}_agreement", sum(equal) / len(equal), f"of {len(equal)} tokens")
    table.add(f"{name}_logprob_error", statistics.fmean(errors))


def main() -> int:
    parser = report.arguments(__doc__, METRICS)
    parser.add_argument("--base", type=Path, help="directory of the unquantised model; default: the demo model")
    parser.add_argument(
        "--other", type=Path, help="directory of the model to compare; default: the base in all formats"
    )
    parser.add_argument(
        "--formats", nargs="*", default=[*FORMATS, *ROUNDINGS], metavar="NAME", help="some of the formats"
    )
    parser.add_argument("--add", action="store_true", help="keep the other formats of the result file")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    base_dir: Path = args.base or demo_model()
    texts, settings = texts_of(base_dir), {"device": args.device, "dtype": args.dtype}
    used = {"base": args.base or "SmolLM2-135M-Instruct (the demo model)", "other": args.other, **settings}

    def save() -> None:
        shown = {key: str(value) for key, value in used.items()}
        report.write(args.out, "quality", table.metrics, "torch", rows=table.rows, settings=shown)

    table = report.MetricTable()
    if args.add:
        kept = json.loads(args.out.read_text(encoding="utf-8"))
        table = report.MetricTable(kept["metrics"], [row for row in kept["rows"] if row["name"] != "base_perplexity"])
    found = {"base": scores(base_dir, texts, **settings)}
    table.add("base_perplexity", found["base"].perplexity, f"{len(found['base'].best)} tokens")
    if args.other is not None:
        compare(table, "other", found["base"], scores(args.other, texts, **settings))
    else:
        scales = input_scales(base_dir, texts) if not STATIC.isdisjoint(args.formats) else None
        for name in args.formats:
            if name == "weights-fp8-bf16" and "bf16" not in found:
                found["bf16"] = scores(base_dir, texts, **(settings | ROUNDINGS["bf16"]))
            if name in ROUNDINGS:
                found[name] = scores(base_dir, texts, **(settings | ROUNDINGS[name]))
            else:
                with tempfile.TemporaryDirectory(prefix="baton-quality-") as folder:
                    write(base_dir, Path(folder), name, group_size=GROUP_SIZE, input_scales=scales)
                    found[name] = scores(Path(folder), texts, **settings)
            compare(table, name, found["bf16" if name == "weights-fp8-bf16" else "base"], found[name])
            save()
    save()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
