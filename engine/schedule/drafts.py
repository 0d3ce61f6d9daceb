"""Drafts of one sequence on their way from a proposer to the step that verifies them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor
from dataclasses import dataclass
from typing import Any


class DraftTokens(NamedTuple):
    """tokens: each a guess for the case that those before it are right. probs: float32 [len(tokens) or more, vocab],
    what each was drawn from; None where nothing was drawn.
    """

    tokens: tuple[int, ...]
    probs: Tensor | None = None


@dataclass(slots=True)
class DraftState:
    """kept: the proposer's own. right of tested: drafts that were reached by verification, and those of them that were
    accepted; old ones count less. probe_at: tokens of output from which it drafts again although it does not pay;
    pause: tokens between two such probes. patience: proposals that steps wait for, if all are empty; found: share of
    proposals that were not, of late.
    """

    proposer_state: Any
    accepted: float
    tested: float
    probe_at: int = 0
    probe_interval: int = 0
    waits_left: int = 0
    hit_rate: float = 1.0

    @property
    def acceptance_rate(self) -> float:
        """Share of drafts that are right if those before them are."""
        return self.accepted / self.tested
