"""Measures the whole system on two CPU cores, each metric with its baseline in the same run.

- speedup_vs_transformers: output tokens/s of 16 concurrent streams (128 tokens in, 64 out) through gateway, prefill and
  decode, over `generate` of transformers with one request at a time.
- relay_ttft_overhead_ms_p50: time to first token of a 128-token prompt through all processes, minus that of the
  in-process engine. Concurrency is 1; the two are measured in turn; median of the differences.
- index_lookup_ms_p50: look-up of a 250-block prompt in the stack's Redis, beside the pods' own entries.

    python benchmarks/cpu_relay.py --out benchmarks/results/cpu_relay.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support import local_stack, report
from benchmarks.support.report import ms, timed, timed_calls
from cli.demo.model import demo_model
from common.settings.up import UpConfig
from common.types import PodLoad, Role, SamplingParams
from engine.llm import LLM  # must be imported before torch: engine/__init__.py sets OMP_WAIT_POLICY
from loadtest.client.base import RequestDraft
from loadtest.client.rest_client import RestClient
from loadtest.config import LoadConfig
from loadtest.run import RequestRecord
from loadtest.workload.sessions import PromptMessage, TextPiece, Turn
from prefix_index.lookup_cache import CACHE_S
from prefix_index.publisher import IndexPublisher
from prefix_index.reader import IndexReader
from prefix_index.store import PodRecord

PROMPT, OUTPUT, CONCURRENT = 128, 64, 16
PACKAGES = ("torch", "transformers", "grpcio", "nixl-cu13", "starlette", "redis")
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
VOCAB = (100, 49_000)  # Range of the token ids in prompts.


def prompts(count: int, seed: int) -> list[TextPiece]:
    """Returns unique random prompts. They share no prefix, so no cache helps."""
    return [TextPiece(f"{seed}-{number}".encode(), PROMPT) for number in range(count)]


def transformers_tokens_s(model_dir: Path, count: int) -> float:
    """Measures output tokens/s of generate(), one request at a time, in a process with OpenMP's default wait policy."""
    env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    argv = [sys.executable, __file__, "--transformers-only", str(model_dir), "--baseline", str(count)]
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def generate_one_by_one(model_dir: Path, count: int) -> float:
    """Runs in the child process of `transformers_tokens_s`. Returns output tokens/s."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # ignore_eos
    batch = [prompt.ids(*VOCAB) for prompt in prompts(count, 1)]
    run = {"do_sample": False, "min_new_tokens": OUTPUT, "max_new_tokens": OUTPUT, "pad_token_id": 0}
    with torch.inference_mode():
        model.generate(torch.tensor([batch[0][:16]]), **{**run, "min_new_tokens": 4, "max_new_tokens": 4})
        begin = time.perf_counter()
        for prompt in batch:
            model.generate(torch.tensor([prompt]), **run)
    return len(batch) * OUTPUT / (time.perf_counter() - begin)


async def stream(client: RestClient, prompt: TextPiece, output: int) -> RequestRecord:
    """Requests a greedy answer of `output` tokens from the gateway. RuntimeError if it fails."""
    turn = Turn((PromptMessage("user", (prompt,)),), output)
    record = RequestRecord("", 0, 0, PROMPT, output, time.perf_counter())
    await client.send(await client.build(RequestDraft(turn, {}, "", "", "")), record)
    if not record.ok or record.tokens != output:
        raise RuntimeError(f"{record.tokens} tokens, expected {output}: {record.error} {record.message}")
    return record


async def tokens_s(client: RestClient, batch: list[TextPiece]) -> float:
    """Returns the output tokens/s of concurrent streams."""
    begin = time.perf_counter()
    await asyncio.gather(*(stream(client, prompt, OUTPUT) for prompt in batch))
    return len(batch) * OUTPUT / (time.perf_counter() - begin)


async def lookup_ms(redis: str, record: PodRecord, count: int = 500) -> float:
    """Returns the median time of looking up a chain of 250 blocks that the pod of `record` holds."""
    chain = [os.urandom(16) for _ in range(250)]
    index = IndexPublisher(redis, record, lambda: chain, PodLoad)
    await index.start()
    now = 0.0
    reader = IndexReader(redis, clock=lambda: now)
    pods = [(record.pod, record.generation)]

    async def look_up() -> int:
        nonlocal now
        now += 2 * CACHE_S  # expires the reader's cache, so every look-up goes to Redis
        return (await reader.lookup(record.scope, chain, pods))[record.pod]

    deadline = time.monotonic() + 10
    while await look_up() < len(chain):
        assert time.monotonic() < deadline, "the chain is not in the index after 10 s"
        await asyncio.sleep(0.05)
    times = await timed_calls(look_up, count)
    await index.stop()
    await reader.close()
    return ms(statistics.median(times))


async def measure(args: argparse.Namespace, model_dir: Path) -> tuple[dict[str, float], dict[str, object]]:
    threads = len(os.sched_getaffinity(0))
    llm = LLM(model_dir, threads=threads)
    baseline = await asyncio.to_thread(transformers_tokens_s, model_dir, args.baseline)
    print(f"transformers, one by one: {baseline:.1f} tokens/s", flush=True)

    config = UpConfig(model=str(model_dir), port=0, threads=threads, log_level="warning")
    async with local_stack.running(config, model_dir, start_s=120) as stack:
        url = stack.base_url.removesuffix("/v1")
        client = RestClient(LoadConfig(url=url, endpoint="completions", form="ids", model=stack.model, vocab=VOCAB))
        await stream(client, prompts(1, 2)[0], 2)
        pairs = []
        for prompt in prompts(args.pairs, 3):
            alone, _ = timed(partial(llm.generate, [prompt.ids(*VOCAB)], ONE_TOKEN))
            record = await stream(client, prompt, 1)
            assert record.ttft_s is not None
            pairs.append((alone * 1e3, record.ttft_s * 1e3))
        rates = [await tokens_s(client, prompts(CONCURRENT, 10 + i)) for i in range(args.rounds)]
        await client.close()
        reader = IndexReader(stack.redis)
        pod = next(p.record for p in await reader.pods() if p.record.role is Role.PREFILL)
        await reader.close()
        lookup = await lookup_ms(stack.redis, replace(pod, pod="bench-pod"))
    overhead = statistics.median(b - a for a, b in pairs)
    metrics = {
        "speedup_vs_transformers": round(statistics.median(rates) / baseline, 2),
        "relay_ttft_overhead_ms_p50": round(overhead, 2),
        "index_lookup_ms_p50": lookup,
        "relay_tokens_s": round(statistics.median(rates), 1),
        "transformers_tokens_s": round(baseline, 1),
        "engine_ttft_ms_p50": round(statistics.median(a for a, _ in pairs), 1),
        "relay_ttft_ms_p50": round(statistics.median(b for _, b in pairs), 1),
    }
    return metrics, {"relay_tokens_s_rounds": [round(r, 1) for r in rates]}


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--baseline", type=int, default=6, help="requests of the transformers baseline")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of 16 concurrent streams")
    parser.add_argument("--pairs", type=int, default=21, help="pairs of first tokens, engine and whole system in turn")
    parser.add_argument("--transformers-only", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.transformers_only:
        print(generate_one_by_one(args.transformers_only, args.baseline))
        return
    metrics, more = asyncio.run(measure(args, demo_model(print)))
    report.show(metrics)
    report.write(args.out, "cpu_relay", metrics, *PACKAGES, **more)


if __name__ == "__main__":
    main()
