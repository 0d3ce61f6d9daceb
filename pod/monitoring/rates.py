"""The measured speed of this pod. Routing predicts times from it.

Each rate except the pull time is a straight line through recent points (least squares with exponential forgetting), so
it follows the current load and lengths: a fixed time plus a time per token (prefill step, chunk in a step that decodes,
end of a hand-off) or per sequence (decode step).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

DECAY = 0.97  # Each new point multiplies the weight of older ones by this
#: Fixed share of a decode step while the steps have one size. A decode step reads all weights for any batch size, so
#: steps of equal size do not show the fixed part. A second sequence is assumed to cost something, too.
DECODE_FIXED_SHARE = 0.5
#: Small prefill steps that must be measured before a rate is reported. The first steps of a process are slow, and
#: their time would be taken for the fixed time of every prompt.
MIN_SMALL_STEPS = 3
#: A point that took so many times less than the earlier points imply shows that those were measured while the pod was
#: slow: its kernels compiled, or its machine was busy. They are forgotten. Chunks at the end of a long context take up
#: to about five times as long as those at its start.
OUTLIER = 8.0
OUTLIER_POINTS = 8  #: Points after which a point counts as at most OUTLIER times its prediction.
FASTEST_POINTS = 64  #: The fastest point is that of at least this many recent points, and of at most twice as many.
PULL_SHARE = 0.2  # Weight of the newest pull in the mean
PULL_TTL_S = 120.0  # The measured pull time expires: a long one stops all pulls, and no new pull would correct it


class LinearFit:
    """y = base + slope * x through recent points. base and slope are never negative.

    A fixed time is part of every point, so base is at most the smallest recent y. A few points of a slow moment do not
    spoil the line: see OUTLIER. A lasting change is followed, since each point may move the line.
    """

    __slots__ = ("_fastest", "_fastest_before", "_n", "_points", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._points = 0  # Number of all points
        self._fastest = self._fastest_before = math.inf  # Smallest y of the last points, and of FASTEST_POINTS before

    def add_point(self, x: float, y: float) -> None:
        if self.known:
            mean_x, mean_y = self._x / self._n, self._y / self._n
            # No line with a base of at least 0 goes through the mean and below this.
            if OUTLIER * y < mean_y * min(1.0, x / mean_x):
                self._n = self._x = self._y = self._xx = self._xy = 0.0
                self._fastest_before = self._fastest = math.inf
            elif self._points >= OUTLIER_POINTS:
                base, slope = self.fit()
                y = min(y, OUTLIER * max(base + slope * x, self.fastest))
        if self._points % FASTEST_POINTS == 0:
            self._fastest_before, self._fastest = self._fastest, math.inf
        self._fastest = min(self._fastest, y)
        self._points += 1
        self._n = DECAY * self._n + 1
        self._x = DECAY * self._x + x
        self._y = DECAY * self._y + y
        self._xx = DECAY * self._xx + x * x
        self._xy = DECAY * self._xy + x * y

    @property
    def known(self) -> bool:
        return self._n > 0 and self._x > 0

    @property
    def points(self) -> int:
        """Number of points so far."""
        return self._points

    @property
    def mean(self) -> float:
        """Mean of y."""
        return self._y / self._n

    @property
    def fastest(self) -> float:
        """Smallest recent y."""
        return min(self._fastest, self._fastest_before)

    def fit(self, fixed: float = 0.0) -> tuple[float, float]:
        """Returns base and slope; zeros while unknown.

        fixed: the share of y that does not grow with x, used if x hardly varies or y falls with x.
        """
        if not self.known:
            return 0.0, 0.0
        base, slope = self._fit(fixed)
        if base <= self.fastest:
            return base, slope
        return self.fastest, (self.mean - self.fastest) * self._n / self._x

    def _fit(self, fixed: float) -> tuple[float, float]:
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        if spread > 0.01 * mean_x * mean_x:
            slope = (self._xy / self._n - mean_x * mean_y) / spread
            if slope > 0:
                base = mean_y - slope * mean_x
                return (base, slope) if base >= 0 else (0.0, mean_y / mean_x)
            if not fixed:
                return mean_y, 0.0
        return fixed * mean_y, (1 - fixed) * mean_y / mean_x


@dataclass(eq=False)
class PodRates:
    """Measured rates of one pod. One thread writes; any thread reads, possibly a slightly older state."""

    full_step: int  # Tokens of a full prefill step
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._saw_half_full_step = False
        self._prefill, self._decode, self._chunk, self._transfer = (LinearFit() for _ in range(4))
        self._pull_s = 0.0
        self._pulled_at = float("-inf")

    def observe_step(self, prompt_tokens: int, decode_tokens: int, seconds: float) -> None:
        """Records one engine step. prompt_tokens include recomputed tokens."""
        if seconds <= 0:
            return
        if prompt_tokens and decode_tokens and self._decode.known:
            base, slope = self.decode_fit()
            self._chunk.add_point(prompt_tokens, max(0.0, seconds - base - slope * decode_tokens))
        if prompt_tokens:
            self._saw_half_full_step = self._saw_half_full_step or 2 * prompt_tokens >= self.full_step
            self._prefill.add_point(prompt_tokens + decode_tokens, seconds)
        elif decode_tokens:
            self._decode.add_point(decode_tokens, seconds)

    def observe_hand_off(self, tokens: int, seconds: float) -> None:
        """Records a hand-off of `tokens` prompt tokens: `seconds` from the last chunk to the acknowledgement."""
        if tokens > 0 and seconds > 0:
            self._transfer.add_point(tokens, seconds)

    def prefill_fit(self) -> tuple[float, float]:
        """Returns the prompt tokens per second of full steps and the seconds of an empty step; zeros while unknown."""
        if not self._saw_half_full_step and self._prefill.points < MIN_SMALL_STEPS:
            return 0.0, 0.0
        base, slope = self._prefill.fit()
        # A small step has the fixed time of any step, so its time per token says little about a full step.
        if not self._saw_half_full_step:
            base = max(base, min(self._prefill.fastest, self._prefill.mean / 2))
            slope = min(slope, base / self.full_step)
        return self.full_step / (base + slope * self.full_step), base

    def prefill_s(self, tokens: int) -> float:
        """Returns the seconds for `tokens` prompt tokens; 0 before the first step that was at least half full."""
        return self.prefill_estimate_s(tokens) if self._saw_half_full_step else 0.0

    def prefill_estimate_s(self, tokens: int) -> float:
        """Returns `prefill_s` from steps of any size: too low if all were small; 0 while no rate is known."""
        rate, base = self.prefill_fit()
        return base + tokens / rate if rate else 0.0

    def predicted_step_s(self, prompt_tokens: int, decodes: int) -> float | None:
        """Returns the seconds of a step with so many prompt tokens and decoding sequences; None while unknown."""
        seconds = 0.0
        for rate, count, fixed in ((self._prefill, prompt_tokens, 0.0), (self._decode, decodes, DECODE_FIXED_SHARE)):
            if count and not rate.known:
                return None
            base, slope = rate.fit(fixed)
            seconds += base + slope * count if count else 0.0
        return seconds

    def decode_fit(self) -> tuple[float, float]:
        """Returns the seconds of a decode step, the fixed part and the part per sequence; zeros while unknown."""
        return self._decode.fit(DECODE_FIXED_SHARE)

    def chunk_s(self, tokens: int) -> float:
        """Returns the seconds that `tokens` prompt tokens add to a step that decodes; 0 while unknown.

        Until a step with decodes was measured, the time of steps without decodes is used.
        """
        base, slope = (self._chunk if self._chunk.known else self._prefill).fit()
        return base + slope * tokens

    def transfer_fit(self) -> tuple[float, float]:
        """Returns the prompt tokens per second of a hand-off and the fixed seconds at its end; zeros while unknown."""
        base, slope = self._transfer.fit()
        return (1 / slope if slope > 0 else 0.0), base

    def observe_pull(self, seconds: float, moving_s: float) -> None:
        """Records a pull that took or was given up after `seconds`. moving_s: time for its bytes at the pair's rate."""
        fixed_s, mean_s = max(seconds - moving_s, 1e-6), self.pull_s()
        self._pull_s = mean_s + (fixed_s - mean_s) * (PULL_SHARE if mean_s else 1.0)
        self._pulled_at = self.clock()

    def pull_s(self) -> float:
        """Returns the mean seconds of recent pulls without the time for their bytes; 0 while unknown."""
        return self._pull_s if self.clock() - self._pulled_at < PULL_TTL_S else 0.0
