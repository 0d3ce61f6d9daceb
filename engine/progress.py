"""Progress of long work: a bar on stderr if that is a terminal, else a log line every few seconds."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

log = logging.getLogger(__name__)
LOG_EVERY_S = 2.0
SMALL_GB = 2  # Sizes below are shown in MB.


@dataclass(slots=True)
class Progress:
    """Work of which `done` of `total` units are done; the code that does the work calls `advance`."""

    what: str
    total: float
    unit: str
    done: float = 0.0
    began: float = field(default_factory=time.perf_counter)
    bar: Bar | None = None  # Shows the progress; None for log lines
    logged_at: float = field(default_factory=time.perf_counter)  # Time of the last log line; infinite for none

    def advance(self, done: float, *, skipped: float = 0.0) -> None:
        """Adds `done` units to those done, and takes `skipped` units, which need not be done, from the total."""
        self.done += done
        self.total -= skipped
        if self.bar is not None:
            rate = self.done / max(time.perf_counter() - self.began, 1e-9)
            self.bar.update(self.bar.task_ids[0], completed=self.done, total=self.total, rate=_figure(rate))
        elif time.perf_counter() - self.logged_at >= LOG_EVERY_S:
            self.logged_at = time.perf_counter()
            self.log("now")

    def log(self, phase: str = "done") -> None:
        """Logs the state of the work. `phase` is the phase that `baton up` shows, see common/process/lifecycle.py."""
        seconds = max(time.perf_counter() - self.began, 1e-9)
        scale, unit = (1e3, "MB") if self.unit == "GB" and self.total < SMALL_GB else (1, self.unit)
        done, total, rate = self.done * scale, self.total * scale, self.done * scale / seconds
        figures = (_figure(done), _figure(total), unit, seconds, _figure(rate), unit)
        log.info("%s: %s of %s %s in %.1f s, %s %s/s", self.what, *figures, extra={"phase": phase})


def _figure(value: float) -> str:
    """Returns a number with four digits, or without decimals if it is larger, for humans."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


@contextmanager
def progress(what: str, total: float, unit: str, *, show: bool = True) -> Iterator[Progress]:
    """Shows the progress of the block, unless `show` is False."""
    work = Progress(what, total, unit)
    if not show:
        work.logged_at = float("inf")
        yield work
    elif not sys.stderr.isatty():
        yield work
        work.log()
    else:
        from rich import progress as rich
        from rich.console import Console

        rate = "{task.completed:,.4g}/{task.total:,.4g} {task.fields[unit]} ({task.fields[rate]} {task.fields[unit]}/s)"
        figures = rich.TextColumn(rate)
        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), figures, rich.TimeElapsedColumn())
        with rich.Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as work.bar:
            work.bar.add_task(what, total=total, unit=unit, rate="0")
            yield work
