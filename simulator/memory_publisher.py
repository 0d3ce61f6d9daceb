"""A simulated pod's publisher into the index in memory: common/index_pod.py's protocol in virtual time.

Invariant: batches are numbered without gaps and arrive in order; after an answer that is not 'ok' or a failure, the pod
registers and sends a snapshot, and changes before that need not be kept.
"""

from __future__ import annotations

from collections.abc import Callable

from common.index_pod import BATCH_S, HEARTBEAT_S
from common.index_records import PodLoad
from common.index_store import PREFIX_BYTES
from simulator.clock import Clock
from simulator.memory_index import MemoryIndex

_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 5.0


class MemoryPublisher:
    """lag_s: what a batch takes to reach the index, on top of the batching. index: None while it is away."""

    def __init__(
        self,
        clock: Clock,
        index: Callable[[], MemoryIndex | None],
        pod: str,
        generation: int,
        *,
        lag_s: float,
    ) -> None:
        self._clock = clock
        self._index = index
        self._pod = pod
        self._generation = generation
        self._snapshot: Callable[[], list[bytes]] = list
        self._lag_s = lag_s
        self._pending: dict[bytes, bool] = {}
        self._held: set[bytes] = set()
        self._number = 0
        self._in_step = False  # registered, with a snapshot: batches may follow
        self._flushing = False
        self._stopped = False
        self._backoff_s = _MIN_BACKOFF_S

    def start(self, snapshot: Callable[[], list[bytes]], load: Callable[[], PodLoad]) -> None:
        """Registers, sends a snapshot, then heartbeats and batches until stop(). Loads do not travel here."""
        self._snapshot = snapshot
        self._clock.at(self._clock.now, self._join)

    async def stop(self) -> None:
        """The process has died: nothing more is sent."""
        self._stopped = True

    def stored(self, hashes: list[bytes]) -> None:
        self._enqueue(hashes, True)

    def evicted(self, hashes: list[bytes]) -> None:
        self._enqueue(hashes, False)

    def _enqueue(self, hashes: list[bytes], held: bool) -> None:
        if not self._in_step or self._stopped:
            return
        for h in hashes:
            self._pending[h[:PREFIX_BYTES]] = held
        if not self._flushing:
            self._flushing = True
            self._clock.after(BATCH_S, self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._stopped or not self._in_step:
            return
        changes, self._pending = self._pending, {}
        stored = [h for h, held in changes.items() if held and h not in self._held]
        evicted = [h for h, held in changes.items() if not held and h in self._held]
        if not stored and not evicted:
            return
        self._number += 1
        self._held.update(stored)
        self._held.difference_update(evicted)
        number = self._number
        self._clock.after(self._lag_s, lambda: self._deliver(number, stored, evicted))

    def _deliver(self, number: int, stored: list[bytes], evicted: list[bytes]) -> None:
        if self._stopped or not self._in_step:
            return
        index = self._index()
        answer = index.apply(self._pod, self._generation, number, stored, evicted) if index else "away"
        if answer not in ("ok", "duplicate"):
            self._fall_out()

    def _beat(self) -> None:
        if self._stopped or not self._in_step:
            return
        index = self._index()
        if index is None or index.heartbeat(self._pod, self._generation) < 0:
            self._fall_out()
        else:
            self._clock.after(HEARTBEAT_S, self._beat)

    def _fall_out(self) -> None:
        self._in_step = False
        self._pending.clear()
        self._clock.after(self._backoff_s, self._join)
        self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)

    def _join(self) -> None:
        if self._stopped or self._in_step:
            return
        index = self._index()
        if index is None:
            self._fall_out()
            return
        if not index.register(self._pod, self._generation):
            return  # replaced by a newer process of this name, for good
        held = {h[:PREFIX_BYTES] for h in self._snapshot()}
        self._number += 1
        if index.snapshot(self._pod, self._generation, self._number, held) != "ok":
            self._fall_out()
            return
        self._held, self._in_step, self._backoff_s = held, True, _MIN_BACKOFF_S
        self._clock.after(HEARTBEAT_S, self._beat)
