"""The blocks that lie before a usable boundary: what a pool with KV groups announces to the prefix index.

A boundary between two blocks is usable if the window pages of the blocks before it are cached (common/kv_groups.py).
The index searches along a prompt for the last block that a pod holds, so the announced set must be prefix-closed. A
usable boundary does not make the boundaries before it usable. So each block is announced from which a usable boundary
can be reached, the block's own end included:

    window pages          -  -  x  x  -  -  x  x  -  -       a tail of two blocks; blocks 4 and 8 end usable boundaries
    usable boundary                 ^           ^
    announced             x  x  x  x  x  x  x  x             the last two full pages are cached, but of no use

A prompt that goes on where the cached one ended thus finds its usable hit. The index promises too much to a prompt that
leaves the cached one between two usable boundaries; the pod keeps that boundary after it was missed once.

The lock of the block pool guards all data of this module.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv.prefix_cache import HashesCallback


class UsablePrefixes:
    """The tree of full pages, the window pages that they have, and the changes of the announced set."""

    def __init__(self, hash_by_block: Sequence[bytes | None], tails: Sequence[int]) -> None:
        """`hash_by_block` has the hash of each registered page; `tails` as in GroupedPrefixCache.num_usable."""
        num_blocks = len(hash_by_block)
        self.gained: list[bytes] = []  # Announced since the last `take_changes`, parents before children
        self.lost: list[bytes] = []  # Not announced any more since then, children before parents
        self._hash_by_block = hash_by_block
        self._parent = [-1] * num_blocks
        self._children: dict[int, list[int]] = {}
        self._pages = [0] * num_blocks  # A bit for each window group that has the block's page
        self._usable = bytearray(num_blocks)  # 1 if the boundary at the block's end is usable
        self._uses = [0] * num_blocks  # Announced children, and one more if `_usable`; announced if above 0
        #: For each length of a tail: the length, the bits of its groups, and for each block the number of blocks up to
        #: it that have all these pages, at most the length. The start of a prompt counts like a whole tail.
        self._runs: list[tuple[int, int, list[int]]] = []
        for tail in sorted(set(tails)):
            bits = sum(1 << group for group, other in enumerate(tails) if other == tail)
            self._runs.append((tail, bits, [0] * num_blocks))

    def is_announced(self, block: int) -> bool:
        """Returns whether the full page is announced."""
        return self._uses[block] > 0

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Returns the gained and the lost hashes since the last call."""
        changes = self.gained, self.lost
        self.gained, self.lost = [], []
        return changes

    def report_changes(self, on_gained: HashesCallback, on_lost: HashesCallback) -> None:
        """Reports the lost and then the gained hashes since the last call, if there are some."""
        gained, lost = self.take_changes()
        if lost:
            on_lost(lost)
        if gained:
            on_gained(gained)

    def add(self, block: int, parent: int) -> None:
        """Adds a registered full page; `parent` is the page before it, -1 for none."""
        self._parent[block], self._pages[block] = parent, 0
        if parent >= 0:
            self._children.setdefault(parent, []).append(block)
        self._update(block)

    def remove(self, block: int) -> None:
        """Removes a full page without children, before it is unregistered."""
        assert block not in self._children, "a page was evicted before its children"
        if self._usable[block]:
            self._set_usable(block, False)
        parent = self._parent[block]
        if parent >= 0:
            siblings = self._children[parent]
            siblings.remove(block)
            if not siblings:
                del self._children[parent]

    def set_page(self, block: int, group: int, present: bool) -> None:
        """Records that the block's page of a window group is registered, or is not any more."""
        if present:
            self._pages[block] |= 1 << group
        else:
            self._pages[block] &= ~(1 << group)
        self._update(block)

    def _update(self, block: int) -> None:
        """Computes the runs of a block and of the blocks after it, as far as they change: at most one tail."""
        pending = [block]
        while pending:
            block = pending.pop()
            parent, pages, usable, changed = self._parent[block], self._pages[block], True, False
            for tail, bits, runs in self._runs:
                before = tail if parent < 0 else runs[parent]
                run = min(tail, before + 1) if pages & bits == bits else 0
                changed |= run != runs[block]
                usable &= run >= tail
                runs[block] = run
            if usable != self._usable[block]:
                self._set_usable(block, usable)
            if changed:
                pending += self._children.get(block, ())

    def _set_usable(self, block: int, usable: bool) -> None:
        self._usable[block] = usable
        changed: list[bytes] = []
        while block >= 0:
            was_announced = self._uses[block] > 0
            self._uses[block] += 1 if usable else -1
            if was_announced == (self._uses[block] > 0):
                break
            block_hash = self._hash_by_block[block]
            assert block_hash is not None
            changed.append(block_hash)
            block = self._parent[block]
        if usable:
            self.gained += changed[::-1]
        else:
            self.lost += changed
