"""A rank that dies ends its pod soon, with a reason. Other ranks that wait for it in a collective end too."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from common.errors import BatonError
from common.process.lifecycle import LifecycleState
from common.types import Role
from tests.rigs.parallel.sharded_models import sharded_model
from tests.rigs.pods.harness import Cluster, prompt_of, request
from tests.rigs.waiting import until

END_S = 5.0


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
