"""Measures generation on a CPU: one stream and 16 streams through the whole relay, and the limits of the machine.

Each metric comes from a process of its own, as the median of its rounds. Prompts have 128 random tokens, answers 64.

- fp32_tok_s, bf16_tok_s, int8_tok_s: tokens per second of one stream after its first token.
- relay_16_tok_s: output tokens of 16 float32 streams that start together, over the whole time; aggregated_*: one pod.
- limit_*: the same from the least time of this machine: of reading all weights, or of bare products in torch.
- llama_cpp_fp32_tok_s: llama.cpp with the same weights, in the Python of --llama-cpp; ratio_vs_llama_cpp: ours over it.
- int8_agreement, int8_logprob_error: share of float32's greedy tokens that --weights int8 ranks first, and the mean
  absolute error of their log-probabilities.
- base_*: the checkout of --base. --sections fp32 base --add measures both once more, in turn.

    python benchmarks/cpu_decode.py --base ../baton-base --out benchmarks/results/cpu_decode.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ.get("BENCHMARK_ROOT") or str(Path(__file__).resolve().parents[1]))

from benchmarks.support import report
from cli.demo.model import demo_model

ROOT = Path(sys.path[0])  # The checkout to measure.
PROMPT, OUTPUT, CONCURRENT = 128, 64, 16
VOCAB = (100, 49_000)  # Range of the token ids in prompts.
CHUNK = 256  # Tokens of a prompt chunk on a CPU.
TEXTS = ("README.md", "CONTRIBUTING.md", "docs/design.md", "docs/operations.md")  # Prompts of the accuracy.
TEXT_PROMPT, TEXT_PROMPTS = 96, 16
PACKAGES = ("torch", "transformers", "gguf")


def prompt_ids(seed: int) -> list[int]:
    """Returns a random prompt."""
    rng = random.Random(seed)
    return [rng.randrange(*VOCAB) for _ in range(PROMPT)]


# -- parts, each in a process of its own -----------------------------------------------------------------------------


def relay(model_dir: Path, settings: dict[str, Any], rounds: int, concurrent: bool) -> dict[str, Any]:
    """Measures one stream, and 16 streams if `concurrent`, through a stack with these settings of `baton up`."""
    from benchmarks.support import local_stack
    from common.settings.up import UpConfig
    from loadtest.client.base import RequestDraft
    from loadtest.client.rest_client import RestClient
    from loadtest.config import LoadConfig
    from loadtest.run import RequestRecord
    from loadtest.workload.sessions import PromptMessage, TextPiece, Turn

    async def stream(client: RestClient, seed: str, output: int) -> RequestRecord:
        turn = Turn((PromptMessage("user", (TextPiece(seed.encode(), PROMPT),)),), output)
        record = RequestRecord("", 0, 0, PROMPT, output, time.perf_counter())
        await client.send(await client.build(RequestDraft(turn, {}, "", "", "")), record)
        if not record.ok or record.tokens != output:
            raise RuntimeError(f"{record.tokens} tokens, expected {output}: {record.error} {record.message}")
        return record

    async def measured() -> dict[str, Any]:
        config = UpConfig(model=str(model_dir), port=0, log_level="warning", **settings)
        async with local_stack.running(config, model_dir, start_s=120) as stack:
            url = stack.base_url.removesuffix("/v1")
            client = RestClient(LoadConfig(url=url, endpoint="completions", form="ids", model=stack.model, vocab=VOCAB))
            await stream(client, "warm-up", 8)
            single, ttft, many = [], [], []
            for number in range(rounds):
                record = await stream(client, f"single {number}", OUTPUT)
                single.append((OUTPUT - 1) / (record.event_times[-1] - record.event_times[0]))
                ttft.append(record.ttft_s)
                if concurrent:
                    began = time.perf_counter()
                    await asyncio.gather(*(stream(client, f"{number} {i}", OUTPUT) for i in range(CONCURRENT)))
                    many.append(CONCURRENT * OUTPUT / (time.perf_counter() - began))
            await client.close()
        return {"single": single, "ttft_s": ttft, "many": many}

    return asyncio.run(measured())


def limits(model_dir: Path) -> dict[str, Any]:
    """Measures the memory's read rate, and products of the shapes of a model."""
    import engine  # noqa: F401, I001 - before torch: it sets how the threads of OpenMP wait
    import torch
    import torch.nn.functional as F

    config = json.loads((model_dir / "config.json").read_text())
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    shapes = [((heads + 2 * kv_heads) * width, hidden), (hidden, heads * width), (2 * inner, hidden), (hidden, inner)]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    body = [[torch.randn(shape) for shape in shapes] for _ in range(layers)]
    head = torch.randn(config["vocab_size"], hidden)
    numbers = sum(weight.numel() for layer in body for weight in layer)

    def best(work: Callable[[], object], tries: int) -> float:
        work()
        return min(report.timed(work)[0] for _ in range(tries))

    def products(tokens: int, tries: int) -> tuple[float, float]:
        """Returns seconds of all layers' products of `tokens` rows, and of the head's product of up to 16 rows."""
        inputs = {size: torch.randn(tokens, size) for size in {shape[1] for shape in shapes}}
        few = inputs[hidden][:CONCURRENT]
        plain = best(lambda: [F.linear(inputs[w.shape[1]], w) for layer in body for w in layer], tries)
        packed = [[torch.ops.mkldnn._reorder_linear_weight(w, tokens) for w in layer] for layer in body]
        product, none = torch.ops.mkldnn._linear_pointwise, (None, "none", [], "")
        pairs = [(w, shape[1]) for layer in packed for w, shape in zip(layer, shapes, strict=True)]
        fast = best(lambda: [product(inputs[size], w, *none) for w, size in pairs], tries)
        return min(plain, fast), best(lambda: F.linear(few, head), tries)

    with torch.inference_mode():
        block = torch.randn(1 << 27)
        read = block.nbytes / best(block.sum, 5)
        chunk_s, (rows_s, head_s) = products(CHUNK, 2)[0], products(CONCURRENT, 5)
    size = 4 * (numbers + head.numel())
    return {
        "read_gb_s": read * 1e-9,
        "weight_bytes": size,
        "step_bytes_s": size / read,
        "step_products_16_s": rows_s + head_s,
        "chunk_products_s": chunk_s,
        "chunk_gflop_s": 2e-9 * CHUNK * numbers / chunk_s,
    }


