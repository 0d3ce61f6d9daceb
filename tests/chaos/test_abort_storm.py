"""An abort storm: 500 requests, 70% of them aborted, with late and doubled notifications, a frozen and a killed pod.

Three prefill and three decode pods run in one process over loopback. Their pools are small, so sequences are preempted
and blocks move to host memory and back. Pods pull prefixes from other pods. One case verifies checksums of all
transfers, the other sends commits as notifications.

Each request that is not aborted must get the same tokens as alone. No request may hang, and all blocks must be free at
the end. test_abort_storm_processes.py is a smaller storm over processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.errors import BatonError, Overloaded
from common.pb import decode_pb2, prefill_pb2
from common.types import Role, ValidRequest
from engine.llm import LLM
from kv_transfer.backend.loopback import LoopbackFault
from kv_transfer.messages import CommitNotification, CommittedNotification, parse_notification
from tests.rigs.pods.harness import BLOCK, Cluster, Pod, oracle, prompt_of, request, tiny_llama
from tests.rigs.waiting import until

REQUESTS = 500
AT_ONCE = 20
KINDS = 32  # number of different requests
HOSTED: dict[str, Any] = {"num_blocks": 56, "host_cache": 120 * 2 * 2 * 2 * BLOCK * 16 * 4}
STAGES = ("reserved", "progress", "first_token", "handed_off", "tokens", "any time", "any time")
CALM = 0.3  # share of requests that are not aborted
TRY_S = 2.0  # timeout of one try at a pod that may be frozen
HANG_S = 150.0
WAIT_S = 120.0


class Storm:
    """Sends requests to changing pods. `expected[i]` are the tokens of request i when it runs alone."""

    def __init__(self, cluster: Cluster, requests: list[ValidRequest], expected: list[list[int]]) -> None:
        self.ends: Counter[str] = Counter()  # aborts by stage, and "answered"
        self.errors: Counter[str] = Counter()
        self.calm = 0
        self._cluster = cluster
        self._holders: dict[int, Pod] = {}
        self._requests = requests
        self._expected = expected
        self._rng = random.Random(8)
        self._ids = itertools.count()
        self._places = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(REQUESTS):
                await self._places.acquire()
                group.create_task(self._one())

    async def _one(self) -> None:
        which = self._rng.randrange(len(self._requests))
        calm = self._rng.random() < CALM
        self.calm += calm
        try:
            async with asyncio.timeout(HANG_S):
                if calm:
                    await self._until_answered(which)
                else:
                    await self._aborted(which, self._rng.choice(STAGES))
        finally:
            self._places.release()

    def _new(self, which: int) -> ValidRequest:
        """Half of the requests may share cached prefixes. The others have a unique cache salt."""
        number = next(self._ids)
        salt = "" if self._rng.random() < 0.5 else str(number)
        return replace(self._requests[which], request_id=f"storm-{number}", cache_salt=salt)

    def _pair(self) -> tuple[Pod, Pod]:
        return self._rng.choice(self._cluster.prefills), self._rng.choice(self._cluster.decodes)

    def _pull(self, which: int, r: ValidRequest) -> prefill_pb2.PullHint | None:
        """The pod that answered the same prompt last may still hold its blocks."""
        holder = self._holders.get(which)
        return None if r.cache_salt or holder is None else holder.holds(r.prompt_len // BLOCK)

    def _late(self) -> float | None:
        """Every third prompt is sent before its KV target is known."""
        return self._rng.random() * 0.2 if self._rng.random() < 0.33 else None

    async def _until_answered(self, which: int) -> None:
        """Tries another pod if one is full or dead, like the gateway."""
        while True:
            r, (prefill, decode) = self._new(which), self._pair()
            try:
                remote_only = self._rng.random() < 0.9
                answer = await self._cluster.generate(
                    r,
                    prefill=prefill,
                    decode=decode,
                    remote_only=remote_only,
                    timeout_s=TRY_S,
                    pull=self._pull(which, r),
                    late_s=self._late(),
                )
            except BatonError as error:
                self.errors[error.kind] += 1
                await self._abort(r, prefill, decode)
                await asyncio.sleep(0.02 if isinstance(error, Overloaded) else 0.1)
                continue
            assert answer.ids == self._expected[which], "a neighbour's tokens changed"
            self.ends["answered"] += 1
            if not r.cache_salt:
                self._holders[which] = decode
            return

    async def _aborted(self, which: int, stage: str) -> None:
        r, (prefill, decode) = self._new(which), self._pair()
        there = asyncio.Event()

        def seen(kind: str) -> None:
            if kind == stage:
                there.set()

        if stage == "reserved":
            with contextlib.suppress(BatonError):
                await self._cluster.reserve(r, decode, remote_only=True, timeout_s=TRY_S)
        else:
            running = asyncio.create_task(
                self._cluster.generate(
                    r,
                    prefill=prefill,
                    decode=decode,
                    remote_only=True,
                    timeout_s=TRY_S,
                    on_event=seen,
                    pull=self._pull(which, r),
                    late_s=self._late(),
                )
            )
            reached = asyncio.create_task(there.wait())
            wait_s = self._rng.random() * 0.3 if stage == "any time" else TRY_S
            await asyncio.wait([running, reached], timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            await self._abort(r, prefill, decode)
            reached.cancel()
            running.cancel()
            try:
                answer = await running
            except BatonError as error:
                self.errors[error.kind] += 1
            except asyncio.CancelledError:
                pass
            else:
                assert answer.ids == self._expected[which]
        await self._abort(r, prefill, decode)  # a Reserve in flight may have arrived after the first abort
        self.ends[stage] += 1

    async def _abort(self, r: ValidRequest, prefill: Pod, decode: Pod) -> None:
        await decode.decode.Abort(decode_pb2.DecodeAbortRequest(request_id=r.request_id))
        try:
            await prefill.prefill.Abort(prefill_pb2.PrefillAbortRequest(request_id=r.request_id))
        except grpc.aio.AioRpcError:
            assert prefill not in self._cluster.prefills, "only the killed pod may not answer"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("notifications", [False, True], ids=["checksums", "notifications"])
async def test_five_hundred_requests(notifications: bool, tmp_path: Path) -> None:
    model_dir = tiny_llama(tmp_path)
    rng = random.Random(1)
    requests = [
        request(
            [*prompt_of(4 * (i % 6), seed=i % 3), *prompt_of(rng.randrange(1, 30), seed=i)],
            rng.choice((1, 6, 12, 20)),
            seed=i,
            temperature=rng.choice((0.0, 0.8)),
        )
        for i in range(KINDS)
    ]
    expected = _alone(oracle(model_dir), requests)
    config, received = HOSTED | {"checksums": not notifications}, Counter[type]()

    def late_or_twice(_source: str, _peer: str, payload: bytes) -> Sequence[float]:
        received[type(parse_notification(payload))] += 1
        return rng.choice(((0.0,), (0.0,), (0.0, 0.02), (0.03,), (0.05, 0.01)))

    async with Cluster.start(model_dir, prefill=3, decode=3, prefill_config=config, decode_config=config) as cluster:
        storm = Storm(cluster, requests, expected)
        fabric = cluster.fabric
        fabric.on_notify = late_or_twice
        if notifications:
            fabric.transport = "tcp"
        fabric.on_write = lambda *_: LoopbackFault(delay_s=rng.choice((0.0, 0.0, 0.0, 0.02, 0.1)))
        killed: list[Pod] = []

        async def strike() -> None:
            await until(lambda: storm.ends.total() > 80, WAIT_S)
            fabric.freeze(cluster.decodes[1].agent)
            await until(lambda: storm.ends.total() > 130, WAIT_S)
            victim = cluster.prefills.pop(0)
            killed.append(victim)
            fabric.kill(victim.agent)
            await victim.runtime.stop()
            await until(lambda: storm.ends.total() > 200, WAIT_S)
            fabric.thaw(cluster.decodes[1].agent)
            port = int(victim.runtime.address.rpartition(":")[2])
            await cluster.add(Role.PREFILL, name=victim.runtime.name, port=port, **config)

        began = time.monotonic()
        strikes = asyncio.create_task(strike())
        await storm.run()
        await strikes
        print(f"{time.monotonic() - began:.1f} s: {dict(storm.ends)}, errors {dict(storm.errors)}")
        fabric.on_notify, fabric.on_write = (lambda *_: (0.0,)), (lambda *_: LoopbackFault())
        assert storm.ends.total() == REQUESTS
        assert (received[CommitNotification] > 0) == (received[CommittedNotification] > 0) == notifications
        assert storm.ends["answered"] == storm.calm > 0.2 * REQUESTS
        assert all(storm.ends[stage] > 0 for stage in STAGES)
        for pod in cluster.pods:
            await pod.settled(WAIT_S)
            tier = pod.runtime.engine.pool.host_tier
            assert tier is not None
            assert await asyncio.to_thread(tier.wait_idle, WAIT_S)
            pod.runtime.engine.pool.check_integrity()
            stats = pod.runtime.engine.pool.host_stats()
            assert stats is not None
            assert stats.damaged == pod.runtime.transfer_node.stats().damaged_transfers == 0
        assert sum(_saved(pod) for pod in cluster.pods) > 0
        pulls = {outcome for pod in cluster.prefills for outcome in pod.counted("pulls")}
        assert pulls
        assert ("failed", "internal_error") not in pulls
        for pod in killed:
            await pod.channel.close(None)


def _alone(llm: LLM, requests: list[ValidRequest]) -> list[list[int]]:
    completions = llm.generate(
        [r.prompt_ids for r in requests], [r.sampling for r in requests], ignore_eos=True, show_progress=False
    )
    return [completion.ids for completion in completions]


def _saved(pod: Pod) -> int:
    stats = pod.runtime.engine.pool.host_stats()
    return 0 if stats is None else stats.saved
