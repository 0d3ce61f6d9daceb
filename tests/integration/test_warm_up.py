"""A new pod pulls the most used prefixes of its peers before it is ready, within its limits."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cli.stack.valkey import EmbeddedValkey
from common.kv_layout import KVLayout
from common.types import Role
from engine.kv.groups.state_blocks import StateBlockPool
from engine.llm import LLM
from kv_transfer.messages import PullResult, WantedBlocks
from kv_transfer.servicer import TransferServicer
from pod.warm_up import MIN_HITS, PrefixWarmUp, _Offer, parse_hot_prefixes
from prefix_index import publisher
from prefix_index.reader import IndexReader
from prefix_index.store import PodRecord
from tests.kv_groups.families import check_tokens, save
from tests.rigs.engine.hybrid_models import HYBRID_CASES, save_hybrid
from tests.rigs.pods.harness import BLOCK, VOCAB, Cluster, Pod, expected, prompt_of, request
from tests.rigs.waiting import until

PREFIX = prompt_of(8 * BLOCK, seed=9)
WARM = {"warm_up_s": 30.0, "pull": "push"}


@pytest.fixture
async def redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr(publisher, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(publisher, "HOT_S", 0.05)
    valkey = EmbeddedValkey(0, tmp_path)
    try:
        yield await valkey.start()
    finally:
        await valkey.stop()


def warmed(pod: Pod) -> int:
    return int(pod.runtime.metrics.warm_up_blocks._value.get())


async def use_prefix(cluster: Cluster, redis: str, *, holders: int = 2, prompts: int = 3) -> None:
    """Some prompts with one prefix; waits until Redis has the lists of so many pods, with two hits each."""
    for number in range(prompts):
        await cluster.generate(request([*PREFIX, *prompt_of(BLOCK + 1, seed=number)], 2))
    runtimes = [pod.runtime for pod in (*cluster.prefills, cluster.decode)][:holders]
    scope, names = runtimes[0].engine.layout.scope, [runtime.name for runtime in runtimes]
    reader = IndexReader(redis, books=False, timeout_s=5.0)

    async def listed() -> bool:
        lists = await reader.hot_prefixes(scope, names)
        return all(raw is not None and parse_hot_prefixes(raw)[0].hits > MIN_HITS for raw in lists)

    await until(listed)
    await reader.close()


async def test_a_new_pod_has_the_hot_prefix_when_it_is_ready(model_dir: Path, llm: LLM, redis: str) -> None:
    config: dict[str, Any] = {"redis": redis, **WARM}
    async with Cluster.start(model_dir, prefill_config=config, decode_config=config) as cluster:
        assert [warmed(pod) for pod in cluster.pods] == [0, 0], "the first pods have no peers to pull from"
        await use_prefix(cluster, redis)
        new = await cluster.add(Role.PREFILL, **config)
        assert warmed(new) == len(PREFIX) // BLOCK
        r = request([*PREFIX, *prompt_of(BLOCK + 3, seed=77)], 6)
        answer = await cluster.generate(r, prefill=new)
        assert answer.ids == expected(llm, r)
        assert answer.cached_tokens == len(PREFIX)
        small = await cluster.add(Role.PREFILL, **config, warm_up_size=3 * new.runtime.engine.layout.block_bytes)
        assert warmed(small) == 3
        cold = await cluster.add(Role.PREFILL, **{**config, "warm_up_s": 0.0})
        assert warmed(cold) == 0


async def test_holders_that_fail_leave_a_new_pod_cold_and_ready(
    model_dir: Path, redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, Any] = {"redis": redis, **WARM}
    async with Cluster.start(model_dir, prefill_config=config, decode_config=config, check=False) as cluster:
        await use_prefix(cluster, redis)

        def refuse(*_: object) -> None:
            raise RuntimeError("no block is lent")

        for pod in cluster.pods:
            monkeypatch.setattr(pod.runtime.engine.pool, "pin_prefix", refuse)
        async with asyncio.timeout(60):
            new = await cluster.add(Role.PREFILL, **{**config, "warm_up_s": 1.0})
        assert warmed(new) == 0


@pytest.mark.parametrize("hanging", [1, 2])
async def test_a_holder_that_hangs_leaves_time_for_others_and_no_block_behind(
    model_dir: Path, llm: LLM, redis: str, monkeypatch: pytest.MonkeyPatch, hanging: int
) -> None:
    asked: list[TransferServicer] = []
    answer_pull = TransferServicer.Pull

    async def pull(self: TransferServicer, *call: Any) -> Any:
        asked.append(self)
        if len(asked) <= hanging:
            await asyncio.sleep(60)
        return await answer_pull(self, *call)

    monkeypatch.setattr(TransferServicer, "Pull", pull)
    config: dict[str, Any] = {"redis": redis, **WARM}
    async with Cluster.start(model_dir, prefill_config=config, decode_config=config) as cluster:
        await use_prefix(cluster, redis)
        async with asyncio.timeout(60):
            new = await cluster.add(Role.PREFILL, **{**config, "warm_up_s": 2.0})
        assert len(asked) == len(set(asked)) == 2, "prefill and decode pod hold the prefix, each is asked once"
        assert warmed(new) == (len(PREFIX) // BLOCK if hanging == 1 else 0)
        r = request([*PREFIX, *prompt_of(BLOCK + 3, seed=78)], 6)
        assert (await cluster.generate(r, prefill=new)).ids == expected(llm, r)
        await until(lambda: new.runtime.engine.pool.counts().quarantined == 0)


@pytest.mark.parametrize("family", ["qwen2-window", "qwen3.5"])
async def test_a_new_pod_pulls_pages_of_windows_and_recurrent_states(family: str, tmp_path: Path, redis: str) -> None:
    (tmp_path / "model").mkdir()
    hybrid = family in HYBRID_CASES
    save_model = functools.partial(save_hybrid, vocab_size=VOCAB) if hybrid else save
    reference = save_model(tmp_path / "model", family)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    config: dict[str, Any] = {"redis": redis, "kv_groups": True, "num_blocks": 400, **WARM}
    async with Cluster.start(tmp_path / "model", prefill_config=config, decode_config=config) as cluster:
        await use_prefix(cluster, redis, holders=1, prompts=4)  # the second one makes the snapshot
        new = await cluster.add(Role.PREFILL, **config)
        assert warmed(new) == len(PREFIX) // BLOCK
        r = request([*PREFIX, *prompt_of(BLOCK + 3, seed=77)], 6, logprobs=0)
        answer = await cluster.generate(r, prefill=new)
        assert answer.cached_tokens == len(PREFIX)
        check_tokens(reference, r.prompt_ids, answer.tokens)


@pytest.mark.parametrize(
    ("num_states", "max_blocks", "snapshots"), [(8, 100, 4), (2, 100, 1), (1, 100, 1), (8, 18, 2), (8, 9, 1), (8, 5, 0)]
)
async def test_a_warm_up_keeps_the_states_of_the_most_used_prefixes(
    num_states: int, max_blocks: int, snapshots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = KVLayout("m", "r", 1, 1, 16, 4, "float32", states="one array")
    layout = replace(layout, state_bytes=5 * layout.block_bytes)
    pool = StateBlockPool(100, 4, num_states=num_states, spacing=8, state_pages=layout.state_pages)
    record = PodRecord("peer", 1, "peer:1", Role.PREFILL, "m", layout.scope, layout.fingerprint, 4, 64, 100)
    offers = [_Offer(9.0 - i, tuple(bytes([i, j]) * 8 for j in range(4)), (record,)) for i in range(6)]

    class Node:
        async def pull(self, address: str, pod: str, wanted: WantedBlocks) -> PullResult:
            wanted.pin.release()
            return PullResult(len(wanted.blocks), "none", 1.0)

    async def offered(_: PrefixWarmUp) -> list[_Offer]:
        return offers

    monkeypatch.setattr(PrefixWarmUp, "_offers", offered)
    engine: Any = SimpleNamespace(pool=pool, layout=layout)
    warm_up = PrefixWarmUp(engine, cast(Any, Node()), cast(Any, None), "new")
    assert await warm_up.run(10.0, max_blocks) == 4 * snapshots
    assert [pool.match_prefix(offer.hashes) for offer in offers] == [4] * snapshots + [0] * (6 - snapshots)


async def test_without_redis_a_pod_starts_at_once(model_dir: Path) -> None:
    config: dict[str, Any] = {"redis": "redis://127.0.0.1:1", **WARM}
    async with asyncio.timeout(60):
        async with Cluster.start(model_dir, role=Role.BOTH, prefill=0, decode_config=config) as cluster:
            assert warmed(cluster.decode) == 0
