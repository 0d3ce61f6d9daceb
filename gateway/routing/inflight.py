"""Prompts that pods are computing: what they will soon have cached, before any index knows.

Hashes are chained, so two prompts share exactly the blocks up to the last position at which their hashes are equal. A
prompt is entered under its hashes at the positions 1, 2, 4, 8, ... and under its last; a look-up walks the same
positions of its own chain from the longest down, and compares those that it meets by halving. So neither grows with the
length of prompts, and only prompts that share something are looked at, closest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MAX_COMPARED = 64


class InFlight:
    """Prompts by request id. Hashes are of the chain from the prompt's start; one layout's never equal another's."""

    def __init__(self) -> None:
        self._prompts: dict[str, tuple[str, Sequence[bytes]]] = {}
        self._by_hash: dict[bytes, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, request_id: str, pod: str, hashes: Sequence[bytes]) -> None:
        """A pod computes this prompt from now on; again replaces."""
        self.remove(request_id)
        if hashes:
            self._prompts[request_id] = (pod, hashes)
            for at in _positions(len(hashes)):
                self._by_hash.setdefault(hashes[at], {})[request_id] = None

    def remove(self, request_id: str) -> None:
        """It is computed or given up; without effect when it is not known."""
        entry = self._prompts.pop(request_id, None)
        if entry is None:
            return
        hashes = entry[1]
        for at in _positions(len(hashes)):
            marked = self._by_hash[hashes[at]]
            del marked[request_id]
            if not marked:
                del self._by_hash[hashes[at]]

    def match_blocks(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Pod -> blocks of this chain that it will have once it has computed what it computes now."""
        found: dict[str, int] = {}
        if not self._prompts or not hashes:
            return found
        seen: set[str] = set()
        for at in reversed(_positions(len(hashes))):
            # The newest first: of equal prompts on one pod any will do.
            for request_id in reversed(self._by_hash.get(hashes[at], {})):
                if request_id in seen:
                    continue
                seen.add(request_id)
                pod, other = self._prompts[request_id]
                best = found.get(pod, 0)
                # Equal there means that it shares more than the best so far; of those of a burst few do.
                if best < min(len(hashes), len(other)) and hashes[best] == other[best]:
                    found[pod] = _shared(hashes, other, max(at, best))
                if len(seen) == MAX_COMPARED:
                    return found
        return found


def _positions(length: int) -> list[int]:
    """Indices of the hashes under which a chain is entered."""
    return [*_powers(length), length - 1]


def _powers(length: int) -> Iterator[int]:
    at = 1
    while at < length:
        yield at - 1
        at *= 2


def _shared(a: Sequence[bytes], b: Sequence[bytes], equal_at: int) -> int:
    """Blocks that two chains share; they are known to be equal at index equal_at."""
    low, high = equal_at, min(len(a), len(b))
    while high - low > 1:
        middle = (low + high) // 2
        if a[middle] == b[middle]:
            low = middle
        else:
            high = middle
    return low + 1
