"""Lengths of prompts and answers: fixed, uniform between two, or log-normal around a median."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from common.errors import ConfigError

MOST = 10_000_000
SPREAD = 0.8  # of the logarithm: the ninth decile is 2.8 times the median, about what recorded traces show
_TEXT = re.compile(r"(~?)(\d+)(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Tokens. around: log-normal with this median; else uniform from low to high, both included."""

    low: int
    high: int
    around: bool = False

    def draw(self, rng: random.Random) -> int:
        """At least 1."""
        if self.around:
            return min(MOST, max(1, round(rng.lognormvariate(math.log(self.low), SPREAD))))
        return rng.randint(self.low, self.high)

    @classmethod
    def parse(cls, flag: str, text: str) -> LengthDistribution:
        """`512`, `128:1024` or `~512`. Raises ConfigError that names the flag."""
        found = _TEXT.fullmatch(text.strip())
        if found is None or (found[1] and found[3]):
            raise ConfigError(f"--{flag}: {text!r} is not a length like 512, 128:1024 or ~512", field=flag)
        low, high = int(found[2]), int(found[3] or found[2])
        if not 1 <= low <= high <= MOST:
            raise ConfigError(f"--{flag}: lengths go from 1 to {MOST} and from low to high, not {text}", field=flag)
        return cls(low, high, bool(found[1]))

    def __str__(self) -> str:
        if self.around:
            return f"~{self.low}"
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"
