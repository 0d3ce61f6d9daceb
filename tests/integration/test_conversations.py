"""Routing of the gateway over two real pods of each role: blocks that the turns of a conversation move."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cli.stack.valkey import EmbeddedValkey
from common.auth import GATEWAY, Signer
from common.settings.process import DEFAULT_SECRET
from common.types import SamplingParams, ValidRequest
from engine.llm import LLM
from gateway.dispatch.dispatch import Dispatch
from gateway.pods.table import PodTable
from gateway.routing.router import Router
from gateway.telemetry.metrics import GatewayMetrics
from gateway.telemetry.timeline import Timeline
from pod.monitoring.rates import PodRates
from prefix_index.reader import IndexReader
from tests.rigs.pods.harness import BLOCK, Cluster, prompt_of
from tests.rigs.waiting import until

TURNS, SAID, ANSWER = 10, BLOCK + 1, BLOCK + 1  # an answer fills the block in which its prompt ended


class World:
    """Pods, a gateway's dispatch over them, and a real index."""

    def __init__(self, cluster: Cluster, table: PodTable, router: Router) -> None:
        self.cluster = cluster
        self._table = table
        self._router = router
        self._asked = 0

    async def ask(self, prompt: list[int]) -> list[int]:
        """Returns the answer's ids once all pods are idle and the index and the gateway know that."""
        self._asked += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER)
        valid = ValidRequest(f"turn{self._asked}", "tiny", tuple(prompt), sampling)
        timeline = Timeline(valid.request_id, None, "test")
        run = Dispatch(self._router, valid, deadline=time.monotonic() + 30, timeline=timeline)
        ids: list[int] = []
        try:
            while True:
                delta = await run.next()
                ids += [token.id for token in delta.tokens]
                if delta.finish is not None:
                    break
        finally:
            run.close()
        for pod in self.cluster.pods:
            await pod.settled()
        await self._all_is_known()
        return ids

    async def _all_is_known(self) -> None:
        indexes = [pod.runtime._index for pod in self.cluster.pods]
        await until(lambda: all(index is not None and index.up_to_date for index in indexes))
        pods = list(self._table.pods.values())
        for _ in range(2):  # the first answer may belong to an earlier poll
            asked = time.monotonic()
            for pod in pods:
                pod.recheck()
            await until(lambda asked=asked: all(pod.last_answer_at > asked for pod in pods))  # type: ignore[misc]

    def moved(self) -> tuple[int, int]:
        """Blocks handed off and blocks pulled since the start."""
        pairs = [pair for pod in self.cluster.pods for pair in pod.runtime.transfer_node.pair_stats()]
        pulled = sum(pair.pulled_blocks for pair in pairs)
        return sum(pair.blocks for pair in pairs) - pulled, pulled


@asynccontextmanager
async def world(model_dir: Path, tmp_path: Path, local_prefill: str, pull: str) -> AsyncIterator[World]:
    valkey = EmbeddedValkey(port=0, directory=tmp_path)
    url = await valkey.start()
    try:
        async with Cluster.start(
            model_dir,
            prefill=2,
            decode=2,
            prefill_config={"redis": url, "pull": pull},
            decode_config={"redis": url, "local_prefill": local_prefill},
        ) as cluster:
            # Index answers are not cached, and a slow one is awaited.
            reader = IndexReader(url, timeout_s=20.0, clock=lambda: time.monotonic() * 1e6)
            table = PodTable((), reader, signer=Signer(DEFAULT_SECRET.encode(), GATEWAY, "g", 1), model="tiny")
            router = Router(table, GatewayMetrics(), rng=random.Random(1))
            await table.start()
            try:
                await until(
                    lambda: len(table.decode_pods()) == 2 and sum(map(len, table.pods_by_layout().values())) == 4
                )
                yield World(cluster, table, router)
            finally:
                await router.stop()
                await table.stop()
    finally:
        await valkey.stop()


@pytest.mark.parametrize("pull", ["off", "push"])
async def test_ten_turns_move_each_block_once_at_most(
    model_dir: Path, tmp_path: Path, llm: LLM, pull: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Equal pods report equal rates. Measured rates differ on a busy machine, and a pod that looks slow loses its
    # conversation to the other one.
    monkeypatch.setattr(PodRates, "prefill_fit", lambda _: (1_000.0, 0.01))
    monkeypatch.setattr(PodRates, "decode_fit", lambda _: (0.01, 0.001))
    monkeypatch.setattr(PodRates, "transfer_fit", lambda _: (100_000.0, 0.001))
    async with world(model_dir, tmp_path, "off", pull) as w:
        history: list[int] = []
        for turn in range(TURNS):
            history += prompt_of(SAID, seed=turn)
            answer = await w.ask(history)
            sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER)
            assert len(answer) == ANSWER
            assert answer == llm.generate([tuple(history)], sampling, ignore_eos=True)[0].ids
            handed_off, pulled = w.moved()
            assert handed_off <= -(-len(history) // BLOCK), f"turn {turn}"
            # Blocks that decode completed may be pulled by prefill, once.
            assert pulled <= (0 if pull == "off" else (len(history) - 1) // BLOCK), f"turn {turn}"
            history += answer


async def test_turns_stay_on_decode_where_that_is_cheaper(model_dir: Path, tmp_path: Path, llm: LLM) -> None:
    async with world(model_dir, tmp_path, "auto", "push") as w:
        history: list[int] = []
        for turn in range(4):
            history += prompt_of(SAID, seed=turn)
            answer = await w.ask(history)
            sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER)
            assert answer == llm.generate([tuple(history)], sampling, ignore_eos=True)[0].ids
            history += answer
        decided: dict[tuple[str, ...], float] = {}
        for pod in w.cluster.decodes:
            for labels, count in pod.counted("local_prefill_decisions").items():
                decided[labels] = decided.get(labels, 0) + count
        assert decided[("remote", "nothing_cached")] == 1  # the first turn: a whole prompt
        assert sum(decided.values()) == 4
        computed = [(await pod.info()).computed for pod in w.cluster.decodes]
        local = decided.get(("local", "cheaper"), 0)
        assert sum(c.local for c in computed) <= local * (SAID + ANSWER)
        assert (sum(c.local for c in computed) > 0) == (local > 0)
