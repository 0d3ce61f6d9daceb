"""Starts pods without a gateway: processes of `baton serve` on this machine, each with its own flags.

    with running(model, {"holder": {"role": "prefill"}, "puller": {"role": "prefill"}}) as pods:
        stub = PrefillStub(open_channel(pods["holder"].address))

Each pod gets its own GPU, in order. If there are more pods than GPUs, pods share GPUs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.local_stack import STOP_S, logs_on_failure
from cli import probes
from cli.gpus import shared_out, visible_gpus
from cli.stack.process import ChildProcess, PortLease

START_S = 300.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class BarePod:
    """A running pod that is ready."""

    name: str
    address: str
    process: ChildProcess


def connections(process: ChildProcess) -> list[str]:
    """Returns the log lines about connections of a pod: `connected to NAME generation G over TRANSPORT ...`."""
    begin = "connected to"
    return [line[line.index(begin) :] for line in process.tail(4000) if begin in line]


@contextlib.contextmanager
def running(
    model: Path, pods: Mapping[str, Mapping[str, str]], *, device: str, start_s: float = START_S
) -> Iterator[dict[str, BarePod]]:
    """Runs pods for the block and prints their logs if the block fails. Kills them: running requests do not matter.

    Call it outside an event loop, in a thread that lives longer than the block.

    Args:
        pods: flags of `baton serve` by pod name.
        start_s: time in which all pods must be ready.

    Raises:
        RuntimeError: a pod ends, or is not ready in time.
    """
    gpus = shared_out(len(pods), () if device == "cpu" else visible_gpus())
    env = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    env["BATON_SECRET"] = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-pods-")))
        started: dict[str, BarePod] = {}
        for (name, flags), gpu in zip(pods.items(), gpus, strict=True):
            port = stack.enter_context(PortLease())
            common = {"model": str(model), "name": name, "port": str(port.port), "device": device}
            common |= {"log-level": "info", "log-format": "text"}
            argv = [f"--{flag}={value}" for flag, value in {**common, **flags}.items()]
            process = ChildProcess(
                name,
                [sys.executable, "-P", "-m", "cli", "serve", *argv],
                log=logs / f"{name}.log",
                env=env if gpu is None else env | {"CUDA_VISIBLE_DEVICES": gpu[0].id},
            )
            stack.callback(process.kill, STOP_S)
            started[name] = BarePod(name, port.address, process)
        with logs_on_failure(pod.process for pod in started.values()):
            for pod in started.values():
                pod.process.start()
            _await_ready(started, start_s)
            yield started


def _await_ready(pods: Mapping[str, BarePod], start_s: float) -> None:
    until = time.monotonic() + start_s
    for pod in pods.values():
        while not asyncio.run(probes.grpc_ready(pod.address)):
            if not pod.process.alive:
                raise RuntimeError(f"{pod.name} ended with exit code {pod.process.exit_code}")
            if time.monotonic() > until:
                raise RuntimeError(f"{pod.name} is not ready after {start_s:.0f} s")
            time.sleep(POLL_S)
