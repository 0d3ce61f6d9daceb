"""Whether drafts pay. Both sides are measured: acceptance per sequence, step times per size of the batch.

A step without drafts takes time 1 and gives B tokens; with drafts it takes 1 + C and gives B + E, where E is the sum
over the sequences of r + r ** 2 + ... for a chain of drafts that are each right at the rate r. Most of C is there with
the first draft (a product of a matrix with five columns instead of one), so a sequence drafts as much as it may or not
at all. Where steps are padded to one length (graphs), C is the same however many draft: everyone does, if E / B > C.
Elsewhere a sequence does if its part of E is more than its part of C.

A draft model is asked for each of its drafts, so there C grows with every one, and where steps are not padded a
sequence drafts as many as give the most tokens a time: the k with the largest (1 + r + ... + r ** k) / (1 + c * k).

What does not pay now may pay later, so it is tried now and then, ever more rarely while it fails: by one sequence, or
by the batch where it is padded.

Estimates may be wrong, so there is an account, too, in units of a step without drafts. A step that had drafts, or that
waited to learn that there are none, pays what it took more, and gets what its batch gained. Every other step brings
INCOME, and what is saved up is bounded; nobody drafts below zero. So whatever the text, in a time of N steps drafts
lose no more than INCOME * N, what had been saved up, and the one step that went below zero. Not in this account is what
a draft model computes of text for which nobody drafts: its keys and values, to keep blocks complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.schedule.drafts import DraftState

SEQ_DECAY = 0.9  # weight of a sequence's drafts after those of one more step
ALL_DECAY = 0.98  # of all sequences' drafts
TIME_DECAY = 0.95  # of steps
START_RATE, START_WEIGHT, LEAST_START = 0.6, 2.0, 0.25
FIRST_EXTRA, MOST_EXTRA = 0.2, 1.2  # before it was measured; what is measured on a busy machine may be anything
FIRST_PROBE_INTERVAL, MAX_PROBE_INTERVAL = 8, 32  # tokens of a sequence, or steps of a batch, between two tries
FIRST_PLAIN, PLAIN_EVERY = 8, 200  # steps with drafts in a row before plain ones, for the comparison
PLAIN_RUN = 2  # of these in a row, if the first one does not do: it may have been launched late
TIME_BUDGET_RATE, FIRST_TIME_BUDGET, MAX_TIME_BUDGET = 0.01, 2.0, 4.0  # steps
MAX_EMPTY_PROPOSALS = 2  # empty proposals in a row after which a sequence no longer makes steps wait


@dataclass(slots=True)
class _StepTimes:
    """Of steps of about one size, mean seconds: plain ones, which have no drafts and waited for none; those with some,
    and their mean drafts; those that waited in vain. since_plain: steps with drafts since the last plain one; withheld:
    steps that were to be plain.
    """

    plain: float = 0.0
    verify: float = 0.0
    vain: float = 0.0
    drafts: float = 0.0
    since_plain: int = FIRST_PLAIN
    withheld: int = 0

    def add(self, drafts: int, seconds: float, *, waited: bool) -> None:
        if drafts:
            self.verify, self.drafts = _mean(self.verify, seconds), _mean(self.drafts, drafts)
            self.since_plain += 1
        elif waited:
            self.vain = _mean(self.vain, seconds)
        else:
            self.plain = _mean(self.plain, seconds)
            self.since_plain = self.withheld = 0

    def withhold(self) -> bool:
        """A step without drafts is due, to be timed."""
        if self.since_plain < (PLAIN_EVERY if self.plain else FIRST_PLAIN):
            return False
        self.withheld += 1
        if self.withheld == PLAIN_RUN:
            self.since_plain = self.withheld = 0  # also if prompts join the steps, which tell nothing then
        return True

    @property
    def extra(self) -> float:
        """What a step with drafts takes more, as a share of a plain one."""
        return self._more(self.verify)

    @property
    def extra_in_vain(self) -> float:
        """The same of a step that waited to learn that there are none."""
        return self._more(self.vain)

    def _more(self, seconds: float) -> float:
        return seconds / self.plain - 1 if self.plain and seconds else FIRST_EXTRA


class DraftController:
    """most: drafts of a sequence in a step. padded: a step with drafts costs the same however many it has. drawn: each
    of them takes a step of a draft model.
    """

    def __init__(self, max_drafts: int, *, pads_steps: bool, has_model: bool = False) -> None:
        self.max_drafts = max_drafts
        self._padded, self._drawn = pads_steps, has_model
        self._most_extra = MOST_EXTRA + (
            max_drafts if has_model else 0
        )  # a draft takes no longer than the target's token
        self._times: dict[int, _StepTimes] = {}
        self._accepted, self._tested = START_RATE * START_WEIGHT, START_WEIGHT
        self._steps = 0
        self._pause, self._probe_at = 0, 0
        self._time_budget, self._accepted_in_step = FIRST_TIME_BUDGET, 0

    def new_state(self, kept: object) -> DraftState:
        """A new sequence is expected to be like those before it, and may soon show that it is not."""
        rate = max(self._accepted / self._tested, LEAST_START)
        return DraftState(kept, rate * START_WEIGHT, START_WEIGHT)

    def limits(self, states: Sequence[tuple[DraftState, int]]) -> list[int]:
        """Drafts for each sequence of a batch: its state, and how many tokens of output it has."""
        if not states:
            return []
        times = self._times.setdefault(_size(len(states)), _StepTimes())
        if self._time_budget < 0 or times.withhold():
            return [0] * len(states)
        if self._padded:
            return [self.max_drafts if self._batch_pays(states, times) else 0] * len(states)
        extra = min(times.extra, self._most_extra)
        if self._drawn:
            # Of a batch the extra is for as many drafts as its longest chain, which is about the mean one.
            each = extra / max(1.0, times.drafts / len(states))
            return [self._limit(state, output, self._best(state, each)) for state, output in states]
        share = extra / max(1.0, times.drafts / self.max_drafts)
        return [self._limit(state, output, self.max_drafts * (self._gain(state) > share)) for state, output in states]

    def _best(self, state: DraftState, each: float) -> int:
        """Drafts that give the most tokens a time, where each costs so much of a step."""
        best, most, tokens = 0, 1.0, 1.0
        for count in range(1, self.max_drafts + 1):
            tokens += state.acceptance_rate**count
            if tokens / (1 + each * count) > most:
                best, most = count, tokens / (1 + each * count)
        return best

    def _batch_pays(self, states: Sequence[tuple[DraftState, int]], times: _StepTimes) -> bool:
        gain = sum(state.hit_rate * self._gain(state) for state, _ in states)
        if gain > min(times.extra, self._most_extra) * len(states):
            self._pause = 0
            return True
        if not self._pause:
            self._pause = FIRST_PROBE_INTERVAL
            self._probe_at = self._steps + self._pause
        return self._steps >= self._probe_at

    def on_proposal_asked(self) -> None:
        """The batch was asked for drafts."""
        if self._pause:
            self._pause = min(MAX_PROBE_INTERVAL, 2 * self._pause)
            self._probe_at = self._steps + self._pause

    def _limit(self, state: DraftState, output: int, paying: int) -> int:
        if paying:
            state.probe_interval = 0
            return paying
        if not state.probe_interval:
            state.probe_interval = FIRST_PROBE_INTERVAL
            state.probe_at = output + state.probe_interval
        return (1 if self._drawn else self.max_drafts) if output >= state.probe_at else 0

    def _gain(self, state: DraftState) -> float:
        """Accepted drafts of a whole chain."""
        rate = state.acceptance_rate
        return rate * (1 - rate**self.max_drafts) / (1 - rate) if rate < 1 else self.max_drafts

    def on_proposed(self, state: DraftState, drafts: int) -> None:
        """The proposer had so many drafts for a sequence that was to have some."""
        state.waits_left = MAX_EMPTY_PROPOSALS if drafts else max(0, state.waits_left - 1)
        state.hit_rate = SEQ_DECAY * state.hit_rate + (1 - SEQ_DECAY) * (drafts > 0)

    def on_verified(self, state: DraftState, output: int, drafts: int, accepted: int) -> None:
        """What became of a sequence's drafts."""
        self._accepted_in_step += accepted
        tested = min(drafts, accepted + 1)
        state.accepted, state.tested = SEQ_DECAY * state.accepted + accepted, SEQ_DECAY * state.tested + tested
        self._accepted, self._tested = ALL_DECAY * self._accepted + accepted, ALL_DECAY * self._tested + tested
        trying = bool(state.probe_interval or self._pause)
        if trying and accepted == drafts and not self._drawn:
            # The text has changed: it repeats something now. What was before says little.
            state.accepted, state.tested, state.hit_rate = (
                START_RATE * START_WEIGHT + accepted,
                START_WEIGHT + accepted,
                1.0,
            )
        elif state.probe_interval:
            # That a draft model is often right is no news: whether it pays is asked with every step.
            again = accepted and not self._drawn
            state.probe_interval = FIRST_PROBE_INTERVAL if again else min(MAX_PROBE_INTERVAL, 2 * state.probe_interval)
            state.probe_at = output + state.probe_interval

    def on_step(self, rows: int, drafts: int, seconds: float, *, waited: bool = False) -> None:
        """A step in which every one of `rows` sequences decoded. waited: it was launched late, to know of drafts."""
        self._steps += 1
        gained, self._accepted_in_step = self._accepted_in_step, 0
        if not rows:
            return
        times = self._times.setdefault(_size(rows), _StepTimes())
        times.add(drafts, seconds, waited=waited)
        change = TIME_BUDGET_RATE
        if drafts or waited:
            extra = times.extra if drafts else times.extra_in_vain
            change = gained / rows - min(max(extra, 0.0), self._most_extra)
        self._time_budget = min(MAX_TIME_BUDGET, self._time_budget + change)


class AlwaysDraft(DraftController):
    """Every sequence drafts as much as it may, whatever that costs: for tests, and to measure what it costs."""

    def __init__(self, max_drafts: int) -> None:
        super().__init__(max_drafts, pads_steps=False)

    def limits(self, states: Sequence[tuple[DraftState, int]]) -> list[int]:
        return [self.max_drafts] * len(states)


def _size(rows: int) -> int:
    """Batches within a factor of 1.4 of each other."""
    return round(2 * math.log2(max(1, rows)))


def _mean(mean: float, value: float) -> float:
    """One step that took much longer than its kind does says nothing about the next ones."""
    return TIME_DECAY * mean + (1 - TIME_DECAY) * min(value, 3 * mean) if mean else value
