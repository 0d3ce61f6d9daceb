"""How fast this pod is, by its own measure: what routing multiplies its work with.

A step takes a fixed time and some more per token (prefill) or per sequence (decode), a hand-off's end some per token
that still has to move; a chunk in a step that decodes takes what that step takes longer than one without. Each is a
straight line through what was seen, where each point weighs a little less than the one after it (least squares with
exponential forgetting), so the figures follow the load and the lengths of the day.
"""

from __future__ import annotations

import time
from collections.abc import Callable

DECAY = 0.97  # weight of a point after one more
# A decode step reads all weights whatever the batch, so steps of one size say little about smaller ones; yet a
# neighbour is never free.
DECODE_FIXED_SHARE = 0.5
PULL_SHARE = 0.2  # of the newest pull in the mean
PULL_TTL_S = 120.0  # then what pulls took says nothing: where it is long nobody pulls, and none would correct it


class LinearFit:
    """y = base + slope * x, both never negative, through recent points."""

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add_point(self, x: float, y: float) -> None:
        """One more point."""
        self._n = DECAY * self._n + 1
        self._x = DECAY * self._x + x
        self._y = DECAY * self._y + y
        self._xx = DECAY * self._xx + x * x
        self._xy = DECAY * self._xy + x * y

    @property
    def known(self) -> bool:
        return self._n > 0 and self._x > 0

    @property
    def mean(self) -> float:
        """Of y."""
        return self._y / self._n

    def fit(self, fixed: float = 0.0) -> tuple[float, float]:
        """base and slope. Raises nothing once known.

        Where all x are about the same, or y falls with x, `fixed` is the share of y that does not grow with x.
        """
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


class PodRates:
    """full_step: tokens of a full prefill step. clock: seconds, monotonic. Written by one thread, read by any: a reader
    sees a recent state.
    """

    def __init__(self, full_step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full_step = full_step
        self._filled = False
        self._prefill = LinearFit()
        self._decode = LinearFit()
        self._chunk = LinearFit()
        self._transfer = LinearFit()
        self._pull_s = 0.0
        self._pulled_at = float("-inf")

    def observe_step(self, prompt_tokens: int, decode_tokens: int, seconds: float) -> None:
        """One engine step; prompt_tokens include recomputed ones."""
        if seconds <= 0:
            return
        if prompt_tokens and decode_tokens and self._decode.known:
            base, slope = self.decode_fit()
            self._chunk.add_point(prompt_tokens, max(0.0, seconds - base - slope * decode_tokens))
        if prompt_tokens:
            self._filled = self._filled or 2 * prompt_tokens >= self._full_step
            self._prefill.add_point(prompt_tokens + decode_tokens, seconds)
        elif decode_tokens:
            self._decode.add_point(decode_tokens, seconds)

    def observe_hand_off(self, tokens: int, seconds: float) -> None:
        """The end of a hand-off: so many prompt tokens' KV moved, and was acknowledged, after the last was computed."""
        if tokens > 0 and seconds > 0:
            self._transfer.add_point(tokens, seconds)

    def prefill_fit(self) -> tuple[float, float]:
        """Prompt tokens per second of full steps, and the seconds of an empty one; zeros while unknown."""
        if not self._prefill.known:
            return 0.0, 0.0
        base, slope = self._prefill.fit()
        if not self._filled:  # a small step takes what any step takes: its tokens alone would make a full one endless
            base = max(base, self._prefill.mean / 2)
            slope = min(slope, base / self._full_step)
        return self._full_step / (base + slope * self._full_step), base

    def prefill_s(self, tokens: int) -> float:
        """Seconds that so many prompt tokens take; 0 until a step was at least half full: small steps say little."""
        return self.prefill_estimate_s(tokens) if self._filled else 0.0

    def prefill_estimate_s(self, tokens: int) -> float:
        """The same from whatever steps there were, which is too short where all were small; 0 before any."""
        rate, base = self.prefill_fit()
        return base + tokens / rate if rate else 0.0

    def decode_fit(self) -> tuple[float, float]:
        """Seconds of a decode step: the fixed part, and what a sequence adds; zeros while unknown."""
        return self._decode.fit(DECODE_FIXED_SHARE) if self._decode.known else (0.0, 0.0)

    def chunk_s(self, tokens: int) -> float:
        """Seconds by which so many prompt tokens lengthen a step that decodes; measured without decodes, as long as
        it never was with them; 0 while unknown.
        """
        line = self._chunk if self._chunk.known else self._prefill
        if not line.known:
            return 0.0
        base, slope = line.fit()
        return base + slope * tokens

    def transfer_fit(self) -> tuple[float, float]:
        """Prompt tokens per second whose KV moves, and the seconds of a hand-off's end beyond that; zeros while
        unknown.
        """
        if not self._transfer.known:
            return 0.0, 0.0
        base, slope = self._transfer.fit()
        return (1 / slope if slope > 0 else 0.0), base

    def observe_pull(self, seconds: float, moving_s: float) -> None:
        """A pull took so long, or was given up then, of which its bytes at the pair's rate account for moving_s."""
        beyond, known = max(seconds - moving_s, 1e-6), self.pull_s()
        self._pull_s = known + (beyond - known) * (PULL_SHARE if known else 1.0)
        self._pulled_at = self._clock()

    def pull_s(self) -> float:
        """What a pull takes beyond moving its bytes, lately; 0 while unknown."""
        return self._pull_s if self._clock() - self._pulled_at < PULL_TTL_S else 0.0
