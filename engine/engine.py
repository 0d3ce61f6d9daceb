"""One model on one device: weights, KV pool, scheduler and sampler behind `add`, `abort` and `step`.

Lifecycle of a sequence: `add` takes it in (and its lease, if it brings one); steps compute and sample; when it ends the
scheduler forgets it, the hook of that step sees it once more with its lease alive, and then the engine finishes the
lease. Not thread-safe: one thread calls it (see loop.py); `pool` alone may be used from anywhere.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from common.block_hash import HASH_BYTES
from common.errors import BatonError, ConfigError, InternalError, InvalidRequest
from common.kv_layout import KVLayout
from common.types import FinishReason, Token, ValidRequest
from engine import weights
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import TritonAttention
from engine.block_pool import BlockPool
from engine.config import DEFAULT_KV_MEMORY, EngineConfig
from engine.kv_pool import DTYPES, KVPool
from engine.models.decoder import Decoder
from engine.models.spec import load_spec
from engine.runner import ItemResult, Runner
from engine.scheduler import Item, Scheduler, SchedulerConfig
from engine.sequence import Sequence

log = logging.getLogger(__name__)

assert HASH_BYTES == 16, "the pool's hashes are 128 bits"


def _ignore(hashes: list[bytes]) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one step did for one sequence.

    computed: its tokens that have KV now. chunk_done: the step computed tokens of its prompt. tokens: new ones (at most
    one here). finish: the request is over, and why. handed_off: a hand_off sequence ended here with its first token;
    another pod goes on unless finish is set too. error: why it failed; finish is ERROR then.
    """

    seq: Sequence
    computed: int
    chunk_done: bool = False
    tokens: tuple[Token, ...] = ()
    finish: FinishReason | None = None
    handed_off: bool = False
    error: BatonError | None = None

    @property
    def ended(self) -> bool:
        """The engine is done with it."""
        return self.finish is not None or self.handed_off


@dataclass(frozen=True, slots=True)
class StepResult:
    """One output per scheduled item. num_prompt_tokens excludes num_recomputed_tokens (KV lost to a preemption)."""

    outputs: list[SequenceOutput] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_decode_tokens: int = 0
    num_recomputed_tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class EngineCounters:
    """Since the start. prompt_tokens were computed for the first time, recomputed_tokens after a preemption."""

    steps: int = 0
    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    decode_tokens: int = 0
    failed_sequences: int = 0
    seconds: float = 0.0


StepHook = Callable[[StepResult], None]


