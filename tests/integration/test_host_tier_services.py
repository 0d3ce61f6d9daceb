"""Pods with a host tier: cache hits, hand-offs, preemption, the index and metrics count blocks in host memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cli.stack.valkey import EmbeddedValkey
from common.pb import control_pb2, control_pb2_grpc
from common.types import Role
from engine.llm import LLM
from prefill_service import prefix_pull
from prefix_index.reader import IndexReader
from tests.rigs.pods.harness import BLOCK, Cluster, Pod, expected, prompt_of, request

BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 16 * 4
HOSTED = {"num_blocks": 24, "host_cache": 200 * BLOCK_BYTES}
WAIT_S = 20.0


async def at_rest(pod: Pod) -> None:
    await pod.settled()
    tier = pod.runtime.engine.pool.host_tier
    assert tier is not None
    assert await asyncio.to_thread(tier.wait_idle, WAIT_S)


@pytest.mark.parametrize("role", [Role.DECODE, Role.BOTH])
async def test_evicted_blocks_are_neither_computed_nor_moved_again(model_dir: Path, llm: LLM, role: Role) -> None:
    prefill = 1 if role is Role.DECODE else 0
    async with Cluster.start(
        model_dir, role=role, prefill=prefill, prefill_config=HOSTED, decode_config=HOSTED
    ) as cluster:
        prompts = [prompt_of(60, seed=i) for i in range(4)]
        for prompt in prompts:
            r = request(prompt)
            assert (await cluster.generate(r)).ids == expected(llm, r)
            for pod in cluster.pods:
                await at_rest(pod)
        again = request(prompts[0])
        answer = await cluster.generate(again)
        assert answer.ids == expected(llm, again)
        assert answer.cached_tokens == 56
        if answer.target is not None:
            assert answer.target.first_block == 56 // BLOCK
            assert len(answer.target.blocks) == 1
        for pod in cluster.pods:
            await at_rest(pod)
            text = pod.runtime.metrics.metrics.exposition().decode()
            lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
            assert float(lines['baton_host_blocks{state="used"}']) > 0
            assert float(lines['baton_host_blocks{state="free"}']) > 0
            assert float(lines['baton_host_moved_bytes_total{direction="to_device"}']) >= BLOCK_BYTES
            assert float(lines['baton_host_moved_bytes_total{direction="to_host"}']) >= BLOCK_BYTES
            assert float(lines['baton_prefix_hit_tokens_total{tier="host"}']) > 0
            assert lines['baton_damaged_kv_total{where="host"}'] == "0.0"


async def test_preempted_sequences_of_a_decode_pod_are_not_recomputed(model_dir: Path, llm: LLM) -> None:
    async with Cluster.start(model_dir, decode_config=HOSTED | {"num_blocks": 26}) as cluster:
        requests = [request(prompt_of(24, seed=i), 60) for i in range(3)]
        answers = await asyncio.gather(*(cluster.generate(r, remote_only=True) for r in requests))
        for r, answer in zip(requests, answers, strict=True):
            assert answer.ids == expected(llm, r)
        stats = cluster.decode.runtime.engine.scheduler.stats()
        assert stats.fully_restored == stats.preemptions > 0
        computed = (await cluster.decode.info()).computed
        assert (computed.prefill, computed.local, computed.recompute) == (0, 0, 0)
        text = cluster.decode.runtime.metrics.metrics.exposition().decode()
        assert f'baton_preempted_sequences_total{{outcome="resumed"}} {stats.fully_restored}.0' in text
        assert 'baton_preempted_sequences_total{outcome="recomputed"} 0.0' in text


async def test_damage_in_host_memory_reaches_no_answer(model_dir: Path, llm: LLM) -> None:
    """A reservation with damaged blocks from host memory ends with an error, and its blocks are freed."""
    async with Cluster.start(model_dir, decode_config=HOSTED) as cluster:
        prompts = [prompt_of(60, seed=i) for i in range(3)]
        for prompt in prompts:
            await cluster.generate(request(prompt))
            await at_rest(cluster.decode)
        memory = cluster.decode.runtime.engine.host_memory
        assert memory is not None
        memory.data[:, 7] ^= 1
        with pytest.raises(Exception, match="damaged"):
            await cluster.generate(request(prompts[0]))
        await at_rest(cluster.decode)
        text = cluster.decode.runtime.metrics.metrics.exposition().decode()
        assert 'baton_damaged_kv_total{where="host"} 1.0' in text
        again = request(prompts[0])
        assert (await cluster.generate(again)).ids == expected(llm, again)


async def test_blocks_in_host_memory_are_not_pulled(model_dir: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill pod has five blocks of a prefix in host memory and pulls the rest from another pod."""
    monkeypatch.setattr(prefix_pull, "UNKNOWN_TIME_S", WAIT_S)
    monkeypatch.setattr(prefix_pull, "MIN_TIME_S", WAIT_S)
    monkeypatch.setattr(prefix_pull, "MAX_TIME_S", WAIT_S)
    async with Cluster.start(model_dir, prefill=2, prefill_config=HOSTED | {"pull": "push"}) as cluster:
        holder, second = cluster.prefills
        prefix = prompt_of(12 * BLOCK, seed=9)
        await cluster.generate(request([*prefix, 7], 2), prefill=holder)
        await cluster.generate(request([*prefix[: 5 * BLOCK], 3], 2), prefill=second)
        for i in range(3):
            await cluster.generate(request(prompt_of(80, seed=i), 2), prefill=second)
            await at_rest(second)
        r = request([*prefix, *prompt_of(2 * BLOCK + 1, seed=3)], 6)
        pool = second.runtime.engine.pool
        hashes = second.runtime.engine.new_sequence(r).matchable_hashes()
        assert hashes[0] not in pool.cached_hashes()
        assert pool.match_prefix(hashes) == 5
        answer = await cluster.generate(r, prefill=second, pull=holder.holds(12))
        assert answer.ids == expected(llm, r)
        assert answer.cached_tokens == 12 * BLOCK
        assert second.counted("pulled_blocks") == {(): 7}


