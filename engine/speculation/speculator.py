"""Drafts for the sequences that decode next: who gets how many, from whom, and what became of them.

Called by the stepper on the engine's thread: `draft` before a step is planned whose tokens are all known, `verified`
for each sequence whose drafts a step has tested, `stepped` after each step, `due`, while a device computes, to learn
whether the next step should wait for this one's result. A proposer that fails costs its drafts and no more.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence

from engine.schedule.drafts import DraftState, DraftTokens
from engine.schedule.scheduler import NO_DRAFTS, ScheduledSequence
from engine.schedule.sequence import Sequence as EngineSequence
from engine.speculation.controller import DraftController
from engine.speculation.model_proposer import ModelProposer
from engine.speculation.proposer import DraftBatch, Proposer
from engine.speculation.stats import SpeculationStats

log = logging.getLogger(__name__)

MAX_DRAFT_LAG = 64  # tokens that a draft model may be behind while nobody drafts: until then they are not published
OBSERVED_PER_STEP = 4  # sequences whose new tokens the proposer sees while a step is computed
NO_STATE = object()  # is kept of a sequence that the proposer failed to begin with


class Speculator:
    """control: how many drafts who gets; max_seqs: nobody drafts where more sequences decode."""

    def __init__(self, proposer: Proposer, controller: DraftController, *, max_seqs: int) -> None:
        self.stats = SpeculationStats(proposer.name, controller.max_drafts)
        self._proposer = proposer
        self._controller = controller
        self._max_seqs = max_seqs
        self._steps = 0

    def draft(self, seqs: Sequence[EngineSequence]) -> Mapping[EngineSequence, DraftTokens]:
        """Drafts of those sequences for which they pay."""
        if any(seq.draft_lag >= MAX_DRAFT_LAG for seq in seqs):
            self._catch_up([seq for seq in seqs if seq.draft_lag])
        limits = self._limits(seqs)
        asked = [(seq, limit) for seq, limit in zip(seqs, limits, strict=True) if limit]
        if not asked:
            return NO_DRAFTS
        self._controller.on_proposal_asked()
        chosen = [seq for seq, _ in asked]
        kept = [seq.draft_state.proposer_state for seq in chosen if seq.draft_state is not None]
        drafts: DraftBatch | None = None
        with self._tolerate_failure():
            drafts = self._proposer.propose(chosen, kept, [limit for _, limit in asked])
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

    def _catch_up(self, seqs: Sequence[EngineSequence]) -> None:
        if isinstance(self._proposer, ModelProposer):
            with self._tolerate_failure():
                self._proposer.catch_up(seqs)

    def wants_drafts(self, seqs: Sequence[EngineSequence]) -> bool:
        """Some of these sequences, which are in the step in flight, should draft for the next one."""
        decoding = [seq for seq in seqs if seq.decoding and not seq.hand_off]
        if any(seq.draft_lag >= MAX_DRAFT_LAG for seq in decoding):
            return True
        limits = self._limits(decoding)
        self._observe(decoding)
        states = [seq.draft_state for seq in decoding]
        return any(
            limit and state is not None and state.waits_left for limit, state in zip(limits, states, strict=True)
        )

    def _observe(self, seqs: Sequence[EngineSequence]) -> None:
        """The device computes, so looking costs no time: only who may have drafts by what is known makes steps wait."""
        first = self._steps * OBSERVED_PER_STEP
        for place in range(first, first + min(OBSERVED_PER_STEP, len(seqs))):
            seq = seqs[place % len(seqs)]
            state = seq.draft_state
            if state is not None and state.proposer_state is not NO_STATE:
                likely = False
                with self._tolerate_failure():
                    likely = self._proposer.expects_drafts(seq, state.proposer_state)
                state.waits_left = max(state.waits_left, int(likely))

    def on_verified(self, seq: EngineSequence, drafts: int, accepted: int) -> None:
        """A step has tested the sequence's drafts."""
        assert seq.draft_state is not None
        self.stats.add(drafts, accepted)
        self._controller.on_verified(seq.draft_state, seq.num_output, drafts, accepted)
        try:
            self._proposer.on_verified(seq, seq.draft_state.proposer_state, drafts, accepted)
        except Exception:
            self._failed()

    def on_step(self, items: Sequence[ScheduledSequence], seconds: float, *, waited: bool = False) -> None:
        """A step has ended after so many seconds. waited: it was launched after the result of the one before."""
        self._steps += 1
        decodes = len(items) if all(item.is_decode for item in items) else 0
        self._controller.on_step(decodes, sum(len(item.drafts) for item in items), seconds, waited=waited)

    def _limits(self, seqs: Sequence[EngineSequence]) -> list[int]:
        if len(seqs) > self._max_seqs:
            return [0] * len(seqs)
        states = [(seq.draft_state or self._begin(seq), seq.num_output) for seq in seqs]
        limits = self._controller.limits(states)
        return [
            0 if state.proposer_state is NO_STATE else limit for (state, _), limit in zip(states, limits, strict=True)
        ]

    def _begin(self, seq: EngineSequence) -> DraftState:
        kept: object = NO_STATE
        with self._tolerate_failure():
            kept = self._proposer.new_state(seq)
        seq.draft_state = self._controller.new_state(kept)
        return seq.draft_state

    @contextlib.contextmanager
    def _tolerate_failure(self) -> Iterator[None]:
        """The proposer may fail inside."""
        try:
            yield
        except Exception:
            self._failed()

    def _failed(self) -> None:
        """One that fails in every step does not fill the log."""
        self.stats.failures += 1
        if self.stats.failures.bit_count() == 1:
            log.exception("the %s proposer failed, %d times so far", self._proposer.name, self.stats.failures)
