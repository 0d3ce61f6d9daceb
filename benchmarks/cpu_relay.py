"""What the walking system is worth on two CPU cores, each figure against its baseline in the same run.

- speedup_vs_transformers: output tokens/s of 16 concurrent streams (128 in, 64 out) through gateway, prefill, decode,
  over `transformers` generate one request at a time.
- relay_ttft_overhead_ms_p50: first token of a 128-token prompt through the whole relay, minus the in-process engine's;
  concurrency 1, pairs in turn, median of the differences.
- index_lookup_ms_p50: look-up of a 250-block prompt against the running Redis, with the pods' own entries in it.

    python benchmarks/cpu_relay.py --out benchmarks/results/cpu_relay.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import orjson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report
from common.config import UpConfig
from common.index_cache import CACHE_S
from common.index_pod import PodIndex
from common.index_reader import IndexReader
from common.index_records import PodLoad, PodRecord
from common.models import resolve_model
from common.stack import Stack
from common.supervisor import Supervisor
from common.types import Role, SamplingParams
from engine.llm import LLM  # before anything imports torch: engine/__init__.py sets how OpenMP waits

PROMPT, OUTPUT, CONCURRENT = 128, 64, 16


def prompts(count: int, seed: int, vocab_size: int) -> list[list[int]]:
    """Unique random prompts: no prefix is shared, so nothing is served from a cache."""
    rng = random.Random(seed)
    return [[rng.randrange(100, vocab_size) for _ in range(PROMPT)] for _ in range(count)]


def transformers_tokens_s(model_dir: Path, count: int) -> float:
    """Output tokens/s of generate(), one request at a time, in a process of its own with OpenMP's default policy."""
    env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    argv = [sys.executable, __file__, "--transformers-only", str(model_dir), "--baseline", str(count)]
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def generate_one_by_one(model_dir: Path, count: int) -> float:
    """What transformers_tokens_s runs."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # as ignore_eos
    batch = prompts(count, 1, model.config.vocab_size)
    run = {"do_sample": False, "min_new_tokens": OUTPUT, "max_new_tokens": OUTPUT, "pad_token_id": 0}
    with torch.inference_mode():
        model.generate(torch.tensor([batch[0][:16]]), **{**run, "min_new_tokens": 4, "max_new_tokens": 4})
        begin = time.perf_counter()
        for prompt in batch:
            model.generate(torch.tensor([prompt]), **run)
    return len(batch) * OUTPUT / (time.perf_counter() - begin)


async def stream(client: httpx.AsyncClient, model: str, prompt: list[int], output: int) -> tuple[float, int]:
    """Seconds to the first token, and tokens received."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    begin, first, tokens = time.perf_counter(), 0.0, 0
    async with client.stream("POST", "completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.perf_counter() - begin
            usage = orjson.loads(line[6:]).get("usage")
            tokens = usage["completion_tokens"] if usage else tokens
    assert tokens == output, f"{tokens} tokens, expected {output}"
    return first, tokens


async def relay_tokens_s(client: httpx.AsyncClient, model: str, rounds: list[list[list[int]]]) -> list[float]:
    """Output tokens/s of each round of concurrent streams."""
    rates = []
    for batch in rounds:
        begin = time.perf_counter()
        answers = await asyncio.gather(*(stream(client, model, prompt, OUTPUT) for prompt in batch))
        rates.append(sum(n for _, n in answers) / (time.perf_counter() - begin))
    return rates


def engine_ttft(llm: LLM, prompt: list[int]) -> float:
    begin = time.perf_counter()
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))
    return time.perf_counter() - begin


