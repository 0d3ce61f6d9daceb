"""Chained hashes that name full KV blocks, the same in every process and on every pod.

h_i = BLAKE2b-128(h_{i-1} || tokens_i || extra), keyed with the layout's fingerprint, h_{-1} empty. tokens_i are the
block's token ids as little-endian uint32; extra is the tenant's cache salt (length-prefixed), later LoRA id and
multimodal hashes. Only full blocks have a hash; the golden vectors in tests/unit/test_block_hash.py fix the bytes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

HASH_BYTES = 16


class BlockHasher:
    """Hash chain of one sequence; extend it as tokens arrive.

    hashes[i] names block i. The chain only covers full blocks of the tokens given so far.
    """

    __slots__ = ("_block_size", "_extra", "_key", "hashes")

    def __init__(self, fingerprint: str, block_size: int, salt: str = "") -> None:
        self._key = bytes.fromhex(fingerprint)
        self._block_size = block_size
        raw = salt.encode()
        self._extra = len(raw).to_bytes(4, "little") + raw
        self.hashes: list[bytes] = []

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """Hashes of all full blocks of `tokens` (the whole sequence so far); computes only the new ones."""
        size = self._block_size
        for i in range(len(self.hashes), len(tokens) // size):
            h = hashlib.blake2b(self.hashes[-1] if i else b"", digest_size=HASH_BYTES, key=self._key)
            h.update(array("I", tokens[i * size : (i + 1) * size]).tobytes())
            h.update(self._extra)
            self.hashes.append(h.digest())
        return self.hashes


def block_hashes(tokens: Sequence[int], *, fingerprint: str, block_size: int, salt: str = "") -> list[bytes]:
    """Hashes of all full blocks of `tokens`, 16 bytes each."""
    return BlockHasher(fingerprint, block_size, salt).extend(tokens)


def matchable_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks of a prompt that a cache may supply: one token is always left, so nothing writes a shared block."""
    return max(0, (num_tokens - 1) // block_size)
