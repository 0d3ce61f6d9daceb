"""Prefill and decode pods over gRPC and the loopback fabric: tokens, hand-off, overlap."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.pb import prefill_pb2
from common.types import FinishReason, Role
from common.wire import request_to_pb
from engine.llm import LLM
from tests.rigs.pods.harness import BLOCK, CHUNK, MAX_LEN, Cluster, expected, prompt_of, request

LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 1, CHUNK, CHUNK + 1, 3 * CHUNK, MAX_LEN - 1]


class TestTokens:
    @pytest.mark.parametrize("length", LENGTHS)
    async def test_every_length_cold_and_with_a_prefix_hit_equals_one_process(
        self, model_dir: Path, llm: LLM, length: int
    ) -> None:
        async with Cluster.start(model_dir) as cluster:
            for attempt in range(2):
                r = request(prompt_of(length), min(8, MAX_LEN - length))
                answer = await cluster.generate(r, remote_only=True)
                assert answer.ids == expected(llm, r)
                assert answer.cached_tokens == (0 if attempt == 0 else (length - 1) // BLOCK * BLOCK)
                assert answer.events.count("first_token") == 1
            info = await cluster.decode.info()
            assert (info.computed.prefill, info.computed.local, info.computed.recompute) == (0, 0, 0)

    async def test_sampled_output_and_logprobs_are_those_of_one_process(self, model_dir: Path, llm: LLM) -> None:
        async with Cluster.start(model_dir) as cluster:
            r = request(
                prompt_of(30), 12, temperature=1.0, top_k=50, top_p=0.9, seed=7, presence_penalty=0.5, logprobs=2
            )
            answer = await cluster.generate(r)
            alone = llm.generate([r.prompt_ids], r.sampling, ignore_eos=True)[0]
            assert answer.ids == alone.ids
            assert [t.logprob for t in answer.tokens] == pytest.approx([t.logprob for t in alone.tokens], abs=1e-4)
            assert all(len(t.top) == 2 for t in answer.tokens)

    async def test_many_at_once_over_two_and_two_pods(self, model_dir: Path, llm: LLM) -> None:
        async with Cluster.start(model_dir, prefill=2, decode=2, decode_config={"num_blocks": 200}) as cluster:
            requests = [request(prompt_of(5 + 7 * (i % 12), seed=i), 4 + i % 5) for i in range(16)]
            answers = await asyncio.gather(
                *(
                    cluster.generate(r, prefill=cluster.prefills[i % 2], decode=cluster.decodes[i // 2 % 2])
                    for i, r in enumerate(requests)
                )
            )
            for r, answer in zip(requests, answers, strict=True):
                assert answer.ids == expected(llm, r)

    async def test_a_corrupted_block_changes_the_output(self, model_dir: Path, llm: LLM) -> None:
        async with Cluster.start(model_dir, prefill_config={"checksums": False}) as cluster:
            r = request(prompt_of(40), 12)
            target_blocks: list[int] = []
            kv = cluster.decode.runtime.engine.kv

            def corrupt(source: str, peer: str, payload: bytes) -> tuple[float, ...]:
                raw = bytearray(kv.read_block(target_blocks[2]))
                raw[3::4] = b"\x40" * len(raw[3::4])
                kv.write_block(target_blocks[2], bytes(raw))
                return (0.0,)

            reply = await cluster.reserve(r)
            target_blocks.extend(reply.target.blocks)
            cluster.fabric.on_notify = corrupt
            inbox = cluster.stream_of(cluster.decode).expect(r.request_id)
            message = prefill_pb2.PrefillRequest(request=request_to_pb(r), target=reply.target)
            ids = [
                event.first_token.token.id
                async for event in cluster.prefill.prefill.Prefill(message, timeout=20)
                if event.HasField("first_token")
            ]
            while True:
                delta = await asyncio.wait_for(inbox.get(), 30)
                ids.extend(t.id for t in delta.tokens)
                if delta.finish_reason:
                    break
            assert ids[0] == expected(llm, r)[0]
            assert ids != expected(llm, r)

    @pytest.mark.parametrize("local", [False, True])
    async def test_a_request_that_ends_with_its_first_token(self, model_dir: Path, llm: LLM, local: bool) -> None:
        async with Cluster.start(model_dir, role=Role.BOTH if local else Role.DECODE) as cluster:
            r = request(prompt_of(21), 1, logprobs=0)
            answer = await cluster.generate(r)
            assert answer.ids == expected(llm, r)
            assert answer.finish is FinishReason.LENGTH
            assert answer.tokens[0].logprob is not None
            stop = request(prompt_of(21, seed=1), 9)
            first = expected(llm, stop)[0]
            answer = await cluster.generate(request(stop.prompt_ids, 9, stop_token_ids=(first,)))
            assert (answer.ids, answer.finish) == ([first], FinishReason.STOP)
            # The decode pod cached the prompt's full blocks although it never ran the request.
            await cluster.decode.settled()
            assert (await cluster.decode.info()).blocks.cached == 2 * (21 // BLOCK)


class TestHandOff:
    async def test_the_first_token_does_not_wait_for_the_hand_off(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            release = asyncio.Event()
            cluster.fabric.freeze(cluster.decode.agent)

            def seen(kind: str) -> None:
                if kind == "first_token":
                    cluster.fabric.thaw(cluster.decode.agent)
                    release.set()

            # The pods connect first, because a frozen peer cannot be probed.
            cluster.fabric.thaw(cluster.decode.agent)
            await cluster.generate(request(prompt_of(3)))
            cluster.fabric.freeze(cluster.decode.agent)
            answer = await cluster.generate(request(prompt_of(33)), on_event=seen)
            assert release.is_set()
            assert answer.events.index("first_token") < answer.events.index("handed_off")

    async def test_a_repeated_prompt_computes_and_moves_one_block_at_most(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            for length in (40, 43):
                prompt = prompt_of(length)
                await cluster.generate(request(prompt), remote_only=True)
                before = (await cluster.prefill.info()).computed.prefill
                answer = await cluster.generate(request(prompt), remote_only=True)
                assert (await cluster.prefill.info()).computed.prefill - before <= BLOCK
                assert answer.handed_off is not None
                assert answer.handed_off.blocks <= 1

    async def test_short_suffixes_stay_local(self, model_dir: Path, llm: LLM) -> None:
        async with Cluster.start(model_dir, decode_config={"local_prefill": "8"}) as cluster:
            turn = prompt_of(40)
            first = await cluster.generate(request(turn))
            assert first.target is not None
            await cluster.decode.settled()  # the blocks of the answer are in its cache now
            again = request(turn + first.ids + prompt_of(2, seed=3))
            answer = await cluster.generate(again)
            assert answer.target is None
            assert answer.ids == expected(llm, again)
            assert answer.cached_tokens >= 40
            info = await cluster.decode.info()
            assert 0 < info.computed.local <= 12
            assert info.computed.prefill == 0

    async def test_an_aggregated_pod_needs_no_prefill_pod(self, model_dir: Path, llm: LLM) -> None:
        async with Cluster.start(model_dir, prefill=0, role=Role.BOTH) as cluster:
            requests = [request(prompt_of(11 * (i + 1), seed=i), 6) for i in range(8)]
            answers = await asyncio.gather(*(cluster.generate(r) for r in requests))
            for r, answer in zip(requests, answers, strict=True):
                assert answer.ids == expected(llm, r)
            assert (await cluster.decode.info()).computed.prefill == sum(r.prompt_len for r in requests)
