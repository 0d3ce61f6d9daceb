"""Embeddings of a prefill pod."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from common.errors import InvalidRequest, NotServed, RoleChanged
from common.pb import embedding_pb2, embedding_pb2_grpc
from common.rpc import translate_rpc_errors
from common.types import ValidRequest
from common.wire import request_to_pb
from engine.llm import LLM
from tests.rigs.pods.harness import BLOCK, CHUNK, MAX_LEN, VOCAB, Cluster, expected, prompt_of, request
from tests.rigs.waiting import until


def with_pooling(directory: Path, model_dir: Path, config: dict[str, bool]) -> None:
    """Makes a model directory with sentence-transformers' files."""
    for file in model_dir.iterdir():
        (directory / file.name).symlink_to(file)
    kind = "sentence_transformers.models.Pooling"
    (directory / "modules.json").write_text(json.dumps([{"path": "1_Pooling", "type": kind}]))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))


class TestEmbeddings:
    async def embed(
        self, cluster: Cluster, r: ValidRequest, logit_ids: Sequence[int] = (), timeout: float = 60.0
    ) -> embedding_pb2.EmbedResponse:
        stub = embedding_pb2_grpc.EmbeddingStub(cluster.prefill.channel)
        with translate_rpc_errors():
            return await stub.Embed(
                embedding_pb2.EmbedRequest(request=request_to_pb(r), logit_ids=logit_ids), timeout=timeout
            )

    @pytest.mark.parametrize("length", [1, BLOCK, CHUNK + 3, MAX_LEN - 1])
    async def test_they_are_the_last_states_of_transformers_cold_and_with_a_prefix_hit(
        self, model_dir: Path, length: int
    ) -> None:
        model = LlamaForCausalLM.from_pretrained(model_dir)
        prompt = prompt_of(length)
        with torch.no_grad():
            state = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        vector = torch.nn.functional.normalize(state, dim=0)
        async with Cluster.start(model_dir) as cluster:
            for cached in (0, (length - 1) // BLOCK * BLOCK):
                said = await self.embed(cluster, request(prompt))
                assert torch.allclose(torch.tensor(list(said.values)), vector, atol=1e-4)
                assert said.cached_tokens == cached
            await cluster.prefill.settled()

    @pytest.mark.parametrize("kind", ["mean", "cls"])
    @pytest.mark.parametrize("length", [1, BLOCK, 2 * CHUNK + 3])
    async def test_other_poolings_are_those_of_transformers_although_the_prefix_is_cached(
        self, model_dir: Path, kind: str, length: int
    ) -> None:
        model = LlamaForCausalLM.from_pretrained(model_dir)
        prompt = prompt_of(length)
        with torch.no_grad():
            states = model.model(torch.tensor([prompt])).last_hidden_state[0]
        state = states.mean(dim=0) if kind == "mean" else states[0]
        vector = torch.nn.functional.normalize(state, dim=0)
        async with Cluster.start(model_dir, prefill_config={"pooling": kind}) as cluster:
            for _ in range(2):  # the second time the prompt is in the cache, and its states are computed again
                said = await self.embed(cluster, request(prompt))
                assert torch.allclose(torch.tensor(list(said.values)), vector, atol=1e-4)
                assert said.cached_tokens == 0
            await cluster.prefill.settled()

    async def test_poolings_beside_generation(self, model_dir: Path, llm: LLM) -> None:
        async with Cluster.start(model_dir, prefill_config={"pooling": "mean"}) as cluster:
            texts = [request(prompt_of(20 + 17 * i, seed=i)) for i in range(5)]
            alone = [await self.embed(cluster, text) for text in texts]
            r = request(prompt_of(60), 12)
            together = asyncio.gather(*(self.embed(cluster, text) for text in texts))
            answer = await cluster.generate(r)
            assert answer.ids == expected(llm, r)
            for one, other in zip(alone, await together, strict=True):
                assert torch.allclose(torch.tensor(list(one.values)), torch.tensor(list(other.values)), atol=1e-4)
            await cluster.prefill.settled()

    async def test_a_pooling_that_is_not_served_is_refused(self, model_dir: Path, tmp_path: Path) -> None:
        with_pooling(tmp_path, model_dir, {"pooling_mode_max_tokens": True})
        async with Cluster.start(tmp_path) as cluster:
            with pytest.raises(NotServed, match="pooling_mode_max_tokens"):
                await self.embed(cluster, request(prompt_of(5)))

    @pytest.mark.parametrize("length", [1, BLOCK, CHUNK + 3])
    async def test_logits_are_those_of_transformers_cold_and_with_a_prefix_hit(
        self, model_dir: Path, length: int
    ) -> None:
        model, prompt, ids = LlamaForCausalLM.from_pretrained(model_dir), prompt_of(length), [7, 3, 7]
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, -1, ids]
        async with Cluster.start(model_dir) as cluster:
            for cached in (0, (length - 1) // BLOCK * BLOCK):
                said = await self.embed(cluster, request(prompt), ids)
                assert torch.allclose(torch.tensor(list(said.logits)), logits, atol=1e-3)
                assert (list(said.values), said.cached_tokens) == ([], cached)
            with pytest.raises(InvalidRequest, match="logit_ids"):
                await self.embed(cluster, request(prompt), [VOCAB])
            await cluster.prefill.settled()

    async def test_many_embeddings_beside_generation_and_one_cancelled_call(self, model_dir: Path, llm: LLM) -> None:
        async with Cluster.start(model_dir) as cluster:
            alone = [await self.embed(cluster, request(prompt_of(20 + i, seed=i))) for i in range(4)]
            r = request(prompt_of(60), 12)
            gone = asyncio.ensure_future(self.embed(cluster, request(prompt_of(90, seed=9))))
            texts = [request(prompt_of(20 + i, seed=i)) for i in range(4)]
            together = asyncio.gather(*(self.embed(cluster, text) for text in texts))
            answer = await cluster.generate(r)
            gone.cancel()
            assert answer.ids == expected(llm, r)
            for one, other in zip(alone, await together, strict=True):
                assert torch.allclose(torch.tensor(list(one.values)), torch.tensor(list(other.values)), atol=1e-4)
            await until(lambda: not cluster.prefill.runtime._embedder.requests)
            await cluster.prefill.settled()

    async def test_impossible_requests_are_refused(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            for prompt, error in (([], InvalidRequest), ([1] * MAX_LEN, InvalidRequest), ([VOCAB], InvalidRequest)):
                with pytest.raises(error):
                    await self.embed(cluster, request(prompt))
            stub = embedding_pb2_grpc.EmbeddingStub(cluster.decode.channel)
            with pytest.raises(RoleChanged), translate_rpc_errors():
                await stub.Embed(embedding_pb2.EmbedRequest(request=request_to_pb(request([1]))))
