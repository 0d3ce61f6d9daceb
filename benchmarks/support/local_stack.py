"""Runs processes of Baton on this machine for the duration of a benchmark: all of `baton up`, a Valkey, a script."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path

from cli.stack.process import ChildProcess
from cli.stack.stack import Stack
from cli.stack.supervisor import Supervisor
from cli.stack.valkey import EmbeddedValkey
from common.process.tether import tether_command
from common.settings.configs import UpConfig
from prefix_index import publisher

STOP_S = 20.0
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
