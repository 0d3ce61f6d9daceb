"""Counts of drafts since the start: written by the engine thread, read by the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

USELESS_AFTER = 50  # A proposer is useless after this many verified proposals in a row without an accepted draft.


@dataclass(slots=True)
class SpeculationStats:
    """The counts of drafts. A chain is the drafts of one sequence that one step verified."""

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
