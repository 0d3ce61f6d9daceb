"""What a prompt waits for when its blocks are read from files, and the decision to read or to compute them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

RATE_DECAY = 0.9  # Each load multiplies the weight of older ones by this
RATE_TTL_S = 60.0  # An older rate counts as unknown: a slow one would stop all loads, and so never be corrected


def saves_time(read_s: float, compute_s: float) -> bool:
    """Returns whether blocks are read, not computed, by the predicted seconds of both; 0: unknown."""
    return not (read_s and compute_s) or read_s < compute_s


class FileLoad:
    """Blocks of a prompt on their way from files to the host. A prompt may use the cache once `done` is true.

    A load goes through the file tiers in order; each continues the prefix that it finds in the pool and the host.
    """

    __slots__ = ("_ended", "_follows", "compute_s", "expires_at", "hashes", "held", "host_blocks", "keys", "valid")

    def __init__(self, hashes: Sequence[bytes], compute_s: Callable[[int], float] | None = None) -> None:
        self.hashes = hashes  # Of the prompt's blocks that a cache may supply
        self.compute_s = compute_s  # Predicts the seconds of computing prompt tokens; None: as the tier does
        self.held = 0  # Number of blocks before the first one to read
        self.keys: Sequence[bytes] = ()  # Blocks to read or to look for, parents first
        self.host_blocks: Sequence[int] = ()  # Where they go; empty while the tier looks for them
        self.valid = True  # The cache was not reset since
        self.expires_at = float("inf")
        self._ended = False
        self._follows: FileLoad | None = None

    @property
    def done(self) -> bool:
        """Whether the load has ended, or is late. Any thread."""
        if self._follows is not None:
            return self._follows.done
        return self._ended or time.monotonic() > self.expires_at

    @property
    def parent(self) -> bytes:
        """Hash of the block before the first one to read; empty for the first block of a prompt."""
        return self.hashes[self.held - 1] if self.held else b""

    def set_range(self, held: int, keys: Sequence[bytes], wait_s: float) -> None:
        """Sets the blocks to read or to look for, and how long a prompt waits for them from now on."""
        self.held, self.keys, self.host_blocks = held, keys, ()
        self.expires_at = time.monotonic() + wait_s

    def follow(self, other: FileLoad) -> None:
        """Makes this load end when `other` does, which reads the same blocks."""
        self._follows = other

    def end(self) -> None:
        """Ends the wait for this load."""
        self._ended = True


NO_LOAD = FileLoad(())
NO_LOAD.end()


class ReadRate:
    """The rate of the last loads of a tier. Older loads have less weight."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0
        self._measured_at = float("-inf")

    def observe(self, size: int, seconds: float) -> None:
        """Records that a load of `size` bytes of the pool took so long, with decoding."""
        if size and seconds > 0:
            self._bytes = RATE_DECAY * self._bytes + size
            self._seconds = RATE_DECAY * self._seconds + seconds
            self._measured_at = time.monotonic()

    def predict_s(self, size: int) -> float:
        """Returns the predicted seconds of a load of `size` bytes; 0 while the rate is unknown."""
        if not self._bytes or time.monotonic() - self._measured_at > RATE_TTL_S:
            return 0.0
        return size * self._seconds / self._bytes

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second of the last loads; 0 before the first one. Any thread."""
        return self._bytes / self._seconds if self._bytes else 0.0
