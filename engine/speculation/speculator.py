"""Connects proposer and controller with the stepper: which sequences draft, how many drafts, and their acceptance.

Runs on the engine thread. The stepper calls

- `draft` before it plans a step, if all tokens so far are known;
- `wants_drafts` while the device computes, to decide if the next step waits for the result of this one;
- `on_verified` for each sequence with verified drafts;
- `on_step` after each step.

A proposer that raises loses its drafts, and the sequences continue without drafts.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from engine.schedule.scheduler import NO_DRAFTS, ScheduledSequence
from engine.schedule.sequence import DraftState, DraftTokens
from engine.schedule.sequence import Sequence as EngineSequence
from engine.speculation.controller import DraftController
from engine.speculation.draft_loop import ModelProposer
from engine.speculation.proposer import DraftBatch, Proposer

_log = logging.getLogger(__name__)

MAX_DRAFT_LAG = 64  # Max tokens that a draft model may lag. Blocks that lag are published after the catch-up.
OBSERVED_PER_STEP = 4  # Max sequences that the proposer reads during a step.
NO_STATE = object()  # Proposer state of a sequence for which `Proposer.new_state` raised.
USELESS_AFTER = 50  # A proposer is useless after this many verified proposals in a row without an accepted draft.


@dataclass(slots=True)
class SpeculationStats:
    """Counts of drafts, for the metrics. A chain is the drafts of one sequence that one step verified."""

    proposer: str  # Name of the proposer.
    max_drafts: int  # Largest number of drafts in a chain.
    chains: int = 0  # Verified chains.
    proposed: int = 0  # Drafts of all chains.
    accepted: int = 0  # Accepted drafts of all chains.
    proposed_at: list[int] = field(default_factory=list)  # Drafts by their place in the chain.
    accepted_at: list[int] = field(default_factory=list)  # Accepted drafts by their place in the chain.
    rejected_in_a_row: int = 0  # Number of the newest chains in a row that had no accepted draft.
    failures: int = 0  # Calls of the proposer that raised.

    def __post_init__(self) -> None:
        self.proposed_at = [0] * self.max_drafts
        self.accepted_at = [0] * self.max_drafts

    def add(self, proposed: int, accepted: int) -> None:
        """Counts one chain."""
        self.chains += 1
        self.proposed += proposed
        self.accepted += accepted
        for place in range(proposed):
            self.proposed_at[place] += 1
        for place in range(accepted):
            self.accepted_at[place] += 1
        self.rejected_in_a_row = 0 if accepted else self.rejected_in_a_row + 1

    @property
    def is_useless(self) -> bool:
        """Whether the newest USELESS_AFTER chains had no accepted draft. Drafts then cost time and gain nothing."""
        return self.rejected_in_a_row >= USELESS_AFTER


class Speculator:
    """The speculation of an engine: proposes and counts drafts, none while more than `max_seqs` sequences decode."""

    def __init__(self, proposer: Proposer, controller: DraftController, *, max_seqs: int) -> None:
        self.stats = SpeculationStats(proposer.name, controller.max_drafts)
        self._proposer, self._controller, self._max_seqs = proposer, controller, max_seqs
        self._steps = 0

    def draft(self, seqs: Sequence[EngineSequence]) -> Mapping[EngineSequence, DraftTokens]:
        """Returns drafts for the sequences in which drafts save time."""
        if isinstance(self._proposer, ModelProposer) and any(seq.draft_lag >= MAX_DRAFT_LAG for seq in seqs):
            with self._tolerate_failure():
                self._proposer.catch_up([seq for seq in seqs if seq.draft_lag])
        limits = self._limits(seqs)
        requested = [(seq, limit) for seq, limit in zip(seqs, limits, strict=True) if limit]
        if not requested:
            return NO_DRAFTS
        self._controller.on_proposal_asked()
        chosen = [seq for seq, _ in requested]
        states = [seq.draft_state.proposer_state for seq in chosen if seq.draft_state is not None]
        drafts: DraftBatch | None = None
        with self._tolerate_failure():
            drafts = self._proposer.propose(chosen, states, [limit for _, limit in requested])
        if drafts is None:
            return NO_DRAFTS
        proposed: dict[EngineSequence, DraftTokens] = {}
        rows = zip(chosen, drafts.tokens.tolist(), drafts.lengths.tolist(), strict=True)
        for row, (seq, tokens, length) in enumerate(rows):
            assert seq.draft_state is not None
            count = length if seq.constraint is None else len(seq.constraint.masks(tokens[:length])[0])
            self._controller.on_proposed(seq.draft_state, count)
            if count:
                probs = None if drafts.probs is None else drafts.probs[row, :count]
                proposed[seq] = DraftTokens(tuple(tokens[:count]), probs)
        return proposed

    def wants_drafts(self, seqs: Sequence[EngineSequence]) -> bool:
        """Returns whether some of these sequences, which are in the step in flight, should draft for the next step."""
        decoding = [seq for seq in seqs if seq.decoding and not seq.hand_off]
        if any(seq.draft_lag >= MAX_DRAFT_LAG for seq in decoding):
            return True
        limits = self._limits(decoding)
        self._observe(decoding)
        states = zip(limits, (seq.draft_state for seq in decoding), strict=True)
        return any(limit and state is not None and state.waits_left for limit, state in states)

    def _observe(self, seqs: Sequence[EngineSequence]) -> None:
        """Lets the proposer read the new tokens of a few sequences, which costs no time while the device computes.

        Only sequences with likely drafts make the next step wait.
        """
        first = self._steps * OBSERVED_PER_STEP
        for index in range(first, first + min(OBSERVED_PER_STEP, len(seqs))):
            seq = seqs[index % len(seqs)]
            state = seq.draft_state
            if state is not None and state.proposer_state is not NO_STATE:
                likely = False
                with self._tolerate_failure():
                    likely = self._proposer.expects_drafts(seq, state.proposer_state)
                state.waits_left = max(state.waits_left, int(likely))

    def on_verified(self, seq: EngineSequence, drafts: int, accepted: int) -> None:
        """Records that a step verified drafts of the sequence."""
        assert seq.draft_state is not None
        self.stats.add(drafts, accepted)
        self._controller.on_verified(seq.draft_state, seq.num_output, drafts, accepted)
        with self._tolerate_failure():
            self._proposer.on_verified(seq, seq.draft_state.proposer_state, drafts, accepted)

    def on_step(self, scheduled: Sequence[ScheduledSequence], seconds: float, *, waited: bool = False) -> None:
        """Records the end of a step. `waited`: the step was launched after the result of the step before."""
        self._steps += 1
        decodes = len(scheduled) if all(entry.is_decode for entry in scheduled) else 0
        self._controller.on_step(decodes, sum(len(entry.drafts) for entry in scheduled), seconds, waited=waited)

    def _limits(self, seqs: Sequence[EngineSequence]) -> list[int]:
        """Returns the limit of drafts of each sequence."""
        if len(seqs) > self._max_seqs:
            return [0] * len(seqs)
        states = [(seq.draft_state or self._new_state(seq), seq.num_output) for seq in seqs]
        limits = zip(states, self._controller.limits(states), strict=True)
        return [0 if state.proposer_state is NO_STATE else limit for (state, _), limit in limits]

    def _new_state(self, seq: EngineSequence) -> DraftState:
        proposer_state: object = NO_STATE
        with self._tolerate_failure():
            proposer_state = self._proposer.new_state(seq)
        seq.draft_state = self._controller.new_state(proposer_state)
        return seq.draft_state

    @contextlib.contextmanager
    def _tolerate_failure(self) -> Iterator[None]:
        """Counts an exception of the proposer. Logs failures 1, 2, 4, 8, ..., which do not fill the log."""
        try:
            yield
        except Exception:
            self.stats.failures += 1
            if self.stats.failures.bit_count() == 1:
                _log.exception("the %s proposer failed, %d times so far", self._proposer.name, self.stats.failures)
