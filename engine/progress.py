"""How far something long is: a bar on stderr where that is a terminal, else a line in the log now and then."""

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
    """done of total, counted in `unit`; whoever does the work calls advance."""

    what: str
    total: float
    unit: str
    on_advance: Callable[[Progress], None]
    done: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    @property
    def rate(self) -> float:
        """Units a second since the start."""
        return self.done / max(time.perf_counter() - self.began, 1e-9)

    def advance(self, done: float, *, skipped: float = 0.0) -> None:
        """done: more than at the last call; skipped: what need not be done after all."""
        self.done += done
        self.total -= skipped
        self.on_advance(self)


@contextmanager
def progress(what: str, total: float, unit: str, *, show: bool = True) -> Iterator[Progress]:
    """Shows what happens inside the block; show False: neither bar nor lines."""
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
    said = time.perf_counter()

    def say(p: Progress) -> None:
        seconds = time.perf_counter() - p.began
        log.info("%s: %.4g of %.4g %s in %.1f s, %.3g/s", what, p.done, p.total, unit, seconds, p.rate)

    def shown(p: Progress) -> None:
        nonlocal said
        if time.perf_counter() - said >= LOG_EVERY_S:
            said = time.perf_counter()
            say(p)

    work = Progress(what, total, unit, shown)
    yield work
    say(work)
