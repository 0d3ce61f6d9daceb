"""Measures what the papers behind the engine promise, each beside the contiguous or unoptimised way in the same run.

    python benchmarks/promises.py --device cpu --out benchmarks/results/promises-cpu.json
    python benchmarks/promises.py --device cuda --out benchmarks/results/promises-h200.json

A model with the shape of Llama-3.1-8B and random weights runs on a GPU, one of six small layers on a CPU.
All requests go through the code that a pod runs. It takes two to three minutes.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.support import report
from benchmarks.support.engine_driver import Driver, Prompts, Steps, running
from benchmarks.support.grammar_tokenizer import train_tokenizer
from benchmarks.support.limits import free_memory, median_seconds
from benchmarks.support.shapes import SHAPES, config_directory, llama
from common.block_hash import BlockHasher
from common.grammar.compiler import from_json_schema
from common.kv_layout import KVLayout
from common.types import Grammar, SamplingParams
from engine.attention.base import StepShape
from engine.attention.torch_backend import TorchAttention
from engine.config import EngineConfig
from engine.kv.kv_pool import KVPool
from engine.schedule.outputs import StepResult

METRICS = """
Metrics, with the limit of each:

- kv_utilisation (above 0.96): slots of leased blocks that hold a token, mean over the steps that decode a full batch.
  Contiguous: the same sequences with their longest length reserved (kv_utilisation_contiguous).
- paging_over_contiguous (at most 1.05): decode attention over scattered blocks of the default size, over the same
  attention with each sequence in one contiguous block.
- n4_saving (at least 0.55): KV blocks that n = 4 saves against four requests without sharing, long prompt.
- hash_share (below 0.01): time to hash a prompt's blocks over the time of its first token.
- prefix_hit_saving (at least 0.9): part of the time to the first token that a cached prefix saves.
- rag_speedup (2 to 5): time of questions about a few documents without and with reuse of the documents' KV.
- itl_p99_ratio_chunking (at least 3): p99 of the time between tokens while prompts arrive, whole prompts over chunks.
- graphs_speedup_1 (at least 1.25): decode step of one row without and with CUDA graphs. GPU only.
- grammar_cost (at most 0.05, goal 0.03): decode step with a JSON schema over the same step without, minus 1.
"""
CALLS = {"cuda": 8, "cpu": 1}  # Calls of attention that are timed together.
ENOUGH = SamplingParams(temperature=0.0, max_tokens=1)
LIMITS = {
    "kv_utilisation": ("at least", 0.96),
    "paging_over_contiguous": ("at most", 1.05),
    "n4_saving": ("at least", 0.55),
    "hash_share": ("at most", 0.01),
    "prefix_hit_saving": ("at least", 0.9),
    "rag_speedup": ("at least", 2.0),
    "itl_p99_ratio_chunking": ("at least", 3.0),
    "graphs_speedup_1": ("at least", 1.25),
    "grammar_cost": ("at most", 0.05),
}
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"enum": ["a", "bb", "ccc"]}},
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The workload of one kind of device."""

    config: dict[str, Any]
    max_len: int
    batch: int  # Sequences of kv_utilisation.
    prompts: tuple[int, int]  # Shortest and longest prompt of it.
    attention: tuple[int, int]  # Rows and context of paging_over_contiguous.
    long_prompt: int  # Of n4_saving, hash_share and prefix_hit_saving.
    fresh: int  # Tokens of a prompt behind a cached prefix.
    documents: tuple[int, int, int]  # Documents, tokens of each, questions in all.
    streams: tuple[int, int, int]  # Rows that decode, prompts that arrive beside them, tokens of each.
    chunk: int  # Prompt tokens of a mixed step with chunking.
    grammar_rows: int
    steps: int
    num_blocks: int  # 0: what fits.


SIZES = {
    "cuda": Sizes(
        SHAPES["llama-3.1-8b"].config, 15000, 64, (256, 4096), (64, 1024), 8192, 48, (6, 4096, 48), (16, 12, 4096), 256,
        16, 64, 0,
    ),
    "cpu": Sizes(
        llama(4096, 256, 704, layers=6, heads=4, kv_heads=2, context=2048, torch_dtype="float32"),
        2048, 8, (256, 768), (8, 512), 1984, 16, (3, 1536, 12), (4, 6, 512), 32, 4, 24, 1024,
    ),
}  # fmt: skip


