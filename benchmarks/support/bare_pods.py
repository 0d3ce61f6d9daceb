"""Pods without a gateway: processes of `baton serve` on this machine, each with flags of its own.

    with running(model, {"holder": {"role": "prefill"}, "puller": {"role": "prefill"}}) as pods:
        stub = PrefillStub(channel(pods["holder"].address))

Where there are GPUs, each has one of its own as long as there are enough, in their order; else they share.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cli import probes
from cli.gpus import shared_out, visible_gpus
from cli.stack.process import ChildProcess, PortLease

START_S = 300.0
STOP_S = 20.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class BarePod:
    """One of them, ready."""

    name: str
    address: str
    process: ChildProcess


def connections(process: ChildProcess) -> list[str]:
    """What a pod's log says of connections that it made: `connected to NAME generation G over TRANSPORT ...`."""
    begin = "connected to"
    return [line[line.index(begin) :] for line in process.tail(4000) if begin in line]


@contextlib.contextmanager
def running(
    model: Path, pods: Mapping[str, Mapping[str, str]], *, device: str, start_s: float = START_S
) -> Iterator[dict[str, BarePod]]:
    """Ready within start_s. pods: flags of `baton serve` by name. Logs are printed when the block fails. Call it from a
    thread that outlives it, and where no event loop runs. RuntimeError when a pod ends, or is not ready in time.
    """
    secret = secrets.token_hex(16)
    places = shared_out(len(pods), () if device == "cpu" else visible_gpus())
    ours = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-pods-")))
        made: dict[str, BarePod] = {}
        for (name, flags), place in zip(pods.items(), places, strict=True):
            port = stack.enter_context(PortLease())
            every = {"model": str(model), "name": name, "port": str(port.port), "device": device}
            every |= {"log-level": "info", "log-format": "text"}
            argv = [f"--{flag}={value}" for flag, value in {**every, **flags}.items()]
            env = ours | {"BATON_SECRET": secret} | ({} if place is None else {"CUDA_VISIBLE_DEVICES": place[0].id})
            process = ChildProcess(
                name, [sys.executable, "-P", "-m", "cli", "serve", *argv], log=logs / f"{name}.log", env=env
            )
            made[name] = BarePod(name, port.address, process)
        stack.callback(_stop, made)
        try:
            for pod in made.values():
                pod.process.start()
            _await_ready(made, start_s)
            yield made
        except BaseException:
            for pod in made.values():
                print(f"--- {pod.name}", *pod.process.tail(60), sep="\n", flush=True)
            raise


def _await_ready(pods: Mapping[str, BarePod], start_s: float) -> None:
    until = time.monotonic() + start_s
    for pod in pods.values():
        while not asyncio.run(probes.grpc_ready(pod.address)):
            if not pod.process.alive:
                raise RuntimeError(f"{pod.name} ended with {pod.process.exit_code}")
            if time.monotonic() > until:
                raise RuntimeError(f"{pod.name} is not ready after {start_s:.0f} s")
            time.sleep(POLL_S)


def _stop(pods: Mapping[str, BarePod]) -> None:
    """They are killed at once: nobody waits for what they do."""
    for pod in pods.values():
        if pod.process.alive:
            pod.process.kill(STOP_S)
