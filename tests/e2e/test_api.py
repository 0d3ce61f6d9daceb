"""Endpoints beside chat and completions against real pods: what the openai SDK gets, and what pods then hold."""

from __future__ import annotations

import httpx
import openai
import pytest
import torch

from tests.e2e.cluster import Cluster
from tests.e2e.oracle import Oracle

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