def text_prompts(model_dir: Path) -> list[list[int]]:
    """Returns prompts of English text: the beginnings of parts of Baton's pages."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    parts: list[list[int]] = []
    for name in TEXTS:
        ids = tokenizer.encode((ROOT / name).read_text()).ids
        parts += [ids[at : at + TEXT_PROMPT] for at in range(0, len(ids) - TEXT_PROMPT, 4 * TEXT_PROMPT)]
    return parts[:: max(1, len(parts) // TEXT_PROMPTS)][:TEXT_PROMPTS]


def answers(model_dir: Path, settings: dict[str, Any], texts: list[list[int]]) -> list[list[int]]:
    """Returns greedy answers of OUTPUT tokens in an engine with these settings."""
    from common.types import SamplingParams
    from engine.llm import LLM

    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT)
    done = LLM(model_dir, device="cpu", **settings).generate(texts, params, ignore_eos=True, show_progress=False)
    return [completion.ids for completion in done]


def scores(model_dir: Path, settings: dict[str, Any], texts: list[list[int]]) -> list[tuple[list[float], list[int]]]:
    """Returns log-probabilities and ranks (1: most likely) of the last OUTPUT tokens of each text."""
    from common.types import SamplingParams, ValidRequest
    from engine.llm import LLM
    from engine.schedule.outputs import StepResult

    engine, params = LLM(model_dir, device="cpu", **settings).engine, SamplingParams(max_tokens=1, prompt_logprobs=0)
    logprobs: dict[str, list[float]] = {}
    ranks: dict[str, list[int]] = {}

    def on_step(result: StepResult) -> None:
        for output in result.outputs:
            if (part := output.prompt_logprobs) is not None:
                logprobs.setdefault(output.seq.request_id, []).extend(part.logprobs)
                ranks.setdefault(output.seq.request_id, []).extend(part.ranks)

    names = [str(number) for number in range(len(texts))]
    for name, ids in zip(names, texts, strict=True):
        engine.add(engine.new_sequence(ValidRequest(name, engine.layout.model, tuple(ids), params)))
    while engine.has_work:
        engine.step(on_step)
    return [(logprobs[name][-OUTPUT:], ranks[name][-OUTPUT:]) for name in names]


PARTS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (relay, limits, answers, scores)}


def run_part(root: Path, part: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a part in a new process, with the code of the checkout `root`."""
    code = str(root.resolve())
    env = {**os.environ, "BENCHMARK_ROOT": code, "PYTHONPATH": code}
    task = json.dumps([part.__name__, *arguments])
    done = subprocess.run([sys.executable, __file__, "--part", task], env=env, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# -- the whole measurement -------------------------------------------------------------------------------------------

STACKS: dict[str, dict[str, Any]] = {  # Settings of `baton up` for each measured stack.
    "fp32": {},
    "base": {},
    "aggregated": {"aggregated": 1},
    "int8": {"weights": "int8"},
    "bf16": {"dtype": "bfloat16"},
}


def stack_metrics(name: str, found: dict[str, Any]) -> dict[str, float]:
    prefix = {"fp32": "", "int8": "int8_", "bf16": "bf16_"}.get(name, f"{name}_fp32_")
    metrics = {f"{prefix}tok_s" if prefix else "fp32_tok_s": round(statistics.median(found["single"]), 1)}
    metrics[f"{prefix}ttft_ms"] = report.ms(statistics.median(found["ttft_s"]))
    if found["many"]:
        metrics[f"{prefix.removesuffix('fp32_')}relay_16_tok_s"] = round(statistics.median(found["many"]), 1)
    return metrics


def limit_metrics(measured: dict[str, float], ours: dict[str, Any] | None) -> dict[str, float]:
    """Returns the limits, and the shares of them that the relay reaches."""
    step_s = max(measured["step_bytes_s"], measured["step_products_16_s"])
    seconds = CONCURRENT * PROMPT / CHUNK * measured["chunk_products_s"] + (OUTPUT - 1) * step_s
    single, many = 1 / measured["step_bytes_s"], CONCURRENT * OUTPUT / seconds
    metrics = {
        "limit_read_gb_s": round(measured["read_gb_s"], 2),
        "limit_chunk_gflop_s": round(measured["chunk_gflop_s"], 1),
        "limit_fp32_tok_s": round(single, 1),
        "limit_relay_16_tok_s": round(many, 1),
    }
    if ours is not None:
        metrics["share_fp32"] = round(statistics.median(ours["single"]) / single, 3)
        metrics["share_relay_16"] = round(statistics.median(ours["many"]) / many, 3)
    return metrics


def accuracy(model: str, model_dir: Path) -> dict[str, float]:
    """Compares int8 weights with float32 along the greedy answers of float32."""
    texts = text_prompts(model_dir)
    texts = [[*text, *answer] for text, answer in zip(texts, run_part(ROOT, answers, model, {}, texts), strict=True)]
    exact, rounded = (run_part(ROOT, scores, model, settings, texts) for settings in ({}, {"weights": "int8"}))
    ranks = [rank for _, found in rounded for rank in found]
    errors = [
        abs(a - b) for one, other in zip(exact, rounded, strict=True) for a, b in zip(one[0], other[0], strict=True)
    ]
    return {
        "int8_agreement": round(sum(rank == 1 for rank in ranks) / len(ranks), 4),
        "int8_logprob_error": round(statistics.fmean(errors), 4),
        "int8_tokens_compared": len(ranks),
    }


def llama_cpp(python: Path, model: str, model_dir: Path) -> dict[str, float]:
    """Measures llama.cpp with the same weights, and counts the equal first tokens of its answer and ours."""
    from benchmarks.support import llama_peer as peer

    with tempfile.TemporaryDirectory(prefix="baton-gguf-") as folder:
        file = Path(folder) / "model.gguf"
        peer.write_gguf(model_dir, file)
        prompt, threads = prompt_ids(1), len(os.sched_getaffinity(0))
        runs = [peer.measure(python, file, prompt, OUTPUT, threads) for _ in range(3)]
    ours = run_part(ROOT, answers, model, {}, [prompt])[0]
    equal = [a == b for a, b in zip(ours, runs[0]["tokens"], strict=True)]
    return {
        "llama_cpp_fp32_tok_s": round(statistics.median(run["tok_s"] for run in runs), 1),
        "llama_cpp_prompt_ms": report.ms(statistics.median(run["prompt_s"] for run in runs)),
        "llama_cpp_same_tokens": [*equal, False].index(False),
    }


SECTIONS = ("limits", *STACKS, "accuracy", "llama_cpp")


def measure(args: argparse.Namespace, section: str, model_dir: Path) -> Any:
    """Measures one section; None if its arguments are missing."""
    model = str(model_dir)
    if section == "limits":
        return run_part(ROOT, limits, model)
    if section == "accuracy":
        return accuracy(model, model_dir)
    if section == "llama_cpp":
        return None if args.llama_cpp is None else llama_cpp(args.llama_cpp, model, model_dir)
    root = args.base if section == "base" else ROOT
    concurrent = section not in ("int8", "bf16")
    settings = {**STACKS[section], "threads": args.threads}
    return None if root is None else run_part(root, relay, model, settings, args.rounds, concurrent)


def metrics_of(parts: dict[str, Any]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name in STACKS:
        if name in parts:
            metrics |= stack_metrics(name, parts[name])
    if "limits" in parts:
        metrics |= limit_metrics(parts["limits"], parts.get("fp32"))
    metrics |= parts.get("accuracy", {}) | parts.get("llama_cpp", {})
    if {"fp32_tok_s", "llama_cpp_fp32_tok_s"} <= metrics.keys():
        metrics["ratio_vs_llama_cpp"] = round(metrics["fp32_tok_s"] / metrics["llama_cpp_fp32_tok_s"], 3)
    return metrics


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--base", type=Path, help="another checkout, measured in turn")
    parser.add_argument("--llama-cpp", type=Path, metavar="PYTHON", help="interpreter that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=3, help="streams, and rounds of 16 streams, of one stack")
    parser.add_argument("--threads", type=int, default=0, help="threads of each pod; default: those of `baton up`")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="default: all")
    parser.add_argument("--add", action="store_true", help="keep the other sections of the result file")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        name, model, *arguments = json.loads(args.part)
        print(json.dumps(PARTS[name](Path(model), *arguments)))
        return
    model_dir = demo_model(print)
    parts: dict[str, Any] = json.loads(args.out.read_text())["parts"] if args.add and args.out.exists() else {}
    for section in args.sections:
        if (found := measure(args, section, model_dir)) is None:
            continue
        if section in STACKS and args.add and section in parts:
            found = {key: [*parts[section][key], *values] for key, values in found.items()}  # another turn
        parts[section] = found
        print(section, found, flush=True)
        report.write(args.out, "cpu_decode", metrics_of(parts), *PACKAGES, parts=parts)
    report.show(metrics_of(parts))


if __name__ == "__main__":
    main()
