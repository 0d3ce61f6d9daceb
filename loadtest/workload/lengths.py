"""Length distributions of prompts and answers: fixed, uniform or log-normal."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from common.errors import ConfigError

MAX_TOKENS = 10_000_000
#: Standard deviation of the logarithm. The 90th percentile is 2.8 times the median, similar to recorded traces.
SIGMA = 0.8
_TEXT = re.compile(r"(~?)(\d+)(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A distribution of token counts: uniform, or log-normal if `around` is set."""

    low: int  # The lowest count, or the median if `around` is set.
    high: int  # The highest count (inclusive). Ignored if `around` is set.
    around: bool = False

    def draw(self, rng: random.Random) -> int:
        """Draws a count of at least 1."""
        if self.around:
            return min(MAX_TOKENS, max(1, round(rng.lognormvariate(math.log(self.low), SIGMA))))
        return rng.randint(self.low, self.high)

    @classmethod
    def parse(cls, flag: str, text: str) -> LengthDistribution:
        """Parses `512`, `128:1024` or `~512`. Raises ConfigError that names the flag."""
        match = _TEXT.fullmatch(text.strip())
        if match is None or (match[1] and match[3]):
            raise ConfigError(f"--{flag}: {text!r} is not a length like 512, 128:1024 or ~512", field=flag)
        low, high = int(match[2]), int(match[3] or match[2])
        if not 1 <= low <= high <= MAX_TOKENS:
            raise ConfigError(
                f"--{flag}: invalid length {text!r}: expected 1 <= low <= high <= {MAX_TOKENS}", field=flag
            )
        return cls(low, high, bool(match[1]))

    def __str__(self) -> str:
        if self.around:
            return f"~{self.low}"
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


ONE = LengthDistribution(1, 1)
