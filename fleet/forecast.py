"""Forecast of an arrival rate: a line through the recent past, and the same time of earlier seasons.

A sudden change is not a trend. If the last seconds differ from the line by more than chance allows, the past before
them is forgotten, so a step of the load is known after SHORT_S seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

WINDOW_S = 120.0  #: Past through which the line goes.
SHORT_S = 10.0  #: Newest part, which is compared with the line.
SURPRISE = 4.0  #: Standard deviations of a count from the line after which the load has stepped.
SEASON_BINS = 96  #: Parts of a season with a mean each.
SEASON_SHARE = 0.3  #: Weight of the newest season in the mean of a part.


class RateForecast:
    """Arrivals per second. Times are seconds of one clock; they never go back."""

    def __init__(self, season_s: float = 0.0) -> None:
        """`season_s`: length of a season; 0 for none."""
        self._season_s = season_s
        self._points: deque[tuple[float, float, float]] = deque()  # Middle of an interval, its length, arrivals
        self._bins: list[float | None] = [None] * SEASON_BINS
        self._first_at: float | None = None
        self._last_at = 0.0

    def add(self, now: float, seconds: float, arrivals: float) -> None:
        """Records the arrivals of the `seconds` before now."""
        if seconds <= 0:
            return
        if self._first_at is None:
            self._first_at = now - seconds
        self._last_at = now
        self._points.append((now - seconds / 2, seconds, arrivals))
        while self._points and self._points[0][0] < now - WINDOW_S:
            self._points.popleft()
        if self._stepped(now):
            newest = self._points[-1]
            while self._points[0][0] < now - SHORT_S / 2 and self._points[0] is not newest:
                self._points.popleft()
        if self._season_s:
            place = self._bin(now - seconds / 2)
            known, rate = self._bins[place], arrivals / seconds
            self._bins[place] = rate if known is None else known + SEASON_SHARE * (rate - known)

    @property
    def known(self) -> bool:
        """At least SHORT_S seconds were observed."""
        return self._first_at is not None and self._last_at - self._first_at >= SHORT_S

    @property
    def noise(self) -> float:
        """Relative standard deviation of the mean rate, if arrivals are independent of each other."""
        return 1 / math.sqrt(max(1.0, sum(arrivals for *_, arrivals in self._points)))

    @property
    def rate(self) -> float:
        """Arrivals per second over the window."""
        return sum(arrivals for *_, arrivals in self._points) / max(1e-9, sum(s for _, s, _ in self._points))

    def at(self, when: float) -> float:
        """Returns the expected arrivals per second at `when`, now or later. Never negative."""
        plain = self._line(self._points, when)
        seasonal = self._seasonal(when)
        return max(plain, seasonal, 0.0)

    def peak(self, now: float, ahead_s: float) -> float:
        """Returns the highest expected rate between now and `ahead_s` seconds later."""
        return max(self.at(now + ahead_s * step / 4) for step in range(5))

    def _stepped(self, now: float) -> bool:
        old = [point for point in self._points if point[0] < now - SHORT_S]
        new = [point for point in self._points if point[0] >= now - SHORT_S]
        seconds = sum(s for _, s, _ in new)
        if sum(s for _, s, _ in old) < SHORT_S or seconds < SHORT_S / 2:
            return False
        count = sum(arrivals for *_, arrivals in new)
        expected = max(0.0, self._line(old, now - seconds / 2)) * seconds
        return abs(count - expected) > SURPRISE * math.sqrt(max(expected, count, 1.0)) + 1.0

    def _line(
        self, points: Sequence[tuple[float, float, float]] | deque[tuple[float, float, float]], at: float
    ) -> float:
        """Returns the value at `at` of the line through the rates (least squares, weighted by length).

        The slope is shrunk by its own uncertainty, so that chance in a constant load is no trend.
        """
        total = sum(s for _, s, _ in points)
        if total <= 0:
            return 0.0
        mean_t = sum(t * s for t, s, _ in points) / total
        mean = sum(arrivals for *_, arrivals in points) / total
        spread = sum(s * (t - mean_t) ** 2 for t, s, _ in points)
        if spread <= 0 or total < WINDOW_S / 4:
            return mean
        slope = sum((arrivals - mean * s) * (t - mean_t) for t, s, arrivals in points) / spread
        noise = math.sqrt(max(mean, 1e-9) / spread)  # Standard deviation of the slope of a Poisson process
        slope *= slope * slope / (slope * slope + noise * noise) if slope else 0.0
        return mean + slope * (at - mean_t)

    def _bin(self, when: float) -> int:
        return int(when % self._season_s / self._season_s * SEASON_BINS) % SEASON_BINS

    def _seasonal(self, when: float) -> float:
        """Returns the rate of earlier seasons at this time; 0 in the first one."""
        if not self._season_s or self._first_at is None or when - self._first_at < self._season_s:
            return 0.0
        return self._bins[self._bin(when)] or 0.0
