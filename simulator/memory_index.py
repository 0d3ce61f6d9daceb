"""The prefix index in memory, on a virtual clock: answers what the Lua scripts answer (a test compares them).

Per pod one set of 8-byte block names under its generation. Invariant, as in Redis: only the registered generation with
a live lease changes its set or is credited in a look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from common.index_store import LEASE_MS, OWN_TTL_S, PREFIX_BYTES

LEASE_S = LEASE_MS / 1e3


@dataclass(slots=True)
class _Entry:
    """One registered pod. number: of the last batch, None before the first snapshot."""

    generation: int
    lease_until: float
    set_until: float
    own: set[bytes] = field(default_factory=set)
    number: int | None = None


class MemoryIndex:
    """All pods of one scope. time: seconds, of any clock."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self._pods: dict[str, _Entry] = {}

    def register(self, pod: str, generation: int) -> bool:
        """Enters a generation; False when a later one is known. What an earlier one held is forgotten."""
        now = self._time()
        known = self._pods.get(pod)
        if known is not None and known.generation > generation:
            return False
        if known is None or known.generation != generation:
            known = self._pods[pod] = _Entry(generation, 0.0, now + OWN_TTL_S)
        known.lease_until = now + LEASE_S
        return True

    def heartbeat(self, pod: str, generation: int) -> int:
        """Renews the lease; entries of the pod, or -1 when it has to register (again)."""
        entry = self._pods.get(pod)
        now = self._time()
        if entry is None or entry.generation != generation or entry.number is None or not self._fresh(entry):
            return -1
        entry.lease_until, entry.set_until = now + LEASE_S, now + OWN_TTL_S
        return len(entry.own)

    def apply(self, pod: str, generation: int, number: int, stored: Iterable[bytes], evicted: Iterable[bytes]) -> str:
        """One numbered batch: 'ok', 'duplicate', 'gap' (send a snapshot) or 'fenced' (register again)."""
        entry = self._live(pod, generation)
        if entry is None:
            return "fenced"
        if not self._fresh(entry) or entry.number is None or number > entry.number + 1:
            return "gap"
        if number <= entry.number:
            return "duplicate"
        entry.own.difference_update(h[:PREFIX_BYTES] for h in evicted)
        entry.own.update(h[:PREFIX_BYTES] for h in stored)
        entry.number, entry.set_until = number, self._time() + OWN_TTL_S
        return "ok"

    def snapshot(self, pod: str, generation: int, number: int, held: Collection[bytes]) -> str:
        """Replaces a pod's entries: 'ok', 'gap' (something newer was applied) or 'fenced'."""
        entry = self._live(pod, generation)
        if entry is None:
            return "fenced"
        if self._fresh(entry) and entry.number is not None and entry.number >= number:
            return "gap"
        entry.own = {h[:PREFIX_BYTES] for h in held}
        entry.number, entry.set_until = number, self._time() + OWN_TTL_S
        return "ok"

    def lapse(self, pod: str) -> None:
        """The pod's lease runs out now."""
        if pod in self._pods:
            self._pods[pod].lease_until = self._time()

    def leave(self, pod: str, generation: int) -> None:
        """Forgets a pod; without effect for another generation than the registered one."""
        entry = self._pods.get(pod)
        if entry is not None and entry.generation == generation:
            del self._pods[pod]

    def lookup(self, chain: Sequence[bytes], pods: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Blocks of the chain that each (pod, generation) holds, from its start; pods that hold none may be left out.

        Galloping, then halving: sets are prefix-closed.
        """
        found: dict[tuple[str, int], int] = {}
        if not chain:
            return found
        names = [h[:PREFIX_BYTES] for h in chain]
        first, now = names[0], self._time()
        for pod, generation in pods:
            entry = self._pods.get(pod)
            if entry is None or first not in entry.own or entry.generation != generation:
                continue
            if now < entry.lease_until and now < entry.set_until:
                found[pod, generation] = _matched(names, entry.own)
        return found

    def _live(self, pod: str, generation: int) -> _Entry | None:
        entry = self._pods.get(pod)
        live = entry is not None and entry.generation == generation and self._time() < entry.lease_until
        return entry if live else None

    def _fresh(self, entry: _Entry) -> bool:
        """The set and its number have not expired (nobody renewed them for OWN_TTL_S)."""
        return self._time() < entry.set_until

    def size(self) -> int:
        """Entries of all pods."""
        return sum(len(entry.own) for entry in self._pods.values())


def _matched(names: Sequence[bytes], own: set[bytes]) -> int:
    """The longest lead of names in own, which holds the first."""
    low, high, length = 1, 2, len(names)
    while high <= length and names[high - 1] in own:
        low, high = high, 2 * high
    high = min(high, length + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if names[middle - 1] in own:
            low = middle
        else:
            high = middle
    return low
