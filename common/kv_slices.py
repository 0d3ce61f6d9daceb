"""Which bytes of a block go from which rank to which rank, when KV moves between pods of different sizes.

Four KV heads from a pod with one rank to a pod with two, and from two ranks to three copies of one head:

    1 rank   [ draft | h0 | h1 | h2 | h3 ]           2 ranks  [ h0 ]  [ h1 ]
                 |     |    |    |    |                          |  \\     |  \\
    rank 0   [ draft | h0 | h1 ] |    |              4 ranks  [ h0 ] [ h0 ] [ h1 ] [ h1 ]
    rank 1                     [ h2 | h3 ]

A slice is one range of bytes at both ends, so a block is one descriptor for each pair of ranks. Every byte of every
rank's block at the target is in exactly one slice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.kv_layout import KVLayout

DRAFT_PART = -1


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """A range of bytes in each block: `nbytes` from offset `source` of the sender's to `target` of the receiver's."""

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RankSlice:
    """The bytes that a rank of the sender writes to a rank of the receiver."""

    source_rank: int
    target_rank: int
    span: BlockSpan


def first_head(layout: KVLayout, rank: int) -> int:
    """Returns the first KV head of a rank."""
    if layout.tensor_parallel <= layout.num_kv_heads:
        return rank * layout.rank_heads
    return rank * layout.num_kv_heads // layout.tensor_parallel


def rank_slices(layout: KVLayout, target_size: int) -> list[RankSlice]:
    """Returns the slices from the ranks of a pod with this layout to the ranks of a pod with `target_size` ranks.

    `KVLayout.require_equal` accepts the pair. Rank 0 writes to rank 0, from offset 0 to offset 0.
    """
    target = replace(layout, tensor_parallel=target_size)
    size, heads = layout.tensor_parallel, layout.num_kv_heads
    if size == target_size:
        whole = [layout.of_rank(rank).block_bytes for rank in range(size)]
        return [RankSlice(rank, rank, BlockSpan(0, 0, nbytes)) for rank, nbytes in enumerate(whole)]
    slices: list[RankSlice] = []
    for rank in range(target_size):
        first = first_head(target, rank)
        head, end = first, first + target.rank_heads
        while head < end:
            source = _holder(layout, head, rank, target)
            held = first_head(layout, source)
            stop = min(end, held + layout.rank_heads)
            span = _span(layout.of_rank(source), target.of_rank(rank), head - held, head - first, stop - head)
            if source == rank == 0 and head == 0:  # the draft segments are before the heads, or after the only head
                span = BlockSpan(0, 0, min(layout.block_bytes, target.block_bytes))
            slices.append(RankSlice(source, rank, span))
            head = stop
    assert heads == 1 or layout.kv_order == "heads"
    return slices


def _holder(layout: KVLayout, head: int, target_rank: int, target: KVLayout) -> int:
    """Returns the rank that sends a head. Copies of a head go to copies of it in order, so all ranks send alike."""
    copies = max(1, layout.tensor_parallel // layout.num_kv_heads)
    if copies == 1:
        return head // layout.rank_heads
    wanted = max(1, target.tensor_parallel // target.num_kv_heads)
    return head * copies + target_rank % wanted * copies // wanted


def _span(source: KVLayout, target: KVLayout, from_head: int, to_head: int, count: int) -> BlockSpan:
    unit = head_bytes(source)
    return BlockSpan(source.heads_start + from_head * unit, target.heads_start + to_head * unit, count * unit)


def head_bytes(layout: KVLayout) -> int:
    """Returns the bytes of one KV head in a block; of all heads of a rank with the order "layers"."""
    if layout.kv_order == "heads":
        return layout.segments[0].head_bytes
    return layout.of_rank(1).block_bytes


def checked_parts(layout: KVLayout, rank: int) -> dict[int, tuple[int, int]]:
    """Returns offset and bytes of the parts of a rank's block that have a checksum each, by the number of the part.

    A part is a KV head, or the draft segments (DRAFT_PART). With the order "layers", where only pods of one size
    exchange several heads, all heads of a rank are one part.
    """
    own = layout.of_rank(rank)
    if layout.kv_order == "layers" and layout.num_kv_heads > 1:
        return {rank: (0, own.block_bytes)}
    unit, start = head_bytes(layout), own.heads_start
    parts = {first_head(layout, rank) + i: (start + i * unit, unit) for i in range(own.rank_heads)}
    if own.draft_layers:
        parts[DRAFT_PART] = (0, start) if start else (unit, own.block_bytes - unit)
    return parts
