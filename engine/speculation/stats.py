"""What speculation came to, since the start: read by metrics, written by the engine's thread."""

from __future__ import annotations

from dataclasses import dataclass, field

ALARM_CHAINS = 50  # proposals in a row of which nothing was accepted: something is wrong with the proposer


@dataclass(slots=True)
class SpeculationStats:
    """proposer: its name. chains: verified proposals of one sequence in one step. proposed, accepted: their drafts.

    proposed_at[i], accepted_at[i]: of those, the ones at place i. fruitless: chains in a row without acceptance.
    failures: proposals that raised.
    """

    proposer: str
    max_drafts: int
    chains: int = 0
    proposed: int = 0
    accepted: int = 0
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    rejected_in_a_row: int = 0
    failures: int = 0

    def __post_init__(self) -> None:
        self.proposed_at = [0] * self.max_drafts
        self.accepted_at = [0] * self.max_drafts

    def add(self, proposed: int, accepted: int) -> None:
        """One chain."""
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
        """The acceptance length stays at 1.00: drafts cost time and give nothing."""
        return self.rejected_in_a_row >= ALARM_CHAINS
