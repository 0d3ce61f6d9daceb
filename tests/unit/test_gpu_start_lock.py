"""The start lock of a GPU: one engine starts at a time; a timeout, an error or the end of a process ends the wait."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import multiprocessing.synchronize
import threading
import time
from pathlib import Path

import pytest
import torch

from engine.device import file_lock, gpu_start_lock
from engine.step.warm_up import _graph_bytes


def test_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "card"
    order: list[str] = []

    def second() -> None:
        with file_lock(path, 30.0):
            order.append("second")

    with file_lock(path, 30.0):
        other = threading.Thread(target=second)
        other.start()
        time.sleep(0.3)
        order.append("first")
    other.join(30.0)
    assert order == ["first", "second"]


def test_the_wait_has_a_timeout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "card"
    with file_lock(path, 30.0), caplog.at_level(logging.WARNING), file_lock(path, 0.0):
        assert "starting without the lock" in caplog.text


def test_without_a_lock_file_there_is_no_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), file_lock(tmp_path / "no such" / "card", 30.0):
        assert "without a lock" in caplog.text


def test_on_a_file_system_without_locks_there_is_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    with caplog.at_level(logging.WARNING), file_lock(tmp_path / "card", 30.0):
        assert "no locks available" in caplog.text


def _hold(path: Path, held: multiprocessing.synchronize.Event) -> None:
    with file_lock(path, 30.0):
        held.set()
        time.sleep(60.0)


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    path, held = tmp_path / "card", spawn.Event()
    holder = spawn.Process(target=_hold, args=(path, held))
    holder.start()
    try:
        assert held.wait(60.0)
        holder.kill()
        began = time.monotonic()
        with file_lock(path, 30.0):
            assert time.monotonic() - began < 20.0
    finally:
        holder.kill()
        holder.join(30.0)


def test_a_cpu_has_no_start_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.device.file_lock", None)
    with gpu_start_lock(torch.device("cpu")):
        pass


def test_memory_that_another_process_takes_meanwhile_is_not_counted_for_each_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = iter([1000, 900, 400, 390])  # the second graph took 10, another process 490
    monkeypatch.setattr("engine.step.warm_up._free", lambda _: next(free))
    captured: list[int] = []
    assert _graph_bytes([8, 4, 2, 1], captured.extend, torch.device("cuda:0")) == 100 + 3 * 10
    assert captured == [8, 4, 2]
    free = iter([1000, 900, 890, 880])
    assert _graph_bytes([8], captured.extend, torch.device("cuda:0")) == 100
