"""Watches the loops of a process. A loop without a beat for its bound is stuck.

    running --a bound without a beat--> stuck --another bound--> the process ends with EXIT_STUCK
       ^                                  |
       '-------------- a beat ------------'

A loop writes its heartbeat with plain attribute stores, and one thread samples all heartbeats. When a loop gets stuck,
the stacks of all threads go to the log. Time counts only while this thread's own clock ticks, so a process that was
frozen or suspended has no stuck loop. The time in which a loop waited for a CPU, and a bound in which it compiled a
kernel, do not count either. A loop that holds the interpreter's lock stops this thread too; peers and probes notice
that.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_log = logging.getLogger(__name__)

EXIT_STUCK = 6
PERIOD_S = 1.0  #: Longest time between two samples.
REPORT_S = 5.0  #: Longest wait for the log and the metrics, whose locks the stuck loop may hold.
STEP_FACTOR = 20.0  #: A step is stuck after this many times its predicted seconds, if that is above the setting.


class Heartbeat:
    """The sign of life of one loop. The loop writes the attributes, and the watchdog reads them without a lock."""

    __slots__ = ("beats", "ident", "idle", "native_id")

    def __init__(self) -> None:
        self.beats = 0  #: Turns of the loop.
        self.idle = False  #: The loop waits for work, or has ended.
        self.ident = self.native_id = 0  #: The thread of the loop; 0 before `begin`.

    def begin(self) -> None:
        """Records the calling thread as that of the loop."""
        self.ident, self.native_id = threading.get_ident(), threading.get_native_id()


class TickClock:
    """Measures time by its own ticks, which should come every `period_s` seconds.

    A tick that is late by more than the period counts as one period: the process did not run in between.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._last: float | None = None

    def tick(self, now: float) -> float:
        """Returns the seconds that count since the last tick; 0 for the first."""
        last, self._last = self._last, now
        elapsed = 0.0 if last is None else now - last
        return elapsed if elapsed <= 2 * self._period_s else self._period_s


class LoopEvent(enum.Enum):
    """A change in the life of one loop."""

    STUCK = "stuck"
    RECOVERED = "recovered"
    HOPELESS = "hopeless"


class LoopWatch:
    """Decides whether one loop is stuck. A pure state machine: the caller gives the time."""

    def __init__(self, period_s: float) -> None:
        self.stuck = False
        self.silent_s = 0.0  #: Counted seconds since the last beat.
        self._clock = TickClock(period_s)
        self._beats = -1  # at the last tick
        self._bound_from_s = 0.0  # value of silent_s at which the current bound began

    def tick(
        self,
        now: float,
        beats: int,
        bound_s: float,
        *,
        idle: bool = False,
        starved_s: float = 0.0,
        exempt: Callable[[], bool] = lambda: False,
    ) -> LoopEvent | None:
        """Takes a sample of the loop and returns what it changes.

        Args:
            beats: turns of the loop so far.
            bound_s: longest time without a beat; 0 for no bound.
            starved_s: seconds since the last tick in which the loop waited for a CPU.
            exempt: called at the end of a bound; True starts the bound again.
        """
        elapsed_s = self._clock.tick(now)
        if beats != self._beats or idle or bound_s <= 0:
            recovered, self.stuck = self.stuck, False
            self._beats, self.silent_s, self._bound_from_s = beats, 0.0, 0.0
            return LoopEvent.RECOVERED if recovered else None
        self.silent_s += max(0.0, elapsed_s - starved_s)
        if self.silent_s - self._bound_from_s < bound_s:
            return None
        self._bound_from_s = self.silent_s
        if exempt():
            return None
        if self.stuck:
            return LoopEvent.HOPELESS
        self.stuck = True
        return LoopEvent.STUCK


@dataclass(eq=False)
class _Loop:
    """One watched loop."""

    name: str
    heartbeat: Heartbeat
    bound_s: Callable[[], float]
    watch: LoopWatch
    starved_at_s: float = 0.0  # seconds on the run queue at the last sample
    stuck_since: float = 0.0  # time.monotonic() of its last beat, while it is stuck

    @property
    def title(self) -> str:
        """The loop's name in a sentence."""
        return "the " + self.name.replace("_", " ")

    def starved_s(self) -> float:
        """Returns the seconds since the last call in which the loop's thread was ready to run but had no CPU."""
        before, self.starved_at_s = self.starved_at_s, _run_queue_s(self.heartbeat.native_id)
        return max(0.0, self.starved_at_s - before)


