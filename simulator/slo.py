"""What a user of `baton plan` wants of each request: a time to the first token, and a time between tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.errors import ConfigError
from simulator.outcome import Outcome

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_TIME = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(s|ms|us)")


@dataclass(frozen=True, slots=True)
class Slo:
    """A request is good when its first token came within ttft_s and its tokens, in the mean, itl_s apart.

    attainment: share of all requests that must be good.
    """

    ttft_s: float
    itl_s: float
    attainment: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.attainment <= 1:
            raise ConfigError(f"--attainment must be above 0 and at most 1, not {self.attainment}", field="attainment")

    def good(self, outcome: Outcome) -> bool:
        """Whether one request was served in time; a refused one was not."""
        if not outcome.done or outcome.ttft_s is None or outcome.ttft_s > self.ttft_s:
            return False
        return outcome.gap_s is None or outcome.gap_s <= self.itl_s

    @classmethod
    def parse(cls, text: str, attainment: float = 0.9) -> Slo:
        """`ttft=2s,itl=50ms`. Raises ConfigError."""
        found: dict[str, float] = {}
        for part in text.split(","):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            time = _TIME.fullmatch(value)
            if not equals or name not in ("ttft", "itl") or name in found:
                raise ConfigError(f"--slo: {part.strip()!r} is not one of ttft=TIME and itl=TIME", field="slo")
            if time is None or float(time[1]) == 0:
                raise ConfigError(f"--slo: {value!r} is not a time like 2s or 50ms", field="slo")
            found[name] = float(time[1]) * _UNITS[time[2]]
        if len(found) != 2:
            raise ConfigError("--slo: both are needed, as in ttft=2s,itl=50ms", field="slo")
        return cls(found["ttft"], found["itl"], attainment)
