"""Adapters with all that moves or shares KV at once: each answer has the tokens of the model with the adapter merged.

One cluster: two prefill pods, two decode pods with n-gram drafts and a host tier, a gateway. The base and three
adapters share each batch.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from common.grammar.compiler import from_regex
from common.types import SamplingParams
from engine.llm import LLM
from tests.lora.adapter_cluster import OPTIONS, THIRD, AdapterCluster, AdapterFiles, adapter_cluster, make_files
from tests.rigs.pods.harness import BLOCK, Cluster, prompt_of, request

ADAPTERS = {**OPTIONS, "third": THIRD}
MODELS = ("", *ADAPTERS)
#: Decode pods with a pool so small that the prompts of this test do not fit.
DECODE = {"speculation": "ngram", "host_cache": 16 << 20, "num_blocks": 40}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> AdapterFiles:
    return make_files(tmp_path_factory.mktemp("matrix"), ADAPTERS)


@pytest.fixture(scope="module")
def oracles(files: AdapterFiles) -> Iterator[dict[str, LLM]]:
    engines = {name: files.oracle(name) for name in MODELS}
    yield engines
    for llm in engines.values():
        llm.engine.close()


def digest_of(cluster: Cluster, name: str) -> str:
    entries, _ = cluster.prefill.runtime.adapters.entries()
    return next((entry.digest for entry in entries if entry.name == name), "")


def from_host(cluster: Cluster) -> int:
    """Returns the blocks that decode pods took from their host tiers."""
    stats = [pod.runtime.engine.pool.host_stats() for pod in cluster.decodes]
    return sum(each.loaded for each in stats if each is not None)


async def check(
    cluster: AdapterCluster, oracles: dict[str, LLM], prompt: list[int], *, regex: str = "", n: int = 1, **sampling: Any
) -> None:
    """Asks all models at once and compares their answers with the oracles."""
    source = from_regex(regex, field="grammar") if regex else None
    max_tokens = sampling.pop("max_tokens", 20)
    asked = (
        cluster.ask(name or "tiny", prompt, n=n, max_tokens=max_tokens, grammar=source, **sampling) for name in MODELS
    )
    answers = await asyncio.gather(*asked)
    params = SamplingParams(**{"temperature": 0.0, "seed": 7, "n": n, "max_tokens": max_tokens, **sampling})
    for name, answer in zip(MODELS, answers, strict=True):
        done = oracles[name].generate([prompt], params, ignore_eos=not regex, grammar=source, show_progress=False)
        assert answer == [completion.ids for completion in done], f"model {name or 'base'}, {sampling}"


async def test_every_answer_is_that_of_the_merged_model(files: AdapterFiles, oracles: dict[str, LLM]) -> None:
    async with adapter_cluster(files, prefill=2, decode=2, decode_config=DECODE) as cluster:
        repeated = [5, 6, 7, 8] * 8  # n-gram drafts find it
        await check(cluster, oracles, repeated, max_tokens=30)
        await check(cluster, oracles, prompt_of(45), n=3, temperature=1.0)
        await check(cluster, oracles, prompt_of(26, seed=1), regex="[a-z]{3}-[0-9]{4}")
        assert sum(sum(pod.counted("speculation_tokens").values()) for pod in cluster.pods.decodes) > 0

        # evict the prompts to the host, and take them from there
        prompts = [prompt_of(60, seed=seed) for seed in range(10, 16)]
        for prompt in (*prompts, *prompts[:2]):
            await check(cluster, oracles, prompt, max_tokens=4)
        assert from_host(cluster.pods) > 0

        # another pod's prefix, by a pull
        pods, prompt = cluster.pods, prompt_of(64, seed=30)
        for name in MODELS:
            asked = dataclasses.replace(request(prompt, 6), adapter=digest_of(pods, name))
            await pods.generate(asked, prefill=pods.prefills[0], decode=pods.decodes[0], remote_only=True)
            again = dataclasses.replace(request(prompt + prompt_of(9, seed=31), 6), adapter=asked.adapter)
            hint = pods.prefills[0].holds(60 // BLOCK)
            answer = await pods.generate(
                again, prefill=pods.prefills[1], decode=pods.decodes[1], pull=hint, remote_only=True
            )
            params = SamplingParams(temperature=0.0, max_tokens=6)
            done = oracles[name].generate([again.prompt_ids], params, ignore_eos=True, show_progress=False)
            assert answer.ids == done[0].ids, name
        assert pods.prefills[1].counted("pulled_blocks")


async def test_answers_go_on_after_a_decode_death(files: AdapterFiles, oracles: dict[str, LLM]) -> None:
    async with adapter_cluster(
        files, prefill=1, decode=2, decode_config=DECODE | {"num_blocks": 256}, check=False
    ) as cluster:
        killed = list[asyncio.Task[None]]()

        def on_token(_token: object) -> None:
            busy = [pod for pod in cluster.pods.decodes if len(pod.service.requests)]
            if not killed and busy:
                killed.append(asyncio.ensure_future(busy[0].runtime.stop()))

        prompt, params = prompt_of(37), SamplingParams(temperature=1.0, seed=7, n=2, max_tokens=60)
        asked = (
            cluster.ask(m or "tiny", prompt, n=2, max_tokens=60, temperature=1.0, on_token=on_token) for m in MODELS
        )
        answers = await asyncio.gather(*asked)
        await killed[0]
        for name, answer in zip(MODELS, answers, strict=True):
            done = oracles[name].generate([prompt], params, ignore_eos=True, show_progress=False)
            assert answer == [completion.ids for completion in done], f"model {name or 'base'}"
