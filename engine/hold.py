"""A writer's or reader's claim on physical blocks, apart from the request's; it outlives the lease that granted it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from common.errors import InternalError
from engine.block_ledger import BlockLedger


class Hold:
    """Blocks that bytes may still be written to (`writes`) or read from by someone other than the request.

    blocks: the physical blocks it was granted on, in logical order; held: those not released yet. Thread-safe.
    """

    __slots__ = ("_ledger", "blocks", "is_writer", "pinned")

    def __init__(self, ledger: BlockLedger, blocks: Iterable[int], *, is_writer: bool) -> None:
        """Called under the ledger's lock, by a lease."""
        self.blocks = tuple(blocks)
        self.is_writer = is_writer
        self.pinned = set(self.blocks)
        self._ledger = ledger
        ledger.acquire(self.blocks, ledger.writers if is_writer else ledger.readers)
        ledger.pins.add(self)

    def release(self, blocks: Sequence[int] | None = None) -> None:
        """Give up `blocks` (physical; None for all); what was released before is skipped, a stranger raises."""
        with self._ledger.lock:
            if blocks is not None and not set(blocks).issubset(self.blocks):
                raise InternalError(f"blocks {sorted(set(blocks).difference(self.blocks))} are not of this hold")
            self.release_locked(self.pinned if blocks is None else self.pinned.intersection(blocks))

    def release_locked(self, gone: Collection[int] | None = None) -> None:
        """`release` of held blocks (None for all), under the ledger's lock."""
        ledger = self._ledger
        gone = self.pinned if gone is None else gone
        if not gone:
            return
        ledger.release(
            [b for b in reversed(self.blocks) if b in gone], ledger.writers if self.is_writer else ledger.readers
        )
        self.pinned = self.pinned.difference(gone)
        if not self.pinned:
            ledger.pins.discard(self)
