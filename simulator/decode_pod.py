"""A decode pod with modelled step times. Steps between two changes of the batch are one event.

Lifecycle of a sequence: `reserve` (blocks for its whole length, so no sequence is preempted) -> `join` when its KV has
arrived -> waits for a slot -> decodes -> `on_end`. The step time depends on the batch and its contexts; it is
recomputed when a sequence comes or goes, and every REFRESH_STEPS steps.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.types import PodLoad
from engine.kv.blocks import Lease
from simulator.clock import VirtualClock
from simulator.hardware_rates import HardwareRates
from simulator.index import SimPublisher
from simulator.prefill_pod import PodShape

REFRESH_STEPS = 32
_SLOPE_BATCH = 64  # Batch size at which the growth of a step per sequence is measured.


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """One reserved sequence."""

    lease: Lease
    cached_blocks: int  # Prompt blocks that the pod had in its cache.
    context: int  # Prompt tokens.
    tokens_left: int  # Tokens to decode.
    on_end: Callable[[], None]  # Called after the last token.
    block_hashes: Sequence[bytes]
    end_step: float = 0.0  # Step of the pod at which the sequence ends; 0 while it does not run.


class SimulatedDecodePod:
    """One process of a decode pod; a restart creates another object."""

    def __init__(self, clock: VirtualClock, rates: HardwareRates, shape: PodShape, publisher: SimPublisher) -> None:
        self.pool = shape.pool(publisher)
        self.alive = True
        self.busy_s = 0.0
        self._clock = clock
        self._rates = rates
        self._shape = shape
        #: Running sequences by number, and a heap of (end step, number, sequence).
        self._running: dict[int, DecodeSequence] = {}
        self._ends: list[tuple[float, int, DecodeSequence]] = []
        self._waiting: deque[DecodeSequence] = deque()
        self._last_number = 0
        self._context = 0.0  # Tokens of all running contexts.
        #: Steps since the start, up to time `_since`, and the current step time.
        self._steps = 0.0
        self._step_s = 0.0
        self._since = 0.0
        self._alarm = 0  # Number of the newest scheduled wake-up; older ones have no effect.

    def reserve(
        self, prompt_len: int, output_len: int, block_hashes: Sequence[bytes], on_end: Callable[[], None]
    ) -> DecodeSequence | None:
        """Reserves blocks for the prompt and the whole output. Returns None if there is no room now."""
        size = self._shape.block_size
        total = -(-(prompt_len + output_len) // size)
        lease = self.pool.lease(list(block_hashes[: (prompt_len - 1) // size]), total)
        if lease is None:
            return None
        return DecodeSequence(lease, lease.cached_blocks, prompt_len, output_len - 1, on_end, block_hashes)

    def join(self, sequence: DecodeSequence) -> None:
        """Queues a sequence whose KV has arrived. It decodes as soon as a slot is free."""
        if not self.alive or sequence.lease.finished:
            return
        sequence.lease.publish(list(sequence.block_hashes[: sequence.context // self._shape.block_size]))
        if sequence.tokens_left <= 0:
            sequence.lease.finish("length")
            sequence.on_end()
            return
        self._advance()
        self._waiting.append(sequence)
        self._admit()
        self._schedule()

    def cancel(self, sequence: DecodeSequence) -> None:
        """Gives up a reservation that has not joined. Idempotent."""
        if self.alive:
            sequence.lease.finish("cancelled")

    def progress(self, sequence: DecodeSequence) -> int:
        """Returns how many tokens of a running sequence are decoded."""
        if sequence.end_step == 0.0:
            return 0
        steps = self._steps + (self._clock.now - self._since) / self._step_s if self._step_s else self._steps
        return max(0, min(sequence.tokens_left, int(sequence.tokens_left - (sequence.end_step - steps))))

    def kill(self) -> None:
        """Ends the process: no callback is called any more."""
        self._advance()
        self.alive = False

    def load(self) -> PodLoad:
        """Returns the load report of now."""
        flat = self._rates.decode_s(1, 0)
        return PodLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            free_blocks=self.pool.num_available(),
            step_s=flat,
            step_slope_s=self._slope(flat),
            transfer_rate=self._rates.link_byte_s / self._rates.kv_bytes,
        )

    def _slope(self, flat: float) -> float:
        """Returns the seconds by which one more sequence lengthens a step, at the current mean context."""
        running = len(self._running)
        mean = self._context / running if running else 1024.0
        return (self._rates.decode_s(_SLOPE_BATCH, _SLOPE_BATCH * mean) - flat) / _SLOPE_BATCH

    def _advance(self) -> None:
        """Counts the steps since the last change."""
        now = self._clock.now
        if self._running and self._step_s > 0:
            steps = (now - self._since) / self._step_s
            self._steps += steps
            self._context += steps * len(self._running)
            self.busy_s += now - self._since
        self._since = now

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._shape.max_seqs:
            sequence = self._waiting.popleft()
            self._last_number += 1
            sequence.end_step = self._steps + sequence.tokens_left
            self._running[self._last_number] = sequence
            self._context += sequence.context
            heapq.heappush(self._ends, (sequence.end_step, self._last_number, sequence))

    def _schedule(self) -> None:
        running = len(self._running)
        if not running:
            self._context = 0.0
            return
        self._step_s = self._rates.decode_s(running, self._context)
        steps = min(REFRESH_STEPS, max(0.0, self._ends[0][0] - self._steps))
        self._alarm += 1
        alarm = self._alarm
        self._clock.call_after(steps * self._step_s, lambda: self._wake(alarm))

    def _wake(self, alarm: int) -> None:
        if not self.alive or alarm != self._alarm:
            return
        self._advance()
        ended: list[DecodeSequence] = []
        while self._ends and self._ends[0][0] <= self._steps + 1e-6:
            _, number, sequence = heapq.heappop(self._ends)
            del self._running[number]
            self._context -= sequence.context + sequence.tokens_left
            ended.append(sequence)
        self._admit()
        self._schedule()
        for sequence in ended:
            sequence.lease.finish("length")
            sequence.on_end()
