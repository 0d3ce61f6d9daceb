"""Lifecycle: the drain, signals in child processes, and the death of children with their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.process.lifecycle import Lifecycle, LifecycleState, host_boot_id

ROOT = Path(__file__).parents[2]
SERVICE = """
import asyncio, sys
from common.process.lifecycle import Lifecycle

async def main():
    async def drain():
        print("drain", flush=True)
        await asyncio.sleep(float(sys.argv[1]))
        print("drained", flush=True)
    life = Lifecycle(drain, drain_s=60)
    life.install_signals()
    life.ready()
    print("ready", flush=True)
    await life.wait_stopped()
    print(life.state.name, flush=True)

if "uvloop" in sys.argv:
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""


@contextmanager
def service(*args: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", SERVICE, *args], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(number: signal.Signals, loop: str) -> None:
    with service("0", loop) as process:
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
    assert (output.split(), process.returncode) == (["drain", "drained", "STOPPED"], 0)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_second_signal_exits_at_once(number: signal.Signals, code: int, loop: str) -> None:
    with service("60", loop) as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "drain\n"
        process.send_signal(number)
        assert process.wait(timeout=120) == code


async def test_the_drain_runs_once_and_states_only_move_forward() -> None:
    drains = 0

    async def drain() -> None:
        nonlocal drains
        drains += 1
        assert life.draining

    life = Lifecycle(drain, drain_s=5)
    assert life.state is LifecycleState.STARTING
    life.ready()
    assert (life.state, life.draining) == (LifecycleState.READY, False)
    life.begin_drain("test")
    life.begin_drain("again")
    life.ready()
    assert life.state is LifecycleState.DRAINING
    await asyncio.wait_for(life.wait_stopped(), 30)
    assert (life.state, drains) == (LifecycleState.STOPPED, 1)


@pytest.mark.parametrize(
    ("wait_s", "drain_s", "error", "said"),
    [
        (0.0, 60.0, KeyError("bug"), "drain failed"),
        (0.0, 60.0, TimeoutError("a peer's"), "drain failed"),  # not its own time
        (60.0, 0.05, KeyError("bug"), "drain took more than 0 s"),
    ],
)
async def test_a_drain_that_fails_or_hangs_still_ends(
    wait_s: float, drain_s: float, error: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def drain() -> None:
        await asyncio.sleep(wait_s)
        raise error

    life = Lifecycle(drain, drain_s=drain_s)
    life.begin_drain("test")
    await asyncio.wait_for(life.wait_stopped(), 30)
    assert life.state is LifecycleState.STOPPED
    (record,) = caplog.records
    assert record.getMessage() == f"{said}; stopping anyway"
    assert (record.exc_info is not None) == (said == "drain failed")


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_child_dies_with_its_killed_parent() -> None:
    child = "import os, sys, time; from common.process.tether import die_with_parent; "
    child += "die_with_parent(int(sys.argv[1])); print(os.getpid(), flush=True); time.sleep(60)"
    parent = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, str(os.getpid())])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    assert gone(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_child_of_a_dead_parent_ends() -> None:
    code = "from common.process.tether import die_with_parent; die_with_parent(999999999)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, check=False).returncode == 1


def gone(pid: int) -> bool:
    """Whether the process ends within a few seconds (a zombie has ended)."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return False


def test_one_boot_has_one_id() -> None:
    assert host_boot_id() == host_boot_id() != ""
