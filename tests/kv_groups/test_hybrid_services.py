"""Hybrid models over prefill and decode pods: the recurrent state at the end of a prompt moves with its blocks."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import BatonError, ConfigError, LayoutMismatch
from common.types import Role, ValidRequest
from engine.kv.groups.state_blocks import StateBlockPool
from engine.schedule.sequence import Sequence as EngineSequence
from kv_transfer.backend.loopback import LoopbackFault
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
        assert layout.state_pages > 1
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


async def test_prefixes_with_a_state_are_not_pulled(saved: tuple[Path, Any]) -> None:
    path, reference = saved
    async with hybrids(path, prefill=2, **BOTH) as cluster:
        holder, puller = cluster.prefills
        base = prompt(50, seed=12)
        await cluster.generate(asked(base, 2), prefill=holder, remote_only=True)
        r = asked([*base[:48], *prompt(7, seed=13)])
        assert not (await puller.info()).pulls
        answer = await cluster.generate(r, prefill=puller, pull=holder.holds(12), remote_only=True)
        check(reference, r, answer)
        assert answer.cached_tokens == 0
        assert puller.counted("pulls") == {("skipped", "off"): 1}


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
