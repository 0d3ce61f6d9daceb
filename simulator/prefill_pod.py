"""A prefill pod with modelled step times: the engine's scheduler and block cache, without an engine.

Lifecycle of a prompt: `add` -> waits for blocks -> chunks -> `on_first_token` (its blocks are published) -> `release`
after its KV has been sent. `kill` ends all prompts without a callback, like a process that dies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.block_hash import matchable_blocks
from common.types import FinishReason, PodLoad, SamplingParams, ValidRequest
from engine.kv.blocks import BlockPool
from engine.schedule.scheduler import ScheduledSequence, Scheduler, SchedulerConfig
from engine.schedule.sequence import Sequence as EngineSequence
from simulator.clock import VirtualClock
from simulator.hardware_rates import HardwareRates
from simulator.index import SimPublisher

_FINGERPRINT = "00" * 16  # Has no effect: the block hashes come from the trace.
_ONE_TOKEN = SamplingParams(max_tokens=1)
_RATE_MEMORY = 0.9  # Weight of the old value in the exponential mean of the prefill rate.


@dataclass(frozen=True, slots=True, kw_only=True)
class PodShape:
    """Sizes of one simulated pod."""

    block_size: int
    num_blocks: int  # Blocks of the pool.
    chunk_tokens: int = 2048  # Prompt tokens of a step.
    max_seqs: int = 64  # Sequences that run at once.

    @property
    def capacity(self) -> int:
        """Prompt and output tokens that one request can have."""
        return self.block_size * self.num_blocks

    def pool(self, publisher: SimPublisher) -> BlockPool:
        """Returns an empty block cache. The publisher gets the hashes of the blocks that enter and leave it."""
        return BlockPool(self.num_blocks, self.block_size, on_stored=publisher.stored, on_evicted=publisher.evicted)


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
        request = ValidRequest(request_id, "", (0,) * prompt_len, _ONE_TOKEN)
        super().__init__(request, fingerprint=_FINGERPRINT, block_size=block_size, hand_off=True)
        self.block_hashes = list(block_hashes)
        self.on_chunk = on_chunk
        self.on_first_token = on_first_token

    def matchable_hashes(self) -> list[bytes]:
        return self.block_hashes[: matchable_blocks(self.prompt_len, self.block_size)]

    def publishable_hashes(self) -> list[bytes]:
        return self.block_hashes[: self.computed // self.block_size]


class SimulatedPrefillPod:
    """One process of a prefill pod; a restart creates another object."""

    def __init__(self, clock: VirtualClock, rates: HardwareRates, shape: PodShape, publisher: SimPublisher) -> None:
        self.pool = shape.pool(publisher)
        self.alive = True
        self.computed_tokens = 0
        self.busy_s = 0.0
        self._clock = clock
        self._rates = rates
        config = SchedulerConfig(
            chunk_tokens=shape.chunk_tokens, max_seqs=shape.max_seqs, max_model_len=shape.capacity + 1
        )
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

    def kill(self) -> None:
        """Ends the process: no step ends and no callback is called any more."""
        self.alive = False

    def load(self) -> PodLoad:
        """Returns the load report of now."""
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
