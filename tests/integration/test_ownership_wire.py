"""Blocks under aborts, late writes and stale targets over real NIXL; test_ownership_cases.py has all cases on loopback.

By default over CMA, where writes complete while they are posted; test_transfer_tcp.py repeats it over TCP, where they
complete later. Checksums are compared throughout.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from common.errors import BatonError
from common.types import Role
from common.wire import kv_target_from_pb
from engine.llm import LLM
from kv_transfer.backend.interface import Backend
from kv_transfer.backend.nixl import NixlBackend
from tests.rigs.pods.aborts import abort_storm, cancelled
from tests.rigs.pods.harness import BLOCK, CHUNK, Answer, Cluster, expected, prompt_of, request
from tests.rigs.transfer.faulty_backend import FaultyBackend, WriteFaultPlan

STAGES = ("reserved", "progress", "first_token", "in_transfer", "tokens")


class Wire:
    """NIXL backends of all pods, with write faults on prefill pods and notification faults on decode pods."""

    def __init__(self) -> None:
        self.senders: list[FaultyBackend] = []
        self.receivers: list[FaultyBackend] = []

    def __call__(self, role: Role) -> Backend:
        made = FaultyBackend(NixlBackend())
        (self.senders if role is Role.PREFILL else self.receivers).append(made)
        return made

    def heal(self) -> None:
        for backend in (*self.senders, *self.receivers):
            backend.on_write = lambda _p, _l, _r: WriteFaultPlan()
            backend.on_notification = lambda _n: (0.0,)


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest_asyncio.fixture
async def cluster(model_dir: Path, wire: Wire) -> AsyncIterator[Cluster]:
    """Two connected pods. At the end every block must be free or cached."""
    async with Cluster.start(model_dir, backend=wire, decode_config={"num_blocks": 40}) as cluster:
        await cluster.generate(request(prompt_of(3)), remote_only=True)
        yield cluster
        wire.heal()


async def test_an_abort_at_any_stage_gives_all_blocks_back(cluster: Cluster, wire: Wire, llm: LLM) -> None:
    for number, stage in enumerate(STAGES):
        wire.heal()
        r = request(prompt_of(4 * CHUNK, seed=number), 60)
        if stage == "reserved":
            await cluster.reserve(r, remote_only=True)
            await cluster.abort(r.request_id)
            continue
        if stage == "in_transfer":
            wire.senders[0].on_write = lambda _p, _l, _r: WriteFaultPlan(delay_s=0.3)
        there = asyncio.Event()
        at = "progress" if stage == "in_transfer" else stage

        def seen(kind: str, at: str = at, there: asyncio.Event = there) -> None:
            if kind == at:
                there.set()

        running = asyncio.create_task(cluster.generate(r, remote_only=True, on_event=seen))
        await asyncio.wait_for(there.wait(), 30)
        await cluster.abort(r.request_id)
        await cancelled(running)
    wire.heal()
    for pod in cluster.pods:
        await pod.settled()
    again = request(prompt_of(20, seed=9))
    assert (await cluster.generate(again, remote_only=True)).ids == expected(llm, again)


async def test_random_aborts_late_writes_and_doubled_notifications(cluster: Cluster, wire: Wire, llm: LLM) -> None:
    rng = random.Random(4)
    wire.senders[0].on_write = lambda _p, _l, _r: WriteFaultPlan(delay_s=rng.choice((0.0, 0.0, 0.02, 0.15)))
    wire.receivers[0].on_notification = lambda _n: rng.choice(((0.0,), (0.0, 0.01), (0.03,)))
    await abort_storm(cluster, llm, rng, rounds=3)


async def test_a_stale_target_never_gives_an_answer(cluster: Cluster, llm: LLM) -> None:
    r = request(prompt_of(40))
    stale = await cluster.reserve(r, remote_only=True)
    await cluster.abort(r.request_id)
    other = request(prompt_of(40, seed=1))
    inbox = cluster.stream_of(cluster.decode).expect(r.request_id)
    late = Answer(target=kv_target_from_pb(stale.target))
    answer, stale_run = await asyncio.gather(
        cluster.generate(other, remote_only=True),
        cluster.run_prefill(r, late, cluster.prefill, 20, lambda _kind: None),
        return_exceptions=True,
    )
    assert isinstance(answer, Answer)
    assert answer.ids == expected(llm, other)
    assert isinstance(stale_run, BatonError)
    assert stale_run.kind in ("UnknownTransfer", "TransferFailed")
    assert inbox.empty()
    await cluster.prefill.settled()


@pytest.mark.parametrize("fault", ["lost_notification", "failed_write", "damage"])
async def test_decode_never_runs_on_kv_that_did_not_arrive_whole(
    cluster: Cluster, wire: Wire, llm: LLM, fault: str
) -> None:
    if fault == "lost_notification":
        wire.receivers[0].on_notification = lambda _n: ()
    elif fault == "failed_write":
        wire.senders[0].on_write = lambda _p, _l, _r: WriteFaultPlan(fail="remote access error")
    else:
        wire.senders[0].on_write = lambda _p, _l, _r: WriteFaultPlan(
            corrupt=0 if not wire.senders[0].corrupted else None
        )
    seen: list[str] = []
    r = request(prompt_of(10 * BLOCK))
    with pytest.raises(BatonError) as caught:
        await cluster.generate(r, remote_only=True, on_event=seen.append, timeout_s=20 if fault == "damage" else 2)
    if fault == "damage":
        assert "damaged" in caught.value.message or caught.value.kind == "TransferFailed"
        text = cluster.decode.runtime.metrics.metrics.exposition().decode()
        assert 'baton_damaged_kv_total{where="transfer"} 1.0' in text
    await cluster.abort(r.request_id)
    assert "tokens" not in seen
    wire.heal()
    again = request(prompt_of(10 * BLOCK, seed=2))
    assert (await cluster.generate(again, remote_only=True)).ids == expected(llm, again)
