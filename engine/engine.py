"""One model on one device (or one group of ranks): `add`, `abort` and `step`.

    add(seq) -> waiting and running in the scheduler -> step() ... step() -> on_step sees the last output -> lease ends

The engine is not thread-safe. One thread calls it (loop.py), with the engine's device as its current device
(`make_current`); the thread that makes an engine gets this device too. Any thread may use `pool`.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import time
import weakref
from collections import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from common.block_hash import HASH_BYTES
from common.errors import ConfigError, InvalidRequest
from common.grammar import CompiledGrammar, GrammarCompiler, GrammarTokenizer
from common.kv_layout import KVLayout
from common.types import ValidRequest
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import TritonAttention
from engine.config import DEFAULT_KV_MEMORY, EngineConfig
from engine.device import gpu_start_lock, make_current, require_memory
from engine.kv.blocks import BlockPool
from engine.kv.host_copier import HostCopier
from engine.kv.host_pool import HostKVPool
from engine.kv.kv_pool import TORCH_DTYPES, KVPool
from engine.models.base import Model, ModelShape
from engine.models.loader import open_model
from engine.parallel.builder import EngineBuilder, SingleDeviceBuilder
from engine.parallel.leader import TensorParallelBuilder
from engine.parallel.rank_group import RankGroup
from engine.sampling.constraint import Constraint, needs_constraint
from engine.schedule.outputs import EngineCounters, Inbox, OnStep, StepResult
from engine.schedule.scheduler import Scheduler, SchedulerConfig
from engine.schedule.sequence import Sequence
from engine.schedule.stepper import Stepper
from engine.speculation.controller import DraftController
from engine.speculation.draft_model import AttentionClass, BuildDraftModel
from engine.speculation.draft_source import DraftSource, open_draft
from engine.speculation.model_proposer import ModelProposer
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import Proposer
from engine.speculation.speculator import Speculator
from engine.speculation.suffix import SuffixProposer
from engine.step.memory import EXTRA_BLOCKS, blocks_that_fit, measure_memory
from engine.step.runner import ModelRunner
from engine.step.warm_up import StepRows, chunk_graph_shapes, cudnn_plan_steps, kernel_steps, largest_step

if TYPE_CHECKING:
    from engine.sampling.device_sampler import DeviceSampler

log = logging.getLogger(__name__)

#: Bytes of one copy to the host. It takes 0.6 ms over PCIe, and a load may wait that long.
HOST_COPY_BYTES = 32 << 20
#: Most sequences that verify drafts in one step on a GPU. Larger steps are compute-bound, so drafts cost time there.
MAX_DRAFTING_SEQS = 128

assert HASH_BYTES == 16, "the pool's hashes are 128 bits"


def _no_callback(hashes: list[bytes]) -> None:
    """Does nothing."""


class Engine:
    """Weights, KV pool, scheduler, sampler and runner of one model."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        start_ranks: Callable[[EngineConfig], RankGroup] = RankGroup.start,
        on_stored: Callable[[list[bytes]], None] = _no_callback,
        on_evicted: Callable[[list[bytes]], None] = _no_callback,
        on_host_stored: Callable[[list[bytes]], None] = _no_callback,
        on_host_evicted: Callable[[list[bytes]], None] = _no_callback,
    ) -> None:
        """Loads the model and allocates the KV pool. ConfigError if the model or the machine does not fit the config.

        Args:
            config: The configuration.
            start_ranks: Starts the other ranks if tensor_parallel_size is above 1; the engine closes them.
            on_stored: Gets hashes that the prefix cache gained, see BlockPool.
            on_evicted: Gets hashes that the prefix cache lost.
            on_host_stored: Gets hashes that the host tier gained.
            on_host_evicted: Gets hashes that the host tier lost.
        """
        self.config = config
        source = open_model(config.model_dir, config.load_format, config.weights_seed)
        self.spec = spec = source.spec
        self.device = device = config.resolve_device()
        make_current(device)
        torch.set_num_threads(config.threads_per_rank)
        self.rank_group: RankGroup | None = None
        self._close_ranks: Callable[[], object] = lambda: None
        self._builder: EngineBuilder = SingleDeviceBuilder(source, device)
        if config.tensor_parallel_size > 1:
            TensorParallelBuilder.check(config, source, device)
            self.rank_group = start_ranks(config)
            self._close_ranks = weakref.finalize(self, self.rank_group.close)
            self._builder = TensorParallelBuilder(self.rank_group, config, source, device)
        dtype = config.resolve_dtype(device)
        max_len = min(config.max_model_len or spec.max_position, spec.max_position)
        draft = self._open_draft(spec, max_len)
        self.layout = KVLayout(
            model=config.name or config.model_dir.resolve().name,
            revision=source.revision(device),
            num_layers=spec.num_layers,
            tensor_parallel=self._builder.shard.size,
            num_kv_heads=self._builder.shard.shard_spec(spec).num_kv_heads,
            head_dim=spec.head_dim,
            block_size=config.block_size,
            dtype=config.resolve_kv_dtype(device),
            **({} if draft is None else draft.layout_fields(device)),
        )
        self._fingerprint = self.layout.fingerprint
        self._host_blocks = config.host_cache // self.layout.block_bytes
        self.vocab_size = spec.vocab_size
        self.eos_token_ids = spec.eos_token_ids
        self.grammar_compiler = GrammarCompiler(
            GrammarTokenizer(config.model_dir, eos_ids=spec.eos_token_ids, vocab_size=spec.vocab_size)
        )
        with gpu_start_lock(device):
            self._allocate(
                draft,
                dtype,
                max_len,
                on_stored=on_stored,
                on_evicted=on_evicted,
                on_host_stored=on_host_stored,
                on_host_evicted=on_host_evicted,
            )
        self._pads_steps = self.runner.decode_step is not None
        self._stepper = Stepper(
            self.scheduler,
            self.pool,
            self.runner,
            max_model_len=self.max_model_len,
            overlap=config.resolve_overlap(device),
            draft_model_lags=self.runner.draft_model_lags,
        )
        self._speculator: Speculator | None = None
        if config.speculation != "none":
            self.set_proposer(self.configured_proposer())
        self.host_memory: HostKVPool | None = None
        self._stop_copier: Callable[[], object] = lambda: None
        if self.pool.host_tier is not None:
            self.host_memory = HostKVPool(self.kv, self._host_blocks)
            copier = HostCopier(self.pool.host_tier, self.host_memory, checksums=config.checksums)
            self._stop_copier = weakref.finalize(self, copier.stop)

    def _allocate(
        self,
        draft: DraftSource | None,
        dtype: str,
        max_len: int,
        *,
        on_stored: Callable[[list[bytes]], None],
        on_evicted: Callable[[list[bytes]], None],
        on_host_stored: Callable[[list[bytes]], None],
        on_host_evicted: Callable[[list[bytes]], None],
    ) -> None:
        """Loads the weights as `dtype` and makes the KV pool, block pool, scheduler and runner."""
        config, device, spec = self.config, self.device, self.spec
        model = self._builder.load(max_len, dtype)
        make_draft = None if draft is None else draft.load(model, max_len, device, TORCH_DTYPES[dtype])
        chunk_tokens, prompt_step_tokens, max_seqs = config.resolve_limits(device)
        self._sampler: DeviceSampler | None = None
        if device.type == "cuda":
            from engine.sampling.device_sampler import DeviceSampler

            torch.set_float32_matmul_precision("highest")
            self._sampler = DeviceSampler(max_seqs, spec.vocab_size, device, max_drafts=self._draft_limits()[1])
        graphs = config.cuda_graphs and device.type == "cuda" and model.capturable
        build = functools.partial(self._build_runner, model, make_draft, self._sampler, max_len, graphs=graphs)
        limits = SchedulerConfig(
            chunk_tokens=chunk_tokens,
            prompt_step_tokens=prompt_step_tokens,
            local_chunk_tokens=config.local_chunk_tokens,
            max_seqs=max_seqs,
            max_model_len=max_len,
        )
        num_blocks = self._num_blocks(build, limits, graphs=graphs)
        self.max_model_len = min(max_len, num_blocks * config.block_size)
        self.kv = self._builder.pool(self.layout, num_blocks, device)
        self.pool = BlockPool(
            num_blocks,
            config.block_size,
            on_stored=on_stored,
            on_evicted=on_evicted,
            host_blocks=self._host_blocks,
            host_batch=max(1, HOST_COPY_BYTES // self.layout.block_bytes),
            on_host_stored=on_host_stored,
            on_host_evicted=on_host_evicted,
        )
        self.scheduler = Scheduler(dataclasses.replace(limits, max_model_len=self.max_model_len), self.pool)
        self.runner = build(self.kv)
        if device.type == "cuda":
            self._compile_kernels()

    def close(self) -> None:
        """Ends the copier of the host tier and the other ranks. No step may be in flight. Idempotent."""
        self._stop_copier()
        self._close_ranks()

    @property
    def failure(self) -> str | None:
        """Why the engine cannot compute any more (a rank was lost); None while it can. Any thread may read it."""
        return None if self.rank_group is None else self.rank_group.failure

    @property
    def counters(self) -> EngineCounters:
        return self._stepper.counters

    @property
    def speculator(self) -> Speculator | None:
        """The object that proposes drafts and has their statistics; None without speculation."""
        return self._speculator

    def configured_proposer(self) -> Proposer:
        """Makes a new proposer of the kind in the configuration."""
        kind = self.config.speculation
        if self.runner.draft_loop is not None:
            return ModelProposer(self.runner.draft_loop, self.scheduler.reserve_for_drafts)
        assert kind in ("ngram", "suffix")
        return NgramProposer() if kind == "ngram" else SuffixProposer()

    def set_proposer(self, proposer: Proposer | None, controller: DraftController | None = None) -> None:
        """Replaces the proposer of drafts; None for no drafts.

        Only while no sequence is in the engine, and only if the configuration names a proposer: graphs and buffers are
        made for drafts then. The default `controller` lets the sequences draft that gain time by it.
        """
        drafts, max_drafts = self._draft_limits()
        assert drafts
        assert not self.has_work
        self._speculator = None
        if proposer is not None:
            has_model = isinstance(proposer, ModelProposer)
            controller = controller or DraftController(drafts, pads_steps=self._pads_steps, has_model=has_model)
            self._speculator = Speculator(proposer, controller, max_seqs=max_drafts // drafts)
        self._stepper.speculator = self._speculator

    @property
    def has_work(self) -> bool:
        """Whether a step is on the device, or a sequence wants to run."""
        return self._stepper.has_work

    def new_sequence(
        self,
        request: ValidRequest,
        *,
        grammar: CompiledGrammar | None = None,
        output: abc.Sequence[int] = (),
        **kwargs: Any,
    ) -> Sequence:
        """Makes a sequence for this engine; passes `kwargs` to Sequence. Any thread may call it.

        `grammar` is the request's grammar, compiled; without it this method compiles it, which may take a second.
        Raises InvalidRequest if it cannot be compiled, BatonError if `output` does not match it.
        """
        constraint = None
        if needs_constraint(request):
            self._check_ids(request, output)
            if grammar is None and request.grammar is not None:
                grammar = self.grammar_compiler.compile(request.grammar)
            constraint = Constraint(request, self.vocab_size, grammar=grammar, output=output)
        return Sequence(
            request,
            fingerprint=self._fingerprint,
            block_size=self.layout.block_size,
            output=output,
            constraint=constraint,
            **kwargs,
        )

    def add(self, seq: Sequence) -> None:
        """Adds a sequence and its lease. If this raises (usually InvalidRequest), the lease is finished."""
        try:
            self._check_ids(seq.request, seq.output)
            if self._sampler is not None:
                self._sampler.validate(seq.request.sampling)
            self.scheduler.add(seq)
        except Exception:
            if seq.lease is not None:
                seq.lease.finish("refused")
            raise

    def abort(self, request_id: str, child: int | None = None) -> list[Sequence]:
        """Ends the sequences of a request, or one child; returns the ended ones."""
        ended = self.scheduler.abort(request_id, child)
        for seq in ended:
            if seq.lease is not None:
                seq.lease.finish("abort")
        return ended

    def step(self, on_step: OnStep | None = None, inbox: Inbox | None = None) -> StepResult:
        """Runs one step and returns its result, which is empty if nothing can run now.

        With overlap, the next step is launched before the result is read.

        `on_step` gets the result before the leases of ended sequences finish, so it may pin their blocks. `inbox` runs
        messages while the device computes; sequences that it adds are in the next step if that is not launched yet.
        An error of the step ends the step's sequences and is not raised; an error of `on_step` is raised.
        """
        return self._stepper.step(on_step, inbox)

    def finish_in_flight(self, on_step: OnStep | None = None) -> None:
        """Waits for the step on the device, if there is one; launches nothing."""
        self._stepper.finish_in_flight(on_step)

    def _check_ids(self, request: ValidRequest, output: abc.Sequence[int]) -> None:
        """Raises InvalidRequest for token ids outside the vocabulary, which would fail the whole step."""
        params = request.sampling
        for name, ids in (
            ("prompt", (*request.prompt_ids, *output)),
            ("logit_bias", [token for token, _ in params.logit_bias]),
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids),
            ("bad_words", [token for word in params.bad_words for token in word]),
        ):
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                raise InvalidRequest(f"{name} has token ids outside 0..{self.vocab_size - 1}", field=name)

    def warm_up(self) -> None:
        """Builds the cuDNN plans of long prompts. Does nothing on a CPU.

        Call it before the first request, on the thread that will run the steps: plans belong to a thread.
        """
        if self.device.type == "cuda":
            limits = self.scheduler.config
            shared = limits.prompt_step_tokens or limits.chunk_tokens
            last = min(limits.chunk_tokens, shared)
            for rows in cudnn_plan_steps(limits.max_step_tokens, shared, limits.max_seqs, limits.max_model_len, last):
                self.runner.warm_up_attention(rows, self.kv.dummy_block)
            torch.cuda.synchronize(self.device)

    def _compile_kernels(self) -> None:
        """Compiles kernels and captures graphs, so that the first requests do not wait for it."""
        began = time.monotonic()
        limits = self.scheduler.config
        steps = kernel_steps(limits.max_step_tokens, limits.max_seqs, limits.max_model_len, self._draft_limits()[0])
        pool = self.config.kv_pool_setting
        with require_memory("the first steps", pool, f"lower {pool}"):
            self._warm_up_steps(steps)
        log.info("kernels are ready after %.0f s", time.monotonic() - began)
        with require_memory("CUDA graphs", pool, self.config.cuda_graph_advice(pool)):
            self.runner.capture()
        # All objects that exist now stay. A full collection that visits them would take as long as several steps.
        gc.collect()
        gc.freeze()

    def _warm_up_steps(self, steps: list[StepRows]) -> None:
        for rows in steps:
            self.runner.warm_up(rows, self.kv.dummy_block)
        torch.cuda.synchronize(self.device)

    def _num_blocks(self, build: Callable[[KVPool], ModelRunner], limits: SchedulerConfig, *, graphs: bool) -> int:
        """Returns the number of blocks of the pool. Called after the weights are loaded.

        `build` makes a runner, to measure memory.
        """
        config, layout = self.config, self.layout
        if config.num_blocks:
            return config.num_blocks
        if not config.kv_memory and self.device.type == "cuda":
            step = largest_step(limits.max_step_tokens, limits.max_seqs, limits.max_model_len, *self._draft_limits())
            share = config.gpu_memory_utilization
            make_pool = functools.partial(self._builder.pool, layout, 1, self.device)
            remedy = config.cuda_graph_advice() if graphs else None
            use = measure_memory(build, make_pool, self.device, share=share, graphs=remedy, step=step)
            blocks = blocks_that_fit(use, layout)
            log.info("%d KV blocks of %d tokens: %s", blocks, layout.block_size, use.summary())
            return blocks
        memory = config.kv_memory or DEFAULT_KV_MEMORY
        blocks = memory // layout.block_bytes - EXTRA_BLOCKS
        if blocks < 2:
            raise ConfigError(
                f"kv_memory: {memory} bytes hold fewer than 4 KV blocks of {layout.block_bytes} bytes",
                field="kv_memory",
            )
        return blocks

    def _open_draft(self, spec: ModelShape, max_len: int) -> DraftSource | None:
        """Opens the draft model that the configuration names."""
        config = self.config
        if config.speculation_model is None:
            return None
        return open_draft(
            config.speculation,
            config.speculation_model,
            spec,
            config.model_dir,
            load_format=config.load_format,
            seed=config.weights_seed,
            max_len=max_len,
        )

    def _build_runner(
        self,
        model: Model,
        make_draft: BuildDraftModel | None,
        sampler: DeviceSampler | None,
        max_len: int,
        kv: KVPool,
        *,
        graphs: bool,
    ) -> ModelRunner:
        attention: AttentionClass = TritonAttention if self.device.type == "cuda" else TorchAttention
        spec = self._builder.shard.shard_spec(self.spec)
        backend = self._builder.attention(
            attention(kv.layers(), spec.num_heads, spec.windows, kv.dummy_block, scale=spec.scale, softcap=spec.softcap)
        )
        max_blocks = self.layout.blocks_for(max_len) + 1  # a lease may have a block for the next token
        chunk_tokens, prompt_step_tokens, max_seqs = self.config.resolve_limits(self.device)
        drafts, max_drafts = self._draft_limits()
        draft = None if make_draft is None else make_draft(kv, attention)
        return ModelRunner(
            model,
            kv,
            backend,
            max_seqs=max_seqs,
            max_blocks=max_blocks,
            sampler=sampler,
            use_cuda_graphs=graphs and (draft is None or draft.capturable),
            max_step_tokens=max(chunk_tokens, prompt_step_tokens or 0),
            max_seq_drafts=drafts,
            max_drafts=max_drafts,
            rejection=self.config.speculation_accept == "rejection",
            draft_model=draft,
            chunk_graphs=chunk_graph_shapes(min(self.config.chunk_graphs, max_len), chunk_tokens),
        )

    def _draft_limits(self) -> tuple[int, int]:
        """Returns most drafts of a sequence in a step, and of all sequences of a step."""
        config = self.config
        if config.speculation == "none":
            return 0, 0
        *_, max_seqs = config.resolve_limits(self.device)
        max_drafting = min(max_seqs, MAX_DRAFTING_SEQS) if self.device.type == "cuda" else max_seqs
        return config.speculation_tokens, config.speculation_tokens * max_drafting
