"""A rank that dies ends its pod, with a reason: in a step, in a drain, at the start. Waiting ranks end too."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from common.errors import BatonError, InternalError
from common.process.lifecycle import LifecycleState
from common.types import Role
from engine.llm import LLM
from engine.parallel import link_probe
from engine.parallel.collectives import Collectives
from kv_transfer.backend.loopback import LoopbackFabric
from tests.rigs.parallel.sharded_models import sharded_model
from tests.rigs.parallel.thread_ranks import thread_ranks
from tests.rigs.pods.harness import Cluster, prompt_of, request
from tests.rigs.waiting import until

END_S = 60.0  # A loaded machine needs several seconds; a wait without the loss would be much longer.


async def test_a_lost_rank_ends_the_pod_and_the_other_ranks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model_dir, options = sharded_model(tmp_path / "model", "llama")
    options |= {"tensor_parallel_size": 3, "kv_memory": 1 << 20, "transport": "loopback"}
    async with Cluster.start(
        model_dir, prefill=0, role=Role.BOTH, decode_config=options, own_backend=True, check=False
    ) as cluster:
        runtime = cluster.decode.runtime
        group = runtime.engine.rank_group
        assert group is not None
        began = asyncio.Event()
        answers = [
            asyncio.create_task(cluster.generate(request(prompt_of(9, seed=n), 110), on_event=lambda _: began.set()))
            for n in range(2)
        ]
        await began.wait()
        pids = group.pids
        os.kill(pids[0], signal.SIGKILL)
        await until(lambda: runtime.lifecycle.state is LifecycleState.STOPPED, END_S)
        assert runtime.exit_code == 4
        for failed in await asyncio.gather(*answers, return_exceptions=True):
            assert isinstance(failed, BatonError)
        assert "leaving: tensor-parallel rank 1 has ended (SIGKILL)" in caplog.text
        await asyncio.wait_for(runtime.stop(), END_S)
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


class EndlessRequest:
    """A request that only an error ends."""

    num_sequences = queued_tokens = 0

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.error: BatonError | None = None

    def fail(self, error: BatonError) -> None:
        self.error = error
        self.ended.set()

    async def drained(self) -> None:
        await self.ended.wait()


async def test_a_rank_that_dies_in_a_drain_ends_the_drain(tmp_path: Path) -> None:
    model_dir, options = sharded_model(tmp_path / "model", "llama")
    options |= {"tensor_parallel_size": 2, "kv_memory": 1 << 20, "transport": "loopback", "drain_s": 3600.0}
    both: dict[str, Any] = {"prefill": 0, "role": Role.BOTH, "own_backend": True, "check": False}
    with thread_ranks(LoopbackFabric()) as ranks:
        async with Cluster.start(model_dir, decode_config=options, **both) as cluster:
            runtime = cluster.decode.runtime
            endless = EndlessRequest()
            runtime.requests.add("endless", endless)
            runtime.lifecycle.begin_drain("SIGTERM")
            await asyncio.sleep(0)
            assert runtime.lifecycle.draining
            for channel in ranks.channels[0]:
                channel._sock.shutdown(socket.SHUT_RDWR)
            await until(lambda: runtime.lifecycle.state is LifecycleState.STOPPED, END_S)
            assert "is broken: tensor-parallel rank 1 is gone" in str(endless.error)
            assert runtime.exit_code == 4


def test_a_rank_that_fails_while_the_ranks_connect_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 0 and 1 would wait TIMEOUT_S for rank 2."""
    model_dir, options = sharded_model(tmp_path / "model", "llama")

    def connect(store: Any, rank: int, *place: Any, **options: Any) -> Collectives:
        if rank == 2:
            raise RuntimeError("no route between the devices")
        return Collectives(store, rank, *place, **options)

    monkeypatch.setattr("engine.parallel.rank.Collectives", connect)
    # The threads of ranks 0 and 1 end then, after this test.
    monkeypatch.setattr("engine.parallel.collectives.TIMEOUT_S", END_S)
    with thread_ranks() as ranks:
        with pytest.raises(InternalError, match=r"rank 2 failed: .*no route between the devices"):
            LLM(model_dir, device="cpu", threads=1, num_blocks=16, tensor_parallel_size=3, **options)
        ranks.threads[1].join(END_S)
        assert "no route between the devices" in str(ranks.errors[0])


def test_the_link_probe_says_why_a_rank_failed() -> None:
    with pytest.raises(InternalError, match=r"rank 1 on cuda:99 failed: \w"):
        link_probe.probe(["cpu", "cuda:99"])
