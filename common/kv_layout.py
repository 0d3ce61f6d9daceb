"""Layout of the bytes inside a KV block, and a fingerprint that two pods compare.

The pool is uint8[num_blocks, block_bytes]. A block is one contiguous range with all layers, so it is one NIXL
descriptor. Its segments follow each other:

    kv             [num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]
                   [num_layers, 1, 1, block_size, head_dim]              with multi-head latent attention
    scales         [num_layers, num_kv_heads, block_size, 2 (K, V)]      with an 8-bit dtype
    draft_kv       as kv, of the draft model                             with a draft model
    draft_scales   as scales, of the draft model                         with a draft model and an 8-bit dtype
    draft_state    [draft_state]: the target's state at the last token   with an EAGLE head

Code that moves, caches or checks a block therefore includes scales and draft data.

A layout with groups (common/kv_groups.py) cuts a block of tokens into one *page* per group of layers. Its pool is
uint8[num_pages, block_bytes], and the segments have the layers of the largest group (`page_layers`). Without groups, a
block is one page.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, fields

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

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def end(self) -> int:
        """Offset of the next segment, a multiple of SEGMENT_ALIGN."""
        return -(-(self.offset + self.nbytes) // SEGMENT_ALIGN) * SEGMENT_ALIGN


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
    tensor_parallel: int = field(default=1, kw_only=True)  #: Ranks; every rank has its kv heads of every block.
    num_layers: int
    num_kv_heads: int  # KV heads of one rank.
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

    @property
    def page_layers(self) -> int:
        """Layers of a page: those of the largest group, or all."""
        return max((len(group.layers) for group in self.groups), default=self.num_layers)

    @property
    def segments(self) -> tuple[Segment, ...]:
        vectors = 1 if self.latent_dim else 2
        segments = self._kv("", self.page_layers, vectors, self.num_kv_heads, self.head_dim, 0)
        if self.draft_layers:
            sizes = (self.draft_layers, 2, self.draft_kv_heads, self.draft_head_dim)
            segments += self._kv("draft_", *sizes, segments[-1].end)
        if self.draft_state:
            dtype = SCALE_DTYPE if self.dtype == FP8_DTYPE else self.dtype
            segments += (Segment("draft_state", (self.draft_state,), dtype, segments[-1].end),)
        return segments

    def _kv(self, prefix: str, layers: int, vectors: int, heads: int, dim: int, offset: int) -> tuple[Segment, ...]:
        kv = Segment(prefix + "kv", (layers, vectors, heads, self.block_size, dim), self.dtype, offset)
        if self.dtype != FP8_DTYPE:
            return (kv,)
        return (kv, Segment(prefix + "scales", (layers, heads, self.block_size, vectors), SCALE_DTYPE, kv.end))

    @property
    def block_bytes(self) -> int:
        """Bytes of one page, all segments, each padded to SEGMENT_ALIGN. Without groups a page is a block."""
        return self.segments[-1].end

    @property
    def fingerprint(self) -> str:
        """Hash of the layout, 32 hex digits, equal in every process.

        It covers draft_* fields only with a draft model, tensor_parallel only above 1, weights only if they are
        quantised, latent_dim only if it is set, and groups only if there are some, so that layouts without them keep
        the fingerprint of older versions.
        """
        covered = [f.name for f in fields(self) if self.draft_layers or not f.name.startswith("draft_")]
        if self.tensor_parallel == 1:
            covered.remove("tensor_parallel")
        if not self.weights:
            covered.remove("weights")
        if not self.latent_dim:
            covered.remove("latent_dim")
        if not self.groups:
            covered.remove("groups")
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
        """Raises LayoutMismatch with the first field in which `other`, the peer's layout, differs."""
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if mine != theirs:
                differ = f"KV layouts differ in {f.name}: {mine!r} on this pod, {theirs!r} on the peer"
                raise LayoutMismatch(differ, field=f.name)
