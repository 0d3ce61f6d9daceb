"""How many drafts pay. A draft is worth the chance that it and all before it are right; it costs what it adds to the
step. Both are measured: acceptance per sequence, step times per size of the batch.

A step without drafts takes time 1 and gives B tokens. With D drafts it takes 1 + c * D and gives B + E tokens, E of
them accepted drafts. So the i-th draft of a sequence whose drafts are right at the rate r is worth taking while
r ** i > c * (B + E) / (1 + c * D): more tokens a second than the step gives without it. A sequence for which that
asks for none tries a short chain now and then, ever more rarely while it fails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.speculation.drafting import Drafting

KEEP = 0.9  # weight of a sequence's drafts after those of one more step
KEEP_ALL = 0.98  # of all sequences' drafts, and of step times
START_RATE, START_WEIGHT = 0.6, 2.0
FIRST_COST = 0.05  # of a draft, as a share of a step, before it was measured
LEAST_COST = 0.001
FIRST_PAUSE, LONGEST_PAUSE = 16, 256
PROBE = 2  # drafts of a probe


@dataclass(slots=True)
class _Times:
    """Of steps of about one size: mean seconds without drafts and with some, and mean drafts of the latter."""

    plain: float = 0.0
    plain_rows: float = 0.0
    verify: float = 0.0
    verify_rows: float = 0.0
    drafts: float = 0.0

    def add(self, rows: int, drafts: int, seconds: float) -> None:
        if drafts:
            self.verify, self.verify_rows = _mean(self.verify, seconds), _mean(self.verify_rows, rows)
            self.drafts = _mean(self.drafts, drafts)
        else:
            self.plain, self.plain_rows = _mean(self.plain, seconds), _mean(self.plain_rows, rows)

    @property
    def cost(self) -> float | None:
        """Of one draft, as a share of a step without any; None while unknown."""
        if not (self.plain and self.drafts):
            return None
        return max(LEAST_COST, (self.verify / self.plain - 1) / self.drafts)


class Control:
    """most: drafts of a sequence in a step."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._times: dict[int, _Times] = {}
        self._right, self._tested = START_RATE * START_WEIGHT, START_WEIGHT

    def begin(self, kept: object) -> Drafting:
        """A new sequence is expected to be like those before it, and may soon show that it is not."""
        rate = max(self._right / self._tested, 0.2)
        return Drafting(kept, rate * START_WEIGHT, START_WEIGHT)

    def limits(self, states: Sequence[tuple[Drafting, int]]) -> list[int]:
        """Drafts for each sequence of a batch: its state, and how many tokens of output it has."""
        times = self._times.get(_size(len(states)))
        cost = times.cost if times is not None and times.cost is not None else FIRST_COST
        worth = self._threshold([state.rate for state, _ in states], cost)
        return [self._limit(state, output, worth) for state, output in states]

    def _threshold(self, rates: Sequence[float], cost: float) -> float:
        """The chance of acceptance from which a draft pays, given that all drafts that pay are taken."""
        gain, drafts = float(len(rates)), 0.0
        for _ in range(3):
            worth = cost * gain / (1 + cost * drafts)
            lengths = [_chain(rate, worth, self.most) for rate in rates]
            drafts = float(sum(lengths))
            gain = len(rates) + sum(_expected(rate, k) for rate, k in zip(rates, lengths, strict=True))
        return cost * gain / (1 + cost * drafts)

    def _limit(self, state: Drafting, output: int, worth: float) -> int:
        length = _chain(state.rate, worth, self.most)
        if length:
            state.pause = 0
            return length
        if not state.pause:
            state.pause = FIRST_PAUSE
            state.probe_at = output + state.pause
        return min(PROBE, self.most) if output >= state.probe_at else 0

    def verified(self, state: Drafting, output: int, drafts: int, accepted: int) -> None:
        """What became of a sequence's drafts."""
        tested = min(drafts, accepted + 1)
        state.right, state.tested = KEEP * state.right + accepted, KEEP * state.tested + tested
        self._right, self._tested = KEEP_ALL * self._right + accepted, KEEP_ALL * self._tested + tested
        if state.pause:
            state.pause = FIRST_PAUSE if accepted else min(LONGEST_PAUSE, 2 * state.pause)
            state.probe_at = output + state.pause

    def stepped(self, rows: int, drafts: int, seconds: float) -> None:
        """A step in which every one of `rows` sequences decoded."""
        self._times.setdefault(_size(rows), _Times()).add(rows, drafts, seconds)


def _size(rows: int) -> int:
    """Batches within a factor of 1.4 of each other."""
    return round(2 * math.log2(max(1, rows)))


def _mean(mean: float, value: float) -> float:
    return KEEP_ALL * mean + (1 - KEEP_ALL) * value if mean else value


def _chain(rate: float, worth: float, most: int) -> int:
    """Drafts that are right often enough, one after the other."""
    length, chance = 0, rate
    while length < most and chance > worth:
        length, chance = length + 1, chance * rate
    return length


def _expected(rate: float, drafts: int) -> float:
    """Accepted ones of so many drafts."""
    return sum(rate**i for i in range(1, drafts + 1))
