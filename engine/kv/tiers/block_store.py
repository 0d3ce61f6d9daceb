"""What a file tier asks of the store of its blocks: segment_store.py for a disk, shared_store.py for all pods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from engine.kv.tiers.cold_codec import BlockCodec


class StoredBlock(NamedTuple):
    """A block to append to a store."""

    key: bytes  # Its hash
    parent: bytes  # Hash of the block before it; empty for the first block of a prompt
    content: memoryview  # uint8 [block_bytes]


class BlockStore(Protocol):
    """Where a file tier keeps its blocks. Thread-safe; one thread calls `append`."""

    searches: bool  # `match` is a guess, and `find` asks the files
    directory: Path
    block_bytes: int
    content_bytes: int  # Of a block in a file
    max_bytes: int
    codec: BlockCodec | None
    epoch: int  # Number of calls of `clear` and `forget`
    damaged: int  # Blocks that were cut or had a wrong checksum

    @property
    def size(self) -> int:
        """Bytes of all files, as far as is known."""

    @property
    def has_chores(self) -> bool:
        """Whether `append` has work besides blocks."""

    def __contains__(self, key: object, /) -> bool:
        """Returns whether the block is there, as far as is known without a look at the files."""

    def __len__(self) -> int: ...

    def hashes(self) -> list[bytes]:
        """Returns the hashes of the blocks that are there, as far as is known."""

    def match(self, hashes: Sequence[bytes], /) -> int:
        """Returns how many of the leading blocks are there, or may be there if the store `searches`. No I/O."""

    def find(self, keys: Sequence[bytes], /) -> int:
        """Returns how many of the leading blocks are there. Raises OSError."""

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview], /) -> int:
        """Reads blocks into `targets`; returns the number of leading blocks that came whole. Raises OSError."""

    def append(self, blocks: Sequence[StoredBlock], epoch: int | None = None, /) -> int:
        """Writes blocks, parents first; returns how many were written. Raises OSError."""

    def scan(self, stopped: Callable[[], bool], /) -> int:
        """Prepares the store, once and first; returns the number of blocks that it has found. Raises OSError."""

    def clear(self) -> None:
        """Forgets all blocks; the files are removed later."""

    def forget(self) -> None:
        """Forgets all blocks and keeps the files."""

    def close(self) -> None:
        """Ends the store. No other call may be under way or follow."""

    def inconsistencies(self) -> list[str]:
        """Returns violations of the invariants, one sentence each."""
