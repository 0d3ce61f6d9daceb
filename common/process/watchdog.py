"""Watches the loops of a process. A loop is stuck after a bound: a time in which its heartbeat did not change.

    running --a bound without a beat--> stuck --another bound--> the process ends with EXIT_STUCK
       ^                                  |
       '-------------- a beat ------------'

A loop writes its heartbeat with plain attribute stores. One thread, the watchdog, samples all heartbeats. When a loop
gets stuck, the watchdog logs the stacks of all threads. Three times do not count as silence of a loop:

- The process was frozen or suspended. The watchdog did not run either, so its own clock (TickClock) leaves this out.
- The loop was ready to run but had no CPU.
- The loop compiled a kernel at the end of its bound. The bound then begins again.

A loop that holds the interpreter's lock also stops the watchdog. Only other processes can notice that: gateways see
that the pod does not answer, and the probes of Kubernetes or `baton up` fail.
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
PERIOD_S = 1.0  #: Longest time between two samples of a heartbeat.
REPORT_S = 5.0  #: Longest wait for the log and the metrics. The stuck loop may hold their locks.
STEP_FACTOR = 20.0  #: The bound of an engine step is this times its predicted seconds, and at least --stuck-step-s.


class Heartbeat:
    """The sign of life of one loop. The loop writes the attributes, and the watchdog reads them without a lock."""

    __slots__ = ("beats", "ident", "idle", "native_id")

    def __init__(self) -> None:
        self.beats = 0  #: Turns of the loop so far.
        self.idle = False  #: The loop waits for work, or has ended. It is then not stuck.
        self.ident = 0  #: Python's number of the loop's thread; 0 before `begin`.
        self.native_id = 0  #: The kernel's number of the loop's thread; 0 before `begin`.

    def begin(self) -> None:
        """Records that the loop runs on the calling thread."""
        self.ident, self.native_id = threading.get_ident(), threading.get_native_id()


class TickClock:
    """Measures the time in which this process ran, by ticks that should come every `period_s` seconds.

    A tick after more than two periods counts as one period: the process was frozen or suspended in between.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._last: float | None = None

    def tick(self, now: float) -> float:
        """Returns the counted seconds since the last tick; 0 for the first tick."""
        last, self._last = self._last, now
        elapsed = 0.0 if last is None else now - last
        return elapsed if elapsed <= 2 * self._period_s else self._period_s


class LoopEvent(enum.Enum):
    """A change of one loop that the watchdog acts on."""

    STUCK = "stuck"  #: A bound has passed without a beat.
    RECOVERED = "recovered"  #: A stuck loop beats again.
    HOPELESS = "hopeless"  #: A further bound has passed since the loop got stuck.


class LoopWatch:
    """Decides whether one loop is stuck. A pure state machine: the caller gives the time."""

    def __init__(self, period_s: float) -> None:
        self.stuck = False  #: A bound has passed since the last beat.
        self.silent_s = 0.0  #: Counted seconds since the last beat.
        self._clock = TickClock(period_s)
        self._beats = -1  #: `Heartbeat.beats` at the last tick.
        self._bound_from_s = 0.0  #: Value of silent_s at which the current bound began.

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
        """Takes one sample of the loop. Returns the event that the sample causes, or None.

        Args:
            now: time of the sample in seconds, of a monotonic clock.
            beats: turns of the loop so far.
            bound_s: longest time without a beat; 0 for no bound.
            idle: the loop waits for work, or has ended.
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

    name: str  #: The value of the metric's label `loop`, like "transfer_thread".
    heartbeat: Heartbeat
    bound_s: Callable[[], float]  #: Returns the bound that applies now; 0 for none.
    watch: LoopWatch
    starved_at_s: float = 0.0  #: `_run_queue_s` of the loop's thread at the last sample.
    stuck_since: float = 0.0  #: time.monotonic() of the last beat of a stuck loop.

    @property
    def title(self) -> str:
        """The loop's name in a sentence, like "the transfer thread"."""
        return "the " + self.name.replace("_", " ")

    def starved_s(self) -> float:
        """Returns how many seconds the loop's thread was ready to run without a CPU, since the last call."""
        before, self.starved_at_s = self.starved_at_s, _run_queue_s(self.heartbeat.native_id)
        return max(0.0, self.starved_at_s - before)


class Watchdog:
    """One thread that samples the heartbeats of a process.

    Args:
        stuck_s: bound of a loop without a bound of its own; 0 turns the watchdog off.
        on_stuck: called with the name of a loop that got stuck, on a thread of its own.
        on_change: called after a change of `stuck`, on the watchdog's thread. It must not block.
        end: called with the exit code to end the process.
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
        self.end = end  #: Ends the process with an exit code.
        self._stuck_s = stuck_s
        self._period_s = min(PERIOD_S, stuck_s / 10)
        self._on_stuck, self._on_change = on_stuck, on_change
        self._loops: list[_Loop] = []
        self._pulse: asyncio.TimerHandle | None = None  #: Timer of the event loop's next beat.
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, name: str, heartbeat: Heartbeat, bound_s: Callable[[], float] | None = None) -> None:
        """Watches one more loop. `bound_s` returns the bound that applies now, 0 for none; the default is `stuck_s`."""
        bound = bound_s or (lambda: self._stuck_s)
        self._loops.append(_Loop(name, heartbeat, bound, LoopWatch(self._period_s)))

    def watch_event_loop(self) -> None:
        """Watches the running event loop. A timer in the event loop beats once per period until `stop`."""
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
        """Ends the thread and the timer. Idempotent. If an event loop is watched, call it there."""
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
    """Runs `work` on a thread of its own and waits at most REPORT_S. `work` may need a lock of the stuck loop."""
    thread = threading.Thread(target=work, name="watchdog-report", daemon=True)
    thread.start()
    thread.join(REPORT_S)


def _run_queue_s(native_id: int) -> float:
    """Returns how many seconds a thread of this process has waited for a CPU so far; 0 if the kernel does not tell."""
    try:
        return int(Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _compiles(frame: FrameType | None) -> bool:
    """Returns whether a thread with this innermost frame is inside Triton's compiler."""
    while frame is not None:
        if frame.f_code.co_name == "compile" and frame.f_globals.get("__name__", "").startswith("triton.compiler"):
            return True
        frame = frame.f_back
    return False
