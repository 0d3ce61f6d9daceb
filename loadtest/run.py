"""A run: what was asked, and what became of every request; it grows while the run goes on."""

from __future__ import annotations

from dataclasses import dataclass, field

from loadtest.config import LoadConfig
from loadtest.record import Record


@dataclass(slots=True)
class Run:
    """began: time.perf_counter() at the run's zero; began_at: the same, in seconds since the epoch; ended: at its end.

    stopped: it was ended early. unfinished: requests that were under way then. skipped: turns whose conversation had
    failed. left_out: requests of the trace that are too long. planned: requests in all, where that is known.
    cpu_s: what this process used from the beginning to the end.
    """

    config: LoadConfig
    model: str
    began: float = 0.0
    began_at: float = 0.0
    ended: float = 0.0
    cpu_s: float = 0.0
    records: list[Record] = field(default_factory=list)
    unfinished: int = 0
    stopped: bool = False
    skipped: int = 0
    skipped_too_long: int = 0
    planned: int | None = None
    sent: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0
