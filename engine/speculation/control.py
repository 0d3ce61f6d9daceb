"""How many drafts pay. A draft is worth the chance that it and all before it are right; it costs what it adds to the
step. Both are measured: acceptance per sequence, step times per size of the batch.

A step without drafts takes time 1 and gives B tokens; with drafts it takes 1 + C and gives B + E, where E is the sum
over the sequences of r + r ** 2 + ... for a chain of drafts that are each right at the rate r. Where steps are padded
to one length (graphs), C is the same however many drafts there are: everyone drafts, if E / B > C. Elsewhere C = c * D
for D drafts, and the i-th one of a sequence pays while r ** i > c * (B + E) / (1 + c * D), which is a token's price.

What does not pay now may pay later, so it is tried now and then, ever more rarely while it fails: by one sequence where
drafts are paid for singly, else by the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.speculation.drafting import Drafting

KEEP = 0.9  # weight of a sequence's drafts after those of one more step
KEEP_ALL = 0.98  # of all sequences' drafts
KEEP_TIME = 0.95  # of steps
START_RATE, START_WEIGHT, LEAST_START = 0.6, 2.0, 0.25
FIRST_COST = 0.05  # of a draft, as a share of a step, before it was measured
LEAST_COST, MOST_COST = 0.001, 0.3  # what is measured on a busy machine may be anything
FIRST_PAUSE, LONGEST_PAUSE = 8, 32  # tokens, or steps of the batch
FIRST_PLAIN, PLAIN_EVERY = 4, 200  # steps with drafts in a row before one without, for the comparison
PROBE = 2  # drafts of one sequence's probe


@dataclass(slots=True)
class _Times:
    """Of steps of about one size: mean seconds without drafts and with some, and mean drafts of the latter."""

    plain: float = 0.0
    verify: float = 0.0
    drafts: float = 0.0
    since_plain: int = 0

    def add(self, drafts: int, seconds: float) -> None:
        if drafts:
            self.verify, self.drafts = _mean(self.verify, seconds), _mean(self.drafts, drafts)
            self.since_plain += 1
        else:
            self.plain = _mean(self.plain, seconds)
            self.since_plain = 0

    @property
    def stale(self) -> bool:
        """A step without drafts is due, to be timed."""
        return self.since_plain >= (PLAIN_EVERY if self.plain else FIRST_PLAIN)

    @property
    def extra(self) -> float | None:
        """What a step with drafts takes more, as a share of one without; None while unknown."""
        return self.verify / self.plain - 1 if self.plain and self.verify else None


class Control:
    """most: drafts of a sequence in a step. padded: a step with drafts costs the same however many it has."""

    def __init__(self, most: int, *, padded: bool) -> None:
        self.most = most
        self._padded = padded
        self._times: dict[int, _Times] = {}
        self._right, self._tested = START_RATE * START_WEIGHT, START_WEIGHT
        self._steps = 0
        self._pause, self._probe_at = 0, 0

    def begin(self, kept: object) -> Drafting:
        """A new sequence is expected to be like those before it, and may soon show that it is not."""
        rate = max(self._right / self._tested, LEAST_START)
        return Drafting(kept, rate * START_WEIGHT, START_WEIGHT)

    def limits(self, states: Sequence[tuple[Drafting, int]]) -> list[int]:
        """Drafts for each sequence of a batch: its state, and how many tokens of output it has."""
        if not states:
            return []
        times = self._times.get(_size(len(states)), _Times())
        if times.stale:
            return [0] * len(states)
        if self._padded:
            return [self.most if self._batch_pays(states, times) else 0] * len(states)
        cost = FIRST_COST
        if times.extra is not None:
            cost = min(MOST_COST, max(LEAST_COST, times.extra / times.drafts))
        price = self._price([state.rate for state, _ in states], cost)
        return [self._limit(state, output, price) for state, output in states]

    def _batch_pays(self, states: Sequence[tuple[Drafting, int]], times: _Times) -> bool:
        extra = FIRST_COST * self.most if times.extra is None else min(times.extra, MOST_COST * self.most)
        gain = sum(state.found * _expected(state.rate, self.most) for state, _ in states)
        if gain > extra * len(states):
            self._pause = 0
            return True
        if not self._pause:
            self._pause = FIRST_PAUSE
            self._probe_at = self._steps + self._pause
        return self._steps >= self._probe_at

    def tried(self) -> None:
        """The batch was asked for drafts."""
        if self._pause:
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
            self._probe_at = self._steps + self._pause

    def _price(self, rates: Sequence[float], cost: float) -> float:
        """Of a token, in drafts' chances of acceptance, when all drafts that pay are taken."""
        price = cost * len(rates)
        for _ in range(3):
            lengths = [_chain(rate, price, self.most) for rate in rates]
            gain = sum(_expected(rate, k) for rate, k in zip(rates, lengths, strict=True))
            price = cost * (len(rates) + gain) / (1 + cost * sum(lengths))
        return price

    def _limit(self, state: Drafting, output: int, price: float) -> int:
        length = _chain(state.rate, price, self.most)
        if length:
            state.pause = 0
            return length
        if not state.pause:
            state.pause = FIRST_PAUSE
            state.probe_at = output + state.pause
        return min(PROBE, self.most) if output >= state.probe_at else 0

    def proposed(self, state: Drafting, drafts: int) -> None:
        """The proposer had so many drafts for a sequence that was to have some."""
        state.barren = 0 if drafts else state.barren + 1
        state.found = KEEP * state.found + (1 - KEEP) * (drafts > 0)

    def verified(self, state: Drafting, output: int, drafts: int, accepted: int) -> None:
        """What became of a sequence's drafts."""
        tested = min(drafts, accepted + 1)
        state.right, state.tested = KEEP * state.right + accepted, KEEP * state.tested + tested
        self._right, self._tested = KEEP_ALL * self._right + accepted, KEEP_ALL * self._tested + tested
        if state.pause and accepted == drafts:
            # The text has changed: it repeats something now. What was before says little.
            state.right, state.tested = START_RATE * START_WEIGHT + accepted, START_WEIGHT + accepted
        elif state.pause:
            state.pause = FIRST_PAUSE if accepted else min(LONGEST_PAUSE, 2 * state.pause)
            state.probe_at = output + state.pause

    def stepped(self, rows: int, drafts: int, seconds: float) -> None:
        """A step in which every one of `rows` sequences decoded."""
        self._steps += 1
        if rows:
            self._times.setdefault(_size(rows), _Times()).add(drafts, seconds)


def _size(rows: int) -> int:
    """Batches within a factor of 1.4 of each other."""
    return round(2 * math.log2(max(1, rows)))


def _mean(mean: float, value: float) -> float:
    """One step that took much longer than its kind does says nothing about the next ones."""
    return KEEP_TIME * mean + (1 - KEEP_TIME) * min(value, 3 * mean) if mean else value


def _chain(rate: float, price: float, most: int) -> int:
    """Drafts that are right often enough, one after the other."""
    length, chance = 0, rate
    while length < most and chance > price:
        length, chance = length + 1, chance * rate
    return length


def _expected(rate: float, drafts: int) -> float:
    """Accepted ones of so many drafts."""
    return sum(rate**i for i in range(1, drafts + 1))
