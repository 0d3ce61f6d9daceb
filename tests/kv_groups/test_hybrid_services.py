"""Hybrid models over prefill and decode pods: the recurrent state at the end of a prompt moves with its blocks."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import BatonError, ConfigError, LayoutMismatch, Overloaded
from common.kv_groups import PageOrder
from common.types import Role, ValidRequest
from engine.kv.groups.state_blocks import StateBlockPool, require_states
from engine.schedule.sequence import Sequence as EngineSequence
from gateway.pods.info import PodInfo
from kv_transfer.backend.loopback import LoopbackFault
from prefill_service import prefix_pull
from tests.kv_groups.families import BLOCK, CHUNK, check_tokens, prompt
from tests.rigs.engine.hybrid_models import HYBRID_CASES, save_hybrid
from tests.rigs.pods.aborts import abort_storm
from tests.rigs.pods.harness import VOCAB, Answer, Cluster, Pod, oracle, request
from tests.rigs.pods.samples import Samples

torch.set_num_threads(1)
NEW = 9  # Tokens of an answer; they cross two blocks
HYBRID: dict[str, Any] = {"kv_groups": True, "num_blocks": 400}
BOTH: dict[str, Any] = {"prefill_config": HYBRID, "decode_config": {"local_prefill": "off", **HYBRID}}


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineSequence, "CHECKS", True)
    for limit in ("UNKNOWN_TIME_S", "MIN_TIME_S", "MAX_TIME_S"):
        monkeypatch.setattr(prefix_pull, limit, 20.0)


def save_for_pods(path: Path, name: str) -> Any:
    reference = save_hybrid(path, name, vocab_size=VOCAB)
    (path / "tokenizer.json").write_text("{}")
    return reference


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("hybrid")
    return path, save_for_pods(path, "qwen3.5")


def pool_of(pod: Pod) -> StateBlockPool:
    pool = pod.runtime.engine.pool
    assert isinstance(pool, StateBlockPool)
    return pool


@contextlib.asynccontextmanager
async def hybrids(path: Path, **options: Any) -> AsyncIterator[Cluster]:
    """Runs a cluster. At the end no block and no state of any pod is in use."""
    async with Cluster.start(path, **options) as cluster:
        yield cluster
        for pod in cluster.pods:
            await pod.settled()
            pool = pool_of(pod)
            pool.check_integrity()
            assert len(pool.slots.free) + len(pool.slots.snapshots) == pool.slots.num_slots
            assert not pool.slots.pins


def asked(prompt_ids: list[int], max_tokens: int = NEW, **sampling: Any) -> ValidRequest:
    return request(prompt_ids, max_tokens, logprobs=0, **sampling)


def check(reference: Any, r: ValidRequest, answer: Answer) -> None:
    check_tokens(reference, r.prompt_ids, answer.tokens)


@pytest.mark.parametrize("name", HYBRID_CASES)
async def test_prompts_of_every_length_and_repeated_prompts(name: str, tmp_path: Path) -> None:
    reference = save_for_pods(tmp_path, name)
    async with hybrids(tmp_path, **BOTH) as cluster:
        layout = cluster.decode.runtime.engine.layout
        assert PodInfo.from_pb(await cluster.decode.info(), "here:1").state_pages == layout.state_pages > 1
        for length in (1, 3, 4, 5, 23, 32, 33, 71):
            r = asked(prompt(length, seed=length), 5)
            for cold in (True, False):
                answer = await cluster.generate(replace(r, request_id=f"{length}-{cold}"), remote_only=True)
                check(reference, r, answer)
                hit = 0 if cold else (length - 1) // BLOCK
                assert answer.cached_tokens == hit * BLOCK
                assert answer.handed_off is not None
                # A decode pod takes the cached blocks, and gets the others and the state.
                assert answer.handed_off.blocks == layout.blocks_for(length) - hit + layout.state_pages


async def test_conversations_hit_snapshots(saved: tuple[Path, Any]) -> None:
    path, reference = saved
    local = {"decode_config": {**HYBRID, "local_prefill": "12"}, "prefill_config": HYBRID}
    async with hybrids(path, **local) as cluster:
        r = asked(prompt(41, seed=3))
        first = await cluster.generate(r, remote_only=True)
        check(reference, r, first)
        # The decode pod has a snapshot at the last block of its answer, so it computes the rest itself.
        more = asked([*r.prompt_ids, *first.ids, *prompt(3, seed=9)])
        follow = await cluster.generate(more)
        assert follow.events[0] == "local"
        check(reference, more, follow)
        assert follow.cached_tokens == 48
        # The prefill pod's newest snapshot is at the end of the first prompt.
        other = asked([*r.prompt_ids, *prompt(30, seed=4)])
        answer = await cluster.generate(other, remote_only=True)
        check(reference, other, answer)
        assert answer.cached_tokens == 40


async def test_late_targets_and_samples(saved: tuple[Path, Any]) -> None:
    path, reference = saved
    async with hybrids(path, **BOTH) as cluster:
        for length in (21, 64):
            r = asked(prompt(length, seed=length))
            check(reference, r, await cluster.generate(r, remote_only=True, late_s=0.05))
        llm = oracle(path)
        for length in (1, CHUNK, 2 * CHUNK + 3):
            sampled = request(prompt(length, seed=7), 14, temperature=1.0, seed=3, n=3)
            got = await Samples().run(cluster, sampled)
            alone = llm.generate([sampled.prompt_ids], sampled.sampling, ignore_eos=True)
            assert [got.ids(child) for child in range(3)] == [c.ids for c in alone]


async def test_the_last_sample_keeps_the_state_of_the_prompt(saved: tuple[Path, Any]) -> None:
    """With one slot less than samples, only one of them computes the prompt again."""
    path, _ = saved
    sampled = request(prompt(21, seed=7), 14, temperature=1.0, seed=3, n=3)
    alone = oracle(path).generate([sampled.prompt_ids], sampled.sampling, ignore_eos=True)
    for num_states, recomputed in ((1, 2), (2, 1), (3, 0)):
        few = {"prefill_config": HYBRID, "decode_config": {**BOTH["decode_config"], "num_states": num_states}}
        async with hybrids(path, **few) as cluster:
            got = await Samples().run(cluster, sampled)
            assert [got.ids(child) for child in range(3)] == [c.ids for c in alone]
            steps = cluster.decode.runtime.computed_tokens
            assert (steps["local"] + steps["recompute"]) // 21 == recomputed


async def test_reserve_waits_for_the_step_that_uses_the_last_slot(saved: tuple[Path, Any]) -> None:
    path, reference = saved
    few = {"prefill_config": HYBRID, "decode_config": {**BOTH["decode_config"], "num_states": 1}}
    async with hybrids(path, **few) as cluster:
        pool = pool_of(cluster.decode)
        pool.slots.free.reverse()
        r = asked(prompt(30, seed=3))
        with pool.lock:
            pool._last_use[0] = pool._step
        fence = pool.begin_step()
        asyncio.get_running_loop().call_later(0.05, fence.end)
        check(reference, r, await cluster.generate(r, remote_only=True))
        assert cluster.decode.counted("reserve") == {("remote",): 1}
        # A slot that a request has is not free for another one.
        await cluster.decode.settled()
        first, second = asked(prompt(30, seed=4)), replace(asked(prompt(9, seed=5)), request_id="second")
        await cluster.reserve(first, remote_only=True)
        assert cluster.decode.runtime.load().free_blocks == 0
        with pytest.raises(Overloaded, match="num_states"):
            await cluster.generate(second, remote_only=True)
        await cluster.abort(first.request_id)


async def test_a_lasting_quarantine_of_states_counts(saved: tuple[Path, Any]) -> None:
    path, _ = saved
    async with hybrids(path, **BOTH) as cluster:
        pool = pool_of(cluster.decode)
        order = PageOrder(2, state_pages=cluster.decode.runtime.engine.layout.state_pages)
        lease = require_states(pool.lease([], 2))
        assert lease.cover_transfer(order)
        pin = lease.pin_for_write(0, 2, order)
        assert pool.quarantined_share() == 0
        lease.finish("aborted")
        assert pool.quarantined_share() == 1 / pool.slots.num_slots > 2 / pool.num_blocks
        pin.release()
        assert pool.quarantined_share() == 0


async def test_a_context_is_hit_up_to_its_last_block(saved: tuple[Path, Any]) -> None:
    """A second pod that continues an answer, after the first one has died too, finds the snapshot of the first try."""
    path, reference = saved
    async with hybrids(path, **BOTH) as cluster:
        r = asked(prompt(10, seed=3), 30)
        whole = await cluster.generate(r, remote_only=True)
        for number, cached in enumerate((8, 28)):
            rest = replace(r.resumed(0, whole.ids[:22]), request_id=f"try-{number}")
            answer = await cluster.generate(rest, remote_only=True)
            assert answer.cached_tokens == cached
            check_tokens(reference, [*r.prompt_ids, *whole.ids[:22]], answer.tokens)


@pytest.mark.parametrize("role", [Role.DECODE, Role.BOTH])
async def test_another_pod_continues_an_answer(saved: tuple[Path, Any], role: Role) -> None:
    path, reference = saved
    pods = {"decode_config": BOTH["decode_config"], "decode": 2, "role": role}
    pods |= {"prefill": 0} if role is Role.BOTH else {"prefill_config": HYBRID}
    async with hybrids(path, **pods) as cluster:
        for length in (7, 32, 45):
            r = asked(prompt(length, seed=length), 14)
            whole = await cluster.generate(r)
            check(reference, r, whole)
            for at in (1, BLOCK, 13):
                rest = replace(r.resumed(0, whole.ids[:at]), request_id=f"{r.request_id}-{at}")
                answer = await cluster.generate(rest, decode=cluster.decodes[1])
                assert [token.id for token in answer.tokens] == whole.ids[at:]
                check_tokens(reference, [*r.prompt_ids, *whole.ids[:at]], answer.tokens)


async def test_aborts_at_any_time_leak_no_state(saved: tuple[Path, Any]) -> None:
    path, _ = saved
    async with hybrids(path, **BOTH) as cluster:
        await abort_storm(cluster, oracle(path), random.Random(4), rounds=2)


async def test_a_failed_write_leaks_no_state(saved: tuple[Path, Any]) -> None:
    path, reference = saved
    async with hybrids(path, **BOTH) as cluster:
        r = asked(prompt(50, seed=2))
        check(reference, r, await cluster.generate(r, remote_only=True))
        cluster.fabric.on_write = lambda *_: LoopbackFault(fail="the link broke")
        failing = asked(prompt(61, seed=8))
        with pytest.raises(BatonError):
            await cluster.generate(failing, remote_only=True)
        await cluster.abort(failing.request_id)  # as a gateway does; the slot stays pinned for the grace


class TestPulls:
    async def test_a_prefix_is_pulled_with_the_state_at_its_end(self, saved: tuple[Path, Any]) -> None:
        path, reference = saved
        async with hybrids(path, prefill=2, **BOTH) as cluster:
            holder, puller = cluster.prefills
            pages = cluster.decode.runtime.engine.layout.state_pages
            base = prompt(50, seed=12)
            await cluster.generate(asked(base, 2), prefill=holder, remote_only=True)
            r = asked([*base[:48], *prompt(7, seed=13)])
            answer = await cluster.generate(r, prefill=puller, pull=holder.holds(12), remote_only=True)
            check(reference, r, answer)
            assert answer.cached_tokens == 48
            assert puller.counted("pulled_blocks") == {(): 12 + pages}
            # The holder has the state of a longer prefix. The puller has its blocks up to that of another end.
            base = [*r.prompt_ids[:48], *prompt(30, seed=14)]
            await cluster.generate(asked(base, 2), prefill=holder, remote_only=True)
            r = asked([*base[:76], 9, 9])
            answer = await cluster.generate(r, prefill=puller, pull=holder.holds(19), remote_only=True)
            check(reference, r, answer)
            assert answer.cached_tokens == 76
            assert puller.counted("pulled_blocks") == {(): 12 + pages + 7 + pages}

    async def test_a_shorter_prefix_is_pulled_where_the_snapshot_is(self, saved: tuple[Path, Any]) -> None:
        path, reference = saved
        async with hybrids(path, prefill=2, **BOTH) as cluster:
            holder, puller = cluster.prefills
            base = prompt(50, seed=12)
            for length in (26, 50):  # the holder has states after 6 and 12 blocks
                await cluster.generate(asked(base[:length], 2), prefill=holder, remote_only=True)
            r = asked([*base[:40], *prompt(7, seed=13)])
            answer = await cluster.generate(r, prefill=puller, pull=holder.holds(10), remote_only=True)
            check(reference, r, answer)
            assert answer.cached_tokens == 24
            assert puller.counted("pulls") == {("done", "part"): 1}

    async def test_only_the_state_of_known_blocks_is_pulled(self, saved: tuple[Path, Any]) -> None:
        path, reference = saved
        async with hybrids(path, prefill=2, **BOTH) as cluster:
            holder, puller = cluster.prefills
            pages = cluster.decode.runtime.engine.layout.state_pages
            base = prompt(50, seed=12)
            for length, pod in ((50, puller), (42, holder)):
                await cluster.generate(asked(base[:length], 2), prefill=pod, remote_only=True)
            r = asked([*base[:40], *prompt(7, seed=13)])
            answer = await cluster.generate(r, prefill=puller, pull=holder.holds(10), remote_only=True)
            check(reference, r, answer)
            assert answer.cached_tokens == 40
            assert puller.counted("pulled_blocks") == {(): pages}

    async def test_a_failed_pull_leaks_no_state(self, saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        path, reference = saved
        for limit in ("UNKNOWN_TIME_S", "MIN_TIME_S", "MAX_TIME_S"):
            monkeypatch.setattr(prefix_pull, limit, 0.3)
        async with hybrids(path, prefill=2, **BOTH) as cluster:
            holder, puller = cluster.prefills
            pages = 12 + cluster.decode.runtime.engine.layout.state_pages
            base = prompt(50, seed=12)
            await cluster.generate(asked(base, 2), prefill=holder, remote_only=True)
            cluster.fabric.on_write = lambda source, _peer, count: LoopbackFault(
                fail="the link broke" if source == holder.agent and count == pages else None
            )
            r = asked([*base[:48], *prompt(7, seed=13)])
            answer = await cluster.generate(r, prefill=puller, pull=holder.holds(12), remote_only=True)
            check(reference, r, answer)
            assert answer.cached_tokens == 0
            assert puller.counted("pulls") == {("failed", "DeadlineExceeded"): 1}


async def test_other_states_and_other_settings_are_refused(saved: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = saved
    async with Cluster.start(path, **BOTH) as cluster:
        with pytest.raises(ConfigError, match="kv-groups"):
            await cluster.add(Role.DECODE, num_blocks=100)
        for name, value in (("host_cache", 1 << 20), ("speculation", "ngram"), ("max_adapters", 2)):
            with pytest.raises(ConfigError, match=name):
                await cluster.add(Role.DECODE, **(HYBRID | {name: value}))
        node, layout = cluster.prefill.runtime.transfer_node, cluster.decode.runtime.engine.layout
        assert layout.fingerprint != replace(layout, states=layout.states + " x").fingerprint
        cluster.decode.runtime.engine.layout = replace(layout, state_bytes=layout.state_bytes + 4)
        with pytest.raises(LayoutMismatch, match="state_bytes"):
            await node.connect(cluster.decode.runtime.address, cluster.decode.runtime.name)
        cluster.decode.runtime.engine.layout = layout
