"""Prefill and decode pods over gRPC and the loopback fabric: tokens, hand-off, overlap, admission, streams, drain."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from common.errors import (
    BatonError,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    ModelNotFound,
    NotServed,
    Overloaded,
    TransferFailed,
    Unavailable,
)
from common.pb import (
    control_pb2,
    control_pb2_grpc,
    decode_pb2,
    embedding_pb2,
    embedding_pb2_grpc,
    prefill_pb2,
    types_pb2,
)
from common.prefix_index import IndexReader
from common.rpc import rpc_errors
from common.types import FinishReason, PoolCounts, Role, Token, ValidRequest
from common.valkey import EmbeddedValkey
from common.wire import request_to_pb, token_to_pb
from engine.llm import LLM
from kv_transfer.node import TransferNode
from pod.watch import QuarantineWatch
from prefill_service.hand_off import HandOff
from tests.harness import BLOCK, CHUNK, MAX_LEN, VOCAB, Answer, Cluster, oracle, prompt_of, request, tiny_llama

LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 1, CHUNK, CHUNK + 1, 3 * CHUNK, MAX_LEN - 1]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> LLM:
    return oracle(model_dir)


def expected(llm: LLM, r: ValidRequest) -> list[int]:
    return llm.generate([r.prompt_ids], r.sampling, ignore_eos=True)[0].ids


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 20.0) -> None:
    """Waits until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while True:
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(0.01)


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
                delta = await asyncio.wait_for(inbox.get(), 20)
                ids.extend(t.id for t in delta.tokens)
                if delta.finish_reason:
                    break
            assert ids[0] == expected(llm, r)[0]
            assert ids != expected(llm, r)

    @pytest.mark.parametrize("local", [False, True])
    async def test_finished_at_token_one(self, model_dir: Path, llm: LLM, local: bool) -> None:
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
            # Decode cached the prompt's full blocks although it never ran the request.
            await cluster.decode.settled()
            assert (await cluster.decode.info()).blocks.cached == 2 * (21 // BLOCK)


class TestHandOff:
    async def test_most_blocks_arrive_before_the_last_chunk_is_computed(
        self, model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with Cluster.start(model_dir) as cluster:
            await cluster.generate(request(prompt_of(3)))  # the pair is connected
            runner = cluster.prefill.runtime.engine.runner
            launch = runner.launch

            def as_long_as_a_real_model(items: object) -> object:
                time.sleep(0.2)
                return launch(items)

            monkeypatch.setattr(runner, "launch", as_long_as_a_real_model)
            answer = await cluster.generate(request(prompt_of(4 * CHUNK)), remote_only=True)
            assert answer.handed_off is not None
            assert answer.handed_off.blocks == 4 * CHUNK // BLOCK
            assert answer.handed_off.blocks_before_last_chunk >= 3 * CHUNK // BLOCK
            assert answer.handed_off.transport == "loopback"
            assert answer.events.count("progress") == 4

    async def test_the_first_token_does_not_wait_for_the_hand_off(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            release = asyncio.Event()
            cluster.fabric.freeze(cluster.decode.agent)

            def seen(kind: str) -> None:
                if kind == "first_token":
                    cluster.fabric.thaw(cluster.decode.agent)
                    release.set()

            # The pair is connected first: a frozen peer cannot be probed.
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


class TestAdmission:
    @pytest.mark.parametrize(
        ("fields", "error", "field"),
        [
            ({"prompt": prompt_of(MAX_LEN)}, InvalidRequest, "prompt_ids"),
            ({"prompt": [VOCAB]}, InvalidRequest, "prompt_ids"),
            ({"temperature": float("nan")}, InvalidRequest, "temperature"),
            ({"top_p": 0.0}, InvalidRequest, "top_p"),
            ({"n": 129}, InvalidRequest, "n"),
            ({"logit_bias": ((999, 1.0),)}, InvalidRequest, "logit_bias"),
        ],
    )
    async def test_what_can_never_be_served_is_refused_by_both_roles(
        self, model_dir: Path, fields: dict[str, object], error: type[BatonError], field: str
    ) -> None:
        async with Cluster.start(model_dir) as cluster:
            held = request(prompt_of(9))
            good = await cluster.reserve(held)
            r = request(**{"prompt": prompt_of(9), **fields})  # type: ignore[arg-type]
            with pytest.raises(error) as caught:
                await cluster.reserve(r)
            assert caught.value.field == field
            message = prefill_pb2.PrefillRequest(request=request_to_pb(r), target=good.target)
            with pytest.raises(error) as caught, rpc_errors():
                async for _ in cluster.prefill.prefill.Prefill(message, timeout=20):
                    pass
            assert caught.value.field == field
            await cluster.abort(held.request_id)

    async def test_unknown_model_and_foreign_layout(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            r = request(prompt_of(9))
            with pytest.raises(ModelNotFound):
                await cluster.reserve(ValidRequest(r.request_id, "other", r.prompt_ids, r.sampling))
            good = await cluster.reserve(r)
            good.target.fingerprint = "0" * 32
            message = prefill_pb2.PrefillRequest(request=request_to_pb(r), target=good.target)
            with pytest.raises(LayoutMismatch), rpc_errors():
                await cluster.prefill.prefill.Prefill(message, timeout=20).read()
            await cluster.abort(r.request_id)

    async def test_a_full_pod_rejects_at_once_with_a_time(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir, decode_config={"num_blocks": 24}) as cluster:
            held = [request(prompt_of(30, seed=i)) for i in range(2)]
            for r in held:
                assert (await cluster.reserve(r)).HasField("target")
            reply = await cluster.reserve(request(prompt_of(30, seed=9)))
            assert reply.HasField("rejected")
            assert reply.rejected.retry_after_s > 0
            for r in held:
                await cluster.abort(r.request_id)

    async def test_local_prompts_do_not_starve_behind_remote_ones(self, model_dir: Path) -> None:
        config = {"num_blocks": 10}  # `big` leaves one block: enough for `small` only
        async with Cluster.start(model_dir, role=Role.BOTH, decode_config=config) as cluster:
            big, local, small = request(prompt_of(36), 1), request(prompt_of(8), 4), request(prompt_of(3), 1)
            assert (await cluster.reserve(big, remote_only=True)).HasField("target")
            scheduler = cluster.decode.runtime.engine.scheduler
            waiting = asyncio.create_task(cluster.generate(local))
            await until(lambda: scheduler.stats().waiting == 1)
            reply = await cluster.reserve(small, remote_only=True)
            assert "came before" in reply.rejected.reason
            await cluster.abort(big.request_id)
            assert len((await waiting).ids) == 4
            assert len((await cluster.generate(small, remote_only=True)).ids) == 1

    async def test_a_reservation_that_the_node_refuses_holds_nothing(
        self, model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(**_: object) -> None:
            raise Unavailable("the node is leaving")

        async with Cluster.start(model_dir) as cluster:
            monkeypatch.setattr(cluster.decode.runtime.node, "reserve", refuse)
            with pytest.raises(Unavailable):
                await cluster.reserve(request(prompt_of(30)))
            await cluster.decode.settled(10)

    async def test_a_request_id_is_taken_once(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            r = request(prompt_of(9))
            await cluster.reserve(r)
            with pytest.raises(InvalidRequest, match="already"):
                await cluster.reserve(r)
            await cluster.abort(r.request_id)
            await cluster.decode.settled()
            assert (await cluster.generate(r)).finish is FinishReason.LENGTH

    async def test_reserve_needs_the_gateways_stream(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            message = decode_pb2.ReserveRequest(request=request_to_pb(request([5])), gateway_id="nobody")
            with pytest.raises(Unavailable), rpc_errors():
                await cluster.decode.decode.Reserve(message, timeout=20)


class TestIsolation:
    """One request whose news cannot be handed on ends; those of the same steps go on."""

    async def test_in_a_prefill_step(self, model_dir: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        async with Cluster.start(model_dir) as cluster:
            first, victim, last = (request(prompt_of(5, seed=i)) for i in range(3))
            push = HandOff._push

            def broken(self: HandOff, computed: int, done: bool) -> None:
                if self.seq.request_id == victim.request_id:
                    raise RuntimeError("no push today")
                push(self, computed, done)

            monkeypatch.setattr(HandOff, "_push", broken)
            gate = threading.Event()
            cluster.prefill.runtime.loop.call(lambda: gate.wait(20))
            running = [asyncio.create_task(cluster.generate(r)) for r in (first, victim, last)]
            await until(lambda: cluster.prefill.service.active == 3)
            gate.set()
            a, failed, b = await asyncio.gather(*running, return_exceptions=True)
            assert isinstance(failed, InternalError)
            assert "no push today" in failed.message
            await cluster.abort(victim.request_id)
            for r, answer in ((first, a), (last, b)):
                assert isinstance(answer, Answer)
                assert answer.ids == expected(llm, r)

    @pytest.mark.parametrize("at", [1, 7])
    async def test_in_a_decode_step(self, model_dir: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        """at: the token that cannot be told; 7 is the last one."""
        async with Cluster.start(model_dir) as cluster:
            first, victim, last = (request(prompt_of(5, seed=i)) for i in range(3))

            def broken(token: Token) -> types_pb2.Token:
                if token.index == at and token.id == spoiled[at]:
                    raise RuntimeError("no such token")
                return token_to_pb(token)

            spoiled = expected(llm, victim)
            assert spoiled[at] not in (expected(llm, first)[at], expected(llm, last)[at]), "choose other prompts"
            monkeypatch.setattr("decode_service.hand_off.token_to_pb", broken)
            a, failed, b = await asyncio.gather(
                *(cluster.generate(r) for r in (first, victim, last)), return_exceptions=True
            )
            assert isinstance(failed, InternalError)
            for r, answer in ((first, a), (last, b)):
                assert isinstance(answer, Answer)
                assert answer.ids == expected(llm, r)


class TestStreams:
    async def test_batches_are_numbered_and_a_slow_gateway_is_paused_not_dropped(
        self, model_dir: Path, llm: LLM
    ) -> None:
        async with Cluster.start(model_dir, decode_config={"stream": {"window": 8}}) as cluster:
            stream = cluster.streams[0]
            stream.stalled = True
            r = request(prompt_of(9), 60)
            running = asyncio.create_task(cluster.generate(r))
            await until(lambda: len(stream.numbers) >= 8)
            await asyncio.wait([running], timeout=0.5)
            assert not running.done()
            assert len(stream.numbers) < 20
            with pytest.raises(Unavailable):
                await cluster.reserve(request(prompt_of(5)))
            await stream.catch_up()
            assert (await running).ids == expected(llm, r)
            assert stream.numbers == list(range(1, len(stream.numbers) + 1))

    async def test_a_gateway_that_stays_slow_loses_its_sequences(self, model_dir: Path) -> None:
        slow = {"stream": {"window": 4, "pause_limit_s": 0.2}}
        async with Cluster.start(model_dir, decode_config=slow) as cluster:
            cluster.streams[0].stalled = True
            with pytest.raises(Overloaded):
                await cluster.generate(request(prompt_of(9), 60))

    async def test_the_end_of_the_stream_ends_its_requests(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            await cluster.reserve(request(prompt_of(9)))
            running = asyncio.create_task(cluster.generate(request(prompt_of(9, seed=2), 100)))
            await asyncio.sleep(0.1)
            await cluster.streams[0].close()
            await cluster.decode.settled()
            running.cancel()

    async def test_deadlines_end_work_on_both_sides(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            r = request(prompt_of(9))
            await cluster.generate(r)
            cluster.fabric.freeze(cluster.decode.agent)
            with pytest.raises((DeadlineExceeded, TransferFailed)):
                await cluster.generate(request(prompt_of(40), 80), timeout_s=0.6)
            cluster.fabric.thaw(cluster.decode.agent)


class TestLife:
    async def test_info_describes_the_pod(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            info = await cluster.decode.info()
            engine = cluster.decode.runtime.engine
            assert info.ready
            assert not info.draining
            assert info.fingerprint == engine.layout.fingerprint
            assert info.served_name == "tiny"
            assert (info.max_model_len, info.num_blocks, info.vocab_size) == (MAX_LEN, 64, 256)
            assert info.blocks.free == info.num_blocks
            assert info.pid
            assert info.boot_id
            assert info.version

    async def test_drain_finishes_what_runs_and_refuses_the_rest(self, model_dir: Path, llm: LLM) -> None:
        async with Cluster.start(model_dir) as cluster:
            r = request(prompt_of(50), 60)
            under_way = asyncio.Event()
            running = asyncio.create_task(cluster.generate(r, on_event=lambda _kind: under_way.set()))
            await under_way.wait()
            for pod in cluster.pods:
                pod.runtime.lifecycle.begin_drain("test")
            with pytest.raises(Unavailable):
                await cluster.reserve(request(prompt_of(5)))
            assert (await running).ids == expected(llm, r)
            for pod in cluster.pods:
                await asyncio.wait_for(pod.runtime.lifecycle.wait_stopped(), 20)

    async def test_metrics_count_what_happened(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            await cluster.generate(request(prompt_of(33)))
            text = cluster.prefill.runtime.metrics.base.exposition().decode()
            assert 'baton_prompt_tokens_computed_total{reason="prefill"} 33.0' in text
            assert "baton_transfer_bytes_total" in text
            text = cluster.decode.runtime.metrics.base.exposition().decode()
            assert 'baton_reserve_total{outcome="remote"} 1.0' in text
            assert 'baton_kv_blocks{state="leased"}' in text

    async def test_an_inconsistent_pool_takes_the_pod_out_of_service(
        self, model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pod.watch.WATCH_PERIOD_S", 0.02)
        async with Cluster.start(model_dir, check=False) as cluster:
            runtime = cluster.decode.runtime
            watch = runtime._watch
            check = watch._check_pool

            def fails_once() -> None:
                monkeypatch.setattr(watch, "_check_pool", check)
                raise RuntimeError("the watch goes on")

            monkeypatch.setattr(watch, "_check_pool", fails_once)
            runtime.engine.pool._ledger.free.append(0)
            await until(lambda: not cluster.decode.runtime.info().ready)
            with pytest.raises(Unavailable):
                await cluster.reserve(request(prompt_of(5)))
            assert "baton_kv_pool_intact 0.0" in cluster.decode.runtime.metrics.base.exposition().decode()

    async def test_a_pod_whose_quarantine_lasts_drains_and_exits_with_3(
        self, model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pod.watch.WATCH_PERIOD_S", 0.02)
        monkeypatch.setattr("pod.watch.QuarantineWatch", lambda: QuarantineWatch(share=0.1, limit_s=0.1))
        async with Cluster.start(model_dir) as cluster:
            await cluster.generate(request(prompt_of(3)))
            cluster.fabric.freeze(cluster.decode.agent)
            r = request(prompt_of(40))
            with pytest.raises(BatonError):
                await cluster.generate(r, timeout_s=0.3)
            await asyncio.wait_for(cluster.decode.runtime.lifecycle.wait_stopped(), 20)
            assert cluster.decode.runtime.exit_code == 3
            cluster.fabric.thaw(cluster.decode.agent)

    @pytest.mark.parametrize("thread", ["engine", "transfer"])
    async def test_a_pod_that_lost_a_thread_drains_and_exits_with_4(
        self, model_dir: Path, monkeypatch: pytest.MonkeyPatch, thread: str
    ) -> None:
        monkeypatch.setattr("pod.watch.WATCH_PERIOD_S", 0.02)
        async with Cluster.start(model_dir, prefill=0) as cluster:
            runtime = cluster.decode.runtime
            if thread == "engine":
                await asyncio.to_thread(runtime.loop.stop, 5)
            else:
                runtime.node._thread.stop()
            await asyncio.wait_for(runtime.lifecycle.wait_stopped(), 20)
            assert runtime.exit_code == 4
            with pytest.raises(Unavailable):
                await cluster.reserve(request(prompt_of(5)))

    async def test_allow_tcp_reaches_the_transfers(self, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        allowed: list[bool] = []

        class Node(TransferNode):
            def __init__(self, *, allow_tcp: bool, **rest: Any) -> None:
                allowed.append(allow_tcp)
                super().__init__(allow_tcp=allow_tcp, **rest)

        monkeypatch.setattr("pod.runtime.TransferNode", Node)
        async with Cluster.start(model_dir, prefill_config={"allow_tcp": True}):
            assert allowed == [False, True]

    async def test_pods_find_each_other_in_the_index_and_leave_it_first(self, model_dir: Path, tmp_path: Path) -> None:
        valkey = EmbeddedValkey(0, tmp_path)
        config = {"redis": await valkey.start()}
        reader = IndexReader(config["redis"], timeout_s=5.0)
        try:
            async with Cluster.start(model_dir, prefill_config=config, decode_config=config) as cluster:
                await until(lambda: len(cluster.prefill.runtime.node.stats().peers) == 1)
                late = await cluster.add(Role.DECODE, **config)
                await until(lambda: len(cluster.prefill.runtime.node.stats().peers) == 2)
                await cluster.streams.pop().close()
                cluster.decodes.remove(late)
                await late.close()
                r = request(prompt_of(40))
                await cluster.generate(r)
                runtime = cluster.decode.runtime
                hashes = runtime.engine.new_sequence(r).matchable_hashes()
                layout = runtime.engine.layout

                async def held() -> bool:
                    found = await reader.lookup(layout.scope, hashes, [(runtime.name, runtime.generation)])
                    return found.get(runtime.name) == len(hashes)

                await until(held)
                runtime.lifecycle.begin_drain("test")
                await asyncio.wait_for(runtime.lifecycle.wait_stopped(), 20)
                assert [p.record.pod for p in await reader.pods()] == [cluster.prefill.runtime.name]
        finally:
            await reader.close()
            await valkey.stop()

    async def test_a_taken_port_is_a_configuration_error(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir, prefill=0) as cluster:
            port = int(cluster.decode.runtime.address.rpartition(":")[2])
            with pytest.raises(ConfigError, match="port"):
                await cluster.add(Role.DECODE, port=port)

    def test_a_lasting_quarantine_is_noticed(self) -> None:
        watch = QuarantineWatch(share=0.1, limit_s=60)
        bad, good = PoolCounts(8, 0, 0, 2), PoolCounts(9, 0, 0, 1)
        assert not watch.overdue(bad, 0.0)
        assert not watch.overdue(good, 30.0)
        assert not watch.overdue(bad, 40.0)
        assert not watch.overdue(bad, 99.0)
        assert watch.overdue(bad, 100.0)


async def test_a_reset_empties_the_prefix_cache_and_the_index(model_dir: Path, tmp_path: Path) -> None:
    valkey = EmbeddedValkey(0, tmp_path)
    config = {"redis": await valkey.start()}
    reader = IndexReader(config["redis"], timeout_s=5.0)
    try:
        async with Cluster.start(model_dir, prefill_config=config, decode_config=config) as cluster:
            r = request(prompt_of(5 * BLOCK + 1))
            await cluster.generate(r)
            await cluster.prefill.settled()
            runtime = cluster.prefill.runtime
            hashes, scope = runtime.engine.pool.cached_hashes(), runtime.engine.layout.scope
            owner = [(runtime.name, runtime.generation)]

            async def indexed() -> bool:
                return (await reader.lookup(scope, hashes, owner))[runtime.name] > 0

            await until(indexed)
            stub = control_pb2_grpc.ControlStub(cluster.prefill.channel)
            said = await stub.ResetPrefixCache(control_pb2.ResetPrefixCacheRequest())
            assert (said.cleared, said.kept, said.indexed) == (len(hashes), 0, True)
            assert runtime.engine.pool.cached_hashes() == []
            fresh = IndexReader(config["redis"], timeout_s=5.0)  # knows no earlier answer
            assert await fresh.lookup(scope, hashes, owner) == {runtime.name: 0}
            await fresh.close()
            again = request(r.prompt_ids)
            assert (await cluster.generate(again)).cached_tokens == 0
    finally:
        await reader.close()
        await valkey.stop()


class TestEmbeddings:
    async def embed(self, cluster: Cluster, r: ValidRequest, timeout: float = 20.0) -> embedding_pb2.EmbedResponse:
        stub = embedding_pb2_grpc.EmbeddingStub(cluster.prefill.channel)
        with rpc_errors():
            return await stub.Embed(embedding_pb2.EmbedRequest(request=request_to_pb(r)), timeout=timeout)

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

    async def test_beside_generation_many_at_once_and_one_that_leaves(self, model_dir: Path, llm: LLM) -> None:
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
            await until(lambda: not cluster.prefill.runtime._embedder.active)
            await cluster.prefill.settled()

    async def test_what_cannot_be_computed_is_refused(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            for prompt, error in (([], InvalidRequest), ([1] * MAX_LEN, InvalidRequest), ([VOCAB], InvalidRequest)):
                with pytest.raises(error):
                    await self.embed(cluster, request(prompt))
            stub = embedding_pb2_grpc.EmbeddingStub(cluster.decode.channel)
            with pytest.raises(NotServed), rpc_errors():
                await stub.Embed(embedding_pb2.EmbedRequest(request=request_to_pb(request([1]))))
