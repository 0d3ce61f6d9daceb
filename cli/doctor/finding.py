"""The result of one check of `baton doctor`."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    #: Works, but slower or only in part.
    WARN = "warn"
    #: `baton serve` cannot work.
    MISSING = "missing"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    level: Level
    detail: str
    fix: str = ""  # Advice for the user; empty if there is nothing to do.