@contextmanager
def engine(directory: Path, device: str, sizes: Sizes, **settings: Any) -> Iterator[Driver]:
    """Runs an engine with random weights and the defaults of a pod, except for `settings`."""
    defaults: dict[str, Any] = {"max_model_len": sizes.max_len, "num_blocks": sizes.num_blocks}
    config = EngineConfig(model_dir=directory, device=device, load_format="dummy", **(defaults | settings))
    with running(config) as driver:
        yield driver
    free_memory()


class Promises:
    """The measurements, each on a running engine."""

    def __init__(self, sizes: Sizes, table: report.MetricTable) -> None:
        self.sizes, self.table = sizes, table
        self.prompts = Prompts(sizes.config["vocab_size"])

    def add(self, name: str, value: float, **more: float) -> None:
        what, limit = LIMITS[name]
        kept = value >= limit if what == "at least" else value <= limit
        self.table.add(name, value, f"{what} {limit}{'' if kept else ': MISSED'} {more}", **more)

    def kv_utilisation(self, driver: Driver) -> None:
        """Decodes a full batch of prompts of mixed lengths, and compares used and reserved slots in each step."""
        sizes, pool = self.sizes, driver.engine.pool
        rng = self.prompts.rng
        prompts = [self.prompts.make(1, rng.randint(*sizes.prompts))[0] for _ in range(sizes.batch)]
        # Long enough that the first sequence still decodes when the last prompt is computed.
        outputs = [rng.randint(16 * sizes.steps, 32 * sizes.steps) for _ in prompts]
        reserved = sum(len(prompt) + output for prompt, output in zip(prompts, outputs, strict=True))
        used, shares, exact, whole = [], [], [], []

        def seen(result: StepResult) -> bool:
            if result.num_decode_tokens == sizes.batch and not result.num_prompt_tokens:
                leased = pool.counts().leased * pool.block_size
                tokens = sum(output.computed for output in result.outputs)
                used.append(tokens)
                shares.append(tokens / leased)
                exact.append(tokens / reserved)
                whole.append(tokens / (sizes.batch * sizes.max_len))
            return len(shares) == sizes.steps // 2

        params = [SamplingParams(temperature=0.0, max_tokens=n) for n in outputs]
        driver.begin(prompts, params)
        driver.wait(seen)
        driver.end()
        self.add(
            "kv_utilisation",
            statistics.fmean(shares),
            kv_utilisation_contiguous=statistics.fmean(whole),
            kv_utilisation_contiguous_if_lengths_were_known=statistics.fmean(exact),
        )

    def n4_saving(self, driver: Driver) -> None:
        """Compares the most blocks of one request with n = 4 with four times those of one with n = 1."""
        pool, peaks = driver.engine.pool, []
        prompt_len = self.sizes.long_prompt
        for n in (1, 4):
            peak = 0

            def seen(_: StepResult) -> None:
                nonlocal peak
                peak = max(peak, pool.counts().leased)

            driver.begin(self.prompts.make(1, prompt_len), [SamplingParams(seed=1, n=n, max_tokens=48)])
            driver.watch(seen)
            peaks.append(peak)
        single, four = peaks
        self.add("n4_saving", 1 - four / (4 * single), blocks_n4=four, blocks_without_sharing=4 * single)

    def first_token_s(self, driver: Driver, prompt: list[int]) -> float:
        return driver.run([prompt], [ENOUGH])[0][0]

    def hash_and_prefix(self, driver: Driver) -> None:
        """Measures first tokens of long prompts with and without a cached prefix, and the hashing of these prompts."""
        sizes, repeats = self.sizes, 5
        misses, hits, hashes = [], [], []
        for prompt in self.prompts.make(repeats, sizes.long_prompt):
            misses.append(self.first_token_s(driver, prompt))
            again = prompt[: -sizes.fresh] + self.prompts.make(1, sizes.fresh)[0]
            hits.append(self.first_token_s(driver, again))
            layout = driver.engine.layout
            hasher = BlockHasher(layout.fingerprint, layout.block_size, "")
            hashes.append(report.timed(lambda hasher=hasher, prompt=prompt: hasher.extend(prompt))[0])
        miss, hit, hashing = map(statistics.median, (misses, hits, hashes))
        self.add("hash_share", hashing / miss, hash_ms=hashing * 1e3, tokens=sizes.long_prompt)
        self.add("prefix_hit_saving", 1 - hit / miss, hit_ms=hit * 1e3, miss_ms=miss * 1e3, tokens=sizes.long_prompt)

    def rag_speedup(self, driver: Driver) -> None:
        """Asks questions about a few documents. Without reuse, each request has a cache salt of its own."""
        count, length, questions = self.sizes.documents
        params = [SamplingParams(temperature=0.0, max_tokens=4)]
        took = []
        for reuse in (False, True):
            documents = self.prompts.make(count, length)
            asked = [documents[i % count] + self.prompts.make(1, 32)[0] for i in range(questions)]
            began = time.perf_counter()
            # One after another, as from one user; batches would hide the difference behind waiting.
            for number, prompt in enumerate(asked):
                driver.run([prompt], params, cache_salt="" if reuse else str(number))
            took.append(time.perf_counter() - began)
        self.add("rag_speedup", took[0] / took[1], without_s=took[0], with_s=took[1], questions=questions)

    def chunking(self, driver: Driver) -> None:
        """Measures the time between tokens of running answers while prompts arrive."""
        rows, arriving, length = self.sizes.streams
        scheduler = driver.engine.scheduler
        usual, p99 = scheduler.config, {}
        gap = max(4, self.sizes.steps // 4)
        for name, chunk in (("whole", length + rows), ("chunked", self.sizes.chunk)):
            changed = replace(usual, chunk_tokens=length + rows, local_chunk_tokens=chunk, prompt_step_tokens=None)
            driver.call(lambda changed=changed: setattr(scheduler, "config", changed))
            steps = arriving * (gap + length // min(chunk, length) + 2)
            params = [SamplingParams(temperature=0.0, max_tokens=min(2 * steps, self.sizes.max_len // 2))] * rows
            driver.begin(self.prompts.make(rows, 64), params)
            driver.wait(lambda result: result.num_decode_tokens == rows)
            streams = set(driver.names)
            for prompt in self.prompts.make(arriving, length):
                added, decoded = driver.add(prompt, ENOUGH), 0

                def through(result: StepResult, added: str = added) -> bool:
                    nonlocal decoded
                    decoded += not result.num_prompt_tokens
                    return decoded >= gap

                driver.wait(through)
            gaps = _gaps(driver.seen, streams)
            driver.end()
            p99[name] = report.percentile(gaps, 0.99)
        driver.call(lambda: setattr(scheduler, "config", usual))
        self.add(
            "itl_p99_ratio_chunking",
            p99["whole"] / p99["chunked"],
            whole_ms=p99["whole"] * 1e3,
            chunked_ms=p99["chunked"] * 1e3,
        )

    def decode_s(self, driver: Driver, rows: int, length: int, grammar: Grammar | None = None) -> float:
        """Returns the median seconds between the results of steps that decode all rows."""
        steps = self.sizes.steps
        params = [SamplingParams(temperature=1.0, seed=i, max_tokens=4 * steps) for i in range(rows)]
        driver.begin(self.prompts.make(rows, length), params, grammar=grammar)
        count = itertools.count()
        driver.wait(lambda result: result.num_decode_tokens == rows and next(count) > steps + 8)
        seen = list(driver.seen)
        driver.end()
        times = [
            after - before
            for (before, a), (after, b) in itertools.pairwise(seen)
            if a.num_decode_tokens == b.num_decode_tokens == rows
        ]
        return statistics.median(times[-steps:])

    def grammar_cost(self, driver: Driver) -> None:
        """Compares decode steps with and without a JSON schema. Rounds alternate, because clocks and caches drift."""
        rows = self.sizes.grammar_rows
        grammar = from_json_schema(SCHEMA, field="f")
        pairs = [(self.decode_s(driver, rows, 64), self.decode_s(driver, rows, 64, grammar)) for _ in range(3)]
        plain, guided = (statistics.median(times) for times in zip(*pairs, strict=True))
        self.add("grammar_cost", guided / plain - 1, plain_ms=plain * 1e3, guided_ms=guided * 1e3, rows=rows)

    def paging(self, device: torch.device, block_size: int) -> None:
        """Compares decode attention over scattered blocks with attention over one block for each sequence."""
        config = self.sizes.config
        rows, context = self.sizes.attention
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        dim = config["hidden_size"] // heads
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        query = torch.randn(rows, heads, dim, device=device, dtype=dtype)
        fresh = torch.randn(rows, 2, kv_heads, dim, device=device, dtype=dtype)
        runs: dict[str, Callable[[], object]] = {}
        for name, size in (("paged", block_size), ("contiguous", context)):
            count = rows * context // size
            layout = KVLayout(
                model="m", revision="r", num_layers=1, num_kv_heads=kv_heads, head_dim=dim, block_size=size,
                dtype=str(dtype).removeprefix("torch."),
            )  # fmt: skip
            pool = KVPool(layout, count, device)
            pool.segment_view("kv").normal_()
            order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
            tables = [order[i * (context // size) : (i + 1) * (context // size)] for i in range(rows)]
            attend = _attention(device)(pool.layers(), heads, (None,), pool.dummy_block)
            metadata = attend.prepare(StepShape([context - 1] * rows, [1] * rows, tables))
            cache = pool.layers()[0]
            runs[name] = _repeated(lambda a=attend, c=cache, m=metadata: a.attend(query, fresh, c, m, None), device)
        calls = CALLS[device.type]
        rounds = [{name: median_seconds(run, device) / calls for name, run in runs.items()} for _ in range(3)]
        paged, contiguous = (min(times[name] for times in rounds) for name in ("paged", "contiguous"))
        more = {"paged_us": paged * 1e6, "contiguous_us": contiguous * 1e6, "rows": rows, "context": context}
        self.add("paging_over_contiguous", paged / contiguous, **more)


def _repeated(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Returns one call, on a GPU a graph of several, because the device must not wait for launches."""
    if device.type != "cuda":
        return call
    call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS[device.type]):
            call()
    return partial(_replay, graph, call)


def _replay(graph: torch.cuda.CUDAGraph, call: Callable[[], object]) -> None:
    """Replays the graph. `call` keeps the tensors that the graph reads."""
    graph.replay()


def _attention(device: torch.device) -> Any:
    if device.type != "cuda":
        return TorchAttention
    from engine.attention.triton_backend import TritonAttention

    return TritonAttention


def _gaps(seen: Steps, streams: set[str]) -> list[float]:
    """Returns the seconds between the tokens of each stream."""
    last: dict[str, float] = {}
    gaps: list[float] = []
    for at, result in seen:
        for output in result.outputs:
            name = output.seq.request_id
            if name in streams and output.tokens:
                if name in last:
                    gaps.append(at - last[name])
                last[name] = at
    return gaps


def with_graphs_s(
    promises: Promises, directory: Path, device: str, wanted: set[str], measure: Callable[..., None]
) -> float:
    """Measures all that one engine with the defaults shows. Returns the seconds of a decode step; 0 without graphs.

    The engine's memory is free once this function has returned.
    """
    with engine(directory, device, promises.sizes) as driver:
        measure("kv_utilisation", lambda: promises.kv_utilisation(driver))
        measure("n4_saving", lambda: promises.n4_saving(driver))
        measure("hash_share", lambda: promises.hash_and_prefix(driver), "prefix_hit_saving")
        measure("rag_speedup", lambda: promises.rag_speedup(driver))
        measure("grammar_cost", lambda: promises.grammar_cost(driver))
        measure("itl_p99_ratio_chunking", lambda: promises.chunking(driver))
        return promises.decode_s(driver, 1, 128) if device == "cuda" and "graphs_speedup_1" in wanted else 0.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.arguments(__doc__, METRICS)
    parser.add_argument("--device", choices=sorted(SIZES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=sorted(LIMITS), help="metrics to measure; default: all")
    args = parser.parse_args(argv)
    sizes, table = SIZES[args.device], report.MetricTable()
    wanted = set(args.only or LIMITS)
    promises, began = Promises(sizes, table), time.perf_counter()
    device = torch.device(args.device)

    def measure(name: str, work: Callable[[], None], *also: str) -> None:
        if wanted & {name, *also}:
            took, _ = report.timed(work)
            print(f"    {took:.1f} s", flush=True)

    with config_directory(sizes.config) as directory:
        train_tokenizer(directory, min(sizes.config["vocab_size"], 16384))
        measure("paging_over_contiguous", lambda: promises.paging(device, EngineConfig(model_dir=directory).block_size))
        free_memory()
        if wanted - {"paging_over_contiguous"}:
            with_graphs = with_graphs_s(promises, directory, args.device, wanted, measure)
            free_memory()
            if with_graphs:
                with engine(directory, args.device, sizes, cuda_graphs=False, num_blocks=256) as driver:
                    without = promises.decode_s(driver, 1, 128)
                more = {"without_ms": without * 1e3, "with_ms": with_graphs * 1e3}
                promises.add("graphs_speedup_1", without / with_graphs, **more)
    took = round(time.perf_counter() - began, 1)
    limits = {name: f"{what} {value}" for name, (what, value) in LIMITS.items()}
    packages = ("torch", "triton", "llguidance")
    more = {"rows": table.rows, "limits": limits, "device": args.device, "took_s": took}
    report.write(args.out, "promises", table.metrics, *packages, **more)


if __name__ == "__main__":
    main()