class Engine:
    """See the top of this file. Raises ConfigError when the model or the machine does not fit the configuration.

    on_stored, on_evicted: hashes that the prefix cache gained and lost, see BlockPool.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_stored: Callable[[list[bytes]], None] = _ignore,
        on_evicted: Callable[[list[bytes]], None] = _ignore,
    ) -> None:
        self.config = config
        self.spec = spec = load_spec(config.model_dir)
        self.device = device = config.resolve_device()
        torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
        dtype = config.resolve_dtype(device)
        self.layout = KVLayout(
            model=config.name or config.model_dir.resolve().name,
            revision=weights.revision(spec, config.model_dir),
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=config.block_size,
            dtype=config.resolve_kv_dtype(device),
        )
        self.vocab_size = spec.vocab_size
        self.eos_token_ids = spec.eos_token_ids
        wanted_len = min(config.max_model_len or spec.max_position, spec.max_position)
        model = Decoder(spec, wanted_len, device, DTYPES[dtype])
        with torch.inference_mode():
            weights.load(model, config.model_dir)
        num_blocks = self._num_blocks()
        self.max_model_len = min(wanted_len, num_blocks * config.block_size)
        self.kv = KVPool(self.layout, num_blocks, device)
        self.pool = BlockPool(num_blocks, config.block_size, on_stored=on_stored, on_evicted=on_evicted)
        self.scheduler = Scheduler(
            SchedulerConfig(
                token_budget=config.token_budget, max_seqs=config.max_seqs, max_model_len=self.max_model_len
            ),
            self.pool,
        )
        attention = TritonAttention if device.type == "cuda" else TorchAttention
        backend = attention(self.kv.layers(), spec.num_heads, spec.windows, self.kv.dummy_block)
        self.runner = Runner(model, self.kv, backend)
        self.counters = EngineCounters()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def new_sequence(self, request: ValidRequest, **kwargs: Any) -> Sequence:
        """A sequence for this engine's layout; keyword arguments are Sequence's."""
        return Sequence(request, fingerprint=self.layout.fingerprint, block_size=self.layout.block_size, **kwargs)

    def add(self, seq: Sequence) -> None:
        """Takes a sequence in, and its lease with it: when this raises InvalidRequest, the lease is finished."""
        try:
            self._check_ids(seq)
            self.scheduler.add(seq)
        except BatonError:
            if seq.lease is not None:
                seq.lease.finish("refused")
            raise

    def abort(self, request_id: str) -> Sequence | None:
        """Ends a sequence wherever it is; None when it is not here any more. Call between steps."""
        seq = self.scheduler.abort(request_id)
        if seq is not None and seq.lease is not None:
            seq.lease.finish("abort")
        return seq

    def step(self, hook: StepHook | None = None) -> StepResult:
        """Schedules, computes and accounts one step; empty when nothing can run now.

        hook sees the result while the leases of sequences that ended in this step are still alive: it may take holds
        on them. A failure of the step ends its sequences with an error and is not raised; one of the hook is raised.
        """
        started = time.perf_counter()
        items: list[Item] = []
        try:
            items = self.scheduler.schedule().items
        except Exception as error:
            outputs = self._fail_all(error)
        else:
            if not items:
                return StepResult()
            fence = self.pool.begin_step()
            try:
                outputs = [self._account(*pair) for pair in zip(items, self._run(items), strict=True)]
            finally:
                fence.end()
        result = self._result(items, outputs, time.perf_counter() - started)
        try:
            if hook is not None:
                hook(result)
        finally:
            for output in outputs:
                if output.ended and output.seq.lease is not None:
                    output.seq.lease.finish("handed off" if output.finish is None else str(output.finish))
        return result

    def _run(self, items: list[Item]) -> list[ItemResult | InternalError]:
        try:
            results = self.runner.collect(self.runner.launch(items))
        except Exception as error:
            log.exception("a step of %d sequences failed", len(items))
            failure = InternalError(f"the engine step failed: {error}")
            return [failure] * len(items)
        return [r if r.finite else InternalError("the model's output is not a number") for r in results]

    def _account(self, item: Item, result: ItemResult | InternalError) -> SequenceOutput:
        """Advances one sequence by what the step did for it; its failure is its own."""
        if isinstance(result, InternalError):
            # What this step wrote is not to be trusted, so nothing of it is published.
            return self._fail(item.seq, result)
        try:
            return self._advance(item, result)
        except Exception as error:
            log.exception("accounting for request %s failed", item.seq.request_id)
            return self._fail(item.seq, InternalError(f"the engine step failed: {error}"))

    def _advance(self, item: Item, result: ItemResult) -> SequenceOutput:
        seq = item.seq
        seq.computed = item.start + item.num_new
        finish: FinishReason | None = None
        tokens: tuple[Token, ...] = ()
        if result.token is not None:
            tokens = (result.token,)
            seq.append(result.token.id)
            finish = self._finish_reason(seq, result.token.id)
        seq.publish()
        handed_off = seq.hand_off and bool(tokens)
        if finish is not None or handed_off:
            self.scheduler.finish(seq, finish or FinishReason.LENGTH)
        return SequenceOutput(seq, seq.computed, item.start < seq.prompt_len, tokens, finish, handed_off)

    def _fail(self, seq: Sequence, error: BatonError) -> SequenceOutput:
        self.counters.failed_sequences += 1
        self.scheduler.finish(seq, FinishReason.ERROR)
        return SequenceOutput(seq, seq.computed, finish=FinishReason.ERROR, error=error)

    def _fail_all(self, cause: Exception) -> list[SequenceOutput]:
        """The scheduler's state cannot be trusted any more: everything it knows ends."""
        log.error("the scheduler failed", exc_info=cause)
        error = InternalError(f"the scheduler failed: {cause}")
        found = [self.scheduler.find(request_id) for request_id in self.scheduler.request_ids()]
        return [self._fail(seq, error) for seq in found if seq is not None]

    def _finish_reason(self, seq: Sequence, token: int) -> FinishReason | None:
        params = seq.request.sampling
        if token in params.stop_token_ids and seq.num_output > params.min_tokens:
            return FinishReason.STOP
        if seq.num_output >= params.max_tokens or len(seq.tokens) >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def _result(self, items: list[Item], outputs: list[SequenceOutput], seconds: float) -> StepResult:
        recomputed = sum(item.recomputed for item in items)
        prompt = sum(_new_prompt_tokens(item) for item in items)
        # What is left has KV for the first time and is output, also when a chunk after a preemption ends with it.
        decoded = sum(item.num_new for item in items) - prompt - recomputed
        counters = self.counters
        counters.steps += 1
        counters.prompt_tokens += prompt
        counters.decode_tokens += decoded
        counters.recomputed_tokens += recomputed
        counters.seconds += seconds
        return StepResult(outputs, prompt, decoded, recomputed, seconds)

    def _check_ids(self, seq: Sequence) -> None:
        """A token id outside the vocabulary would fail the whole step that meets it."""
        params = seq.request.sampling
        for name, ids in (
            ("prompt", seq.tokens),
            ("logit_bias", [token for token, _ in params.logit_bias]),
            ("stop_token_ids", params.stop_token_ids),
        ):
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                raise InvalidRequest(f"{name} has token ids outside 0..{self.vocab_size - 1}", field=name)

    def _num_blocks(self) -> int:
        """Blocks of the pool; called once the weights are loaded."""
        if self.config.num_blocks:
            return self.config.num_blocks
        memory = self.config.kv_memory
        if not memory and self.device.type == "cuda":
            memory = int(torch.cuda.mem_get_info(self.device)[0] * 0.9)
        memory = memory or DEFAULT_KV_MEMORY
        blocks = memory // self.layout.block_bytes - 2
        if blocks < 2:
            raise ConfigError(
                f"{memory} bytes hold fewer than 4 KV blocks of {self.layout.block_bytes} bytes", field="kv_memory"
            )
        return blocks


def _new_prompt_tokens(item: Item) -> int:
    """Prompt tokens of the item that have KV for the first time."""
    end = min(item.start + item.num_new, item.seq.prompt_len)
    return max(0, end - max(item.start, item.seq.recompute_until))