async def test_the_index_knows_the_tier(model_dir: Path, tmp_path: Path) -> None:
    valkey = EmbeddedValkey(0, tmp_path)
    config = HOSTED | {"redis": await valkey.start()}
    try:
        async with Cluster.start(model_dir, role=Role.BOTH, prefill=0, decode_config=config) as cluster:
            prompts = [prompt_of(61, seed=i) for i in range(4)]
            for prompt in prompts:
                await cluster.generate(request(prompt))
                await at_rest(cluster.decode)
            runtime = cluster.decode.runtime
            engine, owner = runtime.engine, (runtime.name, runtime.generation)
            pool, scope = engine.pool, engine.layout.scope
            for prompt in prompts:
                hashes = engine.new_sequence(request(prompt)).matchable_hashes()
                device = set(pool.cached_hashes())
                here = next((i for i, h in enumerate(hashes) if h not in device), len(hashes))
                async with asyncio.timeout(WAIT_S):
                    while True:
                        reader = IndexReader(config["redis"], timeout_s=5.0)  # has no cached answer
                        held = (await reader.lookup_tiers(scope, hashes, [owner]))[runtime.name]
                        await reader.close()
                        if (held.device_blocks, held.total_blocks) == (here, len(hashes)):
                            break
                        await asyncio.sleep(0.02)
            assert here < len(hashes) or set(pool.host_hashes())
            stub = control_pb2_grpc.ControlStub(cluster.decode.channel)
            said = await stub.ResetPrefixCache(control_pb2.ResetPrefixCacheRequest())
            assert said.indexed
            assert pool.cached_hashes() == pool.host_hashes() == []
            reader = IndexReader(config["redis"], timeout_s=5.0)
            held = (await reader.lookup_tiers(scope, hashes, [owner]))[runtime.name]
            await reader.close()
            assert (held.device_blocks, held.total_blocks) == (0, 0)
    finally:
        await valkey.stop()
