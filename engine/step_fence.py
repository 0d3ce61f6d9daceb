"""A launched engine step as a user of blocks: what is given up while it runs comes back only after its end."""

from __future__ import annotations

from engine.block_ledger import BlockLedger


class StepFence:
    """Open from before a step's launch until its completion; costs nothing per block the step touches.

    The epoch scheme of Fraser (Practical lock-freedom, 2004): releases during the step wait for its end, so neither an
    abort nor a preemption gives a block away that the device still reads or writes. The blocks that leases left behind
    for a copy (`Lease.own`) while this step was planned are kept too: it copies from them.
    """

    __slots__ = ("_ledger", "blocks")

    def __init__(self, ledger: BlockLedger) -> None:
        """Called under the ledger's lock, by the pool."""
        self.blocks, ledger.copy_sources = ledger.copy_sources, []
        self._ledger = ledger
        ledger.fences.append(self)

    def end(self) -> None:
        """The step completed; idempotent, thread-safe, in any order (blocks wait for older open steps)."""
        ledger = self._ledger
        with ledger.lock:
            if self not in ledger.fences:
                return
            position = ledger.fences.index(self)
            del ledger.fences[position]
            if position:
                ledger.fences[position - 1].blocks.extend(self.blocks)
            else:
                ledger.release(self.blocks, ledger.requests)
            self.blocks = []
