"""KV groups over prefill and decode pods: the answers equal those of transformers, and only what decode needs moves."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import BatonError, LayoutMismatch, Overloaded
from common.kv_groups import PageOrder
from common.kv_layout import KVLayout
from common.types import Role, ValidRequest
from engine.kv.groups.grouped_blocks import GroupedBlockPool
from engine.schedule.sequence import Sequence as EngineSequence
from gateway.pods.info import PodInfo
from kv_transfer.backend.loopback import LoopbackFault
from prefill_service import prefix_pull
from tests.kv_groups.families import BLOCK, CHUNK, FAMILIES, check_tokens, prompt, save
from tests.rigs.pods.aborts import abort_storm
from tests.rigs.pods.harness import Answer, Cluster, Pod, oracle, request
from tests.rigs.pods.samples import Samples

torch.set_num_threads(1)
NEW = 9  # Tokens of an answer; they cross two blocks
GROUPS: dict[str, Any] = {"kv_groups": True, "num_blocks": 400}
BOTH: dict[str, Any] = {"prefill_config": GROUPS, "decode_config": {"local_prefill": "off", **GROUPS}}


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineSequence, "CHECKS", True)
    for limit in ("UNKNOWN_TIME_S", "MIN_TIME_S", "MAX_TIME_S"):
        monkeypatch.setattr(prefix_pull, limit, 20.0)


def save_for_pods(path: Path, family: str) -> Any:
    reference = save(path, family)
    (path / "tokenizer.json").write_text("{}")
    return reference


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny Qwen2 whose last layers have a window of 7 tokens."""
    path = tmp_path_factory.mktemp("windowed")
    return path, save_for_pods(path, "qwen2-window")


def asked(prompt_ids: list[int], max_tokens: int = NEW, **sampling: Any) -> ValidRequest:
    return request(prompt_ids, max_tokens, logprobs=0, **sampling)


def layout_of(pod: Pod) -> KVLayout:
    assert isinstance(pod.runtime.engine.pool, GroupedBlockPool)
    return pod.runtime.engine.layout


def check(reference: Any, r: ValidRequest, answer: Answer) -> None:
    check_tokens(reference, r.prompt_ids, answer.tokens)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("cohere2", "exaone4")])
