"""Runs processes of Baton on this machine during a benchmark: all of `baton up`, bare pods, a Valkey, a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cli import probes
from cli.gpus import assign_gpus, visible_gpus
from cli.stack.stack import Stack
from cli.stack.supervisor import ChildProcess, PortLease, Supervisor
from cli.stack.valkey import EmbeddedValkey
from common.process.tether import tether_command
from common.settings.up import UpConfig
from prefix_index import publisher

START_S, STOP_S = 300.0, 20.0
KEPT_S = 36_000


@contextlib.asynccontextmanager
async def running(
    config: UpConfig,
    model_dir: Path,
    *,
    start_s: float,
    pod_flags: Mapping[str, str] | None = None,
    gateway: Path | None = None,
) -> AsyncIterator[Stack]:
    """Runs a stack for the block, and prints the end of each process's log if the block fails.

    Args:
        start_s: time in which the stack must be ready.
        gateway: script that runs instead of `baton gateway`, with the arguments of `python -m cli`.
    """
    env = {name: value for name, value in os.environ.items() if name != "BATON_COMMIT"}  # for reports only
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as logs:
        stack = Stack.plan(config, model_dir, Path(logs), pod_flags=pod_flags, env=env, say=print)
        if gateway is not None:
            process = next(spec.process for spec in stack.specs if spec.role == "gateway")
            command = process.argv.index("gateway")
            process.argv = (sys.executable, "-P", str(gateway), *process.argv[command:])
        supervisor = Supervisor(stack.specs, on_event=print)
        try:
            with logs_on_failure(spec.process for spec in stack.specs):
                await supervisor.start(start_s)
                yield stack
        finally:
            await supervisor.stop(STOP_S)
            stack.close()


@contextlib.contextmanager
def logs_on_failure(processes: Iterable[ChildProcess]) -> Iterator[None]:
    """Prints the end of each process's log if the block fails."""
    try:
        yield
    except BaseException:
        for process in processes:
            print(f"--- {process.name}", *process.tail(60), sep="\n", flush=True)
        raise


@contextlib.asynccontextmanager
async def valkey() -> AsyncIterator[str]:
    """Runs a Valkey for the block. Yields its URL."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        server = EmbeddedValkey(0, Path(directory))
        try:
            yield await server.start()
        finally:
            await server.stop()


def keep_index_entries() -> None:
    """Makes all keys of the index live for hours: nothing expires, and pods in this process send no heartbeat."""
    for name, units_per_s in (("HEARTBEAT_S", 1), ("HELD_TTL_S", 1), ("INFO_TTL_S", 1), ("LEASE_MS", 1_000)):
        getattr(publisher, name)  # an error if the constant has another name now
        setattr(publisher, name, units_per_s * KEPT_S)


def start_script(name: str, *flags: object) -> subprocess.Popen[str]:
    """Starts a script of this folder, with text pipes at stdin and stdout. It ends with this process at the latest."""
    argv = [sys.executable, str(Path(__file__).with_name(name)), *map(str, flags)]
    return subprocess.Popen(tether_command(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> Any:
    """Returns the next line of a script, which is JSON."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@dataclass(frozen=True, slots=True)
class BarePod:
    name: str
    address: str
    process: ChildProcess
    secret: str


def connections(process: ChildProcess) -> list[str]:
    """Returns the log lines about connections of a pod: `connected to NAME generation G over TRANSPORT ...`."""
    begin = "connected to"
    return [line[line.index(begin) :] for line in process.tail(4000) if begin in line]


@contextlib.contextmanager
def running_pods(
    model: Path,
    pods: Mapping[str, Mapping[str, str]],
    *,
    device: str,
    start_s: float = START_S,
    within: Sequence[str] = (),
) -> Iterator[dict[str, BarePod]]:
    """Runs pods without a gateway for the block, and prints their logs if the block fails. Then kills them.

    Each pod gets its own GPU, in order. If there are more pods than GPUs, pods share GPUs. Call it outside an event
    loop, in a thread that lives longer than the block. Raises RuntimeError if a pod ends or is not ready in start_s.

    Args:
        pods: flags of `baton serve` by pod name. A flag that takes no value has "".
        within: a command that runs each pod's command, for example unshare(1) with its flags.
    """
    gpus = assign_gpus(len(pods), () if device == "cpu" else visible_gpus())
    env = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    env["BATON_SECRET"] = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-pods-")))
        started: dict[str, BarePod] = {}
        for (name, flags), gpu in zip(pods.items(), gpus, strict=True):
            port = stack.enter_context(PortLease())
            common = {"model": str(model), "name": name, "port": str(port.port), "device": device}
            common |= {"log-level": "info", "log-format": "text"}
            argv = [f"--{flag}={value}" if value else f"--{flag}" for flag, value in {**common, **flags}.items()]
            process = ChildProcess(
                name,
                [*within, sys.executable, "-P", "-m", "cli", "serve", *argv],
                log=logs / f"{name}.log",
                env=env if gpu is None else env | {"CUDA_VISIBLE_DEVICES": gpu[0].id},
            )
            stack.callback(process.kill, STOP_S)
            started[name] = BarePod(name, port.address, process, env["BATON_SECRET"])
        with logs_on_failure(pod.process for pod in started.values()):
            for pod in started.values():
                pod.process.start()
            until = time.monotonic() + start_s
            for pod in started.values():
                await_ready(pod.process, partial(probes.grpc_ready, pod.address), until)
            yield started


def await_ready(process: ChildProcess, ready: Callable[[], Coroutine[Any, Any, bool]], until: float) -> None:
    """Waits until `ready` returns True. RuntimeError if the process ends, or at the time.monotonic() `until`."""
    while not asyncio.run(ready()):
        if not process.alive or time.monotonic() > until:
            state = "is not ready in time" if process.alive else f"ended with exit code {process.exit_code}"
            raise RuntimeError("\n".join([f"{process.name} {state}:", *process.tail()]))
        time.sleep(0.1)
