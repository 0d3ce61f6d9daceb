"""A GPU that hangs under a pod: its process says where it waits, and ends, so that it can be started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.support.local_stack import await_ready
from benchmarks.support.pd_stack import make_model
from cli import probes
from cli.stack.supervisor import ChildProcess, PortLease
from common.errors import BatonError
from common.process.watchdog import EXIT_STUCK
from tests.rigs.engine import hanging_gpu
from tests.rigs.pods.harness import GatewayStream, PlayedGateway, PodClient, gateway_channel, prompt_of, request

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STUCK_S = 3


@pytest.mark.timeout(300)
async def test_a_pod_with_a_hanging_gpu_ends(tmp_path: Path) -> None:
    model, trigger, secret = tmp_path / "model", tmp_path / "hang", secrets.token_hex(16)
    model.mkdir()
    make_model(model, "small")
    with PortLease() as port:
        flags = {
            "model": model,
            "name": "decode-0",
            "role": "decode",
            "local-prefill": 512,
            "port": port.port,
            "device": "cuda",
            "served-name": "tiny",
            "load-format": "dummy",
            "kv-memory": "256M",
            "stuck-step-s": STUCK_S,
            "log-format": "text",
        }
        argv = ["--no-cuda-graphs", *(f"--{flag}={value}" for flag, value in flags.items())]
        command = [sys.executable, "-P", str(Path(hanging_gpu.__file__)), str(trigger), "serve", *argv]
        env = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        pod = ChildProcess("decode-0", command, log=tmp_path / "log", env=env | {"BATON_SECRET": secret})
        pod.start()
        try:
            # The wait has event loops of its own.
            ready = partial(probes.grpc_ready, port.address)
            await asyncio.to_thread(await_ready, pod, ready, time.monotonic() + 200)
            played: PlayedGateway[PodClient] = PlayedGateway()
            played.decodes.append(PodClient(gateway_channel(port.address, "decode-0", "gw", secret=secret)))
            played.streams.append(await GatewayStream(played.decode, "gw").open())
            assert len((await played.generate(request(prompt_of(40), 8))).ids) == 8
            trigger.touch()
            with contextlib.suppress(BatonError, TimeoutError):
                await played.generate(request(prompt_of(41), 8), timeout_s=60)
            assert await asyncio.to_thread(pod.wait, 90.0) == EXIT_STUCK, pod.tail(60)
            text = "\n".join(pod.tail(400))
            assert "the engine is stuck" in text
            assert "thread engine:" in text
        finally:
            pod.kill()
