"""Progress of long work: a bar on stderr if that is a terminal, else a log line every few seconds."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

LOG_EVERY_S = 10.0


@dataclass(slots=True)
class Progress:
    """Work of which `done` of `total` units are done; the code that does the work calls `advance`."""

    what: str
    total: float
    unit: str
    #: Shows the progress.
    on_advance: Callable[[Progress], None]
    done: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    @property
    def rate(self) -> float:
        """Units per second since the start."""
        return self.done / max(time.perf_counter() - self.began, 1e-9)

    def advance(self, done: float, *, skipped: float = 0.0) -> None:
        """Adds `done` units to those done, and takes `skipped` units, which need not be done, from the total."""
        self.done += done
        self.total -= skipped
        self.on_advance(self)


@contextmanager
def progress(what: str, total: float, unit: str, *, show: bool = True) -> Iterator[Progress]:
    """Shows the progress of the block, unless `show` is False."""
    if not show:
        yield Progress(what, total, unit, lambda _: None)
    elif sys.stderr.isatty():
        yield from _bar(what, total, unit)
    else:
        yield from _lines(what, total, unit)


def _bar(what: str, total: float, unit: str) -> Iterator[Progress]:
    from rich import progress as rich
    from rich.console import Console

    figures = rich.TextColumn("{task.completed:,.4g}/{task.total:,.4g} {task.fields[unit]} ({task.fields[rate]}/s)")
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), figures, rich.TimeElapsedColumn())
    with rich.Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as bar:
        task = bar.add_task(what, total=total, unit=unit, rate="0")

        def shown(p: Progress) -> None:
            bar.update(task, completed=p.done, total=p.total, rate=f"{p.rate:,.3g}")

        yield Progress(what, total, unit, shown)


def _lines(what: str, total: float, unit: str) -> Iterator[Progress]:
    logged_at = time.perf_counter()

    def log_line(p: Progress) -> None:
        seconds = time.perf_counter() - p.began
        log.info("%s: %.4g of %.4g %s in %.1f s, %.3g/s", what, p.done, p.total, unit, seconds, p.rate)

    def shown(p: Progress) -> None:
        nonlocal logged_at
        if time.perf_counter() - logged_at >= LOG_EVERY_S:
            logged_at = time.perf_counter()
            log_line(p)

    work = Progress(what, total, unit, shown)
    yield work
    log_line(work)
