"""The slots of recurrent states: which are free, which have a snapshot, and which a transfer pins.

state_blocks.py says what a slot is used for.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

NO_SLOT = -1


class Snapshot(NamedTuple):
    """A copy of a sequence's state that a step makes."""

    length: int  # The state after this many tokens of the sequence.
    slot: int  # The slot that the copy goes to.


class StateSlots:
    """Which slots are free, and which have a snapshot. The pool's lock guards it."""

    def __init__(self, num_slots: int, on_changed: Callable[[bytes, bool], None]) -> None:
        """`on_changed` is called with the hash of a block that gets a snapshot (True), or that loses it (False)."""
        self.num_slots = num_slots
        self._on_changed = on_changed
        self.free = list(range(num_slots - 1, -1, -1))
        self.snapshots: OrderedDict[bytes, int] = OrderedDict()  # Slots by block hash; the next to evict first
        self.pins = Counter[int]()  # Pins of each slot that has some
        self.pinned_only: set[int] = (
            set()
        )  # Slots that only pins keep: their lease has finished, or their block was evicted
        self._matched: set[bytes] = set()  # Snapshots that a prompt has matched

    def allocate(self, keep: bytes | None = None, is_idle: Callable[[int], bool] | None = None) -> int:
        """Returns a slot, if need be that of a snapshot, that of `keep` last; NO_SLOT if there is none.

        The slot fulfils `is_idle`, if that is given. A snapshot that a transfer reads is not taken.
        """
        for index in range(len(self.free) - 1, -1, -1):
            if is_idle is None or is_idle(self.free[index]):
                return self.free.pop(index)
        available = (
            block_hash
            for block_hash, slot in self.snapshots.items()
            if not self.pins[slot] and (is_idle is None or is_idle(slot))
        )
        taken = next(available, None)
        if taken is not None and taken == keep:
            taken = next(available, keep)
        if taken is None:
            return NO_SLOT
        self._matched.discard(taken)
        self._on_changed(taken, False)
        return self.snapshots.pop(taken)

    @property
    def has_available(self) -> bool:
        """Whether a lease could get a slot now."""
        return bool(self.free) or any(not self.pins[slot] for slot in self.snapshots.values())

    def release(self, slots: Sequence[int]) -> None:
        """Takes back slots; pinned ones become free with their last pin."""
        for slot in slots:
            if self.pins[slot]:
                self.pinned_only.add(slot)
            else:
                self.free.append(slot)

    def unpin(self, slot: int) -> None:
        """Ends one of the pins of a slot."""
        self.pins[slot] -= 1
        if not self.pins[slot]:
            del self.pins[slot]
            if slot in self.pinned_only:
                self.pinned_only.remove(slot)
                self.free.append(slot)

    def num_usable(self, hashes: Sequence[bytes]) -> int:
        """Returns the largest usable number of first blocks. The blocks of all `hashes` are registered."""
        return next((count for count in range(len(hashes), 0, -1) if hashes[count - 1] in self.snapshots), 0)

    def use(self, block_hash: bytes) -> int:
        """Returns the slot of a snapshot that a prompt matches."""
        self.snapshots.move_to_end(block_hash)
        self._matched.add(block_hash)
        return self.snapshots[block_hash]

    def register(self, block_hash: bytes, slot: int) -> None:
        """Makes a slot a snapshot; frees the slot if there is one of this hash."""
        if block_hash in self.snapshots:
            self.free.append(slot)
        else:
            self.snapshots[block_hash] = slot
            self._on_changed(block_hash, True)

    def demote(self, block_hash: bytes) -> None:
        """Makes a snapshot the first to be evicted, unless a prompt has matched it."""
        if block_hash in self.snapshots and block_hash not in self._matched:
            self.snapshots.move_to_end(block_hash, last=False)

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Evicts the snapshots of evicted blocks."""
        for block_hash in hashes:
            if (slot := self.snapshots.pop(block_hash, None)) is not None:
                self._matched.discard(block_hash)
                self.release([slot])