async def lookup_ms(redis: str, fingerprint_of: PodRecord, count: int = 500) -> float:
    """Median time of looking up a chain of 250 blocks that a pod holds, beside whatever else is in the index."""
    chain = [os.urandom(16) for _ in range(250)]
    index = PodIndex(redis, fingerprint_of, lambda: chain, PodLoad)
    await index.start()
    now = 0.0
    reader = IndexReader(redis, clock=lambda: now)
    times: list[float] = []
    pods = [(fingerprint_of.pod, fingerprint_of.generation)]
    deadline = time.monotonic() + 10
    while (await reader.lookup(fingerprint_of.scope, chain, pods))[fingerprint_of.pod] < len(chain):
        assert time.monotonic() < deadline, "the index did not take the chain"
        await asyncio.sleep(0.05)
        now += 2 * CACHE_S
    for _ in range(count):
        now += 2 * CACHE_S  # every look-up goes to Redis: none is answered from what an earlier one brought
        begin = time.perf_counter()
        await reader.lookup(fingerprint_of.scope, chain, pods)
        times.append((time.perf_counter() - begin) * 1e3)
    await index.stop()
    await reader.close()
    return statistics.median(times)


async def measure(args: argparse.Namespace, model_dir: Path) -> tuple[dict[str, float], dict[str, object]]:
    threads = len(os.sched_getaffinity(0))
    llm = LLM(model_dir, threads=threads)
    vocab = llm.engine.vocab_size
    baseline = await asyncio.to_thread(transformers_tokens_s, model_dir, args.baseline)
    print(f"transformers, one by one: {baseline:.1f} tokens/s", flush=True)

    with tempfile.TemporaryDirectory() as logs:
        config = UpConfig(model=str(model_dir), port=0, threads=threads, log_level="warning")
        stack = Stack.plan(config, model_dir, Path(logs))
        supervisor = Supervisor(stack.specs, on_event=print)
        try:
            await supervisor.start(120)
            limits = httpx.Limits(max_connections=CONCURRENT)
            async with httpx.AsyncClient(base_url=stack.base_url, timeout=300, limits=limits) as client:
                await stream(client, stack.model, prompts(1, 2, vocab)[0], 2)
                pairs = []
                for prompt in prompts(args.pairs, 3, vocab):
                    alone = engine_ttft(llm, prompt)
                    through, _ = await stream(client, stack.model, prompt, 1)
                    pairs.append((alone * 1e3, through * 1e3))
                rates = await relay_tokens_s(
                    client, stack.model, [prompts(CONCURRENT, 10 + i, vocab) for i in range(args.rounds)]
                )
            reader = IndexReader(stack.redis)
            record = next(p.record for p in await reader.pods() if p.record.role is Role.PREFILL)
            await reader.close()
            probe = PodRecord(**{**{f: getattr(record, f) for f in record.__slots__}, "pod": "bench-pod"})
            lookup = await lookup_ms(stack.redis, probe)
        finally:
            await supervisor.stop(10)
            stack.close()
    overhead = statistics.median(b - a for a, b in pairs)
    metrics = {
        "speedup_vs_transformers": round(statistics.median(rates) / baseline, 2),
        "relay_ttft_overhead_ms_p50": round(overhead, 2),
        "index_lookup_ms_p50": round(lookup, 3),
        "relay_tokens_s": round(statistics.median(rates), 1),
        "transformers_tokens_s": round(baseline, 1),
        "engine_ttft_ms_p50": round(statistics.median(a for a, _ in pairs), 1),
        "relay_ttft_ms_p50": round(statistics.median(b for _, b in pairs), 1),
    }
    return metrics, {"relay_tokens_s_rounds": [round(r, 1) for r in rates]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--baseline", type=int, default=6, help="requests that transformers generates one by one")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of 16 concurrent streams")
    parser.add_argument("--pairs", type=int, default=21, help="pairs of first tokens, engine and relay in turn")
    parser.add_argument("--transformers-only", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.transformers_only:
        print(generate_one_by_one(args.transformers_only, args.baseline))
        return
    metrics, more = asyncio.run(measure(args, resolve_model("smollm2", say=print)))
    for name, value in metrics.items():
        print(f"{name:32} {value}")
    report.write(
        args.out, "cpu_relay", metrics, "torch", "transformers", "grpcio", "nixl-cu13", "fastapi", "redis", **more
    )


if __name__ == "__main__":
    main()
