"""What a user of `baton plan` wants of each request: a time to the first token, and a time between tokens."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError
from common.objectives import parse_objectives
from simulator.outcome import Outcome


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

    def is_met_by(self, outcome: Outcome) -> bool:
        """Whether one request was served in time; a refused one was not."""
        if not outcome.done or outcome.ttft_s is None or outcome.ttft_s > self.ttft_s:
            return False
        return outcome.mean_itl_s is None or outcome.mean_itl_s <= self.itl_s

    @classmethod
    def parse(cls, text: str, attainment: float = 0.9) -> Slo:
        """`ttft=2s,itl=50ms`. Raises ConfigError."""
        found = parse_objectives(text, ("ttft", "itl"))
        if missing := [name for name in ("ttft", "itl") if name not in found]:
            raise ConfigError(f"--slo: {missing[0]} is missing; expected both, as in ttft=2s,itl=50ms", field="slo")
        return cls(found["ttft"], found["itl"], attainment)
