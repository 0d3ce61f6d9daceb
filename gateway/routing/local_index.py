"""What the pods probably hold, learned from where this gateway sent its own requests: the hint while Redis is away.

Lifecycle: record() with every routed prompt, whether Redis answers or not, so that the memory is warm when it ends;
lookup() while it is away; entries go by age, by forget(), with a new generation of their pod, and least recently used
first when there are too many. Invariant: a recorded point of a chain is never younger than the points before it, and
never outlives them, so what lookup() finds from the start of a chain is a prefix.

Only points are kept: every block of the first STRIDE, then every STRIDE-th, and the last one. A look-up therefore says
up to STRIDE - 1 blocks less than was recorded, never more.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

ANY_POD = ("", 0)  # name and generation: holds what any pod computed
POINT_STRIDE = 8
MAX_POINTS = 100_000  # about 20 MB; one point stands for up to STRIDE blocks
MAX_AGE_S = 600.0  # a pod's cache forgets too, and does not tell us


class ApproxIndex:
    """One per gateway, used on its event loop only. clock: seconds, monotonic."""

    def __init__(
        self,
        *,
        max_points: int = MAX_POINTS,
        max_age_s: float = MAX_AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_points = max_points
        self._max_age_s = max_age_s
        self._clock = clock
        self._points: OrderedDict[bytes, float] = OrderedDict()  # tag + hash -> when; least recently used first
        self._generation_tags: dict[str, tuple[int, bytes]] = {}  # pod -> generation, tag of its points
        self._last_tag = 0

    def __len__(self) -> int:
        """Points kept, those of forgotten pods that have not gone yet included."""
        return len(self._points)

    def record(self, pod: str, generation: int, hashes: Sequence[bytes]) -> None:
        """The pod has, or is about to have, the blocks of this chain. An older generation than known is ignored."""
        known, tag = self._generation_tags.get(pod, (-1, b""))
        if generation < known:
            return
        if generation > known:
            self._last_tag += 1
            tag = self._last_tag.to_bytes(4, "little")
            self._generation_tags[pod] = generation, tag
        now, points = self._clock(), self._points
        for depth in reversed(_depths(len(hashes))):  # the leaf first: it is forgotten first
            point = tag + hashes[depth - 1]
            points[point] = now
            points.move_to_end(point)
        while len(points) > self._max_points:
            points.popitem(last=False)

    def forget(self, pod: str) -> None:
        """The pod is gone, or holds nothing any more."""
        self._generation_tags.pop(pod, None)

    def lookup(self, hashes: Sequence[bytes], pods: Sequence[tuple[str, int]]) -> dict[str, int]:
        """Blocks of the chain that each (pod, generation) probably holds, from its start; 0 for one that is unknown."""
        depths = _depths(len(hashes))
        oldest = self._clock() - self._max_age_s
        return {pod: self._match(pod, generation, hashes, depths, oldest) for pod, generation in pods}

    def _match(self, pod: str, generation: int, hashes: Sequence[bytes], depths: list[int], oldest: float) -> int:
        known, tag = self._generation_tags.get(pod, (-1, b""))
        if known != generation:
            return 0
        low, high = 0, len(depths)  # depths[:low] are held, depths[high:] are not
        probe = 1
        while low < high:
            at = min(low + probe, high) if probe else (low + high + 1) // 2
            when = self._points.get(tag + hashes[depths[at - 1] - 1])
            if when is not None and when >= oldest:
                low, probe = at, 2 * probe
            else:
                high, probe = at - 1, 0
        return depths[low - 1] if low else 0


def _depths(length: int) -> list[int]:
    """The depths of a chain's points, from its start: blocks up to and including each."""
    depths = [*range(1, min(length, POINT_STRIDE)), *range(POINT_STRIDE, length + 1, POINT_STRIDE)]
    if length and (not depths or depths[-1] != length):
        depths.append(length)
    return depths


MAX_COMPARED = 64


class InFlightPrompts:
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
