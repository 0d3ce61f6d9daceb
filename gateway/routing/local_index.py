"""What this gateway itself knows of the pods' caches: prompts that it sent there, and prompts that are computed now."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

ANY_POD = ("", 0)  #: Name and generation that stand for all pods together in ApproxIndex.
POINT_STRIDE = 8  #: Recorded blocks of a chain: the first POINT_STRIDE, every POINT_STRIDE-th, and the last.
MAX_POINTS = 100_000  #: About 20 MB.
MAX_AGE_S = 600.0  #: Pods evict blocks without a message to gateways, so a record is trusted for this long.
MAX_COMPARED_PROMPTS = 64  #: Prompts in flight that one `match_blocks` compares at most.


class ApproxIndex:
    """Remembers which pod computed which prompt; routing uses it while the prefix index is away.

    Every routed prompt is recorded, also while the index answers, so that the memory is warm when it fails. A record
    ends by age, by `forget`, by a new generation of its pod, or as the least recently used of too many.

    Only some blocks of a chain are recorded, its points. So a look-up returns up to POINT_STRIDE - 1 blocks less than
    were recorded, never more. Invariant: a point is never younger than the points before it in the chain and never
    outlives them, so a look-up finds a prefix.
    """

    def __init__(
        self, *, max_points: int = MAX_POINTS, max_age_s: float = MAX_AGE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_points = max_points
        self._max_age_s = max_age_s
        self._clock = clock
        self._points: OrderedDict[bytes, float] = OrderedDict()  #: Time by tag + hash, oldest use first.
        self._generation_tags: dict[str, tuple[int, bytes]] = {}  #: Generation, and tag of the points.
        self._last_tag = 0

    def __len__(self) -> int:
        """Number of points. Those of a forgotten pod count until they are evicted."""
        return len(self._points)

    def record(self, pod: str, generation: int, hashes: Sequence[bytes]) -> None:
        """Records that the pod holds, or soon holds, the blocks of a chain. Has no effect for an older generation."""
        known, tag = self._generation_tags.get(pod, (-1, b""))
        if generation < known:
            return
        if generation > known:
            self._last_tag += 1
            tag = self._last_tag.to_bytes(4, "little")
            self._generation_tags[pod] = generation, tag
        now, points = self._clock(), self._points
        for depth in reversed(_depths(len(hashes))):  # from the end of the chain, so that its end is evicted first
            point = tag + hashes[depth - 1]
            points[point] = now
            points.move_to_end(point)
        while len(points) > self._max_points:
            points.popitem(last=False)

    def forget(self, pod: str) -> None:
        """Forgets a pod that is gone or has an empty cache."""
        self._generation_tags.pop(pod, None)

    def lookup(self, hashes: Sequence[bytes], pods: Sequence[tuple[str, int]]) -> dict[str, int]:
        """Returns by pod name how many leading blocks of the chain each (name, generation) probably holds."""
        depths = _depths(len(hashes))
        oldest = self._clock() - self._max_age_s
        return {pod: self._match(pod, generation, hashes, depths, oldest) for pod, generation in pods}

    def _match(self, pod: str, generation: int, hashes: Sequence[bytes], depths: list[int], oldest: float) -> int:
        """Finds the last recorded point. Doubles the step until a point is missing, then bisects."""
        known, tag = self._generation_tags.get(pod, (-1, b""))
        if known != generation:
            return 0
        low, high = 0, len(depths)  # points before `low` are recorded, those from `high` on are not
        step = 1  # 0: bisect
        while low < high:
            at = min(low + step, high) if step else (low + high + 1) // 2
            when = self._points.get(tag + hashes[depths[at - 1] - 1])
            if when is not None and when >= oldest:
                low, step = at, 2 * step
            else:
                high, step = at - 1, 0
        return depths[low - 1] if low else 0


def _depths(length: int) -> list[int]:
    """Returns the points of a chain, each as the number of blocks up to and with it."""
    depths = [*range(1, min(length, POINT_STRIDE)), *range(POINT_STRIDE, length + 1, POINT_STRIDE)]
    if length and (not depths or depths[-1] != length):
        depths.append(length)
    return depths


class InFlightPrompts:
    """The prompts that pods compute now, as chains of block hashes. Chains of different layouts never share a hash."""

    def __init__(self) -> None:
        self._prompts: dict[str, tuple[str, Sequence[bytes]]] = {}  #: Pod and chain by request id.
        self._by_hash: dict[bytes, dict[str, None]] = {}  #: Request ids by the hashes at `_positions`.

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, request_id: str, pod: str, hashes: Sequence[bytes]) -> None:
        """The pod computes this prompt from now on. Replaces an earlier entry of the request."""
        self.remove(request_id)
        if hashes:
            self._prompts[request_id] = (pod, hashes)
            for at in _positions(len(hashes)):
                self._by_hash.setdefault(hashes[at], {})[request_id] = None

    def remove(self, request_id: str) -> None:
        """The prompt is computed or given up. Has no effect for an unknown request."""
        entry = self._prompts.pop(request_id, None)
        if entry is None:
            return
        hashes = entry[1]
        for at in _positions(len(hashes)):
            request_ids = self._by_hash[hashes[at]]
            del request_ids[request_id]
            if not request_ids:
                del self._by_hash[hashes[at]]

    def match_blocks(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Returns by pod how many leading blocks of the chain it will hold once it has computed its prompts."""
        matched: dict[str, int] = {}
        if not self._prompts or not hashes:
            return matched
        compared: set[str] = set()
        for at in reversed(_positions(len(hashes))):
            # The newest first: among equal prompts on one pod any one is enough.
            for request_id in reversed(self._by_hash.get(hashes[at], {})):
                if request_id in compared:
                    continue
                compared.add(request_id)
                pod, other = self._prompts[request_id]
                best = matched.get(pod, 0)
                # An equal block at `best` means a longer common prefix. In a burst of similar prompts this is rare.
                if best < min(len(hashes), len(other)) and hashes[best] == other[best]:
                    matched[pod] = _common_blocks(hashes, other, max(at, best))
                if len(compared) == MAX_COMPARED_PROMPTS:
                    return matched
        return matched


def _positions(length: int) -> list[int]:
    """Returns the indices of the hashes under which a chain is stored: 0, 1, 3, 7, ... and the last."""
    return [*((1 << power) - 1 for power in range((length - 1).bit_length())), length - 1]


def _common_blocks(a: Sequence[bytes], b: Sequence[bytes], equal_at: int) -> int:
    """Returns how many leading blocks two chains share, given that they are equal at index `equal_at`."""
    low, high = equal_at, min(len(a), len(b))
    while high - low > 1:
        middle = (low + high) // 2
        if a[middle] == b[middle]:
            low = middle
        else:
            high = middle
    return low + 1
