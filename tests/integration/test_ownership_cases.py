"""Cases in which a disaggregated server could lose or mix up KV blocks: aborts, late writes, dead peers, stale targets.

Leaving a Cluster asserts that every pod is idle: all blocks free or cached, none leased or quarantined.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cli.stack.valkey import EmbeddedValkey
from common.errors import BatonError, DeadlineExceeded, InternalError, InvalidRequest, Overloaded, Unavailable
from common.pb import types_pb2
from common.types import Role, ValidRequest
from common.wire import kv_target_from_pb
from engine.llm import LLM
from kv_transfer.backend.loopback import LoopbackFault
from prefix_index.reader import IndexReader
from tests.rigs.pods.aborts import abort_storm, cancelled
from tests.rigs.pods.harness import BLOCK, CHUNK, MAX_LEN, Answer, Cluster, expected, prompt_of, request
from tests.rigs.waiting import until


async def prefill_alone(cluster: Cluster, r: ValidRequest, target: types_pb2.KvTarget) -> None:
    """Calls Prefill for a given target and raises its error, from before or after the first token."""
    answer = Answer(target=kv_target_from_pb(target))
    await cluster.run_prefill(r, answer, cluster.prefill, 20, lambda _kind: None)


class TestAborts:
    @pytest.mark.parametrize(
        "when", ["reserved", "queued", "progress", "first_token", "untold", "in_transfer", "tokens", "cancelled"]
    )
    async def test_an_abort_in_any_state_gives_all_blocks_back(self, model_dir: Path, when: str) -> None:
        async with Cluster.start(model_dir) as cluster:
            await cluster.generate(request(prompt_of(3)))  # connects the pods
            r = request(prompt_of(4 * CHUNK), 60)
            aborting = asyncio.Event()
            gate = threading.Event()

            def seen(kind: str) -> None:
                if kind == {"untold": "first_token", "in_transfer": "progress", "cancelled": "progress"}.get(
                    when, when
                ):
                    aborting.set()

            if when == "reserved":
                await cluster.reserve(r)
                await cluster.abort(r.request_id)
                return
            if when == "queued":
                cluster.prefill.runtime.engine_loop.call(lambda: gate.wait(60))
                aborting.set()
            if when == "untold":
                cluster.fabric.freeze(cluster.decode.agent)
            if when == "in_transfer":
                cluster.fabric.on_write = lambda *_: LoopbackFault(delay_s=0.3)
            running = asyncio.create_task(cluster.generate(r, on_event=seen))
            await asyncio.wait_for(aborting.wait(), 30)
            await asyncio.sleep(0.05 if when == "queued" else 0)
            if when == "cancelled":
                running.cancel()
            await cluster.abort(r.request_id)
            gate.set()
            cluster.fabric.thaw(cluster.decode.agent)
            await cancelled(running)
            again = request(prompt_of(20, seed=5))
            assert len((await cluster.generate(again)).ids) == 8

    async def test_an_abort_while_queued_on_decode_gives_all_blocks_back(
        self, model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The KV arrived, but another request has the only slot."""
        async with Cluster.start(model_dir, decode_config={"max_seqs": 1}) as cluster:
            await cluster.generate(request(prompt_of(3)))
            engine = cluster.decode.runtime.engine
            launch = engine.runner.launch

            def slow(*args: Any) -> object:
                time.sleep(0.05)
                return launch(*args)

            monkeypatch.setattr(engine.runner, "launch", slow)
            decoding = asyncio.Event()
            occupant = request(prompt_of(9), 100)
            first = asyncio.create_task(
                cluster.generate(occupant, on_event=lambda kind: decoding.set() if kind == "tokens" else None)
            )
            await asyncio.wait_for(decoding.wait(), 30)
            r = request(prompt_of(40))
            second = asyncio.create_task(cluster.generate(r))
            async with asyncio.timeout(30):
                while engine.scheduler.stats().waiting == 0:
                    await asyncio.sleep(0.005)
            assert engine.scheduler.stats().running == 1
            held = engine.pool.counts().leased
            await cluster.abort(r.request_id)
            async with asyncio.timeout(30):
                while engine.scheduler.stats().waiting:
                    await asyncio.sleep(0.005)
            assert engine.pool.counts().leased <= held - 40 // BLOCK + 2  # the other request may have grown
            assert not first.done()
            second.cancel()
            monkeypatch.setattr(engine.runner, "launch", launch)
            assert len((await first).ids) == 100

    async def test_a_refusal_by_decode_ends_the_prefill_long_before_its_deadline(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            r = request(prompt_of(40))
            reply = await cluster.reserve(r)
            await cluster.abort(r.request_id)
            with pytest.raises(BatonError) as caught:
                await prefill_alone(cluster, r, reply.target)
            assert caught.value.kind in ("UnknownTransfer", "TransferFailed")
            await cluster.prefill.settled()
            with pytest.raises(InvalidRequest):
                await cluster.generate(request(prompt_of(MAX_LEN)))

    async def test_random_aborts_and_late_writes_do_not_change_other_answers(self, model_dir: Path, llm: LLM) -> None:
        rng = random.Random(4)
        async with Cluster.start(model_dir, decode_config={"num_blocks": 40}) as cluster:
            cluster.fabric.on_write = lambda *_: LoopbackFault(delay_s=rng.choice((0.0, 0.0, 0.02, 0.15)))
            cluster.fabric.on_notify = lambda *_: rng.choice(((0.0,), (0.0, 0.01), (0.03,)))
            await abort_storm(cluster, llm, rng, rounds=5)


class TestPeers:
    async def test_decode_dies_and_prefill_gets_its_blocks_back(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir, decode=2) as cluster:
            await cluster.generate(request(prompt_of(3)))

            def seen(kind: str) -> None:
                if kind == "progress":
                    cluster.fabric.kill(cluster.decode.agent)

            cluster.fabric.on_write = lambda *_: LoopbackFault(delay_s=0.5)  # the prompt must not be there before
            with pytest.raises(BatonError):
                await cluster.generate(request(prompt_of(4 * CHUNK)), on_event=seen, timeout_s=5)
            cluster.fabric.on_write = lambda *_: LoopbackFault()
            await cluster.prefill.settled()
            survivor = cluster.decodes[1]
            assert len((await cluster.generate(request(prompt_of(20)), decode=survivor)).ids) == 8
            await cluster.streams.pop(0).close()
            await cluster.decodes.pop(0).close()

    async def test_prefill_dies_and_its_successor_proves_it(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            await cluster.generate(request(prompt_of(3)))
            old = cluster.prefill
            await until(lambda: old.runtime.transfer_node.stats().pending_writes == 0)
            cluster.fabric.on_write = lambda *_: LoopbackFault(delay_s=600)
            r = request(prompt_of(4 * CHUNK))
            running = asyncio.create_task(cluster.generate(r))
            await until(lambda: old.runtime.transfer_node.stats().pending_writes > 0)
            cluster.fabric.kill(old.agent)
            running.cancel()
            await asyncio.wait([running])
            await cluster.abort(r.request_id)
            cluster.prefills.clear()
            await old.close()
            assert (await cluster.decode.info()).blocks.quarantined > 0
            cluster.fabric.on_write = lambda *_: LoopbackFault()
            port = int(old.runtime.address.rpartition(":")[2])
            await cluster.add(Role.PREFILL, name=old.runtime.name, port=port)
            assert len((await cluster.generate(request(prompt_of(20, seed=3)))).ids) == 8
            await cluster.decode.settled()

    async def test_a_decode_pod_keeps_blocks_that_may_still_be_written(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            await cluster.generate(request(prompt_of(3)))
            posted = 0

            def write(_source: str, _peer: str, count: int) -> LoopbackFault:
                nonlocal posted
                posted += count
                return LoopbackFault()

            cluster.fabric.on_write = write
            cluster.fabric.freeze(cluster.decode.agent)
            r = request(prompt_of(40))
            running = asyncio.create_task(cluster.generate(r))
            await until(lambda: posted == 40 // BLOCK)
            running.cancel()
            await asyncio.wait([running])
            await cluster.abort(r.request_id)

            async def in_quarantine() -> bool:
                return (await cluster.decode.info()).blocks.quarantined == 40 // BLOCK

            await until(in_quarantine)
            await asyncio.sleep(0.3)
            assert await in_quarantine(), "blocks came back while a write may still land"
            assert (await cluster.prefill.info()).blocks.leased == 40 // BLOCK
            cluster.fabric.thaw(cluster.decode.agent)

    async def test_reservations_end_by_their_deadlines_in_any_order(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            first = request(prompt_of(9))
            await cluster.reserve(first)
            await cluster.abort(first.request_id)
            ended: list[float] = []

            async def reserve(timeout_s: float) -> None:
                r = request(prompt_of(9, seed=int(timeout_s * 10)))
                inbox = cluster.stream_of(cluster.decode).expect(r.request_id)
                await cluster.reserve(r, timeout_s=timeout_s)
                delta = await asyncio.wait_for(inbox.get(), 30)
                assert delta.error.kind == "DeadlineExceeded"
                ended.append(timeout_s)

            await asyncio.gather(*map(reserve, (4.0, 2.0, 3.0)))
            assert ended == [2.0, 3.0, 4.0]

    async def test_a_pod_is_ready_only_after_a_real_block_went_to_every_decode_pod(
        self, model_dir: Path, tmp_path: Path
    ) -> None:
        valkey = EmbeddedValkey(0, tmp_path)
        config = {"redis": await valkey.start()}
        reader = IndexReader(config["redis"], timeout_s=5.0)
        try:
            async with Cluster.start(model_dir, prefill=0, decode=2, decode_config=config) as cluster:
                async with asyncio.timeout(30):
                    while len(await reader.pods()) < 2:
                        await asyncio.sleep(0.02)
                early: set[str] = set()  # peers that got a block before the pod was ready

                def write(_source: str, peer: str, _count: int) -> LoopbackFault:
                    if not cluster.prefills:
                        early.add(peer)
                    return LoopbackFault(delay_s=0.05)

                cluster.fabric.on_write = write
                prefill = await cluster.add(Role.PREFILL, **config)
                assert early == {pod.agent for pod in cluster.decodes}
                assert len(prefill.runtime.transfer_node.stats().peers) == 2
        finally:
            await reader.close()
            await valkey.stop()


class TestStaleTransfers:
    async def test_a_stale_target_never_gives_an_answer(self, model_dir: Path, llm: LLM) -> None:
        async with Cluster.start(model_dir) as cluster:
            r = request(prompt_of(40))
            stale = await cluster.reserve(r)
            await cluster.abort(r.request_id)
            # Another request gets the blocks at once; the stale writer must not reach them.
            other = request(prompt_of(40, seed=1))
            inbox = cluster.stream_of(cluster.decode).expect(r.request_id)
            answer, stale_run = await asyncio.gather(
                cluster.generate(other), prefill_alone(cluster, r, stale.target), return_exceptions=True
            )
            assert isinstance(answer, Answer)
            assert answer.ids == expected(llm, other)
            assert isinstance(stale_run, BatonError)
            assert inbox.empty()

    async def test_transfer_ids_are_never_reused(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            ids = []
            for i in range(4):
                r = request(prompt_of(9, seed=i))
                ids.append((await cluster.reserve(r)).target.transfer_id)
                await cluster.abort(r.request_id)
            assert len({i.number for i in ids}) == 4
            assert {i.generation for i in ids} == {cluster.decode.runtime.generation}

    @pytest.mark.parametrize("fault", ["lost_notification", "failed_write"])
    async def test_decode_never_runs_on_kv_that_did_not_arrive(self, model_dir: Path, llm: LLM, fault: str) -> None:
        async with Cluster.start(model_dir) as cluster:
            await cluster.generate(request(prompt_of(3)))
            if fault == "lost_notification":
                cluster.fabric.on_notify = lambda *_: ()
            else:
                cluster.fabric.on_write = lambda *_: LoopbackFault(fail="remote access error")
            seen: list[str] = []
            r = request(prompt_of(40))
            with pytest.raises(BatonError):
                await cluster.generate(r, on_event=seen.append, timeout_s=1.0)
            await cluster.abort(r.request_id)
            assert "tokens" not in seen
            cluster.fabric.on_notify = lambda *_: (0.0,)
            cluster.fabric.on_write = lambda *_: LoopbackFault()
            again = request(prompt_of(40, seed=2))
            assert (await cluster.generate(again)).ids == expected(llm, again)

    async def test_accepted_by_decode_refused_by_prefill(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            r = request(prompt_of(20))
            reply = await cluster.reserve(r)
            cluster.prefill.runtime.lifecycle.begin_drain("test")
            with pytest.raises(Unavailable):
                await prefill_alone(cluster, r, reply.target)
            await cluster.abort(r.request_id)

    async def test_a_sequence_that_the_engine_refuses_gives_its_blocks_back(
        self, model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def choke(_seq: object) -> None:
            raise RuntimeError("nobody foresaw this")

        async with Cluster.start(model_dir) as cluster:
            await cluster.generate(request(prompt_of(3)))
            with monkeypatch.context() as patch:
                patch.setattr(cluster.decode.runtime.engine.scheduler, "add", choke)
                with pytest.raises(InternalError):
                    await cluster.generate(request(prompt_of(20)), remote_only=True)
            assert len((await cluster.generate(request(prompt_of(20)))).ids) == 8


class TestScarcity:
    async def test_chunks_and_preemptions_do_not_change_the_output(self, model_dir: Path, llm: LLM) -> None:
        async with Cluster.start(model_dir, prefill=0, role=Role.BOTH, decode_config={"num_blocks": 26}) as cluster:
            requests = [request(prompt_of(3 * CHUNK, seed=i), 30) for i in range(4)]
            answers = await asyncio.gather(*(cluster.generate(r) for r in requests))
            for r, answer in zip(requests, answers, strict=True):
                assert answer.ids == expected(llm, r)
            assert (await cluster.decode.info()).computed.recompute > 0

    async def test_a_preempted_sequence_of_a_decode_pod_is_recomputed_and_counted_separately(
        self, model_dir: Path, llm: LLM
    ) -> None:
        async with Cluster.start(model_dir, decode_config={"num_blocks": 26}) as cluster:
            requests = [request(prompt_of(24, seed=i), 60) for i in range(3)]
            answers = await asyncio.gather(*(cluster.generate(r, remote_only=True) for r in requests))
            for r, answer in zip(requests, answers, strict=True):
                assert answer.ids == expected(llm, r)
            info = await cluster.decode.info()
            assert info.computed.recompute > 0
            assert (info.computed.prefill, info.computed.local) == (0, 0)

    @pytest.mark.parametrize("role", [Role.DECODE, Role.BOTH])
    async def test_requests_that_need_most_of_the_pool_finish_one_after_the_other(
        self, model_dir: Path, llm: LLM, role: Role
    ) -> None:
        async with Cluster.start(model_dir, role=role, decode_config={"num_blocks": 12}) as cluster:
            requests = [request(prompt_of(30, seed=i), 18) for i in range(3)]

            async def until_served(r: ValidRequest) -> Answer:
                while True:
                    with contextlib.suppress(Overloaded):
                        return await cluster.generate(r)
                    await asyncio.sleep(0.02)

            answers = await asyncio.wait_for(asyncio.gather(*map(until_served, requests)), 120)
            for r, answer in zip(requests, answers, strict=True):
                assert answer.ids == expected(llm, r)
            with pytest.raises(InvalidRequest) as caught:
                await cluster.generate(request(prompt_of(49), 1))
            assert caught.value.field == "prompt_ids"
            with pytest.raises(InvalidRequest) as caught:
                await cluster.generate(request(prompt_of(30), 40))
            assert caught.value.field == "max_tokens"

    async def test_deadlines_bound_decoding(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            await cluster.generate(request(prompt_of(3)))
            engine = cluster.decode.runtime.engine_loop
            gate = threading.Event()
            stuck = []

            def seen(kind: str) -> None:
                if kind == "tokens" and not stuck:
                    stuck.append(engine.call(lambda: gate.wait(60)))

            with pytest.raises(DeadlineExceeded):  # from the decode pod: the client's own timeout is another error
                await cluster.generate(request(prompt_of(9), 100), timeout_s=6.0, on_event=seen)
            assert not stuck[0].done()
            gate.set()
