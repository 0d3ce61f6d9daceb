"""Byte arithmetic of the KV pool: what lies where inside a block, and a fingerprint that two pods compare.

The pool is uint8[num_blocks, block_bytes]. Inside a block the segments follow each other; the segment of one model is
[num_layers, 2 (K, V), num_kv_heads, block_size, head_dim], so a block with all its layers is one contiguous range and
one NIXL descriptor. Segments of other shapes (a draft model's layers, FP8 scales) follow in the same block.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

from common.errors import LayoutMismatch

LAYOUT_VERSION = 1
SEGMENT_ALIGN = 256  # bytes; keeps every segment aligned for vector loads and DMA

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Segment:
    """KV of one group of layers inside a block, shape [num_layers, 2, num_kv_heads, block_size, head_dim]."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    offset: int = 0

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * self.itemsize


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Everything that must agree before one pod may read another's blocks.

    model and revision identify the weights; num_kv_heads is per tensor-parallel rank; dtype is float32 or bfloat16.
    """

    model: str
    revision: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    version: int = LAYOUT_VERSION

    @property
    def segments(self) -> tuple[Segment, ...]:
        return (Segment("kv", self.num_layers, self.num_kv_heads, self.head_dim, self.block_size, self.dtype),)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all segments, each padded to SEGMENT_ALIGN."""
        return sum(-(-s.nbytes // SEGMENT_ALIGN) * SEGMENT_ALIGN for s in self.segments)

    @property
    def fingerprint(self) -> str:
        """32 hex digits over every field; equal layouts have equal fingerprints in every process."""
        text = "\n".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))
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
