"""A decode pod whose steps take modelled time; steps between two changes of the batch are taken at once.

Lifecycle of an answer: reserve (blocks for its whole length, so nothing is ever preempted) -> join, when its KV is
there -> waits for a slot -> decodes -> `on_end`. The step time follows the batch and its contexts; while neither comes
nor goes a sequence, it is renewed every REFRESH steps.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.types import PodLoad
from engine.kv.blocks import BlockPool, Lease
from simulator.clock import VirtualClock
from simulator.hardware_rates import HardwareRates
from simulator.prefill_pod import PodShape

REFRESH_STEPS = 32
_SLOPE_BATCH = 64


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """One reserved sequence. held_blocks: prompt blocks that the pod had already. left: tokens to decode."""

    lease: Lease
    cached_blocks: int
    context: int
    tokens_left: int
    on_end: Callable[[int], None]
    block_hashes: Sequence[bytes]
    end_step: float = 0.0


class SimulatedDecodePod:
    """One process; a restart is another object."""

    def __init__(
        self,
        clock: VirtualClock,
        rates: HardwareRates,
        shape: PodShape,
        *,
        stored: Callable[[list[bytes]], None],
        evicted: Callable[[list[bytes]], None],
    ) -> None:
        self.pool = BlockPool(shape.num_blocks, shape.block_size, on_stored=stored, on_evicted=evicted)
        self.alive = True
        self.tokens = 0
        self.busy_s = 0.0
        self._clock = clock
        self._rates = rates
        self._shape = shape
        self._running: dict[int, DecodeSequence] = {}
        self._ends: list[tuple[float, int, DecodeSequence]] = []
        self._waiting: deque[DecodeSequence] = deque()
        self._joined = 0
        self._context = 0.0  # tokens of all running contexts
        self._steps = 0.0
        self._step_s = 0.0
        self._since = 0.0
        self._alarm = 0  # only the newest scheduled wake-up counts

    def reserve(
        self, prompt_len: int, output_len: int, chain: Sequence[bytes], on_end: Callable[[int], None]
    ) -> DecodeSequence | None:
        """Room for the prompt and all of its answer; None when there is not enough now.

        on_end gets the tokens that this pod produced, when the last one is there.
        """
        size = self._shape.block_size
        total = -(-(prompt_len + output_len) // size)
        lease = self.pool.lease(list(chain[: (prompt_len - 1) // size]), total)
        if lease is None:
            return None
        return DecodeSequence(lease, lease.cached_blocks, prompt_len, output_len - 1, on_end, chain)

    def join(self, answer: DecodeSequence) -> None:
        """Its KV is complete: it decodes as soon as a slot is free."""
        if not self.alive or answer.lease.finished:
            return
        answer.lease.publish(list(answer.block_hashes[: answer.context // self._shape.block_size]))
        if answer.tokens_left <= 0:
            answer.lease.finish("length")
            answer.on_end(0)
            return
        self._advance()
        self._waiting.append(answer)
        self._admit()
        self._schedule()

    def cancel(self, answer: DecodeSequence) -> None:
        """Gives up a reservation that has not joined; idempotent."""
        if self.alive:
            answer.lease.finish("cancelled")

    def progress(self, answer: DecodeSequence) -> int:
        """Tokens that a running answer has got from this pod so far."""
        if answer.end_step == 0.0:
            return 0
        steps = self._steps + (self._clock.now - self._since) / self._step_s if self._step_s else self._steps
        return max(0, min(answer.tokens_left, int(answer.tokens_left - (answer.end_step - steps))))

    def kill(self) -> None:
        """Nothing is computed or answered any more."""
        self._advance()
        self.alive = False

    def load(self) -> PodLoad:
        """What the pod would publish now."""
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
        """Seconds that one more sequence adds, at the contexts of now."""
        running = len(self._running)
        mean = self._context / running if running else 1024.0
        return (self._rates.decode_s(_SLOPE_BATCH, _SLOPE_BATCH * mean) - flat) / _SLOPE_BATCH

    def _advance(self) -> None:
        """Takes the steps since the last change."""
        now = self._clock.now
        if self._running and self._step_s > 0:
            steps = (now - self._since) / self._step_s
            self._steps += steps
            self._context += steps * len(self._running)
            self.busy_s += now - self._since
        self._since = now

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._shape.max_seqs:
            answer = self._waiting.popleft()
            self._joined += 1
            answer.end_step = self._steps + answer.tokens_left
            self._running[self._joined] = answer
            self._context += answer.context
            heapq.heappush(self._ends, (answer.end_step, self._joined, answer))

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
            _, number, answer = heapq.heappop(self._ends)
            del self._running[number]
            self._context -= answer.context + answer.tokens_left
            ended.append(answer)
        self._admit()
        self._schedule()
        for answer in ended:
            self.tokens += answer.tokens_left
            answer.lease.finish("length")
            answer.on_end(answer.tokens_left)
