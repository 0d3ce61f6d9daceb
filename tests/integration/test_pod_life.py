"""Life of a pod: Info, drain, faults that end it, the index, cache reset."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from cli.stack.valkey import EmbeddedValkey
from common.errors import ConfigError, InternalError, Unavailable
from common.pb import control_pb2, control_pb2_grpc
from common.types import Role
from engine.llm import LLM
from engine.step.runner import ModelRunner
from kv_transfer.node import TransferNode
from pod.health import QuarantineWatch
from pod.services import ControlServicer
from prefix_index.reader import IndexReader
from tests.rigs.pods.harness import BLOCK, MAX_LEN, Cluster, expected, prompt_of, request
from tests.rigs.waiting import until


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

    async def test_a_pod_that_cannot_compute_never_becomes_ready(
        self, model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(self: ModelRunner, *_: object) -> None:
            raise RuntimeError("the device is on fire")

        monkeypatch.setattr(ModelRunner, "launch", broken)
        with pytest.raises(InternalError, match="the device is on fire"):
            async with Cluster.start(model_dir):
                pytest.fail("it serves")

    async def test_drain_finishes_running_requests_and_refuses_new_ones(self, model_dir: Path, llm: LLM) -> None:
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
                await asyncio.wait_for(pod.runtime.lifecycle.wait_stopped(), 60)

    async def test_metrics_count_requests_tokens_and_transfers(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            await cluster.generate(request(prompt_of(33)))
            text = cluster.prefill.runtime.metrics.metrics.exposition().decode()
            assert 'baton_prompt_tokens_computed_total{reason="prefill"} 33.0' in text
            assert "baton_transfer_bytes_total" in text
            text = cluster.decode.runtime.metrics.metrics.exposition().decode()
            assert 'baton_reserve_total{outcome="remote"} 1.0' in text
            assert 'baton_kv_blocks{state="leased"}' in text

    async def test_an_inconsistent_pool_takes_the_pod_out_of_service(
        self, model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pod.health.CHECK_PERIOD_S", 0.02)
        async with Cluster.start(model_dir, check=False) as cluster:
            runtime = cluster.decode.runtime
            watch = runtime._health
            check = watch._check_pool

            def fails_once() -> None:
                monkeypatch.setattr(watch, "_check_pool", check)
                raise RuntimeError("the watch goes on")

            monkeypatch.setattr(watch, "_check_pool", fails_once)
            runtime.engine.pool._free.append(0)
            await until(lambda: not cluster.decode.runtime.info().ready)
            with pytest.raises(Unavailable):
                await cluster.reserve(request(prompt_of(5)))
            assert "baton_kv_pool_intact 0.0" in cluster.decode.runtime.metrics.metrics.exposition().decode()

    async def test_a_pod_whose_quarantine_lasts_drains_and_exits_with_3(
        self, model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pod.health.CHECK_PERIOD_S", 0.02)
        monkeypatch.setattr("pod.health.QuarantineWatch", lambda: QuarantineWatch(share=0.1, limit_s=0.1))
        async with Cluster.start(model_dir) as cluster:
            await cluster.generate(request(prompt_of(3)))
            await until(lambda: cluster.prefill.runtime.transfer_node.stats().pending_writes == 0)
            cluster.fabric.freeze(cluster.decode.agent)
            r = request(prompt_of(40))
            running = asyncio.create_task(cluster.generate(r))
            await until(lambda: cluster.prefill.runtime.transfer_node.stats().pending_writes > 0)
            running.cancel()
            await asyncio.wait([running])
            await cluster.abort(r.request_id)
            await asyncio.wait_for(cluster.decode.runtime.lifecycle.wait_stopped(), 60)
            assert cluster.decode.runtime.exit_code == 3
            cluster.fabric.thaw(cluster.decode.agent)

    @pytest.mark.parametrize("thread", ["engine", "transfer"])
    async def test_a_pod_that_lost_a_thread_drains_and_exits_with_4(
        self, model_dir: Path, monkeypatch: pytest.MonkeyPatch, thread: str
    ) -> None:
        monkeypatch.setattr("pod.health.CHECK_PERIOD_S", 0.02)
        async with Cluster.start(model_dir, prefill=0) as cluster:
            runtime = cluster.decode.runtime
            if thread == "engine":
                await asyncio.to_thread(runtime.engine_loop.stop, 60)
            else:
                runtime.transfer_node._thread.stop()
            await asyncio.wait_for(runtime.lifecycle.wait_stopped(), 60)
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

    async def test_pods_find_each_other_in_the_index_and_leave_it_first(
        self, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("prefix_index.publisher._LEAVE_S", 30.0)  # on a busy machine Redis can answer late
        valkey = EmbeddedValkey(0, tmp_path)
        config = {"redis": await valkey.start()}
        reader = IndexReader(config["redis"], timeout_s=5.0)
        try:
            async with Cluster.start(model_dir, prefill_config=config, decode_config=config) as cluster:
                await until(lambda: len(cluster.prefill.runtime.transfer_node.stats().peers) == 1)
                late = await cluster.add(Role.DECODE, **config)
                await until(lambda: len(cluster.prefill.runtime.transfer_node.stats().peers) == 2)
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
                await asyncio.wait_for(runtime.lifecycle.wait_stopped(), 60)
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
        bad, good = 0.2, 0.1
        assert not watch.overdue(bad, 0.0)
        assert not watch.overdue(good, 30.0)
        assert not watch.overdue(bad, 40.0)
        assert not watch.overdue(bad, 99.0)
        assert watch.overdue(bad, 100.0)


async def test_a_reset_that_waits_for_the_host_does_not_block_the_event_loop() -> None:
    seen = threading.Event()

    class Pool:
        def reset_prefix_cache(self) -> int:
            return 3 if seen.wait(20) else -1

        def cached_hashes(self) -> list[bytes]:
            return []

    servicer: Any = ControlServicer(Pool(), lambda: None, None, None)  # type: ignore[arg-type]
    asyncio.get_running_loop().call_later(0.01, seen.set)
    assert (await servicer.ResetPrefixCache(None, None)).cleared == 3


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
            fresh = IndexReader(config["redis"], timeout_s=5.0)  # has no cached answer
            assert await fresh.lookup(scope, hashes, owner) == {runtime.name: 0}
            await fresh.close()
            again = request(r.prompt_ids)
            assert (await cluster.generate(again)).cached_tokens == 0
    finally:
        await reader.close()
        await valkey.stop()
