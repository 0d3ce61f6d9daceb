"""How far something long is: a bar on stderr where that is a terminal, else a line in the log now and then."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

LOG_EVERY_S = 10.0

Advance = Callable[[float], None]


@contextmanager
def progress(what: str, total: float, unit: str, *, scale: float = 1.0, show: bool = True) -> Iterator[Advance]:
    """Yields a function to call with what was done since the last call, in the unit of `total`.

    unit: as it is shown, after a division by `scale` (1e9 and GB for bytes). show False: neither bar nor lines.
    """
    if not show:
        yield lambda done: None
    elif sys.stderr.isatty():
        yield from _bar(what, total, unit, scale)
    else:
        yield from _lines(what, total, unit, scale)


def _bar(what: str, total: float, unit: str, scale: float) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    figures = TextColumn("{task.completed:,.4g}/{task.total:,.4g} {task.fields[unit]} {task.fields[rate]}")
    columns = (TextColumn("{task.description}"), BarColumn(), figures, TimeElapsedColumn())
    began = time.perf_counter()
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as bar:
        task = bar.add_task(what, total=total / scale, unit=unit, rate="")
        done = 0.0

        def advance(more: float) -> None:
            nonlocal done
            done += more / scale
            rate = done / max(time.perf_counter() - began, 1e-9)
            bar.update(task, completed=done, rate=f"({rate:,.3g} {unit}/s)")

        yield advance


def _lines(what: str, total: float, unit: str, scale: float) -> Iterator[Advance]:
    began = said = time.perf_counter()
    done = 0.0

    def say(now: float) -> None:
        rate = done / max(now - began, 1e-9)
        log.info("%s: %.4g of %.4g %s in %.1f s (%.3g %s/s)", what, done, total / scale, unit, now - began, rate, unit)

    def advance(more: float) -> None:
        nonlocal done, said
        done += more / scale
        now = time.perf_counter()
        if now - said >= LOG_EVERY_S:
            said = now
            say(now)

    yield advance
    say(time.perf_counter())
