"""Log directories and messages of `baton up`, without starting a process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from rich.console import Console

from cli.stack import up
from cli.stack.supervisor import ChildProcess, Service, ServiceSpec, State, Supervisor
from common.settings.up import UpConfig
from tests.rigs.waiting import until


def test_logs_of_stacks_that_run_are_kept_and_of_the_others_the_last_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    runs = tmp_path / "baton" / "runs"
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    running = runs / f"20200101-000000-{os.getpid()}"
    old = [runs / f"202101{day:02}-000000-{ended.pid}" for day in range(1, 15)]
    for folder in (running, *old):
        folder.mkdir(parents=True)
    new = up._new_log_dir()
    assert new.parent == runs
    assert set(runs.iterdir()) == {running, *old[-(up.KEPT_LOG_DIRS - 1) :]}


async def test_a_signal_is_answered_with_how_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    granted: list[float] = []

    async def start(_self: Supervisor, _timeout_s: float) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    async def stop(_self: Supervisor, grace_s: float) -> None:
        granted.append(grace_s)

    monkeypatch.setattr(Supervisor, "start", start)
    monkeypatch.setattr(Supervisor, "stop", stop)
    monkeypatch.setattr(up, "prepared", lambda model, **_: Path(model))
    config = UpConfig(model=str(tmp_path), redis="redis://127.0.0.1:1", port=0, log_dir=str(tmp_path), drain_s=3.0)
    assert await up.run(config, once=None) == 0
    assert "stopping: waits up to 3 s for running answers; Ctrl-C again kills" in capsys.readouterr().out
    assert granted[0] > config.drain_s + 15


async def test_a_redis_that_does_not_answer_is_named_at_once() -> None:
    said: list[str] = []
    await up._report_missing_redis("redis://:secret@127.0.0.1:1", said.append)
    (line,) = said
    assert line.startswith("redis://127.0.0.1:1 does not answer (")
    assert "): the stack waits for it. Without --redis" in line
    assert "secret" not in line


async def test_that_all_is_ready_is_said_before_how_to_use_it(capsys: pytest.CaptureFixture[str]) -> None:
    process = ChildProcess("gateway", ["/bin/true"], log=Path("/dev/null"))
    service = Service(ServiceSpec(process=process, role="gateway", address="127.0.0.1:8000", probe=AsyncMock()))
    board = up.Board(Console(highlight=False))
    async with board.showing([service]):
        service.state = State.STARTING
        await until(lambda: "starting" in capsys.readouterr().out)
        service.state, service.ready_after_s = State.READY, 1.0
        board.refresh()
        board.say("examples")
        service.state = State.STOPPED
    ready, examples, stopped = capsys.readouterr().out.splitlines()
    assert "gateway    ready after 1.0 s" in ready
    assert examples == "examples"
    assert "gateway    stopped" in stopped, "how it ended is shown too"


async def test_the_phases_of_a_start_are_shown_once_each(tmp_path: Path) -> None:
    script = """
import logging, time
from common.logs import setup_logs
from common.process.lifecycle import log_phase
setup_logs("info", "json")
log_phase("loads its code")
log_phase("loading m: 5.4 of 5.4 MB in 0.1 s, 54 MB/s", done=True)
logging.getLogger("x").info('"phase": no')
log_phase("warms up")
open(READY, "w").close()
time.sleep(60)
"""
    ready = tmp_path / "ready"
    argv = [sys.executable, "-c", script.replace("READY", repr(str(ready)))]

    async def probe() -> bool:
        return ready.exists() and service.phase == "warms up"

    process = ChildProcess("pod", argv, log=tmp_path / "pod.log")
    said: list[str] = []
    spec = ServiceSpec(process=process, role="both", address="-", probe=probe)
    on_phase = lambda _, text: said.append(text)  # noqa: E731
    supervisor = Supervisor([spec], on_event=said.append, on_phase=on_phase)
    (service,) = supervisor.services
    try:
        await supervisor.start(60.0)
        assert said == ["loading m: 5.4 of 5.4 MB in 0.1 s, 54 MB/s"]
        ready.unlink()
        process.send(signal.SIGKILL)
        await until(lambda: any("ended" in line for line in said))
        await until(lambda: service.state is State.READY)
    finally:
        await supervisor.stop(5.0)
    ended = re.match(r"pod ended \(SIGKILL\), restarting in 0\.5 s \(pid (\d+) ran for \d+\.\d s\)", said[1])
    assert ended is not None
    assert said[2] == said[0], "the phases of the new process, not those of the old one again"
    again = re.fullmatch(r"pod is ready again, \d+\.\d s after its restart \(pid (\d+)\)", said[3])
    assert again is not None
    assert again[1] != ended[1], "the pid of the new process"
    assert len(said) == 4


async def test_a_stack_may_open_its_playground(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []

    def browse(page: str) -> bool:
        opened.append(page)
        return False

    async def start(_self: Supervisor, _timeout_s: float) -> None:
        pass

    async def failure(_self: Supervisor) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    monkeypatch.setattr("webbrowser.open", browse)
    monkeypatch.setattr(Supervisor, "start", start)
    monkeypatch.setattr(Supervisor, "failure", failure)
    monkeypatch.setattr(up, "prepared", lambda model, **_: Path(model))
    config = UpConfig(
        model=str(tmp_path), redis="redis://127.0.0.1:1", port=0, log_dir=str(tmp_path / "logs"), api_key=("k",)
    )
    assert await up.run(config, once=None, browse=True) == 0
    out = capsys.readouterr().out
    (page,) = opened
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#/playground", page)
    origin = page.removesuffix("/#/playground")
    assert f"is served on {origin}/v1" in out
    assert f"dashboard: {origin}/ (with a playground)" in out
    assert f"no browser to open {page}" in out
    assert f"baton chat {origin}" in out
    assert '"temperature": 0.3' in out
    assert "temperature=0.3" in out
    assert "Authorization: Bearer YOUR_KEY" in out
