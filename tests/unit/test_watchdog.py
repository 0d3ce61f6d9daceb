"""Loops without a beat: when they are stuck, what the log says, and that a process survives a freeze."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.process import watchdog
from common.process.watchdog import EXIT_STUCK, Heartbeat, LoopEvent, LoopWatch, TickClock, Watchdog
from tests.rigs.waiting import until

ROOT = Path(__file__).parents[2]
PERIOD = 1.0


@given(
    st.lists(
        st.tuples(
            st.one_of(st.floats(0.5, 2.0), st.floats(2.0, 1000.0)),  # seconds since the last tick
            st.sampled_from(["beat", "silent", "silent", "silent", "silent", "idle"]),
            st.floats(0.0, 1.5),  # seconds without a CPU
            st.booleans(),  # the loop compiles
        ),
        max_size=80,
    ),
    st.floats(2.0, 12.0),
)
def test_a_loop_is_stuck_after_its_bound_in_counted_time(
    ticks: list[tuple[float, str, float, bool]], bound: float
) -> None:
    watch, now, beats = LoopWatch(PERIOD), 0.0, 0
    watch.tick(now, beats, bound)
    counted = 0.0  # since the last beat, or the last event
    stuck = False
    for elapsed, what, starved, compiles in ticks:
        now += elapsed
        beats += what == "beat"
        event = watch.tick(now, beats, bound, idle=what == "idle", starved_s=starved, exempt=lambda c=compiles: c)
        if what != "silent":
            assert event is (LoopEvent.RECOVERED if stuck else None)
            counted, stuck = 0.0, False
            continue
        counted += max(0.0, (elapsed if elapsed <= 2 * PERIOD else PERIOD) - starved)
        due = counted >= bound - 1e-9
        if event is None:
            assert counted < bound + 1e-9 or compiles
            counted = 0.0 if due and compiles else counted
            continue
        assert due
        assert not compiles
        assert event is (LoopEvent.HOPELESS if stuck else LoopEvent.STUCK)
        counted, stuck = 0.0, True
    assert watch.stuck == stuck


@given(st.lists(st.floats(2.1, 1e6), min_size=1, max_size=9), st.floats(10.0, 100.0))
def test_a_freeze_of_any_length_counts_as_one_period(freezes: list[float], bound: float) -> None:
    watch, now = LoopWatch(PERIOD), 0.0
    watch.tick(now, 0, bound)
    for freeze in freezes:
        now += freeze
        assert watch.tick(now, 0, bound) is None


def test_no_bound_is_no_watch() -> None:
    watch = LoopWatch(PERIOD)
    assert all(watch.tick(float(i), 0, 0.0) is None for i in range(100))
    assert [watch.tick(100.0 + i, 0, 3.0) for i in range(3)] == [None, None, LoopEvent.STUCK]


def test_a_late_tick_counts_as_one_period() -> None:
    clock = TickClock(PERIOD)
    assert [clock.tick(now) for now in (5.0, 6.0, 7.5, 60.0, 61.0)] == [0.0, 1.0, 1.5, PERIOD, 1.0]


class Loop:
    """A loop on a thread. While `open` is not set, its turn does not end."""

    def __init__(self) -> None:
        self.heartbeat = Heartbeat()
        self.open = threading.Event()
        self.open.set()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="the-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.heartbeat.begin()
        while not self._ended:
            self.heartbeat.beats += 1
            self._blocking_turn()

    def _blocking_turn(self) -> None:
        self.open.wait()
        time.sleep(0.001)

    def end(self) -> None:
        self._ended = True
        self.open.set()
        self._thread.join()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.end()


class Watched:
    """A watchdog that records its calls and does not end the process."""

    def __init__(self, stuck_s: float = 0.1) -> None:
        self.exits: list[int] = []
        self.stuck: list[str] = []
        self.changes: list[str] = []
        self.dog = Watchdog(
            stuck_s,
            on_stuck=self.stuck.append,
            on_change=lambda: self.changes.append(self.dog.stuck),
            end=self.exits.append,
        )


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.dog.stop()


async def test_a_stuck_loop_is_named_its_stack_is_logged_and_the_process_ends(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(stuck_s=0.5)
    watched.dog.watch("engine", loop.heartbeat)
    watched.dog.start()
    await asyncio.sleep(1.5)  # three bounds
    assert (watched.dog.stuck, watched.changes) == ("", [])
    loop.open.clear()
    await until(lambda: bool(watched.exits))
    assert watched.exits[0] == EXIT_STUCK == 6
    assert watched.changes == ["the engine is stuck"]
    await until(lambda: watched.stuck == ["engine"])
    stuck, ending = caplog.messages[0], caplog.messages[1]
    assert stuck.startswith("the engine is stuck: it made no progress for ")
    assert "thread the-loop:\n" in stuck
    assert "in _blocking_turn" in stuck
    assert "thread MainThread:\n" in stuck
    assert "ending this process with exit code 6" in ending
    watched.dog.stop()


async def test_a_loop_that_comes_back_is_not_stuck_any_more(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(stuck_s=1.0)
    watched.dog.watch("transfer_thread", loop.heartbeat)
    watched.dog.start()
    try:
        loop.open.clear()
        await until(lambda: watched.changes == ["the transfer thread is stuck"])
        loop.open.set()
        await until(lambda: watched.changes == ["the transfer thread is stuck", ""])
        await until(lambda: "the transfer thread runs again; it made no progress for " in caplog.text)
        await asyncio.sleep(2.0)
        assert watched.exits == []
    finally:
        watched.dog.stop()


async def test_each_loop_has_its_own_bound(loop: Loop, watched: Watched) -> None:
    other = Loop()
    try:
        watched.dog.watch("engine", loop.heartbeat, lambda: 1e9)
        watched.dog.watch("rank", other.heartbeat, lambda: 0.1)
        watched.dog.start()
        loop.open.clear()
        other.open.clear()
        await until(lambda: watched.changes == ["the rank is stuck"])
        await until(lambda: watched.stuck == ["rank"])  # its stack is logged before
    finally:
        other.end()


async def test_an_idle_loop_is_not_stuck(loop: Loop, watched: Watched) -> None:
    watched.dog.watch("engine", loop.heartbeat)
    loop.heartbeat.idle = True
    loop.open.clear()
    watched.dog.start()
    await asyncio.sleep(0.5)
    assert watched.changes == []
    loop.heartbeat.idle = False
    await until(lambda: watched.changes == ["the engine is stuck"])


async def test_a_loop_that_waits_for_a_cpu_is_not_stuck(
    loop: Loop, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    starved = time.monotonic()
    monkeypatch.setattr(watchdog, "_run_queue_s", lambda _: time.monotonic() - starved)
    watched.dog.watch("engine", loop.heartbeat)
    loop.open.clear()
    watched.dog.start()
    await asyncio.sleep(0.5)
    assert watched.changes == []
    monkeypatch.setattr(watchdog, "_run_queue_s", lambda _: 0.0)
    await until(lambda: watched.changes == ["the engine is stuck"])


def test_the_kernel_says_how_long_a_thread_waited_for_a_cpu() -> None:
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel has no schedstat")
    assert watchdog._run_queue_s(threading.get_native_id()) >= 0.0
    assert watchdog._run_queue_s(0) == 0.0


async def test_a_loop_that_compiles_a_kernel_is_not_stuck(watched: Watched) -> None:
    """Triton compiles a kernel for seconds when it is first used with new sizes."""
    module = {"__name__": "triton.compiler.compiler"}
    exec("def compile(wait):\n    wait()", module)
    compile_kernel: Callable[[Callable[[], object]], None] = module["compile"]  # type: ignore[assignment]
    heartbeat, compiled, done = Heartbeat(), threading.Event(), threading.Event()

    def run() -> None:
        heartbeat.begin()
        compile_kernel(compiled.wait)
        done.wait()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    watched.dog.watch("engine", heartbeat)
    watched.dog.start()
    await asyncio.sleep(0.5)
    assert watched.changes == []
    compiled.set()
    await until(lambda: watched.changes == ["the engine is stuck"])
    done.set()
    thread.join()


async def test_the_process_ends_even_if_the_log_is_blocked(
    loop: Loop, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stuck loop may be in a write to a log that nothing reads, and hold the handler's lock."""
    monkeypatch.setattr(watchdog, "REPORT_S", 0.1)
    release = threading.Event()

    class Blocked(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            release.wait()

    handler = Blocked()
    logging.getLogger("common.process.watchdog").addHandler(handler)
    try:
        watched.dog.watch("engine", loop.heartbeat)
        watched.dog.start()
        loop.open.clear()
        await until(lambda: bool(watched.exits))
    finally:
        logging.getLogger("common.process.watchdog").removeHandler(handler)
        release.set()


async def test_a_blocked_event_loop_is_stuck(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(stuck_s=1.0)
    watched.dog.watch_event_loop()
    watched.dog.start()
    try:
        await asyncio.sleep(2.0)
        assert watched.changes == []
        end = time.monotonic() + 30
        while not watched.changes and time.monotonic() < end:
            time.sleep(0.01)  # noqa: ASYNC251 - blocks the event loop
        assert watched.changes == ["the event loop is stuck"]
        await until(lambda: watched.changes == ["the event loop is stuck", ""])
        await until(lambda: watched.stuck == ["event_loop"])
    finally:
        watched.dog.stop()


async def test_a_broken_bound_does_not_end_the_watch(loop: Loop, watched: Watched) -> None:
    def broken() -> float:
        raise ValueError("no bound")

    watched.dog.watch("broken", Heartbeat(), broken)
    watched.dog.watch("engine", loop.heartbeat)
    watched.dog.start()
    loop.open.clear()
    await until(lambda: watched.changes == ["the engine is stuck"])


async def test_zero_seconds_is_no_watchdog(loop: Loop) -> None:
    watched = Watched(stuck_s=0.0)
    watched.dog.watch("engine", loop.heartbeat)
    watched.dog.watch_event_loop()
    watched.dog.start()
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}
    watched.dog.stop()


PROCESS = """
import sys, threading, time
from common.process.watchdog import Heartbeat, Watchdog
heartbeat, told = Heartbeat(), threading.Event()
def run():
    heartbeat.begin()
    while not told.is_set():
        heartbeat.beats += 1
        time.sleep(0.01)
    time.sleep(600)
threading.Thread(target=run, daemon=True).start()
dog = Watchdog(0.5)
dog.watch("engine", heartbeat)
dog.start()
print("up", flush=True)
for line in sys.stdin:
    print(dog.stuck or "runs", flush=True)
    if line == "block\\n":
        told.set()
"""


def test_a_process_survives_a_freeze_and_ends_with_6_when_a_loop_is_stuck() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", PROCESS], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.send_signal(signal.SIGSTOP)
        time.sleep(2.5)  # five bounds
        child.send_signal(signal.SIGCONT)
        said, end = "the engine is stuck\n", time.monotonic() + 30
        while said == "the engine is stuck\n" and time.monotonic() < end:  # until its loop has had a turn
            time.sleep(0.5)
            print("ask", file=child.stdin, flush=True)
            said = child.stdout.readline()
        assert said == "runs\n"
        print("block", file=child.stdin, flush=True)
        assert child.wait(30) == EXIT_STUCK
    finally:
        child.kill()
        child.communicate()


def test_other_functions_with_the_name_compile_are_not_the_compiler() -> None:
    frame = SimpleNamespace(f_code=SimpleNamespace(co_name="compile"), f_globals={"__name__": "re"}, f_back=None)
    assert not watchdog._compiles(frame)  # type: ignore[arg-type]
