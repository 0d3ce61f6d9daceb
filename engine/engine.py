"""One model on one device (or one group of ranks): `add`, `abort` and `step`.

    add(seq) -> waiting and running in the scheduler -> step() ... step() -> on_step sees the last output -> lease ends

The engine is not thread-safe. One thread calls it (loop.py), with the engine's device as its current device
(`make_current`); the thread that makes an engine gets this device too. Any thread may use `pool`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import time
import weakref
from collections import abc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from common.block_hash import HASH_BYTES
from common.errors import ConfigError, InternalError, InvalidRequest
from common.grammar.compiler import CompiledGrammar, GrammarCompiler, GrammarTokenizer
from common.kv_layout import KVLayout
from common.model.directory import directory_name
from common.model.generation import end_token_ids
from common.types import ValidRequest
from engine.adapters.packed import Adapter
from engine.adapters.slots import AdapterSlots, HostAdapters
from engine.attention.fixed_order import FixedOrderAttention, RowWiseAttention, check_deterministic
from engine.attention.grouped import make_attention
from engine.attention.latent import LatentAttentionBackend
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import TritonAttention
from engine.config import DEFAULT_KV_MEMORY, EngineConfig
from engine.device import gpu_start_lock, make_current, require_memory
from engine.hybrid import check_hybrid, kv_groups_of, make_states, num_states, state_layout
from engine.kv.groups.grouped_blocks import make_block_pool
from engine.kv.groups.state_blocks import StateBlockPool
from engine.kv.groups.state_pool import EXTRA_SLOTS
from engine.kv.kv_pool import TORCH_DTYPES, KVPool
from engine.kv.ledger import CacheCallbacks
from engine.kv.tiers.cold_codec import check_codec
from engine.kv.tiers.file_copier import start_disk_tier, start_shared_tier
from engine.kv.tiers.host_copier import HostCopier, HostKVPool
from engine.models.base import Model
from engine.models.loader import open_model
from engine.models.pooling import pooling_of
from engine.parallel.leader import EngineBuilder, TensorParallelBuilder
from engine.parallel.rank_group import RankGroup
from engine.sampling.constraint import Constraint, needs_constraint
from engine.schedule.limits import SchedulerConfig
from engine.schedule.outputs import Inbox, OnStep, StepResult
from engine.schedule.scheduler import ScheduledSequence, Scheduler
from engine.schedule.sequence import Sequence
from engine.schedule.states import plan_states
from engine.schedule.stepper import Stepper
from engine.speculation.controller import DraftController
from engine.speculation.draft_loop import ModelProposer
from engine.speculation.draft_model import AttentionClass, BuildDraftModel
from engine.speculation.draft_source import DraftSource, open_draft
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import Proposer
from engine.speculation.speculator import Speculator
from engine.speculation.suffix import SuffixProposer
from engine.step import warm_up
from engine.step.runner import ModelRunner

if TYPE_CHECKING:
    from engine.sampling.device_sampler import DeviceSampler

log = logging.getLogger(__name__)
MAX_DRAFTING_SEQS = 128  # Verify drafts in one step on a GPU; larger steps are compute-bound, so drafts cost time

assert HASH_BYTES == 16, "the pool's hashes are 128 bits"


class Engine:
    """Weights, KV pool, scheduler, sampler and runner of one model."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        start_ranks: Callable[[EngineConfig], RankGroup] = RankGroup.start,
        **callbacks: Unpack[CacheCallbacks],
    ) -> None:
        """Loads the model and allocates the KV pool. ConfigError if the model or the machine does not fit the config.

        `start_ranks` starts the other ranks if tensor_parallel_size is above 1; the engine closes them.
        """
        self.config = config
        form = config.load_format, config.weights_seed, config.weights
        source = open_model(config.model_dir, *form, deterministic=config.deterministic)
        self.spec = spec = source.spec
        groups = kv_groups_of(config, spec)
        self.device = device = config.resolve_device()
        if config.deterministic:
            dtype = config.resolve_dtype(device)
            check_deterministic(device, dtype, head_dim=spec.head_dim, vocab_size=spec.vocab_size)
            log.info("deterministic: the bits of a token do not depend on batch, chunks, cache hits or drafts")
        check_hybrid(config, spec)
        make_current(device)
        torch.set_num_threads(config.threads_per_rank)
        self.rank_group: RankGroup | None = None
        self._close_ranks: Callable[[], object] = lambda: None
        self._builder = EngineBuilder(source, device)
        if config.tensor_parallel_size > 1:
            TensorParallelBuilder.check(config, source, device)
            self.rank_group = start_ranks(config)
            self._close_ranks = weakref.finalize(self, self.rank_group.close)
            self._builder = TensorParallelBuilder(self.rank_group, config, source, device)
        chunk_tokens, prompt_step_tokens, max_seqs = config.resolve_limits(device)
        limits = SchedulerConfig(
            chunk_tokens=chunk_tokens,
            prompt_step_tokens=prompt_step_tokens,
            local_chunk_tokens=config.local_chunk_tokens,
            max_seqs=max_seqs,
            max_model_len=_checked_max_len(config.max_model_len, spec.max_position),
        )
        #: Max drafts of a sequence in a step, and of all sequences of a step.
        self._max_seq_drafts = 0 if config.speculation == "none" else config.speculation_tokens
        max_drafting = min(max_seqs, MAX_DRAFTING_SEQS) if device.type == "cuda" else max_seqs
        self._max_drafts = self._max_seq_drafts * max_drafting
        draft: DraftSource | None = None
        if config.speculation_model is not None:
            draft = open_draft(
                config.speculation,
                Path(config.speculation_model),
                spec,
                config.model_dir,
                load_format=config.load_format,
                seed=config.weights_seed,
                max_len=limits.max_model_len,
            )
        self.layout = KVLayout(
            model=config.name or directory_name(config.model_dir).rpartition("/")[2],
            revision=source.revision(device),
            weights=source.weights_text,
            num_layers=spec.kv_layers,
            tensor_parallel=self._builder.shard.size,
            num_kv_heads=spec.num_kv_heads,
            kv_order=config.resolve_kv_order(spec.num_kv_heads),
            head_dim=spec.head_dim,
            latent_dim=spec.latent_dim,
            block_size=config.block_size,
            dtype=config.resolve_kv_dtype(device, latent=spec.latent_dim > 0),
            groups=groups,
            **state_layout(spec.states, config.resolve_dtype(device)),
            disk_codec="" if config.disk_cache_codec == "none" else config.disk_cache_codec,
            **({} if draft is None else draft.layout_fields(device)),
        )
        check_codec(self.layout)
        self._fingerprint = self.layout.fingerprint
        self.vocab_size = spec.vocab_size
        self.eos_token_ids = tuple(i for i in end_token_ids(config.model_dir) if i < spec.vocab_size)
        self.pooling = pooling_of(config.model_dir, config.pooling)  # How embeddings are made
        tokenizer = GrammarTokenizer(config.model_dir, eos_ids=self.eos_token_ids, vocab_size=spec.vocab_size)
        self.grammar_compiler = GrammarCompiler(tokenizer)
        with gpu_start_lock(device):
            self._allocate(limits, draft, callbacks)
        self._stepper = Stepper(
            self.scheduler,
            self.pool,
            self.runner,
            max_model_len=self.max_model_len,
            overlap=config.resolve_overlap(device),
            assign_adapters=None if self._slots is None else self._slots.assign,
            draft_model_lags=self.runner.draft_model_lags,
            plan_states=functools.partial(plan_states, self.pool) if isinstance(self.pool, StateBlockPool) else None,
        )
        self.counters = self._stepper.counters
        self.speculator: Speculator | None = None  # Proposes drafts and has their statistics; None without speculation
        if config.speculation != "none":
            self.set_proposer(self.configured_proposer())
        self.host_memory: HostKVPool | None = None
        self._stop_copier: Callable[[], object] = lambda: None
        if self.pool.host_tier is not None:
            num_host_blocks = self.pool.host_tier.num_host_blocks
            self.host_memory = self._builder.host_pool(self.kv, num_host_blocks, checksums=config.checksums)
            copier = HostCopier(self.pool.host_tier, self.host_memory, checksums=config.checksums)
            stops = [copier.stop]
            if config.disk_cache is not None:
                size = config.disk_cache_size
                disk = start_disk_tier(Path(config.disk_cache), size, self.layout, self.pool, copier, callbacks)
                stops = [*([] if disk is None else [disk.stop]), *stops]
            if config.shared_cache is not None:
                size = config.shared_cache_size
                shared = start_shared_tier(Path(config.shared_cache), size, self.layout, self.pool, copier)
                stops = [shared.stop, *stops]
            self._stop_copier = weakref.finalize(self, lambda: [stop() for stop in stops])

    def _allocate(self, limits: SchedulerConfig, draft: DraftSource | None, callbacks: CacheCallbacks) -> None:
        """Loads the weights, and makes the KV pool, block pool, scheduler and runner."""
        config, device, max_len = self.config, self.device, limits.max_model_len
        dtype = config.resolve_dtype(device)
        model = self._builder.load(max_len, dtype, keep_head=draft is not None)
        part = self._builder.own_part(model)
        make_draft = None if draft is None else draft.load(part, max_len, device, TORCH_DTYPES[dtype])
        self._adapters: HostAdapters | None = None
        self._slots: AdapterSlots | None = None
        if config.max_adapters:
            room = config.max_adapters, config.max_adapter_rank
            self._adapters, self._slots = self._builder.adapters(model, *room, dtype, fuses=config.fuse_adapters)
        self._sampler: DeviceSampler | None = None
        if device.type == "cuda":
            from engine.sampling.device_sampler import DeviceSampler

            torch.set_float32_matmul_precision("highest")
            self._sampler = DeviceSampler(limits.max_seqs, self.vocab_size, device, max_drafts=self._max_drafts)
        graphs = config.cuda_graphs and device.type == "cuda" and model.capturable
        states = num_states(config, self.spec.states, device, TORCH_DTYPES[dtype], limits.max_seqs)
        self._state_slots = states + EXTRA_SLOTS if states else 0
        build = functools.partial(self._build_runner, limits, model, make_draft, graphs)
        num_blocks = self._num_blocks(build, limits, graphs=graphs)
        self.kv = self._builder.pool(self.layout, num_blocks, device, self._state_slots)
        options: dict[str, Any] = {"policy": config.cache_policy, "keeps_prefixes": config.prefix_cache, **callbacks}
        if not states:
            tiers: dict[str, Any] = {"host_cache": config.host_cache, "pinned_bytes": config.cache_pin}
            tiers["tenant_pinned_bytes"] = config.cache_pin_tenant
            self.pool = make_block_pool(self.layout, num_blocks, **tiers, **options)
        else:
            slots = {"num_states": states, "spacing": config.snapshot_blocks, "state_pages": self.layout.state_pages}
            options["max_pinned"] = config.cache_pin // self.layout.block_bytes
            options["max_pinned_by_tenant"] = config.cache_pin_tenant // self.layout.block_bytes
            self.pool = StateBlockPool(num_blocks, self.layout.block_size, **slots, **options)
        self.max_model_len = min(max_len, self.pool.max_tokens)
        if self.max_model_len < config.max_model_len:
            log.warning(
                "max_model_len is %d, but the KV pool has room for %d tokens, so that is the limit: raise %s",
                config.max_model_len,
                self.max_model_len,
                config.kv_pool_setting,
            )
        self.scheduler = Scheduler(dataclasses.replace(limits, max_model_len=self.max_model_len), self.pool)
        self.runner = build(self.kv)
        if device.type == "cuda":
            self._compile_kernels()

    def close(self) -> None:
        """Ends the host tier, the file tiers and the other ranks. No step may be in flight. Idempotent."""
        self._stop_copier()
        self._close_ranks()

    @property
    def failure(self) -> str | None:
        """Why the engine cannot compute any more (a rank was lost); None while it can. Any thread may read it."""
        return None if self.rank_group is None else self.rank_group.failure

    def configured_proposer(self) -> Proposer:
        """Makes a new proposer of the kind in the configuration."""
        kind = self.config.speculation
        if self.runner.draft_loop is not None:
            return ModelProposer(self.runner.draft_loop, self.scheduler.reserve_for_drafts)
        assert kind in ("ngram", "suffix")
        return NgramProposer() if kind == "ngram" else SuffixProposer()

    def set_proposer(self, proposer: Proposer | None, controller: DraftController | None = None) -> None:
        """Replaces the proposer of drafts (None for no drafts) while no sequence is in the engine.

        The configuration must name a proposer: graphs and buffers are made for drafts then. The default `controller`
        lets the sequences draft that gain time by it.
        """
        drafts = self._max_seq_drafts
        assert drafts
        assert not self.has_work
        self.speculator = None
        if proposer is not None:
            pads_steps, has_model = self.runner.decode_step is not None, isinstance(proposer, ModelProposer)
            controller = controller or DraftController(drafts, pads_steps=pads_steps, has_model=has_model)
            self.speculator = Speculator(proposer, controller, max_seqs=self._max_drafts // drafts)
        self._stepper.speculator = self.speculator

    @property
    def steps_under_way(self) -> tuple[list[ScheduledSequence], ...]:
        """The scheduled sequences of each step that has not ended, oldest first. Any thread may read it."""
        return self._stepper.under_way

    @property
    def has_work(self) -> bool:
        """Whether a step is on the device, or a sequence wants to run."""
        return self._stepper.has_work

    def drop_unused_adapters(self) -> None:
        """Lets other ranks forget adapters without a user, as a step does. Call it on the engine's thread when idle."""
        if self._slots is not None:
            with contextlib.suppress(InternalError):  # a failed group ends by itself
                self._slots.drop_unused()

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
        adapter = self.find_adapter(request.adapter) if request.adapter else None
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
            adapter=adapter,
            **kwargs,
        )

    @property
    def adapters(self) -> HostAdapters:
        """The LoRA adapters on the host. Raises InvalidRequest if the engine has no room for adapters."""
        if self._adapters is None:
            raise InvalidRequest("the engine has no adapters: set max_adapters", field="adapter")
        return self._adapters

    def find_adapter(self, digest: str) -> Adapter:
        """Returns the adapter with this digest. Raises AdapterNotLoaded if the engine lacks it. Any thread."""
        return self.adapters.with_digest(digest)

    def warm_adapters(self) -> tuple[abc.Sequence[Adapter], int]:
        """Returns the adapters on the device, the last used first, and the copies to slots so far. Any thread."""
        return ((), 0) if self._slots is None else (self._slots.warm(), self._slots.loads)

    def add_adapter(self, directory: Path, name: str) -> Adapter:
        """Loads an adapter in PEFT's format to the host, under a new name or in place of another. Any thread.

        Requests that are under way stay with the old one. Raises as `HostAdapters.read` does.
        """
        return self.adapters.add(directory, name)

    def remove_adapter(self, name: str) -> None:
        """Forgets an adapter; requests that are under way keep it. Raises InvalidRequest for an unknown name."""
        self.adapters.remove(name)

    def add(self, seq: Sequence) -> None:
        """Adds a sequence and its lease. If this raises (usually InvalidRequest), the lease is finished."""
        try:
            self._check_ids(seq.request, seq.output, seq.logit_ids)
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

        `on_step` gets the result before the leases of ended sequences finish, so it may pin their blocks. `inbox` runs
        messages while the device computes; with overlap, sequences that it adds are in the step that is launched next.
        An error of the step ends the step's sequences and is not raised; an error of `on_step` is raised.
        """
        return self._stepper.step(on_step, inbox)

    def finish_in_flight(self, on_step: OnStep | None = None) -> None:
        self._stepper.finish_in_flight(on_step)

    def _check_ids(self, request: ValidRequest, output: abc.Sequence[int], logit_ids: abc.Sequence[int] = ()) -> None:
        """Raises InvalidRequest for token ids outside the vocabulary, which would fail the whole step."""
        params = request.sampling
        for name, ids in (
            ("prompt", (*request.prompt_ids, *output)),
            ("logit_ids", logit_ids),
            ("logit_bias", [token for token, _ in params.logit_bias]),
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids),
            ("bad_words", [token for word in params.bad_words for token in word]),
        ):
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                raise InvalidRequest(f"{name} has token ids outside 0..{self.vocab_size - 1}", field=name)

    def warm_up(self) -> None:
        """Builds the cuDNN plans of long prompts, on the thread that will run the steps.

        Does nothing on a CPU, and in the deterministic mode, which does not use cuDNN.
        """
        if self.device.type == "cuda" and not self.config.deterministic:
            limits = self.scheduler.config
            most_tokens, max_seqs, max_len = limits.step_limits
            shared_tokens = limits.prompt_step_tokens or limits.chunk_tokens
            steps = warm_up.cudnn_plan_steps(most_tokens, shared_tokens, max_seqs, max_len, limits.chunk_tokens)
            for rows in steps:
                self.runner.warm_up_attention(rows, self.kv.dummy_block)
            torch.cuda.synchronize(self.device)

    def _compile_kernels(self) -> None:
        """Compiles kernels and captures graphs, so that the first requests do not wait for it."""
        began = time.monotonic()
        pool = self.config.kv_pool_setting
        with require_memory("the first steps", pool, f"lower {pool}"):
            for rows in warm_up.kernel_steps(*self.scheduler.config.step_limits, self._max_seq_drafts):
                self.runner.warm_up(rows, self.kv.dummy_block)
            torch.cuda.synchronize(self.device)
        log.info("kernels are ready after %.0f s", time.monotonic() - began)
        with require_memory("CUDA graphs", pool, self.config.cuda_graph_advice(pool)):
            self.runner.capture()
        # All objects that exist now stay. A full collection that visits them would take as long as several steps.
        gc.collect()
        gc.freeze()

    def _num_blocks(self, build: Callable[[KVPool], ModelRunner], limits: SchedulerConfig, *, graphs: bool) -> int:
        """Returns the number of blocks of the pool, after the weights are loaded; `build` makes a runner to measure."""
        config, layout = self.config, self.layout
        if config.num_blocks:
            return config.num_blocks
        if not config.kv_memory and self.device.type == "cuda":
            use = warm_up.measure_memory(
                build,
                functools.partial(self._builder.pool, layout, 1, self.device, self._state_slots),
                self.device,
                share=config.gpu_memory_utilization,
                graphs=config.cuda_graph_advice() if graphs else None,
                step=warm_up.largest_step(*limits.step_limits, self._max_seq_drafts, self._max_drafts),
            )
            blocks = warm_up.blocks_that_fit(use, layout)
            log.info("%d KV blocks of %d tokens: %s", blocks, layout.block_size, use.summary())
            return blocks
        memory = config.kv_memory or DEFAULT_KV_MEMORY
        blocks = memory // layout.block_bytes - warm_up.EXTRA_BLOCKS - self._state_slots * layout.state_pages
        if blocks < 2:
            text = f"kv_memory: {memory} bytes hold fewer than 4 KV blocks of {layout.block_bytes} bytes"
            if self._state_slots:
                text += f" beside {self._state_slots} recurrent states of {layout.state_bytes} bytes (see num_states)"
            raise ConfigError(text, field="kv_memory")
        return blocks

    def _build_runner(
        self, limits: SchedulerConfig, model: Model, make_draft: BuildDraftModel | None, graphs: bool, kv: KVPool
    ) -> ModelRunner:
        on_gpu, fixed = self.device.type == "cuda", self.config.deterministic
        attention: AttentionClass = TritonAttention if on_gpu else TorchAttention
        fixed_attention: AttentionClass = FixedOrderAttention if on_gpu else RowWiseAttention
        spec = self._builder.shard.shard_spec(self.spec)
        target_attention: AttentionClass = LatentAttentionBackend if on_gpu and spec.latent_dim else attention

        def attention_of(windows: abc.Sequence[int | None]) -> TorchAttention | TritonAttention:
            made = fixed_attention if fixed else target_attention
            return made(kv.layers(), spec.num_heads, windows, kv.dummy_block, scale=spec.scale, softcap=spec.softcap)

        backend = make_attention(self.layout, spec.windows, attention_of)
        draft = None if make_draft is None else make_draft(kv, attention)
        return ModelRunner(
            model,
            kv,
            backend,
            max_seqs=limits.max_seqs,
            max_blocks=self.layout.blocks_for(limits.max_model_len) + 1,  # a lease may have one for the next token
            sampler=self._sampler,
            use_cuda_graphs=graphs and (draft is None or draft.capturable),
            max_step_tokens=limits.prompt_step_tokens or limits.chunk_tokens,
            max_seq_drafts=self._max_seq_drafts,
            max_drafts=self._max_drafts,
            rejection=self.config.speculation_accept == "rejection",
            draft_model=draft,
            adapters=self._slots,
            states=make_states(self.spec.states, kv, self.config.resolve_dtype(self.device)),
            mirror=self._builder.graph_mirror(model),
        )


def _checked_max_len(asked: int, max_position: int) -> int:
    """Returns the longest sequence, `asked` or the model's. Raises ConfigError for more than the model can."""
    if asked > max_position:
        problem = f"{asked} is more than the {max_position} tokens that the model supports (max_position_embeddings)"
        raise ConfigError(f"max_model_len: {problem}", field="max_model_len")
    return asked or max_position
