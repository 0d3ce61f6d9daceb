"""Draft tokens of one sequence, and the statistics that decide how many it gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class DraftTokens(NamedTuple):
    """Guesses of the tokens that follow a sequence; each assumes that all guesses before it are right."""

    tokens: tuple[int, ...]
    #: float32 [len(tokens) or more, vocab], the distributions that a model drew them from; None for other proposers.
    probs: Tensor | None = None


@dataclass(slots=True)
class DraftState:
    """The speculator's state of one sequence between two steps."""

    proposer_state: Any  # Made and read by the proposer
    accepted: float  # Accepted drafts; older ones have less weight
    tested: float  # Verified drafts; older ones have less weight
    #: Number of output tokens from which the sequence drafts again, although drafts did not pay before.
    probe_at: int = 0
    probe_interval: int = 0  # Output tokens between two of these tries
    waits_left: int = 0  # Empty proposals in a row for which steps still wait
    hit_rate: float = 1.0  # Share of recent proposals that were not empty

    @property
    def acceptance_rate(self) -> float:
        """Share of drafts that are right if all drafts before them are right."""
        return self.accepted / self.tested
