"""Byte arithmetic of the KV pool: what lies where inside a block, and a fingerprint that two pods compare.

The pool is uint8[num_blocks, block_bytes]. Inside a block the segments follow each other; the first, "kv", is
[num_layers, 2 (K, V), num_kv_heads, block_size, head_dim], so a block with all its layers is one contiguous range and
one NIXL descriptor. An 8-bit cache has a second segment with the scales of its numbers, so whatever moves, caches or
checks a block takes them along. So it is with what a draft model keeps: its own keys and values, their scales, and for
an EAGLE head the target's state of the block's last token, from which its next key is made.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, fields

from common.errors import LayoutMismatch

LAYOUT_VERSION = 1
SEGMENT_ALIGN = 256  # bytes; keeps every segment aligned for vector loads and DMA

FP8_DTYPE = "float8_e4m3"
SCALE_DTYPE = "bfloat16"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8_DTYPE: 1}


@dataclass(frozen=True, slots=True)
class Segment:
    """A dense array inside every block, `offset` bytes from its start."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def end(self) -> int:
        """Bytes from the block's start to the next segment's, a multiple of SEGMENT_ALIGN."""
        return -(-(self.offset + self.nbytes) // SEGMENT_ALIGN) * SEGMENT_ALIGN


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Everything that must agree before one pod may read another's blocks.

    model and revision identify the weights; tensor_parallel: ranks that share the heads out; num_kv_heads is of each,
    and so are a block's bytes: it lies on every rank, with other heads in it. dtype is that of keys and values:
    float32, bfloat16 or float8_e4m3. The latter has one scale for K and one for V per layer, kv head and token, in the
    segment "scales", [num_layers, num_kv_heads, block_size, 2 (K, V)].

    draft_layers, draft_kv_heads, draft_head_dim: of the draft model whose KV lies in the segments "draft_kv" and
    "draft_scales" of the same blocks, 0 for none; draft_state: numbers of the segment "draft_state"; draft_revision:
    identifies its weights.
    """

    model: str
    revision: str
    tensor_parallel: int = field(default=1, kw_only=True)
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    version: int = LAYOUT_VERSION
    draft_layers: int = 0
    draft_kv_heads: int = 0
    draft_head_dim: int = 0
    draft_state: int = 0
    draft_revision: str = ""

    @property
    def segments(self) -> tuple[Segment, ...]:
        found = self._kv("", self.num_layers, self.num_kv_heads, self.head_dim, 0)
        if self.draft_layers:
            sizes = (self.draft_layers, self.draft_kv_heads, self.draft_head_dim)
            found += self._kv("draft_", *sizes, found[-1].end)
        if self.draft_state:
            dtype = SCALE_DTYPE if self.dtype == FP8_DTYPE else self.dtype
            found += (Segment("draft_state", (self.draft_state,), dtype, found[-1].end),)
        return found

    def _kv(self, prefix: str, layers: int, heads: int, dim: int, offset: int) -> tuple[Segment, ...]:
        kv = Segment(prefix + "kv", (layers, 2, heads, self.block_size, dim), self.dtype, offset)
        if self.dtype != FP8_DTYPE:
            return (kv,)
        return (kv, Segment(prefix + "scales", (layers, heads, self.block_size, 2), SCALE_DTYPE, kv.end))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all segments, each padded to SEGMENT_ALIGN."""
        return self.segments[-1].end

    @property
    def fingerprint(self) -> str:
        """32 hex digits over every field, of a draft's where there is one and of ranks where there are several; equal
        layouts have equal fingerprints in every process.
        """
        known = [f.name for f in fields(self) if self.draft_layers or not f.name.startswith("draft_")]
        if self.tensor_parallel == 1:
            known.remove("tensor_parallel")
        text = "\n".join(f"{name}={getattr(self, name)}" for name in known)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def scope(self) -> str:
        """First 8 hex digits of the fingerprint: the key scope in the prefix index."""
        return self.fingerprint[:8]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def require_equal(self, other: KVLayout) -> None:
        """Raises LayoutMismatch that names the first field in which `other` (the peer's) differs."""
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if mine != theirs:
                raise LayoutMismatch(f"KV layouts differ in {f.name}: {mine!r} here, {theirs!r} there", field=f.name)
