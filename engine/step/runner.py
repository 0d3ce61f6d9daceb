"""Runs the steps of an engine: a scheduled batch becomes tensors, and tensors become tokens.

                 launch(step 1)  launch(step 2)  collect(step 1)  launch(step 3)  collect(step 2)
    host    ------|---------------|---------------|----------------|---------------|------->
    device        [== step 1 ================][== step 2 =================][== step 3 ====

`launch` queues a whole step and returns (on a CPU it computes); `collect` waits for it. In between, the sampled tokens
exist on the device only: the next step reads them from `last_tokens`. Steps run in launch order.

A sequence with a constraint may need a mask that depends on a token which only the device knows. Its token is sampled
without the mask at launch. `sample_deferred` samples it again from the same logits once the step before has been
collected, so the device computes while the host computes masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from common.kv_groups import window_tails
from engine.adapters.rows import AdapterRows, StepAdapters
from engine.adapters.slots import AdapterSlots
from engine.attention.base import AttentionBackend, StepShape
from engine.attention.grouped import GroupedAttention
from engine.attention.triton_backend import TritonAttention
from engine.cuda_graphs import GraphMirror
from engine.device import upload
from engine.kv.groups.state_pool import StatePool, StepStates
from engine.kv.kv_pool import KVPool
from engine.models.base import ForwardContext, LayerHook, Model
from engine.sampling.sampler import token_logprobs
from engine.schedule.scheduler import ScheduledSequence
from engine.schedule.sequence import BlockTables
from engine.schedule.stepper import LaunchCallback, RunnerOutput
from engine.speculation.draft_loop import DraftGraphs, DraftLoop
from engine.speculation.draft_model import DraftModel, EagleDraftModel, TargetModel, state_links_of, store_step_states
from engine.step.states import StateTable
from engine.step.step_sampler import StepSampler, mask_unknown
from engine.step.step_tensors import (
    LaunchedStep,
    SlotTables,
    StepInputs,
    StepPlan,
    StepRows,
    plan_step,
    token_positions,
    upload_inputs,
)

if TYPE_CHECKING:
    from engine.sampling.device_sampler import DeviceSampler
    from engine.step.decode_step import DecodeBucket, DecodeStep
    from engine.step.prompt_step import PromptStep

LOGPROB_CHUNK = 64  # Max prompt tokens with logits in memory at one time
POOL_CHUNK = 1024  # Max prompt tokens with normalized states in memory at one time
Shape = TypeVar("Shape")


class CapturedStep(Protocol[Shape]):
    """A computation with a CUDA graph for each of its shapes."""

    @property
    def shapes(self) -> Sequence[Shape]:
        """All shapes, the largest first."""

    def capture(self, shapes: Sequence[Shape] | None = None) -> None:
        """Captures the graphs of these shapes, None for all."""


class ModelRunner:
    """Implements `StepRunner` for one model over one KV pool. Writes only to blocks of the scheduled sequences."""

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        backend: AttentionBackend[Any],
        *,
        max_seqs: int,  # Number of slots of the scheduler
        max_blocks: int,  # Max blocks of a lease
        max_step_tokens: int,
        sampler: DeviceSampler | None = None,  # Samples on the device; None for sampling with torch
        use_cuda_graphs: bool = False,  # Make `DecodeStep` and `PromptStep`. They need a sampler and the Triton backend
        max_seq_drafts: int = 0,  # Max drafts of a sequence; `max_drafts` of a step
        max_drafts: int = 0,
        rejection: bool = False,  # Accept drafts by rejection sampling
        draft_model: DraftModel | None = None,  # A draft model with its KV in the same pool
        adapters: AdapterSlots | None = None,  # None: no sequence has one
        states: StatePool | None = None,  # The recurrent states; None: the model has none. Then no `PromptStep` is made
        mirror: GraphMirror | None = None,  # The other ranks; None: there are none
    ) -> None:
        self._model, self._kv, self._backend = model, kv, backend
        self._cache, self._device = kv.layers(), kv.data.device
        self._tables = BlockTables(max_seqs, max_blocks, window_tails(kv.layout), kv.dummy_block)
        self._last_tokens = torch.zeros(max_seqs + 1, dtype=torch.int64, device=self._device)
        self._sampling = StepSampler(
            sampler, self._last_tokens, slots=max_seqs, max_seq_drafts=max_seq_drafts, rejection=rejection
        )
        self._adapters, self._mirror = adapters, mirror
        self._states = None if states is None else StateTable(states, max_seqs, fused=model.capturable)
        self._last_bucket: DecodeBucket | None = None  # Bucket of the last launched step, if that was a DecodeStep
        self._max_seq_drafts, self._draft = max_seq_drafts, draft_model
        self._target_model = TargetModel(model, self._cache, backend)
        self.decode_step: DecodeStep | None = None
        self.prompt_step: PromptStep | None = None
        if use_cuda_graphs:
            from engine.step.decode_step import DecodeStep
            from engine.step.prompt_step import PromptStep

            assert sampler is not None
            assert isinstance(backend, TritonAttention | GroupedAttention)
            slot_tables = SlotTables(self._tables, self._device)
            self.decode_step = DecodeStep(
                model,
                self._cache,
                backend,
                sampler,
                slot_tables,
                self._last_tokens,
                max_rows=max_seqs,
                max_seq_drafts=max_seq_drafts,
                max_drafts=max_drafts,
                draft_model=draft_model,
                adapters=adapters,
                states=self._states,
                mirror=mirror,
            )
            if states is None:  # the rows of gated delta layers are listed on the host
                self.prompt_step = PromptStep(
                    model,
                    kv,
                    backend,
                    sampler,
                    slot_tables,
                    self._last_tokens,
                    max_rows=max_seqs,
                    max_step_tokens=max_step_tokens,
                    max_seq_drafts=max_seq_drafts,
                    max_drafts=max_drafts,
                    draft_model=draft_model,
                    adapters=adapters,
                    mirror=mirror,
                )
        self.draft_loop: DraftLoop | None = None
        self.draft_graphs: DraftGraphs | None = None
        if draft_model is not None:
            if self.decode_step is not None and sampler is not None and not rejection:
                self.draft_graphs = DraftGraphs(
                    draft_model,
                    sampler,
                    self._sampling.stage,
                    buckets=self.decode_step.draft_buckets,
                    max_seq_drafts=max_seq_drafts,
                    max_blocks=max_blocks,
                    block_size=kv.layout.block_size,
                    device=self._device,
                )
            self.draft_loop = DraftLoop(draft_model, kv, self._tables, rejection=rejection, graphs=self.draft_graphs)

    @property
    def draft_model_lags(self) -> bool:
        """Whether there is a draft model that lags, see DraftModel.lags."""
        return self._draft is not None and self._draft.lags

    @property
    def captured_steps(self) -> tuple[CapturedStep[Any], ...]:
        """All computations with CUDA graphs, in the order of their capture."""
        prompt_step = self.prompt_step
        steps = self.decode_step, prompt_step, prompt_step and prompt_step.sample_step, self.draft_graphs
        return tuple(step for step in steps if step is not None)

    def capture(self) -> None:
        """Captures all CUDA graphs."""
        for step in self.captured_steps:
            step.capture()

    @torch.inference_mode()
    def launch(self, scheduled: Sequence[ScheduledSequence], on_layer: LaunchCallback | None = None) -> LaunchedStep:
        """Queues the forward pass and the sampling of a step, on one of three paths. See StepRunner.launch.

        - all sequences decode: `DecodeStep`, one CUDA graph for layers and sampling;
        - up to 1024 tokens, with prompts: `PromptStep`, one CUDA graph for the layers and one for the sampling;
        - anything else: layer by layer, with tensors of the step's own size.

        Drafts, log-probabilities of a prompt and embeddings are sampled operation by operation.
        """
        if self._states is not None:
            self._states.copy_before(scheduled)
        self._sampling.stage([entry.seq for entry in scheduled if entry.samples])
        self._kv.copy([copy for entry in scheduled for copy in entry.block_copies])
        self._zero_new_blocks(scheduled)
        self._last_bucket = None
        is_plain = self._is_plain(scheduled)
        if self.decode_step is not None and is_plain and self.decode_step.fits(scheduled):
            step = self._launch_decode(self.decode_step, scheduled)
        else:
            step = self._launch_prompts(scheduled, is_plain, on_layer)
        if self._states is not None:
            self._states.copy_after(scheduled)
        if any(mask_unknown(scheduled[index].seq) for index in step.deferred):
            return step
        return self.sample_deferred(step)

    @torch.inference_mode()
    def sample_deferred(self, step: LaunchedStep) -> LaunchedStep:
        """Does the deferred sampling of a step, and sends the results to the host if they are not sent yet."""
        if step.logits is not None:
            if step.deferred:
                self._sampling.resample(step)
            self._sampling.sample_children(step)
            step.send_to_host()
        return step

    def is_done(self, step: LaunchedStep) -> bool:
        return step.copy_event is None or bool(step.copy_event.query())  # type: ignore[no-untyped-call]

    def collect(self, step: LaunchedStep) -> list[RunnerOutput]:
        outputs = step.collect()
        if self._mirror is not None:
            self._mirror.check_alive()
        return outputs

    def time_replay(self, count: int) -> float | None:
        """Returns seconds of the last step, replayed `count` times; None if it was not a `DecodeStep` on a GPU.

        For measurements only: the replays overwrite KV and sampling state of the step's sequences.
        """
        if self._last_bucket is None or self.decode_step is None or self._device.type != "cuda":
            return None
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            began.record()
            for _ in range(count):
                self.decode_step.run(self._last_bucket)
            ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) * 1e-3 / count

    @torch.inference_mode()
    def warm_up(self, rows: StepRows, block: int) -> None:
        """Queues a step in which all rows sample with log-probabilities. It touches only `block` of the pool.

        A row with `1 + max_seq_drafts` new tokens counts as a row with drafts.
        """
        shape = self._warm_up_shape(rows, block)
        ends = np.cumsum(shape.num_new)
        num_results = np.where(np.array(shape.num_new) == 1 + self._max_seq_drafts, shape.num_new, 1)
        last = np.repeat(ends - np.cumsum(num_results), num_results) + np.arange(num_results.sum())
        tokens = np.zeros(ends[-1], dtype=np.int64)
        ids, positions, logits_indices = upload([tokens, token_positions(shape), last], self._device)
        all_tokens = len(last) == len(ids)
        # With adapters the step runs a second time, with slot 0 for all tokens. Its results are not used.
        for slots in (None,) if self._adapters is None else (None, tokens):
            adapters = self._step_adapters(slots, None if all_tokens else last)
            states = None if self._states is None else self._states.of_dummies(shape.num_new)
            requested = None if all_tokens else logits_indices
            hidden, _ = self._forward(shape, ids, positions, requested, adapters=adapters, states=states)
            self._write_draft_kv(shape, ids, positions, list(range(len(rows))))
            logits = self._model.logits(hidden, self._adapter_rows(slots, last))
        self._sampling.warm_up(num_results, logits, last)

    @torch.inference_mode()
    def warm_up_attention(self, rows: StepRows, block: int) -> None:
        """Builds the cuDNN plans of a step, by attention alone if the backend can, else by the whole model."""
        alone = self._mirror is None  # other ranks build their plans in whole steps
        if alone and self._model.capturable and isinstance(self._backend, TritonAttention | GroupedAttention):
            self._backend.warm_up(self._warm_up_shape(rows, block))
        else:
            self.warm_up(rows, block)

    def _warm_up_shape(self, rows: StepRows, block: int) -> StepShape:
        size = self._kv.layout.block_size
        starts, num_new = zip(*rows, strict=True)
        blocks = [np.full(-(-(start + new) // size), block, dtype=np.int32) for start, new in rows]
        return StepShape(starts, num_new, blocks, [blocks] * len(self._tables.groups))

    def _is_plain(self, scheduled: Sequence[ScheduledSequence]) -> bool:
        """Returns whether no sequence needs what `DecodeStep` cannot do."""
        return not self._sampling.uses_rejection(scheduled) and not any(
            entry.seq.wants_states or (entry.drafts and entry.seq.constraint is not None) for entry in scheduled
        )

    def _launch_decode(self, decode_step: DecodeStep, scheduled: Sequence[ScheduledSequence]) -> LaunchedStep:
        self._last_bucket = decode_step.stage(scheduled)
        results, logits = decode_step.run(self._last_bucket)
        count = sum(1 + len(entry.drafts) for entry in scheduled)
        deferred = [i for i, entry in enumerate(scheduled) if entry.seq.constraint is not None]  # no masks in a graph
        return LaunchedStep(scheduled, results[:count], logits, np.arange(count), deferred)

    def _launch_prompts(
        self, scheduled: Sequence[ScheduledSequence], is_plain: bool, on_layer: LaunchCallback | None
    ) -> LaunchedStep:
        """Queues a step of any size, as a `PromptStep` if it fits."""
        plan = plan_step(scheduled, self._tables)
        prompt_step = self.prompt_step
        bucket = None if prompt_step is None else prompt_step.bucket(scheduled, plan)
        if prompt_step is None or bucket is None:
            inputs = upload_inputs(plan, self._last_tokens)
            all_tokens = len(plan.logits_indices) == len(inputs.ids) == len(plan.hidden_indices)
            rows = None if all_tokens else inputs.hidden_indices
            adapters = None if rows is None else plan.hidden_indices
            step_adapters = self._step_adapters(plan.adapter_slots, adapters)
            recurrent = None if self._states is None else self._states.of_step(scheduled)
            hidden, states = self._forward(
                plan.shape, inputs.ids, inputs.positions, rows, on_layer, step_adapters, recurrent
            )
            self._write_draft_kv(plan.shape, inputs.ids, inputs.positions, plan.prefill_rows)
            return self._sample(scheduled, plan, inputs, hidden, states)
        prompt_step.stage(plan, bucket)
        hidden, states = prompt_step.run(bucket)
        if states is None and is_plain and not plan.logprob_ranges and not any(entry.drafts for entry in scheduled):
            results, logits = prompt_step.sample(plan)
            deferred = [i for i, entry in enumerate(scheduled) if entry.samples and entry.seq.constraint is not None]
            return LaunchedStep(scheduled, results, logits, np.arange(len(results)), deferred)
        states = None if states is None else states[: len(plan.tokens)]
        inputs = upload_inputs(plan, self._last_tokens)
        return self._sample(scheduled, plan, inputs, hidden[: len(plan.hidden_indices)], states)

    def _sample(
        self,
        scheduled: Sequence[ScheduledSequence],
        plan: StepPlan,
        inputs: StepInputs,
        hidden: Tensor,  # [H, hidden], of the tokens `plan.hidden_indices`
        states: Tensor | None,  # [T, hidden], of all tokens, if there is an EAGLE head
    ) -> LaunchedStep:
        """Queues LM head and sampling of a step, operation by operation."""
        num_results = len(plan.logits_indices)
        prompt_logprobs = self._prompt_logprobs(scheduled, plan.logprob_ranges, hidden[num_results:])
        num_scored = sum(end - first for _, first, end in plan.logprob_ranges)
        self._pool_states(scheduled, plan.pooled_ranges, hidden[num_results + num_scored :])
        hidden = hidden[:num_results]
        all_sample = bool(plan.samples.all())
        results = torch.zeros(num_results, dtype=torch.int64, device=self._device)
        if not all_sample:
            results.masked_fill_(~torch.isfinite(hidden.float().sum(dim=-1)), -1)
        logits = hidden
        if sampling := [entry for entry in scheduled if entry.samples]:
            rows = inputs.sampled_results
            sampled_rows = plan.logits_indices if all_sample else plan.logits_indices[plan.samples]
            adapters = self._adapter_rows(plan.adapter_slots, sampled_rows)
            logits = self._model.logits(hidden if all_sample else hidden.index_select(0, rows), adapters)
            _keep_logits(scheduled, plan, logits)
            previous = None
            if num_results > len(scheduled):  # some sequences have drafts
                indices = inputs.hidden_indices[:num_results]
                previous = inputs.ids.index_select(0, indices if all_sample else indices.index_select(0, rows))
            sampled = self._sampling.sample(sampling, logits, inputs.sampled_slots, inputs.sampled_positions, previous)
            tokens = torch.where(sampled.finite, sampled.tokens, -1)
            if all_sample:
                results = tokens
            else:
                results.index_copy_(0, rows, torch.where(results.index_select(0, rows) < 0, -1, tokens))
        self._store_states(states, plan, inputs.ids, results)
        deferred = [i for i, entry in enumerate(scheduled) if entry.samples and mask_unknown(entry.seq)]
        return LaunchedStep(scheduled, results, logits, np.cumsum(plan.samples) - 1, deferred, prompt_logprobs)

    def _forward(
        self,
        shape: StepShape,
        ids: Tensor,
        positions: Tensor,
        rows: Tensor | None,
        on_layer: LaunchCallback | None = None,
        adapters: StepAdapters | None = None,
        states: StepStates | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layers; calls `on_layer` before each one.

        Returns hidden states of the tokens `rows` (None for all), and states of all tokens for an EAGLE head.
        """
        metadata = self._backend.prepare(shape)
        if self._draft is None or self._draft.lags:
            hook: LayerHook | None = None if on_layer is None else lambda _layer, _stream: on_layer()
            context = ForwardContext(self._cache, self._backend, metadata, hook, adapters, states)
            return self._model.forward(ids, positions, context, rows), None
        links = state_links_of(shape, self._kv)
        return self._draft.forward_with_target(
            self._target_model, ids, positions, metadata, rows=rows, links=links, adapters=adapters
        )

    def _step_adapters(self, slots: np.ndarray | None, results: np.ndarray | None) -> StepAdapters | None:
        """Returns the adapters of a step from the slots of its tokens; `results` are the tokens with hidden states."""
        if self._adapters is None or slots is None:
            return None
        rows = self._adapters.rows(slots)
        return StepAdapters(rows, None if results is None else self._adapters.rows(slots[results]))

    def _adapter_rows(self, slots: np.ndarray | None, tokens: np.ndarray) -> AdapterRows | None:
        """Returns the adapters of these tokens of a step, for `logits`."""
        return None if self._adapters is None or slots is None else self._adapters.rows(slots[tokens])

    def _write_draft_kv(self, shape: StepShape, ids: Tensor, positions: Tensor, rows: Sequence[int]) -> None:
        """Writes the KV of a draft model that lags, for the tokens of these rows of the step, which are prompts."""
        if self._draft is None or not self._draft.lags or not rows:
            return
        if len(rows) < len(shape.num_new):
            ends = np.cumsum(shape.num_new)
            tokens = [np.arange(ends[r] - shape.num_new[r], ends[r]) for r in rows]
            (indices,) = upload([np.concatenate(tokens)], self._device)
            ids, positions = ids.index_select(0, indices), positions.index_select(0, indices)
            shape = StepShape(
                [shape.starts[r] for r in rows], [shape.num_new[r] for r in rows], [shape.blocks[r] for r in rows]
            )
        self._draft.write_kv(ids, positions, self._draft.backend.prepare(shape))

    def _store_states(self, states: Tensor | None, plan: StepPlan, ids: Tensor, results: Tensor) -> None:
        """Stores the states that an EAGLE head continues from in the blocks of the step."""
        if isinstance(self._draft, EagleDraftModel) and states is not None:
            store_step_states(
                self._draft,
                states,
                plan.shape,
                results,
                ids,
                plan.logits_indices,
                plan.num_results,
                kv=self._kv,
                query=1 + self._max_seq_drafts,
            )

    def _prompt_logprobs(
        self, scheduled: Sequence[ScheduledSequence], ranges: Sequence[tuple[int, int, int]], hidden: Tensor
    ) -> dict[int, tuple[int, tuple[Tensor, ...]]]:
        """Computes log-probabilities of prompt tokens, LOGPROB_CHUNK at a time: all logits would take too much memory.

        `hidden` has the state of the token before each prompt token, range after range. See LaunchedStep.
        """
        logprobs: dict[int, tuple[int, tuple[Tensor, ...]]] = {}
        for index, first, end in ranges:
            seq = scheduled[index].seq
            num_top = seq.request.sampling.prompt_logprobs or 0
            (targets,) = upload([np.array(seq.tokens[first:end])], self._device)
            previous, hidden = hidden[: end - first], hidden[end - first :]
            parts: list[tuple[Tensor, ...]] = []
            slot = None if seq.adapter is None else np.array([seq.adapter_slot])
            for states, ids in zip(*(torch.split(x, LOGPROB_CHUNK) for x in (previous, targets)), strict=True):
                adapters = None if slot is None else self._adapter_rows(slot, np.zeros(len(ids), dtype=np.int64))
                logits = self._model.logits(states, adapters)
                chosen, top, top_ids = token_logprobs(logits, ids, num_top)
                ranks = (logits > logits.gather(1, ids[:, None])).sum(dim=-1) + 1
                if top is None or top_ids is None:
                    top, top_ids = chosen.new_empty(len(ids), 0), ids.new_empty(len(ids), 0)
                parts.append((chosen, ranks, top_ids, top))
            logprobs[index] = first, tuple(torch.cat(part) for part in zip(*parts, strict=True))
        return logprobs

    def _pool_states(
        self, scheduled: Sequence[ScheduledSequence], ranges: Sequence[tuple[int, int, int]], hidden: Tensor
    ) -> None:
        """Adds the states of the tokens in `ranges`, [tokens, hidden] range after range, to their sequences.

        Each token is added once, even if its step is discarded later: the tokens before it were known and had KV.
        """
        for index, first, end in ranges:
            seq = scheduled[index].seq
            states, hidden = hidden[: end - first], hidden[end - first :]
            for part in torch.split(states, POOL_CHUNK):
                added = self._model.final_norm(part).float().sum(dim=0)
                seq.pooled = added if seq.pooled is None else seq.pooled + added
            seq.next_pooled = end

    def _zero_new_blocks(self, scheduled: Sequence[ScheduledSequence]) -> None:
        """Zeroes the last block of each sequence, if this step writes its first token and leaves it partly filled.

        A hand-off sends a prompt's last block whole, so its unwritten slots must be defined. The block of a sequence
        that decodes needs zeroes only if the attention backend reads unwritten slots. The draft loop of a model that
        lags has zeroed the blocks of its sequences, and written to them.
        """
        size, decodes = self._kv.layout.block_size, self._backend.reads_unwritten_slots
        with_drafts = not self.draft_model_lags
        blocks: list[int] = []
        for entry in scheduled:
            end = entry.start + entry.num_new
            is_new = end % size and end - end % size >= entry.start
            if is_new and (decodes or not entry.is_decode) and (with_drafts or not entry.drafts):
                assert entry.seq.lease is not None
                blocks += entry.seq.lease.pages_of(end // size)
        self._kv.zero(blocks)


def _keep_logits(scheduled: Sequence[ScheduledSequence], plan: StepPlan, logits: Tensor) -> None:
    """Keeps the logits that sequences ask for, before penalties and masks change them. `logits`: float32 [S, vocab]."""
    if not any(entry.seq.logit_ids for entry in scheduled):
        return
    rows = np.cumsum(plan.samples) - 1  # the row of each result
    for entry, end in zip(scheduled, np.cumsum(plan.num_results), strict=True):
        if entry.samples and entry.seq.logit_ids:
            (ids,) = upload([np.array(entry.seq.logit_ids)], logits.device)
            entry.seq.logits = logits[int(rows[end - 1])].index_select(0, ids)
