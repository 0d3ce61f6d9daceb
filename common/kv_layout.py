"""Layout of the bytes inside a KV block, and a fingerprint that two pods compare.

The pool is uint8[num_blocks, block_bytes]. A block is one range with all layers, so it is one NIXL descriptor:

    kv             [num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]; with latent attention [..., 1, 1, ...]
    scales         [num_layers, num_kv_heads, block_size, 2 (K, V)]      with an 8-bit dtype
    draft_kv, draft_scales   the same of a draft model;  draft_state [draft_state]: the target's state, for EAGLE

With tensor parallelism each rank has such a block, with its own kv heads; rank 0 alone has the draft segments. With the
order "heads" the parts of a head are neighbours, so the heads of any rank are one range of a block of any other size:

    draft segments | head 0: kv [num_layers, 2, block_size, head_dim], scales [...] | head 1: ... | ...

Slots for recurrent states (engine/kv/groups/state_pool.py) follow the blocks. A slot is a whole number of blocks. A
layout with groups (kv_groups.py) has one *page* per group for a block; a page has the layers of the largest group.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, fields, replace

from common.errors import LayoutMismatch

LAYOUT_VERSION = 1
SEGMENT_ALIGN = 256  #: Bytes; keeps every segment aligned for vector loads and DMA.

FP8_DTYPE = "float8_e4m3"
SCALE_DTYPE = "bfloat16"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8_DTYPE: 1}


@dataclass(frozen=True, slots=True)
class Segment:
    """A dense array inside every block."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0  # Bytes from the start of the block.
    #: With the order "heads", the dimension of the kv heads and the bytes from one head to the next. Then an array of
    #: the other dimensions is dense. None: the whole array is dense.
    head_dimension: int | None = None
    head_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def end(self) -> int:
        """Offset of the next segment, a multiple of SEGMENT_ALIGN."""
        return aligned(self.offset + self.nbytes)

    @property
    def strides(self) -> tuple[int, ...]:
        """Numbers from one element to the next, in each dimension."""
        itemsize, strides, step = DTYPE_BYTES[self.dtype], list[int](), 1
        for dimension in reversed(range(len(self.shape))):
            is_heads = dimension == self.head_dimension
            strides.append(self.head_bytes // itemsize if is_heads else step)
            step *= 1 if is_heads else self.shape[dimension]
        return tuple(reversed(strides))


def aligned(nbytes: int) -> int:
    """Returns the next multiple of SEGMENT_ALIGN."""
    return -(-nbytes // SEGMENT_ALIGN) * SEGMENT_ALIGN


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose keys and values of one block of tokens lie in one page."""

    window: int  #: Tokens that a query sees in these layers, itself included. 0: all.
    layers: tuple[int, ...]  #: Numbers of the model's layers; layer i of a page belongs to layers[i].


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The properties of KV blocks that must be equal on two pods that exchange blocks."""

    model: str
    weights: str = field(default="", kw_only=True)  #: How the weights are quantised, in words. "": not at all.
    revision: str  # Identifies the weights, together with `model`.
    #: Ranks; every rank has its kv heads of every block. Pods may differ in it, see common/kv_slices.py.
    tensor_parallel: int = field(default=1, kw_only=True)
    num_layers: int
    num_kv_heads: int  # KV heads of the model.
    head_dim: int
    block_size: int  # Tokens.
    #: Of keys and values: float32, bfloat16, float16, or float8_e4m3 with a scale per layer, head, token and K or V.
    dtype: str
    version: int = LAYOUT_VERSION
    #: Multi-head latent attention: a token has one vector of head_dim numbers in each layer, and the first latent_dim
    #: of them are also its value. 0: keys and values are separate vectors.
    latent_dim: int = field(default=0, kw_only=True)
    draft_layers: int = 0  # Layers of the draft model or EAGLE head; 0: none.
    draft_kv_heads: int = 0
    draft_head_dim: int = 0
    draft_state: int = 0  # Numbers in the segment draft_state; 0: the layout has none.
    draft_revision: str = ""  # Identifies the draft model's weights.
    #: One page per block of tokens and group; the first group sees all tokens. Empty: a block is one page.
    groups: tuple[LayerGroup, ...] = field(default=(), kw_only=True)
    #: "layers": a layer's heads are neighbours in a block. "heads": a head's layers are.
    kv_order: str = field(default="layers", kw_only=True)
    #: Codec of the disk tiers (cold_codec.py). "": blocks are exact. "int4": a block may be a decoded one.
    disk_codec: str = field(default="", kw_only=True)
    states: str = field(default="", kw_only=True)  #: The arrays of a recurrent state, in words. "": the model has none.
    state_bytes: int = field(default=0, kw_only=True)  #: Bytes of the recurrent state of one sequence.

    @property
    def state_pages(self) -> int:
        """Blocks whose bytes hold one recurrent state; 0 without states."""
        return -(-self.state_bytes // self.block_bytes) if self.state_bytes else 0

    @property
    def page_layers(self) -> int:
        """Layers of a page: those of the largest group, or all."""
        return max((len(group.layers) for group in self.groups), default=self.num_layers)

    @property
    def rank_heads(self) -> int:
        """KV heads of one rank. With more ranks than heads, several ranks have the same head."""
        return max(1, self.num_kv_heads // self.tensor_parallel)

    def of_rank(self, rank: int) -> KVLayout:
        """Returns the layout of a rank's blocks. Rank 0 alone computes drafts."""
        return self if rank == 0 else replace(self, draft_layers=0, draft_state=0)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of a block of rank 0."""
        if self.kv_order == "heads":
            drafts = self._draft_segments(0)
            return (*self._head_segments(drafts[-1].end if drafts else 0), *drafts)
        vectors = 1 if self.latent_dim else 2
        segments = self._kv("", self.page_layers, vectors, self.rank_heads, self.head_dim, 0)
        return (*segments, *self._draft_segments(segments[-1].end))

    def _draft_segments(self, offset: int) -> tuple[Segment, ...]:
        segments: tuple[Segment, ...] = ()
        if self.draft_layers:
            segments = self._kv("draft_", self.draft_layers, 2, self.draft_kv_heads, self.draft_head_dim, offset)
        if self.draft_state:
            dtype = SCALE_DTYPE if self.dtype == FP8_DTYPE else self.dtype
            segments += (Segment("draft_state", (self.draft_state,), dtype, segments[-1].end),)
        return segments

    def _head_segments(self, offset: int) -> tuple[Segment, ...]:
        """Returns the segments of the order "heads". They are interleaved: one head after the other."""
        vectors = 1 if self.latent_dim else 2
        head = self._kv("", self.page_layers, vectors, 1, self.head_dim, 0)
        unit = sum(aligned(segment.nbytes) for segment in head)
        full = self._kv("", self.page_layers, vectors, self.rank_heads, self.head_dim, 0)
        places = zip(full, head, (2, 1), strict=False)
        return tuple(replace(s, offset=offset + h.offset, head_dimension=d, head_bytes=unit) for s, h, d in places)

    @property
    def heads_start(self) -> int:
        """Offset of the kv heads in a block of rank 0."""
        return self.segments[0].offset

    def _kv(self, prefix: str, layers: int, vectors: int, heads: int, dim: int, offset: int) -> tuple[Segment, ...]:
        kv = Segment(prefix + "kv", (layers, vectors, heads, self.block_size, dim), self.dtype, offset)
        if self.dtype != FP8_DTYPE:
            return (kv,)
        return (kv, Segment(prefix + "scales", (layers, heads, self.block_size, vectors), SCALE_DTYPE, kv.end))

    @property
    def block_bytes(self) -> int:
        """Bytes of one page of rank 0, all segments, each padded to SEGMENT_ALIGN. Without groups a page is a block."""
        segments = self.segments
        heads = segments[0].offset + self.rank_heads * segments[0].head_bytes
        return max(heads, segments[-1].end if segments[-1].head_dimension is None else 0)

    @property
    def all_ranks_bytes(self) -> int:
        """Bytes of one page with the kv heads of all ranks, each once: the same for pods of all sizes."""
        return replace(self, tensor_parallel=1).block_bytes

    @property
    def fingerprint(self) -> str:
        """Hash of the layout, 32 hex digits, equal in every process.

        It describes the model, so it does not cover the number of ranks. It covers draft_* fields only with a draft
        model, weights only if they are quantised, latent_dim and disk_codec only if they are set, groups and states
        only if there are some, and kv_order only if it is "heads", so that layouts without them keep the fingerprint of
        older versions.
        """
        covered = [f.name for f in fields(self) if self.draft_layers or not f.name.startswith("draft_")]
        covered.remove("tensor_parallel")
        if self.kv_order == "layers":
            covered.remove("kv_order")
        if not self.weights:
            covered.remove("weights")
        if not self.latent_dim:
            covered.remove("latent_dim")
        if not self.groups:
            covered.remove("groups")
        if not self.states:
            covered = [name for name in covered if name not in ("states", "state_bytes")]
        if not self.disk_codec:
            covered.remove("disk_codec")
        text = "\n".join(f"{name}={getattr(self, name)}" for name in covered)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def scope(self) -> str:
        """First 8 hex digits of the fingerprint: the key space in the prefix index."""
        return self.fingerprint[:8]

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def require_equal(self, other: KVLayout) -> None:
        """Raises LayoutMismatch with the first field in which `other`, the peer's layout, differs.

        The number of ranks may differ if the order of all blocks is "heads", or if every rank has the only kv head.
        """
        size, heads = other.tensor_parallel, self.num_kv_heads
        if size < 1 or (heads % size and size % heads):
            problem = f"tensor_parallel_size {self.tensor_parallel} on this pod, {size} on the peer"
            raise LayoutMismatch(f"{size} ranks cannot share {heads} KV heads: {problem}", field="tensor_parallel")
        if self.tensor_parallel != other.tensor_parallel and self.num_kv_heads > 1:
            orders = f"{self._ranks_text()} on this pod, {other._ranks_text()} on the peer"
            if "layers" in (self.kv_order, other.kv_order):
                why = "pods of different sizes need the order heads: set kv_order heads on both"
                raise LayoutMismatch(f"KV cannot move between these sizes: {orders}; {why}", field="kv_order")
        for f in fields(self):
            if f.name == "tensor_parallel":
                continue
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if mine != theirs:
                differ = f"KV layouts differ in {f.name}: {mine!r} on this pod, {theirs!r} on the peer"
                raise LayoutMismatch(differ, field=f.name)

    def _ranks_text(self) -> str:
        return f"tensor_parallel_size {self.tensor_parallel} with kv_order {self.kv_order}"
