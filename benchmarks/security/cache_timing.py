"""Measures whether a tenant can find out by time that another tenant has sent a prompt.

    .venv/bin/python benchmarks/security/cache_timing.py --out benchmarks/results/tenants.json

One prefill and one decode pod with SmolLM2 on this machine. In each of ROUNDS rounds tenant a sends a new prompt of
PROMPT tokens. Then, in random order, a sends it again (own), tenant b sends it (other), and b sends a prompt that
is new to all (cold). `share` is the same with --share-cache.

- ttft_ms: time to the first token at the client, the median.
- earlier: share of the pairs of a request and a cold one in which the request's first token comes earlier. 0.5: the
  times show nothing. 1.0: every request is faster than its cold one.
- cached: the mean of cached_tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx

from benchmarks.support import local_stack, report
from cli.demo.model import demo_model
from common.settings.up import UpConfig
from gateway.admission.api_keys import create_key
from gateway.admission.key_store import KeyFile

PROMPT, ROUNDS, VOCAB = 512, 20, (100, 40_000)
KINDS = ("cold", "own", "other")


async def first_token(http: httpx.AsyncClient, model: str, key: str, prompt: list[int]) -> tuple[float, int]:
    """Returns the seconds to the first token of a stream, and cached_tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "ignore_eos": True, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    began, first_s, cached = time.perf_counter(), 0.0, 0
    async with http.stream("POST", "/completions", json=body, headers={"authorization": f"Bearer {key}"}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first_s = first_s or time.perf_counter() - began
            if usage := json.loads(line.removeprefix("data: ")).get("usage"):
                cached = usage["prompt_tokens_details"]["cached_tokens"]
    return first_s, cached


async def measured(*, share_cache: bool) -> dict[str, float]:
    rng, model_dir = random.Random(0), demo_model()
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cached: dict[str, list[int]] = {kind: [] for kind in KINDS}

    def new_prompt() -> list[int]:
        return [rng.randrange(*VOCAB) for _ in range(PROMPT)]

    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        file = Path(folder) / "keys.toml"
        (a, record_a), (b, record_b) = create_key("a"), create_key("b")
        for record in (record_a, record_b):
            KeyFile(file).add(record)
        config = UpConfig(
            model=str(model_dir), port=0, threads=1, log_level="warning", api_keys=(str(file),), share_cache=share_cache
        )
        async with (
            local_stack.running(config, model_dir, start_s=300) as stack,
            httpx.AsyncClient(base_url=stack.base_url, timeout=120) as http,
        ):
            for number in range(ROUNDS + 1):
                known = new_prompt()
                await first_token(http, stack.model, a, known)
                asked = [("cold", b, new_prompt()), ("own", a, known), ("other", b, known)]
                for kind, key, prompt in rng.sample(asked, len(asked)):
                    seconds, hits = await first_token(http, stack.model, key, prompt)
                    if number:  # the first round warms up
                        times[kind].append(seconds)
                        cached[kind].append(hits)
    row: dict[str, float] = {}
    for kind in KINDS:
        row[f"{kind}_ttft_ms"] = report.ms(statistics.median(times[kind]))
        row[f"{kind}_cached"] = round(statistics.fmean(cached[kind]), 1)
        if kind != "cold":
            pairs = [mine < cold for mine in times[kind] for cold in times["cold"]]
            row[f"{kind}_earlier"] = round(sum(pairs) / len(pairs), 3)
    return row


async def main() -> None:
    out = report.arguments(__doc__).parse_args().out
    metrics: dict[str, float] = {}
    for name, share_cache in (("salted", False), ("share", True)):
        metrics |= {f"{name}_{key}": value for key, value in (await measured(share_cache=share_cache)).items()}
    report.show(metrics)
    settings = {"prompt": PROMPT, "rounds": ROUNDS}
    report.write(out, "tenants", metrics, "httpx", "uvicorn", settings=settings)


if __name__ == "__main__":
    asyncio.run(main())
