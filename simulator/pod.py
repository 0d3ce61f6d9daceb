"""The pods of the simulated cluster: processes with modelled step times, under names that outlive them.

A prefill pod runs the engine's scheduler and block cache without an engine. Lifecycle of a prompt: `add` -> waits for
blocks -> chunks -> `on_first_token` (its blocks are published) -> `release` after its KV has been sent.

Lifecycle of a sequence on a decode pod: `reserve` (blocks for its whole length, so no sequence is preempted) -> `join`
when its KV has arrived -> waits for a slot -> decodes -> `on_end`. Steps between two changes of the batch are one
event. Their time depends on the batch and its contexts; it is computed at every change and every REFRESH_STEPS steps.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.block_hash import matchable_blocks
from common.types import FinishReason, PodLoad, Role, SamplingParams, ValidRequest
from engine.kv.blocks import BlockPool
from engine.kv.lease import Lease
from engine.schedule.limits import SchedulerConfig
from engine.schedule.scheduler import ScheduledSequence, Scheduler
from engine.schedule.sequence import Sequence as EngineSequence
from simulator.clock import VirtualClock
from simulator.hardware_rates import HardwareRates
from simulator.index import SimIndex, SimPublisher

REFRESH_STEPS = 32
_SLOPE_BATCH = 64  # Batch size at which the growth of a step per sequence is measured.
_RATE_MEMORY = 0.9  # Weight of the old value in the exponential mean of the prefill rate.


@dataclass(frozen=True, slots=True, kw_only=True)
class PodShape:
    block_size: int
    num_blocks: int  # Blocks of the pool.
    chunk_tokens: int = 2048  # Prompt tokens of a step.
    max_seqs: int = 64  # Sequences that run at once.

    @property
    def capacity(self) -> int:
        """Prompt and output tokens that one request can have."""
        return self.block_size * self.num_blocks


class _PodProcess:
    """One process of a pod; a restart creates another object."""

    def __init__(self, clock: VirtualClock, rates: HardwareRates, shape: PodShape, publisher: SimPublisher) -> None:
        self.pool = BlockPool(
            shape.num_blocks, shape.block_size, on_stored=publisher.stored, on_evicted=publisher.evicted
        )
        self.alive = True
        self.busy_s = 0.0
        self.computed_tokens = 0  # Prompt tokens.
        self._clock = clock
        self._rates = rates
        self._shape = shape

    def kill(self) -> None:
        """Ends the process: no step ends and no callback is called any more."""
        self.alive = False

    def set_rates(self, rates: HardwareRates) -> None:
        """Steps that begin from now on take the time of these rates."""
        self._rates = rates


class PromptSequence(EngineSequence):
    """A sequence of the engine that takes its block hashes from a trace."""

    __slots__ = ("block_hashes", "on_chunk", "on_first_token")

    def __init__(
        self,
        request_id: str,
        prompt_len: int,
        block_hashes: Sequence[bytes],
        block_size: int,
        *,
        on_chunk: Callable[[PromptSequence], None],
        on_first_token: Callable[[PromptSequence], None],
    ) -> None:
        request = ValidRequest(request_id, "", (0,) * prompt_len, SamplingParams(max_tokens=1))
        # The fingerprint has no effect: the block hashes come from the trace.
        super().__init__(request, fingerprint="00" * 16, block_size=block_size, hand_off=True)
        self.block_hashes = list(block_hashes)
        self.on_chunk = on_chunk
        self.on_first_token = on_first_token

    def matchable_hashes(self) -> list[bytes]:
        return self.block_hashes[: matchable_blocks(self.prompt_len, self.block_size)]

    def publishable_hashes(self) -> list[bytes]:
        return self.block_hashes[: self.computed // self.block_size]


class SimulatedPrefillPod(_PodProcess):
    def __init__(self, clock: VirtualClock, rates: HardwareRates, shape: PodShape, publisher: SimPublisher) -> None:
        super().__init__(clock, rates, shape, publisher)
        limits = {"chunk_tokens": shape.chunk_tokens, "max_seqs": shape.max_seqs}
        config = SchedulerConfig(**limits, max_model_len=shape.capacity + 1)
        self._scheduler = Scheduler(config, self.pool)
        self._stepping = False
        self._rate = 0.0

    def add(self, prompt: PromptSequence) -> None:
        """Queues a prompt. Raises InvalidRequest if it can never fit."""
        self._scheduler.add(prompt)
        self._wake()

    def add_prefix(self, block_hashes: Sequence[bytes]) -> None:
        """Adds pulled blocks to the cache. Has no effect without room for them."""
        lease = self.pool.lease(block_hashes, len(block_hashes)) if self.alive else None
        if lease is not None:
            lease.publish(block_hashes)
            lease.finish("pulled")

    def release(self, prompt: PromptSequence) -> None:
        """Ends the lease of a prompt after its KV was sent. The blocks stay cached."""
        if self.alive and prompt.lease is not None:
            prompt.lease.finish("handed off")
            self._wake()

    def cancel(self, prompt: PromptSequence) -> None:
        """Removes a prompt in any state. Idempotent."""
        self._scheduler.abort(prompt.request_id)
        self.release(prompt)

    def load(self) -> PodLoad:
        stats = self._scheduler.stats()
        return PodLoad(
            queued_tokens=stats.queued_tokens,
            running=stats.running,
            waiting=stats.waiting,
            free_blocks=self.pool.num_available(),
            prefill_rate=self._rate,
            prefill_overhead_s=self._rates.prefill_overhead_s,
            transfer_rate=self._rates.link_byte_s / self._rates.kv_bytes,
        )

    def _wake(self) -> None:
        if self.alive and not self._stepping:
            self._stepping = True
            self._clock.call_at(self._clock.now, self._step)

    def _step(self) -> None:
        """Starts a step. The pod sleeps until `_wake` if it has no work, or no blocks before a release."""
        if not self.alive:
            return
        batch = self._scheduler.schedule()
        if not batch:
            self._stepping = False
            return
        seconds = self._rates.prefill_s([(item.start, item.num_new) for item in batch])
        self._clock.call_after(seconds, lambda: self._on_step_done(batch, seconds))

    def _on_step_done(self, batch: list[ScheduledSequence], seconds: float) -> None:
        if not self.alive:
            return
        self.busy_s += seconds
        num_tokens = sum(item.num_new for item in batch)
        self.computed_tokens += num_tokens
        rate = num_tokens / seconds
        self._rate = _RATE_MEMORY * self._rate + (1 - _RATE_MEMORY) * rate if self._rate else rate
        finished: list[PromptSequence] = []
        for item in batch:
            prompt = item.seq
            assert isinstance(prompt, PromptSequence)
            if prompt.finish_reason is not None or prompt.lease is None or prompt.lease.finished:
                continue  # cancelled during the step
            prompt.computed += item.num_new
            prompt.publish()
            prompt.on_chunk(prompt)
            if item.samples:
                finished.append(prompt)
        for prompt in finished:
            self._scheduler.finish(prompt, FinishReason.LENGTH)
            prompt.on_first_token(prompt)
        self._step()


@dataclass(slots=True, eq=False)
class DecodeSequence:
    lease: Lease
    cached_blocks: int  # Prompt blocks that the pod had in its cache.
    context: int  # Prompt tokens.
    tokens_left: int  # Tokens to decode.
    on_end: Callable[[], None]  # Called after the last token.
    block_hashes: Sequence[bytes]
    end_step: float = 0.0  # Step of the pod at which the sequence ends; 0 while it does not run.


class SimulatedDecodePod(_PodProcess):
    def __init__(self, clock: VirtualClock, rates: HardwareRates, shape: PodShape, publisher: SimPublisher) -> None:
        super().__init__(clock, rates, shape, publisher)
        self._running: dict[int, DecodeSequence] = {}  # By number.
        self._ends: list[tuple[float, int, DecodeSequence]] = []  # Heap of (end step, number, sequence).
        self._waiting: deque[DecodeSequence] = deque()
        self._last_number = 0
        self._context = 0.0  # Tokens of all running contexts.
        self._steps = 0.0  # Steps since the start, up to time `_since`.
        self._since = 0.0
        self._step_s = 0.0  # Current step time.
        self._alarm = 0  # Number of the newest scheduled wake-up; older ones have no effect.

    def reserve(
        self, prompt_len: int, output_len: int, block_hashes: Sequence[bytes], on_end: Callable[[], None]
    ) -> DecodeSequence | None:
        """Reserves blocks for the prompt and the whole output. Returns None if there is no room now."""
        size = self._shape.block_size
        total = -(-(prompt_len + output_len) // size)
        if (lease := self.pool.lease(list(block_hashes[: (prompt_len - 1) // size]), total)) is None:
            return None
        return DecodeSequence(lease, lease.cached_blocks, prompt_len, output_len - 1, on_end, block_hashes)

    def join(self, sequence: DecodeSequence) -> None:
        """Queues a sequence after its KV has arrived. It decodes as soon as a slot is free."""
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
        self._advance()
        super().kill()

    def load(self) -> PodLoad:
        running, flat = len(self._running), self._rates.decode_s(1, 0)
        mean = self._context / running if running else 1024.0
        return PodLoad(
            running=running,
            waiting=len(self._waiting),
            free_blocks=self.pool.num_available(),
            step_s=flat,
            step_slope_s=(self._rates.decode_s(_SLOPE_BATCH, _SLOPE_BATCH * mean) - flat) / _SLOPE_BATCH,
            transfer_rate=self._rates.link_byte_s / self._rates.kv_bytes,
        )

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


class SimulatedPod:
    """A pod that can die and start again under the same name, with its network link and its requests.

    A gateway notices a death by a failed call or its next poll; the index notices it when the lease expires.
    """

    def __init__(self, index: SimIndex, name: str, role: Role, rates: HardwareRates, shape: PodShape) -> None:
        self.name = name
        self.role = role
        self.shape = shape
        self.rates = rates
        self.generation = 0  # Number of the process, from 1.
        self.on_lost: dict[str, Callable[[SimulatedPod], None]] = {}  # Called when the pod dies, by lost request.
        self.prompts = 0  # Prompts that the pod was given.
        self._link_free_at = 0.0  # When everything given to the link has been sent.
        self.computed_before = 0  # Prompt tokens that earlier processes computed.
        self._index = index
        self._publisher, self.process = self._start_process()

    @property
    def alive(self) -> bool:
        return self.process.alive

    @property
    def prefill(self) -> SimulatedPrefillPod:
        assert isinstance(self.process, SimulatedPrefillPod)
        return self.process

    @property
    def decode(self) -> SimulatedDecodePod:
        assert isinstance(self.process, SimulatedDecodePod)
        return self.process

    def _start_process(self) -> tuple[SimPublisher, SimulatedPrefillPod | SimulatedDecodePod]:
        """Starts a process of the next generation."""
        self.generation += 1
        self._link_free_at = 0.0
        publisher = self._index.publisher(self.name, self.generation)
        kind = SimulatedPrefillPod if self.role is Role.PREFILL else SimulatedDecodePod
        process = kind(self._index.clock, self.rates, self.shape, publisher)
        publisher.start(process.pool.cached_hashes)
        return publisher, process

    def slow_down(self, factor: float) -> None:
        """The steps of the present process take `factor` times as long from now on; 1.0: as usual."""
        self.process.set_rates(self.rates.slower(factor))

    def kill(self) -> None:
        """Ends the process. Its requests are notified, its cache is lost, its index entries stay until they expire."""
        if not self.process.alive:
            return
        self.process.kill()
        self._publisher.stop()
        lost, self.on_lost = self.on_lost, {}
        for on_lost in lost.values():
            on_lost(self)

    def restart(self) -> None:
        assert not self.process.alive
        self.computed_before += self.process.computed_tokens
        self._publisher, self.process = self._start_process()

    def change_role(self, role: Role, shape: PodShape) -> None:
        """Starts again in another role, with an empty cache."""
        self.role, self.shape = role, shape
        self.restart()

    def send_kv(self, tokens: float) -> float:
        """Queues the KV of tokens on the network link, behind earlier transfers. Returns when it is sent."""
        seconds = tokens * self.rates.kv_bytes / self.rates.link_byte_s
        self._link_free_at = max(self._index.clock.now, self._link_free_at) + seconds
        return self._link_free_at
