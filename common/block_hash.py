"""Chained hashes of full KV blocks, equal in every process and on every pod.

h_i = BLAKE2b-128(h_{i-1} || tokens_i || extra), keyed with the layout's fingerprint; h_{-1} is empty.

tokens_i are the block's token ids as little-endian uint32. extra is the tenant's cache salt and then, if there is one,
the id of the adapter (LoRA), each after its length as a little-endian uint32. Only full blocks have a hash. The golden
vectors in tests/unit/test_block_hash.py fix the bytes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from struct import iter_unpack

HASH_BYTES = 16


class BlockHasher:
    """Hash chain of one sequence, extended as tokens arrive.

    hashes[i] is the hash of block i. `known` is a lead part of the chain that was computed before.
    """

    __slots__ = ("_block_size", "_extra", "_keyed", "hashes")

    def __init__(
        self, fingerprint: str, block_size: int, salt: str = "", adapter: str = "", known: Sequence[bytes] = ()
    ) -> None:
        # Copying this is faster than keying a second one.
        self._keyed = blake2b(digest_size=HASH_BYTES, key=bytes.fromhex(fingerprint))
        self._block_size = block_size
        parts = [part.encode() for part in ((salt, adapter) if adapter else (salt,))]
        self._extra = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        self.hashes = list(known)

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """Returns the hashes of all full blocks of `tokens` (the whole sequence so far); computes only new hashes."""
        size, hashes, extra, keyed = self._block_size, self.hashes, self._extra, self._keyed.copy
        done = len(hashes)
        words = array("I", tokens[done * size : len(tokens) // size * size])
        if sys.byteorder == "big":
            words.byteswap()
        previous = hashes[-1] if hashes else b""
        for (block,) in iter_unpack(f"{4 * size}s", words.tobytes()):
            state = keyed()
            state.update(previous + block + extra)
            previous = state.digest()
            hashes.append(previous)
        return hashes


def hash_blocks(
    tokens: Sequence[int], *, fingerprint: str, block_size: int, salt: str = "", adapter: str = ""
) -> list[bytes]:
    """Returns the hashes of all full blocks of `tokens`, 16 bytes each."""
    return BlockHasher(fingerprint, block_size, salt, adapter).extend(tokens)


def matchable_blocks(num_tokens: int, block_size: int) -> int:
    """Returns how many blocks of a prompt may come from a cache. The last token is always computed."""
    return max(0, (num_tokens - 1) // block_size)
