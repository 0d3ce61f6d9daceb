"""What is known of one sequence's drafts; lives and dies with the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Drafting:
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
