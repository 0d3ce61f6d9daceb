"""Endpoints other than chat and completions against real pods, through the openai SDK."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import openai
import pytest
import torch

from common.pb import inference_pb2, inference_pb2_grpc
from tests.rigs.stack.cluster import Cluster
from tests.rigs.stack.oracle import Oracle

pytestmark = pytest.mark.parametrize("cluster", ["1P+1D"], indirect=True)


async def test_embeddings_are_the_last_states_of_transformers(cluster: Cluster, oracle: Oracle) -> None:
    prompts = [[504, 3856, 1443, 335], [28, 253, 1743, 338, 1194, 260, 1194, 30, 9, 10, 11, 12, 13, 14, 15, 16, 17]]
    async with openai.AsyncOpenAI(base_url=cluster.base_url, api_key="x", max_retries=0) as client:
        said = await client.embeddings.create(model=cluster.model, input=prompts)
    for prompt, item in zip(prompts, said.data, strict=True):
        with torch.inference_mode():
            state = oracle.model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(state, dim=0)
        assert torch.allclose(torch.tensor(item.embedding), expected, atol=1e-3)
    cluster.check_idle()


async def test_a_conversation_over_responses_goes_on_from_what_is_kept(cluster: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=cluster.base_url, api_key="x", max_retries=0) as client:
        common = {"model": cluster.model, "temperature": 0.0, "max_output_tokens": 8}
        first = await client.responses.create(input="Name a colour.", **common)  # type: ignore[call-overload]
        async with client.responses.stream(  # type: ignore[call-overload]
            input="Another.", previous_response_id=first.id, **common
        ) as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        kept = await client.responses.retrieve(first.id)
        assert kept.output_text == first.output_text
        chat = await client.chat.completions.create(
            model=cluster.model,
            temperature=0.0,
            max_completion_tokens=8,
            messages=[
                {"role": "user", "content": "Name a colour."},
                {"role": "assistant", "content": first.output_text},
                {"role": "user", "content": "Another."},
            ],
        )
        assert "".join(deltas) == chat.choices[0].message.content
        await client.responses.delete(first.id)
    cluster.check_idle()


async def test_a_reset_makes_the_next_prompt_cold(cluster: Cluster) -> None:
    body = {"model": cluster.model, "prompt": list(range(300, 350)), "max_tokens": 2, "temperature": 0}

    async with httpx.AsyncClient(base_url=cluster.base_url.removesuffix("/v1"), timeout=60) as http:

        async def cached() -> int:
            usage = (await http.post("/v1/completions", json=body)).raise_for_status().json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        await cached()
        cluster.check_idle()
        assert await cached() >= 16
        cluster.check_idle()
        reset = (await http.post("/reset_prefix_cache")).raise_for_status().json()
        assert len(reset["pods"]) == 2
        assert all(pod["indexed"] and pod["kept"] == 0 for pod in reset["pods"])
        assert all(cluster.info(name).blocks.cached == 0 for name in cluster.pods)
        assert await cached() == 0
    cluster.check_idle()


async def test_the_first_token_comes_once_from_prefill_with_what_was_asked_of_it(cluster: Cluster) -> None:
    """REST and gRPC, streamed or not. Includes first tokens that are also the last (max_tokens, stop token)."""
    prompt, url = list(range(400, 440)), cluster.base_url.removesuffix("/v1")
    async with (
        grpc.aio.insecure_channel(cluster.stack.grpc_address) as channel,
        openai.AsyncOpenAI(base_url=cluster.base_url, api_key="x", max_retries=0) as client,
    ):
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)

        async def parts(**fields: Any) -> list[inference_pb2.GenerateResponse]:
            request = inference_pb2.GenerateRequest(
                model=cluster.model,
                tokens=inference_pb2.TokenPrompt(ids=prompt),
                temperature=0.0,
                logprobs=1,
                **fields,
            )
            return [part async for part in stub.Generate(request, timeout=60)]

        said = await parts(max_tokens=4)
        tokens = [token for part in said for token in part.tokens]
        assert [token.index for token in tokens] == [0, 1, 2, 3]
        assert all(token.HasField("logprob") and len(token.top) == 1 for token in tokens)
        first = tokens[0].id
        for limits, rest_limits, reason, count in (
            ({"max_tokens": 4}, {}, "length", 4),
            ({"max_tokens": 1}, {}, "length", 1),
            ({"max_tokens": 4, "stop_token_ids": [first]}, {"stop_token_ids": [first]}, "stop", 1),
        ):
            got = await parts(**limits)
            assert [token.index for part in got for token in part.tokens] == list(range(count))
            assert got[-1].usage.completion_tokens == count
            body = {
                "model": cluster.model,
                "prompt": prompt,
                "temperature": 0,
                "logprobs": 1,
                "max_tokens": limits["max_tokens"],
                "extra_body": rest_limits,
            }
            whole = await client.completions.create(**body)  # type: ignore[call-overload]
            stream = await client.completions.create(  # type: ignore[call-overload]
                **body, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            choices = [choice for chunk in chunks for choice in chunk.choices]
            logprobs = [p for c in choices if c.logprobs for p in c.logprobs.token_logprobs]
            assert logprobs == pytest.approx(whole.choices[0].logprobs.token_logprobs)
            assert "".join(c.text for c in choices) == whole.choices[0].text
            assert (whole.choices[0].finish_reason, choices[-1].finish_reason) == (reason, reason)
            assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == count
            assert whole.choices[0].logprobs.token_logprobs[:1] == pytest.approx([tokens[0].logprob], abs=1e-4)
            timeline = (await client._client.get(f"{url}/debug/requests/{whole.id}")).json()
            firsts = [event["pod"] for event in timeline["events"] if event["event"] == "first_token"]
            assert firsts == ["prefill-0"]
    cluster.check_idle()


async def test_cached_tokens_are_what_prefill_did_not_compute(cluster: Cluster) -> None:
    """REST, streamed or not, and gRPC. A cold prompt has none."""
    prompt = list(range(500, 550))
    async with (
        grpc.aio.insecure_channel(cluster.stack.grpc_address) as channel,
        openai.AsyncOpenAI(base_url=cluster.base_url, api_key="x", max_retries=0) as client,
    ):
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)

        async def whole(salt: str) -> int:
            body: Any = {"model": cluster.model, "prompt": prompt, "max_tokens": 2, "extra_body": {"cache_salt": salt}}
            usage = (await client.completions.create(**body)).usage
            return int(usage.prompt_tokens_details.cached_tokens)

        async def streamed(salt: str) -> int:
            body: Any = {"model": cluster.model, "prompt": prompt, "max_tokens": 2, "extra_body": {"cache_salt": salt}}
            stream = await client.completions.create(**body, stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            return int(chunks[-1].usage.prompt_tokens_details.cached_tokens)

        async def over_grpc(salt: str) -> int:
            request = inference_pb2.GenerateRequest(
                model=cluster.model, tokens=inference_pb2.TokenPrompt(ids=prompt), max_tokens=2, cache_salt=salt
            )
            return [part async for part in stub.Generate(request, timeout=60)][-1].usage.cached_tokens

        for ask in (whole, streamed, over_grpc):
            for cold in (True, False):
                before = cluster.info("prefill-0").computed.prefill
                cached = await ask(f"cached-{ask.__name__}")
                cluster.check_idle()
                assert cached == len(prompt) - (cluster.info("prefill-0").computed.prefill - before)
                assert (cached == 0) == cold
