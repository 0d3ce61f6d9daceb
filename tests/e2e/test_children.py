"""n choices of one prompt with SmolLM2 through gateway, prefill, NIXL and decode, over REST and gRPC."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import grpc
import openai
import pytest

from common.pb import inference_pb2, inference_pb2_grpc
from tests.rigs.stack.cluster import BLOCK, Cluster
from tests.rigs.stack.oracle import Oracle, assert_same
from tests.rigs.stack.prompts import prompt_of

pytestmark = pytest.mark.parametrize("cluster", ["1P+1D"], indirect=True)

LENGTHS = [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3]
OUTPUT = 6


def computed(cluster: Cluster) -> tuple[int, int]:
    """Returns the prompt tokens computed on the prefill pod and on the decode pod."""
    prefill, decode = (cluster.info(name).computed for name in ("prefill-0", "decode-0"))
    return prefill.prefill, decode.local + decode.recompute


async def test_greedy_children_are_equal_and_cost_one_prefill(
    cluster: Cluster, oracle: Oracle, smollm2_dir: Path
) -> None:
    text = prompt_of(smollm2_dir, max(LENGTHS), 7)
    references = oracle.references(text, LENGTHS, OUTPUT)
    async with grpc.aio.insecure_channel(cluster.stack.grpc_address) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        for length in LENGTHS:
            before = computed(cluster)
            request = inference_pb2.GenerateRequest(
                model=cluster.model,
                tokens=inference_pb2.TokenPrompt(ids=text[:length]),
                max_tokens=OUTPUT,
                temperature=0.0,
                n=3,
                cache_salt=f"children-{length}",
            )
            ids: dict[int, list[int]] = defaultdict(list)
            usage = None
            async for part in stub.Generate(request, timeout=120):
                ids[part.index] += [token.id for token in part.tokens]
                usage = part.usage if part.HasField("usage") else usage
            assert ids[0] == ids[1] == ids[2]
            assert_same(ids[0], references[length], f"prompt of {length} tokens")
            after = computed(cluster)
            assert (after[0] - before[0], after[1] - before[1]) == (length, 0)
            assert usage is not None
            assert (usage.prompt_tokens, usage.completion_tokens) == (length, 3 * len(ids[0]))
    cluster.check_idle()


async def test_seeded_children_reproduce_in_any_company_and_a_disconnect_frees_all(cluster: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=cluster.base_url, api_key="none", max_retries=0) as client:

        async def ask(n: int, seed: int) -> list[str]:
            answer = await client.completions.create(
                model=cluster.model, prompt="Once there was", n=n, seed=seed, temperature=1.0, max_tokens=OUTPUT
            )
            return [choice.text for choice in answer.choices]

        alone = await ask(3, 11)
        assert len(set(alone)) > 1
        together = await asyncio.gather(ask(3, 11), ask(2, 12), ask(1, 11))
        assert together[0] == alone
        assert together[2] == alone[:1]
        said: dict[int, str] = defaultdict(str)
        stream = await client.completions.create(
            model=cluster.model,
            prompt="Once there was",
            n=3,
            seed=11,
            temperature=1.0,
            max_tokens=OUTPUT,
            stream=True,
        )
        async for chunk in stream:
            for choice in chunk.choices:
                said[choice.index] += choice.text
        assert [said[index] for index in range(3)] == alone
        endless = await client.completions.create(
            model=cluster.model,
            prompt="Once there was",
            n=4,
            max_tokens=400,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for _ in endless:
            break
        await endless.close()
    await asyncio.to_thread(cluster.check_idle)
