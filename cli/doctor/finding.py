"""One thing that `baton doctor` looked at."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """ok; warn: works, but worse or not all of it; missing: `baton serve` cannot work."""

    OK = "ok"
    WARN = "warn"
    MISSING = "missing"


@dataclass(frozen=True)
class Finding:
    """One line of the report; `fix` is what to do about it, empty when nothing."""

    what: str
    level: Level
    detail: str
    fix: str = ""