class Watchdog:
    """One thread that samples the heartbeats of a process.

    Args:
        stuck_s: bound of a loop without a bound of its own; 0 for no watchdog.
        on_stuck: gets the name of a loop that got stuck. It runs on a thread of its own.
        on_change: called after a change of `stuck`, on the watchdog's thread. It must not block.
        end: ends the process with an exit code.
    """

    def __init__(
        self,
        stuck_s: float,
        *,
        on_stuck: Callable[[str], object] = lambda _: None,
        on_change: Callable[[], object] = lambda: None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.stuck = ""  #: Which loops are stuck, in words; "" while all run. Any thread may read it.
        self.end = end
        self._stuck_s = stuck_s
        self._period_s = min(PERIOD_S, stuck_s / 10)
        self._on_stuck, self._on_change = on_stuck, on_change
        self._loops: list[_Loop] = []
        self._pulse: asyncio.TimerHandle | None = None  # the next beat of the event loop
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, name: str, heartbeat: Heartbeat, bound_s: Callable[[], float] | None = None) -> None:
        """Watches one more loop. `bound_s` returns its bound now, 0 for none; by default the bound is `stuck_s`."""
        bound = bound_s or (lambda: self._stuck_s)
        self._loops.append(_Loop(name, heartbeat, bound, LoopWatch(self._period_s)))

    def watch_event_loop(self) -> None:
        """Watches the running event loop, in which a timer beats once per period until `stop`."""
        if self._stuck_s <= 0:
            return
        heartbeat, loop = Heartbeat(), asyncio.get_running_loop()

        def beat() -> None:
            heartbeat.beats += 1
            self._pulse = loop.call_later(self._period_s, beat)

        heartbeat.begin()
        beat()
        self.watch("event_loop", heartbeat)

    def start(self) -> None:
        """Starts the thread, unless the watchdog is off."""
        if self._stuck_s > 0:
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread and the timer. Idempotent. Call it on the event loop, if one is watched."""
        self._stopping.set()
        if self._pulse is not None:
            self._pulse.cancel()
        if self._thread is not None:
            self._thread.join(PERIOD_S)

    def _run(self) -> None:
        while not self._stopping.wait(self._period_s):
            for loop in self._loops:
                try:
                    self._sample(loop)
                except Exception:
                    _log.exception("%s could not be watched", loop.title)

    def _sample(self, loop: _Loop) -> None:
        heartbeat, now = loop.heartbeat, time.monotonic()
        event = loop.watch.tick(
            now,
            heartbeat.beats,
            loop.bound_s(),
            idle=heartbeat.idle,
            starved_s=loop.starved_s(),
            exempt=lambda: _compiles(sys._current_frames().get(heartbeat.ident)),
        )
        if event is None:
            return
        if event is LoopEvent.HOPELESS:
            text = "%s has made no progress for %.0f s: ending this process with exit code %d"
            _bounded(lambda: _log.critical(text, loop.title, loop.watch.silent_s, EXIT_STUCK))
            if not self._stopping.is_set():
                self.end(EXIT_STUCK)
            return
        if event is LoopEvent.STUCK:
            loop.stuck_since = now - loop.watch.silent_s
        stuck = [f"{entry.title} is stuck" for entry in self._loops if entry.watch.stuck]
        self.stuck = " and ".join(stuck)
        self._on_change()
        _bounded(lambda: self._report(loop, event, now))

    def _report(self, loop: _Loop, event: LoopEvent, now: float) -> None:
        if event is LoopEvent.RECOVERED:
            _log.warning("%s runs again; it made no progress for %.1f s", loop.title, now - loop.stuck_since)
            return
        silent_s = loop.watch.silent_s
        _log.error("%s is stuck: it made no progress for %.1f s\n%s", loop.title, silent_s, all_stacks())
        self._on_stuck(loop.name)


def all_stacks() -> str:
    """Returns the stacks of all threads but the calling one, each with the thread's name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"thread {names.get(ident, 'without a name')}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    ]
    return "\n".join(stacks)


def _bounded(work: Callable[[], object]) -> None:
    """Runs `work` on a thread, and waits for it at most REPORT_S: it may need a lock that the stuck loop holds."""
    thread = threading.Thread(target=work, name="watchdog-report", daemon=True)
    thread.start()
    thread.join(REPORT_S)


def _run_queue_s(native_id: int) -> float:
    """Returns the seconds that a thread of this process has waited for a CPU; 0 where the kernel does not say."""
    try:
        return int(Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _compiles(frame: FrameType | None) -> bool:
    """Returns whether a stack is inside Triton's compiler."""
    while frame is not None:
        if frame.f_code.co_name == "compile" and frame.f_globals.get("__name__", "").startswith("triton.compiler"):
            return True
        frame = frame.f_back
    return False
