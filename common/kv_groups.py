"""KV groups: which layers of a model share a page, and which pages a sequence needs. See docs/kv_groups.md.

A layer with a window needs the KV of the last `window - 1` tokens only. So the layers are cut into groups, and a block
of tokens is one page per group. All pages have the same bytes and come from one pool:

    tokens      0      16      32      48      64      80        one model: 2 layers see all, 4 have a window of 32
    full        | page  | page  | page  | page  | page  |        layers 2, 5
    window a    |  free |  free | page  | page  | page  |        layers 0, 1
    window b    |  free |  free | page  | page  | page  |        layers 3, 4

The full group is one group, and its pages are numbered like the blocks of a model without groups: hashes, publishing,
eviction and the prefix index work on them as before. The layers of one window are cut into as few groups as fit. These
groups are needed, freed and matched together; each has a block table, because attention reads one table per layer. A
prefix of n blocks is *usable* if the full pages of all n blocks and the window pages of the last `tail` are cached.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from common.kv_layout import KVLayout, LayerGroup

#: Most bytes per token of a sequence that has freed nothing, relative to a block with all layers.
MAX_SHORT_OVERHEAD = 1.25


def split_layers(windows: Sequence[int | None]) -> tuple[LayerGroup, ...]:
    """Returns the groups of a model with these windows of its layers, the full group first; () for no groups."""
    full = tuple(layer for layer, window in enumerate(windows) if window is None)
    groups = [LayerGroup(0, full)]
    for window in sorted({window for window in windows if window is not None}):
        layers = [layer for layer, other in enumerate(windows) if other == window]
        if full:
            count = -(-len(layers) // len(full))
            starts = [i * len(layers) // count for i in range(count + 1)]
            groups += [LayerGroup(window, tuple(layers[a:b])) for a, b in itertools.pairwise(starts)]
    if len(groups) == 1 or len(groups) * len(full) > MAX_SHORT_OVERHEAD * len(windows):
        return ()
    return tuple(groups)


def tail_blocks(window: int, block_size: int) -> int:
    """Returns the number of blocks before a block boundary that the query at this boundary sees."""
    return -(-(window - 1) // block_size)


def first_live_block(start: int, window: int, block_size: int) -> int:
    """Returns the first block that a sequence keeps when it computes the tokens from `start` on."""
    return max(0, start // block_size - tail_blocks(window, block_size))


def window_tails(layout: KVLayout) -> tuple[int, ...]:
    """Returns `tail_blocks` of each window group; () without groups."""
    return tuple(tail_blocks(group.window, layout.block_size) for group in layout.groups[1:])


def blocks_that_fit(num_pages: int, tails: Sequence[int]) -> int:
    """Returns the blocks of the longest sequence that certainly fits in pages; all of them without groups.

    `tails` as in `window_tails`. A sequence needs a full page for each block. A window group needs at most the pages of
    its tail, one for the block that is being filled, and one for the next.
    """
    return max(num_pages // (1 + len(tails)), num_pages - sum(tail + 2 for tail in tails))


@dataclass(frozen=True, slots=True)
class PageOrder:
    """The pages of a sequence's first blocks that another pod needs, and their order in a transfer.

    A page's *number* is its place in this order: block by block, in each block the full page and then the pages of the
    window groups that need the block. A transfer that begins with a later block has a suffix of the order, and a chunk
    of a prompt has a range of it. Without groups the number of a page is that of its block.

        block           0     1     2     3     4
        full            0     1     2     4     6        5 blocks; the window of the one window group begins in block 2
        window 1                    3     5     7

    The pages of the recurrent state come last, if the model has one.
    """

    num_blocks: int
    window_starts: tuple[int, ...] = ()  #: For each window group, the first block with a page in the transfer.
    state_pages: int = 0  #: Pages of the recurrent state.

    @classmethod
    def of_prompt(cls, layout: KVLayout, num_tokens: int) -> PageOrder:
        """Returns the pages with which a pod continues after a prompt, or caches its longest matchable prefix."""
        return cls._of(layout, layout.blocks_for(num_tokens), (num_tokens - 1) // layout.block_size)

    @classmethod
    def of_prefix(cls, layout: KVLayout, num_blocks: int) -> PageOrder:
        """Returns the pages of a usable prefix of full blocks, and of the recurrent state at its end."""
        return cls._of(layout, num_blocks, num_blocks)

    @classmethod
    def _of(cls, layout: KVLayout, num_blocks: int, boundary: int) -> PageOrder:
        """Returns the order for `num_blocks` blocks; the window groups have pages from their tail at `boundary` on."""
        starts = tuple(max(0, boundary - tail) for tail in window_tails(layout))
        return cls(num_blocks, starts, layout.state_pages)

    @property
    def num_pages(self) -> int:
        return self.first_page(self.num_blocks) + self.state_pages

    def first_page(self, block: int) -> int:
        """Returns the number of the first page of a block: so many pages are before it."""
        return block + sum(max(0, block - start) for start in self.window_starts)

    def block_at(self, page: int) -> int | None:
        """Returns the block whose first page has this number; num_blocks for the first page behind all blocks.

        Returns None if there is none.
        """
        block = bisect.bisect_left(range(self.num_blocks + 1), page, key=self.first_page)
        return block if block <= self.num_blocks and self.first_page(block) == page else None
