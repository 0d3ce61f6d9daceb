"""Runs the processes of `baton up` on this machine for the duration of a benchmark."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cli.stack.stack import Stack
from cli.stack.supervisor import Supervisor
from common.settings.configs import UpConfig

STOP_S = 20.0


@contextlib.asynccontextmanager
async def running(
    config: UpConfig,
    model_dir: Path,
    *,
    start_s: float,
    pod_flags: Mapping[str, str] | None = None,
    env: Mapping[str, str] = os.environ,
    gateway: Path | None = None,
) -> AsyncIterator[Stack]:
    """Runs a stack for the block, and prints the end of each process's log if the block fails.

    Args:
        start_s: time in which the stack must be ready.
        gateway: script that runs instead of `baton gateway`, with the arguments of `python -m cli`.
    """
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as logs:
        stack = Stack.plan(config, model_dir, Path(logs), pod_flags=pod_flags, env=env, say=print)
        if gateway is not None:
            process = next(spec.process for spec in stack.specs if spec.role == "gateway")
            command = process.argv.index("gateway")
            process.argv = (sys.executable, "-P", str(gateway), *process.argv[command:])
        supervisor = Supervisor(stack.specs, on_event=print)
        try:
            await supervisor.start(start_s)
            yield stack
        except BaseException:
            for spec in stack.specs:
                print(f"--- {spec.name}", *spec.process.tail(60), sep="\n", flush=True)
            raise
        finally:
            await supervisor.stop(STOP_S)
            stack.close()
