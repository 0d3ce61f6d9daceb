"""Pods with file tiers: they read blocks back from their disks or from the files of others; index and metrics know."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from cli.stack.valkey import EmbeddedValkey
from engine.llm import LLM
from prefix_index.reader import IndexReader
from tests.rigs.pods.harness import BLOCK, Cluster, Pod, expected, prompt_of, request
from tests.rigs.waiting import until

BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 16 * 4
WAIT_S = 20.0


async def at_rest(pod: Pod) -> None:
    await pod.settled()
    tier = pod.runtime.engine.pool.disk_tier or pod.runtime.engine.pool.shared_tier
    assert tier is not None
    assert await asyncio.to_thread(tier.wait_idle, WAIT_S)


def metric(pod: Pod, line: str) -> float:
    text = pod.runtime.metrics.metrics.exposition().decode()
    return next(float(row.rsplit(" ", 1)[1]) for row in text.splitlines() if row.startswith(line + " "))


async def test_both_pods_read_a_prompt_from_their_disks_and_the_index_knows(
    model_dir: Path, llm: LLM, tmp_path: Path
) -> None:
    valkey = EmbeddedValkey(0, tmp_path / "valkey")
    (tmp_path / "valkey").mkdir()
    config: dict[str, Any] = {
        "num_blocks": 24,
        "host_cache": 40 * BLOCK_BYTES,
        "disk_cache": str(tmp_path / "disk"),
        "disk_cache_size": 1 << 24,
        "redis": await valkey.start(),
    }
    try:
        async with Cluster.start(model_dir, prefill_config=config, decode_config=config) as cluster:
            for pod in cluster.pods:
                tier = pod.runtime.engine.pool.disk_tier
                assert tier is not None
                tier.compute_s = lambda _: 0.0  # computing seems to take unknown time, so every load is made
            prompts = [prompt_of(60, seed=i) for i in range(8)]
            for prompt in prompts:
                r = request(prompt)
                assert (await cluster.generate(r)).ids == expected(llm, r)
                for pod in cluster.pods:
                    await at_rest(pod)
            again = request(prompts[0])
            runtime = cluster.prefills[0].runtime
            hashes = runtime.engine.new_sequence(again).matchable_hashes()
            assert [pod.runtime.engine.pool.match_prefix(hashes) for pod in cluster.pods] == [0, 0]

            async def known() -> bool:
                reader = IndexReader(config["redis"], timeout_s=5.0)  # has no cached answer
                owners = [(pod.runtime.name, pod.runtime.generation) for pod in cluster.pods]
                found = await reader.lookup_tiers(runtime.engine.layout.scope, hashes, owners)
                await reader.close()
                return {(hits.total_blocks, hits.disk_blocks) for hits in found.values()} == {(14, 14)}

            await until(known)
            answer = await cluster.generate(again)
            assert answer.ids == expected(llm, again)
            assert answer.target is not None
            assert answer.target.first_block == 56 // BLOCK, "the decode pod has the prefix"
            assert answer.cached_tokens == 56, "the prefill pod has it too"
            for pod in cluster.pods:
                await at_rest(pod)
                assert metric(pod, 'baton_disk_moved_bytes_total{direction="to_host"}') == 14 * BLOCK_BYTES
                assert metric(pod, 'baton_disk_tier_bytes{of="blocks"}') >= 14 * BLOCK_BYTES
                assert metric(pod, "baton_disk_tier_working") == 1
                assert pod.runtime.load().disk_rate > 0
    finally:
        await valkey.stop()


async def test_pods_read_what_pods_of_another_cluster_have_computed(model_dir: Path, llm: LLM, tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "host_cache": 40 * BLOCK_BYTES,
        "shared_cache": str(tmp_path),
        "shared_cache_size": 1 << 24,
    }
    r = request(prompt_of(60, seed=1))
    async with Cluster.start(model_dir, prefill_config=config, decode_config=config) as first:
        assert (await first.generate(r)).ids == expected(llm, r)
        for pod in first.pods:
            await at_rest(pod)
            assert pod.runtime.load().shared_cache
            assert pod.runtime.load().shared_rate == 0
    async with Cluster.start(model_dir, prefill_config=config, decode_config=config) as second:
        for pod in second.pods:
            tier = pod.runtime.engine.pool.shared_tier
            assert tier is not None
            tier.compute_s = lambda _: 0.0  # computing seems to take unknown time, so every load is made
        answer = await second.generate(r)
        assert answer.ids == expected(llm, r)
        assert answer.target is not None
        assert answer.target.first_block == 56 // BLOCK, "the decode pod has the prefix"
        assert answer.cached_tokens == 56, "the prefill pod has it too"
        for pod in second.pods:
            await at_rest(pod)
            assert metric(pod, 'baton_shared_moved_bytes_total{direction="to_host"}') == 14 * BLOCK_BYTES
            assert metric(pod, 'baton_shared_searches_total{outcome="found"}') == 1
            assert metric(pod, "baton_shared_tier_working") == 1
            assert pod.runtime.load().shared_rate > 0