async def test_every_length_and_every_boundary(family: str, tmp_path: Path) -> None:
    reference = save_for_pods(tmp_path, family)
    async with Cluster.start(tmp_path, **BOTH) as cluster:
        layout = layout_of(cluster.decode)
        for length in (1, 3, 4, 5, 23, 32, 33):
            r = asked(prompt(length, seed=length), 5)
            for cold in (True, False):
                answer = await cluster.generate(replace(r, request_id=f"{length}-{cold}"), remote_only=True)
                check(reference, r, answer)
                assert answer.cached_tokens == (0 if cold else (length - 1) // BLOCK * BLOCK)
                assert answer.target is not None
                assert answer.handed_off is not None
                order = PageOrder.of_prompt(layout, length)
                pages = order.num_pages - (0 if cold else order.first_page((length - 1) // BLOCK))
                assert answer.handed_off.blocks == len(answer.target.blocks) == pages
        first = prompt(29, seed=1)
        await cluster.generate(asked(first, 1), remote_only=True)
        for blocks in range(1, 8):
            r = asked([*first[: blocks * BLOCK], *prompt(3, seed=100 + blocks)], 3)
            answer = await cluster.generate(r, remote_only=True)
            check(reference, r, answer)
            assert answer.cached_tokens == blocks * BLOCK


async def test_pages_before_the_window_do_not_move(windowed: tuple[Path, Any]) -> None:
    path, reference = windowed
    async with Cluster.start(path, **BOTH) as cluster:
        r = asked(prompt(101, seed=3))
        answer = await cluster.generate(r, remote_only=True)
        check(reference, r, answer)
        # 26 blocks; each window group needs the two before the last boundary, and the one that is being filled.
        window_groups = len(layout_of(cluster.decode).groups) - 1
        assert answer.handed_off is not None
        assert answer.handed_off.blocks == 26 + 3 * window_groups
        # The conversation goes on: decode has the pages at the end of the prompt, and gets the new ones only.
        more = asked([*r.prompt_ids, *answer.ids[:3], 5], 4)
        follow = await cluster.generate(more, remote_only=True)
        check(reference, more, follow)
        assert follow.target is not None
        assert follow.target.first_block == PageOrder.of_prompt(layout_of(cluster.decode), 105).first_page(26)


async def test_gateways_and_planners_see_blocks_not_pages(windowed: tuple[Path, Any]) -> None:
    path, _ = windowed
    async with Cluster.start(path, **BOTH) as cluster:
        runtime, reported = cluster.decode.runtime, PodInfo.from_pb(cluster.decode.runtime.info(), "here:1")
        pool, layout = runtime.engine.pool, layout_of(cluster.decode)
        windows = len(layout.groups) - 1
        assert pool.num_available() == pool.num_blocks
        assert reported.window_tails == (2,) * windows
        assert reported.num_blocks == runtime.load().free_blocks == pool.num_blocks - 4 * windows
        assert pool.pages_for(reported.num_blocks * BLOCK) == pool.num_blocks
        assert reported.block_bytes == layout.block_bytes
        wrong = runtime.info()
        wrong.layout.block_size = 0
        with pytest.raises(BatonError, match="block_size"):
            PodInfo.from_pb(wrong, "here:1")


async def test_late_targets_samples_and_local_prefill(windowed: tuple[Path, Any]) -> None:
    path, reference = windowed
    async with Cluster.start(path, **BOTH) as cluster:
        for length in (21, 64):
            r = asked(prompt(length, seed=length))
            check(reference, r, await cluster.generate(r, remote_only=True, late_s=0.05))
        llm = oracle(path, kv_groups=True)
        for length in (1, CHUNK, 2 * CHUNK + 3):
            sampled = request(prompt(length, seed=7), 14, temperature=1.0, seed=3, n=3)
            got = await Samples().run(cluster, sampled)
            alone = llm.generate([sampled.prompt_ids], sampled.sampling, ignore_eos=True)
            assert [got.ids(child) for child in range(3)] == [c.ids for c in alone]
    drafting = {"local_prefill": "12", "speculation": "ngram", "speculation_tokens": 3}
    local = {"decode_config": {**GROUPS, **drafting}, "prefill_config": GROUPS}
    async with Cluster.start(path, **local) as cluster:
        r = asked(prompt(40, seed=5))
        first = await cluster.generate(r)
        more = asked([*r.prompt_ids, *first.ids, *prompt(3, seed=9)])
        follow = await cluster.generate(more)
        assert follow.events[0] == "local"
        check(reference, more, follow)
        assert follow.cached_tokens == 48


@pytest.mark.parametrize("role", [Role.DECODE, Role.BOTH])
async def test_another_pod_continues_an_answer(windowed: tuple[Path, Any], role: Role) -> None:
    path, reference = windowed
    pods = {"decode_config": BOTH["decode_config"], "decode": 2, "role": role}
    pods |= {"prefill": 0} if role is Role.BOTH else {"prefill_config": GROUPS}
    async with Cluster.start(path, **pods) as cluster:
        for length in (7, 32, 45):
            r = asked(prompt(length, seed=length), 14)
            whole = await cluster.generate(r)
            for at in (1, BLOCK, 13):
                rest = replace(r.resumed(0, whole.ids[:at]), request_id=f"{r.request_id}-{at}")
                answer = await cluster.generate(rest, decode=cluster.decodes[1])
                assert [token.id for token in answer.tokens] == whole.ids[at:]
                check_tokens(reference, [*r.prompt_ids, *whole.ids[:at]], answer.tokens)


async def test_a_full_pool_rejects_and_preempts(windowed: tuple[Path, Any]) -> None:
    """Many answers at once in few pages: some are rejected and asked again, some are preempted; all are right."""
    path, reference = windowed
    small = {"prefill_config": GROUPS, "decode_config": {**BOTH["decode_config"], "num_blocks": 30}}
    async with Cluster.start(path, **small) as cluster:

        async def one(i: int) -> None:
            r = asked(prompt(5 + 9 * i, seed=i), 24)
            while True:
                try:
                    answer = await cluster.generate(r, remote_only=True)
                except Overloaded:
                    await asyncio.sleep(0.02)
                    continue
                check(reference, r, answer)
                return

        await asyncio.gather(*map(one, range(6)))


async def test_aborts_at_any_time_leak_no_page(windowed: tuple[Path, Any]) -> None:
    path, _ = windowed
    async with Cluster.start(path, **BOTH) as cluster:
        await abort_storm(cluster, oracle(path, kv_groups=True), random.Random(4), rounds=2)


async def test_a_failed_write_leaks_no_page(windowed: tuple[Path, Any]) -> None:
    path, reference = windowed
    async with Cluster.start(path, **BOTH) as cluster:
        r = asked(prompt(50, seed=2))
        check(reference, r, await cluster.generate(r, remote_only=True))
        cluster.fabric.on_write = lambda *_: LoopbackFault(fail="the link broke")
        failing = asked(prompt(61, seed=8))
        with pytest.raises(BatonError):
            await cluster.generate(failing, remote_only=True)
        await cluster.abort(failing.request_id)  # as a gateway does; the written pages stay in quarantine for the grace


class TestPulls:
    async def test_a_prefix_is_pulled_with_the_end_of_its_windows(self, windowed: tuple[Path, Any]) -> None:
        path, reference = windowed
        async with Cluster.start(path, prefill=2, **BOTH) as cluster:
            holder, puller = cluster.prefills
            base = prompt(50, seed=12)
            await cluster.generate(asked(base, 2), prefill=holder, remote_only=True)
            await holder.settled()
            r = asked([*base[:48], *prompt(7, seed=13)])
            answer = await cluster.generate(r, prefill=puller, pull=holder.holds(12), remote_only=True)
            check(reference, r, answer)
            assert answer.cached_tokens == 48
            assert puller.counted("pulls") == {("done", "all"): 1}
            assert puller.counted("pulled_blocks") == {(): PageOrder.of_prefix(layout_of(holder), 12).num_pages}
            # What is missing is pulled: a longer prefix, of which the puller has 12 blocks.
            base += prompt(30, seed=14)
            await cluster.generate(asked(base, 2), prefill=holder, remote_only=True)
            await holder.settled()
            r = asked([*base[:76], 9, 9])
            answer = await cluster.generate(r, prefill=puller, pull=holder.holds(19), remote_only=True)
            check(reference, r, answer)

    async def test_a_boundary_without_window_pages_is_computed(self, windowed: tuple[Path, Any]) -> None:
        """A decode pod got the window pages of no boundary but the last."""
        path, reference = windowed
        async with Cluster.start(path, prefill=2, **BOTH) as cluster:
            puller, holder = cluster.prefills[1], cluster.decode
            base = prompt(50, seed=12)
            await cluster.generate(asked(base, 2), prefill=cluster.prefill, remote_only=True)
            await holder.settled()
            r = asked([*base[:24], *prompt(7, seed=13)])
            answer = await cluster.generate(r, prefill=puller, pull=holder.holds(6), remote_only=True)
            check(reference, r, answer)
            assert puller.counted("pulls") == {("refused", "absent"): 1}
            assert puller.counted("pulls_asked") == {(): 1}

    async def test_a_shorter_prefix_is_pulled_where_the_window_pages_are(self, windowed: tuple[Path, Any]) -> None:
        path, reference = windowed
        async with Cluster.start(path, prefill=2, **BOTH) as cluster:
            puller, holder = cluster.prefills[1], cluster.decode
            base = prompt(50, seed=12)
            for length in (25, 50):  # the holder can send 6 or 12 of these blocks
                r = asked(base[:length], 2)
                await cluster.generate(r, prefill=cluster.prefill, remote_only=True)
                await holder.settled()
            r = asked([*base[:40], *prompt(7, seed=13)])
            answer = await cluster.generate(r, prefill=puller, pull=holder.holds(10), remote_only=True)
            check(reference, r, answer)
            assert puller.counted("pulls") == {("done", "part"): 1}
            assert puller.counted("pulled_blocks") == {(): PageOrder.of_prefix(layout_of(holder), 6).num_pages}


async def test_pods_with_and_without_groups_refuse_each_other(windowed: tuple[Path, Any]) -> None:
    path, _ = windowed
    async with Cluster.start(path, prefill_config={"num_blocks": 100}, decode_config=GROUPS) as cluster:
        r = asked(prompt(9, seed=1))
        with pytest.raises(LayoutMismatch):
            await cluster.generate(r, remote_only=True)
        await cluster.abort(r.request_id)
        node, decode = cluster.prefill.runtime.transfer_node, cluster.decode.runtime
        with pytest.raises(LayoutMismatch, match="groups"):
            await node.connect(decode.address, decode.name)
