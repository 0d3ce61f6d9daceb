"""A writer's or reader's claim on physical blocks, apart from the request's; it outlives the lease that granted it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from common.errors import InternalError
from engine.block_ledger import BlockLedger


class Hold:
    """Blocks that bytes may still be written to (`writes`) or read from by someone other than the request.

    blocks: the physical blocks it was granted on, in logical order; held: those not released yet. Thread-safe.
    """

    __slots__ = ("_ledger", "blocks", "held", "writes")

    def __init__(self, ledger: BlockLedger, blocks: Iterable[int], *, writes: bool) -> None:
        """Called under the ledger's lock, by a lease."""
        self.blocks = tuple(blocks)
        self.writes = writes
        self.held = set(self.blocks)
        self._ledger = ledger
        ledger.add(self.blocks, ledger.writers if writes else ledger.readers)
        ledger.holds.add(self)

    def release(self, blocks: Sequence[int] | None = None) -> None:
        """Give up `blocks` (physical; None for all); what was released before is skipped, a stranger raises."""
        with self._ledger.lock:
            if blocks is not None and not set(blocks).issubset(self.blocks):
                raise InternalError(f"blocks {sorted(set(blocks).difference(self.blocks))} are not of this hold")
            self.drop(self.held if blocks is None else self.held.intersection(blocks))

    def drop(self, gone: Collection[int] | None = None) -> None:
        """`release` of held blocks (None for all), under the ledger's lock."""
        ledger = self._ledger
        gone = self.held if gone is None else gone
        if not gone:
            return
        ledger.drop([b for b in reversed(self.blocks) if b in gone], ledger.writers if self.writes else ledger.readers)
        self.held = self.held.difference(gone)
        if not self.held:
            ledger.holds.discard(self)
