"""Decides how many drafts each sequence of a batch gets, from measured acceptance rates and step times.

A plain step takes time 1 and gives B tokens. A verify step takes 1 + C and gives B + E tokens. E is the sum over the
sequences of r + r**2 + ..., where r is the acceptance rate of a sequence.

- Padded steps (CUDA graphs): C does not depend on the number of drafts, so all sequences draft if E / B > C.
- Other steps: most of C comes with the first draft (a matrix product with five columns instead of one), so a sequence
  drafts as much as allowed if its part of E is above its part of C, and not at all otherwise.
- A draft model adds to C with each draft, so a sequence gets the k that maximises (1 + r + ... + r**k) / (1 + c * k).

Drafts that save no time are probed at growing intervals: by one sequence, or by the batch where steps are padded.

A time budget, in plain steps, bounds the loss from wrong estimates. A step with drafts, or one that waited for drafts
and got none, pays its extra time and earns its accepted drafts. Other steps earn TIME_BUDGET_RATE. Nothing is drafted
while the budget is negative. In N steps drafts cost at most TIME_BUDGET_RATE * N + the saved budget + one step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.schedule.sequence import DraftState

SEQ_DECAY = 0.9  # Factor on the weight of older measurements: acceptance of one sequence, per verify step.
ALL_DECAY = 0.98  # Factor on older measurements of the acceptance of all sequences, per verified sequence.
TIME_DECAY = 0.95  # Factor on older step times, per step.

START_RATE = 0.6  # Acceptance rate before the first measurement.
START_WEIGHT = 2.0  # The start rate counts like this many measured drafts.
MIN_START_RATE = 0.25  # Lowest start rate of a new sequence, also if the drafts of all other sequences are rejected.

FIRST_EXTRA = 0.2  # Extra time of a verify step before the first measurement.
MAX_EXTRA = 1.2  # Upper bound of the extra time. Measurements on a busy machine may be far too high.

#: First and longest interval between two probes: tokens of a sequence, or steps of a padded batch.
FIRST_PROBE_INTERVAL, MAX_PROBE_INTERVAL = 8, 32

FIRST_PLAIN = 8  # Steps with drafts before the first plain step, which is timed for comparison.
PLAIN_EVERY = 200  # Steps with drafts before each later plain step.
PLAIN_RUN = 2  # Max plain steps in a row. The first may have waited for drafts; its time is then not used.

#: In units of a plain step's time: earned per step without drafts, budget at the start, largest budget.
TIME_BUDGET_RATE, FIRST_TIME_BUDGET, MAX_TIME_BUDGET = 0.01, 2.0, 4.0

MAX_EMPTY_PROPOSALS = 2  # Steps stop waiting for the drafts of a sequence after this many empty proposals in a row.


@dataclass(slots=True)
class _StepTimes:
    """Mean seconds of the steps of one size class. 0: not measured."""

    plain: float = 0.0  # Seconds of steps without drafts that did not wait for drafts.
    verify: float = 0.0  # Seconds of steps with drafts.
    empty_wait: float = 0.0  # Seconds of steps that waited for drafts and got none.
    drafts: float = 0.0  # Mean number of drafts of a verify step.
    drafting_steps: int = FIRST_PLAIN  # Steps with drafts since the last plain step.
    num_skipped: int = 0  # Steps since the last plain step that got no drafts, to be timed.

    def add(self, drafts: int, seconds: float, *, waited: bool) -> None:
        if drafts:
            self.verify, self.drafts = _mean(self.verify, seconds), _mean(self.drafts, drafts)
            self.drafting_steps += 1
        elif waited:
            self.empty_wait = _mean(self.empty_wait, seconds)
        else:
            self.plain = _mean(self.plain, seconds)
            self.drafting_steps = self.num_skipped = 0

    def skip_drafts(self) -> bool:
        """Returns whether the next step gets no drafts, so that it can be timed as plain."""
        if self.drafting_steps < (PLAIN_EVERY if self.plain else FIRST_PLAIN):
            return False
        self.num_skipped += 1
        if self.num_skipped == PLAIN_RUN:
            self.drafting_steps = self.num_skipped = 0  # give up: steps with prompts are not timed
        return True

    def extra(self, seconds: float) -> float:
        """Returns the extra time of a step of this duration (`verify` or `empty_wait`), as a share of a plain step."""
        return seconds / self.plain - 1 if self.plain and seconds else FIRST_EXTRA


class DraftController:
    """The policy that decides how many drafts each sequence gets.

    Args:
        max_drafts: max drafts of a sequence in a step.
        pads_steps: a verify step takes the same time for any number of drafts.
        has_model: each draft takes a step of a draft model.
    """

    def __init__(self, max_drafts: int, *, pads_steps: bool, has_model: bool = False) -> None:
        self.max_drafts = max_drafts
        self._pads_steps, self._has_model = pads_steps, has_model
        # A step of the draft model takes at most as long as a step of the target.
        self._max_extra = MAX_EXTRA + (max_drafts if has_model else 0)
        self._times: dict[int, _StepTimes] = {}
        self._accepted, self._tested = START_RATE * START_WEIGHT, START_WEIGHT
        self._steps = 0
        self._probe_interval, self._probe_at = 0, 0
        self._time_budget, self._accepted_in_step = FIRST_TIME_BUDGET, 0

    def new_state(self, proposer_state: object) -> DraftState:
        """Returns the state of a new sequence: the acceptance rate of all sequences at a low weight, to adapt fast."""
        rate = max(self._accepted / self._tested, MIN_START_RATE)
        return DraftState(proposer_state, rate * START_WEIGHT, START_WEIGHT)

    def limits(self, states: Sequence[tuple[DraftState, int]]) -> list[int]:
        """Returns the limit of drafts of each sequence of a batch, from its state and its number of output tokens."""
        if not states:
            return []
        times = self._times.setdefault(_size_class(len(states)), _StepTimes())
        if self._time_budget < 0 or times.skip_drafts():
            return [0] * len(states)
        if self._pads_steps:
            return [self.max_drafts if self._batch_pays(states, times) else 0] * len(states)
        extra = min(times.extra(times.verify), self._max_extra)
        if self._has_model:
            # The draft model takes as many steps as the longest chain of the batch, which is close to the mean.
            cost = extra / max(1.0, times.drafts / len(states))
            return [self._limit(state, output, self._best_count(state, cost)) for state, output in states]
        share, most = extra / max(1.0, times.drafts / self.max_drafts), self.max_drafts
        return [self._limit(state, output, most * (self._expected_accepted(state) > share)) for state, output in states]

    def _best_count(self, state: DraftState, cost: float) -> int:
        """Returns the number of drafts with the most tokens per time, if each draft costs `cost` plain steps."""
        best, best_rate, tokens = 0, 1.0, 1.0
        for count in range(1, self.max_drafts + 1):
            tokens += state.acceptance_rate**count
            if tokens / (1 + cost * count) > best_rate:
                best, best_rate = count, tokens / (1 + cost * count)
        return best

    def _batch_pays(self, states: Sequence[tuple[DraftState, int]], times: _StepTimes) -> bool:
        """Returns whether a padded batch drafts: because drafts save time, or because a probe is due."""
        gain = sum(state.hit_rate * self._expected_accepted(state) for state, _ in states)
        if gain > min(times.extra(times.verify), self._max_extra) * len(states):
            self._probe_interval = 0
            return True
        if not self._probe_interval:
            self._probe_interval = FIRST_PROBE_INTERVAL
            self._probe_at = self._steps + self._probe_interval
        return self._steps >= self._probe_at

    def on_proposal_asked(self) -> None:
        """Records that the proposer is asked for drafts of a batch."""
        if self._probe_interval:
            self._probe_interval = min(MAX_PROBE_INTERVAL, 2 * self._probe_interval)
            self._probe_at = self._steps + self._probe_interval

    def _limit(self, state: DraftState, output: int, best: int) -> int:
        """Returns `best`. If `best` is 0 and a probe of the sequence is due, returns the drafts of the probe."""
        if best:
            state.probe_interval = 0
            return best
        if not state.probe_interval:
            state.probe_interval = FIRST_PROBE_INTERVAL
            state.probe_at = output + state.probe_interval
        return (1 if self._has_model else self.max_drafts) if output >= state.probe_at else 0

    def _expected_accepted(self, state: DraftState) -> float:
        """Returns the expected number of accepted drafts out of `max_drafts`."""
        rate = state.acceptance_rate
        return rate * (1 - rate**self.max_drafts) / (1 - rate) if rate < 1 else self.max_drafts

    def on_proposed(self, state: DraftState, drafts: int) -> None:
        """Records that the proposer returned `drafts` drafts for a sequence."""
        state.waits_left = MAX_EMPTY_PROPOSALS if drafts else max(0, state.waits_left - 1)
        state.hit_rate = SEQ_DECAY * state.hit_rate + (1 - SEQ_DECAY) * (drafts > 0)

    def on_verified(self, state: DraftState, output: int, drafts: int, accepted: int) -> None:
        """Records that a step verified the drafts of a sequence, which now has `output` output tokens."""
        self._accepted_in_step += accepted
        tested = min(drafts, accepted + 1)
        state.accepted, state.tested = SEQ_DECAY * state.accepted + accepted, SEQ_DECAY * state.tested + tested
        self._accepted, self._tested = ALL_DECAY * self._accepted + accepted, ALL_DECAY * self._tested + tested
        probing = bool(state.probe_interval or self._probe_interval)
        if probing and accepted == drafts and not self._has_model:
            # The text has begun to repeat something, so the older acceptance says little about it.
            state.accepted, state.tested = START_RATE * START_WEIGHT + accepted, START_WEIGHT + accepted
            state.hit_rate = 1.0
        elif state.probe_interval:
            # One accepted draft of a draft model is no sign of a change: its acceptance rate enters every decision.
            promising, longer = accepted and not self._has_model, min(MAX_PROBE_INTERVAL, 2 * state.probe_interval)
            state.probe_interval = FIRST_PROBE_INTERVAL if promising else longer
            state.probe_at = output + state.probe_interval

    def on_step(self, rows: int, drafts: int, seconds: float, *, waited: bool = False) -> None:
        """Records the end of a step with this many decoding sequences (0 if it also had prompts) and drafts.

        waited: the step was launched after the result of the step before, so that it could have drafts.
        """
        self._steps += 1
        gained, self._accepted_in_step = self._accepted_in_step, 0
        if not rows:
            return
        times = self._times.setdefault(_size_class(rows), _StepTimes())
        times.add(drafts, seconds, waited=waited)
        change = TIME_BUDGET_RATE
        if drafts or waited:
            extra = times.extra(times.verify if drafts else times.empty_wait)
            change = gained / rows - min(max(extra, 0.0), self._max_extra)
        self._time_budget = min(MAX_TIME_BUDGET, self._time_budget + change)


class AlwaysDraft(DraftController):
    """A controller for tests and measurements: every sequence gets max_drafts drafts at any cost."""

    def __init__(self, max_drafts: int) -> None:
        super().__init__(max_drafts, pads_steps=False)

    def limits(self, states: Sequence[tuple[DraftState, int]]) -> list[int]:
        return [self.max_drafts] * len(states)


def _size_class(rows: int) -> int:
    """Returns the size class of a batch. Sizes within a factor of about 1.4 share a class."""
    return round(2 * math.log2(max(1, rows)))


def _mean(mean: float, value: float) -> float:
    """Returns the decaying mean. A value is limited to three times the mean, because one slow step predicts nothing."""
    return TIME_DECAY * mean + (1 - TIME_DECAY) * min(value, 3 * mean) if mean else value
