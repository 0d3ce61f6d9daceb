"""A Batch becomes tensors, tensors become tokens.

`launch` queues the whole step on the device and returns without waiting for it; `collect` waits and brings the results
to the host. Between the two the sampled tokens exist on the device only, and the next step may be launched already: it
takes them from `last_tokens`. Steps run in the order of their launch.

What may come next of a sequence with a constraint depends on its last token, which the host may not know at launch.
Such a step is launched like any other, and `constrain` draws those tokens again, from the same logits, once the step
before it is accounted for. So the device computes while the host looks for masks, and other sequences pay nothing.

A draft model's layers are computed in the same steps, for the same tokens, see engine/speculation/draft_model.py.

On a GPU a step in which every sequence decodes runs from static buffers (decode_step.py), as a CUDA graph where one
was captured, and so do the layers of a step with few prompt tokens, or with a chunk that was captured (prompt_step.py);
every other step is made of tensors of its own size. On a CPU, launch computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, StepShape
from engine.attention.triton_backend import TritonAttention
from engine.device import upload
from engine.kv.block_tables import BlockTables
from engine.kv.kv_pool import KVPool
from engine.models.base import LayerHook, Model
from engine.sampling.sampler import token_logprobs
from engine.schedule.scheduler import ScheduledSequence
from engine.schedule.stepper import LaunchCallback, RunnerOutput
from engine.speculation.draft_graphs import DraftGraphs
from engine.speculation.draft_loop import DraftLoop
from engine.speculation.draft_model import DraftModel, TargetModel, state_links_of, store_step_states
from engine.step.launched_step import (
    DeferredSampling,
    LaunchedStep,
    PromptLogprobTensors,
    collect,
    first_result_rows,
    logprob_rows,
    send_to_host,
)
from engine.step.step_sampler import StepSampler, mask_unknown
from engine.step.warm_up import StepRows

if TYPE_CHECKING:
    from engine.sampling.device_sampler import DeviceSampler
    from engine.step.decode_step import DecodeStep
    from engine.step.prompt_step import PromptStep

LOGPROB_CHUNK = 64  # prompt tokens whose logits exist at a time
PromptLogprobRange = tuple[
    int, ScheduledSequence, int, int
]  # an item and its index; the prompt tokens from here to before there are scored


class ModelRunner:
    """Owns the model; writes KV only to the blocks of the items' leases.

    max_seqs: slots of the scheduler; max_blocks: of the longest lease. sampler, rejection: see StepSampler. static:
    decode steps, those with few prompt tokens, and `chunks` of prompts (cached and new tokens) run from static buffers;
    needs a sampler and the Triton backend. most_tokens: of a step. drafts: most of an item, max_drafts: of a step.
    draft: layers of a draft model over this pool.
    """

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        backend: AttentionBackend[Any],
        *,
        max_seqs: int,
        max_blocks: int,
        max_step_tokens: int,
        sampler: DeviceSampler | None = None,
        use_cuda_graphs: bool = False,
        max_seq_drafts: int = 0,
        max_drafts: int = 0,
        rejection: bool = False,
        draft_model: DraftModel | None = None,
        chunk_graphs: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._model, self._kv, self._backend = model, kv, backend
        self._cache = kv.layers()
        self._device = kv.data.device
        self._tables = BlockTables(max_seqs, max_blocks)
        self._last_tokens = torch.zeros(max_seqs + 1, dtype=torch.int64, device=self._device)
        self._sampling = StepSampler(
            sampler, self._last_tokens, slots=max_seqs, drafts=max_seq_drafts, rejection=rejection
        )
        self._replayed: tuple[int, int] | None = None
        self._drafts, self._draft = max_seq_drafts, draft_model
        self._target_model = TargetModel(model, self._cache, backend)
        self.decode_step: DecodeStep | None = None
        self.prompt_step: PromptStep | None = None
        if use_cuda_graphs:
            from engine.step.decode_step import DecodeStep
            from engine.step.prompt_step import PromptStep

            assert sampler is not None
            assert isinstance(backend, TritonAttention)
            self.decode_step = DecodeStep(
                model,
                self._cache,
                backend,
                sampler,
                self._tables,
                self._last_tokens,
                max_rows=max_seqs,
                max_seq_drafts=max_seq_drafts,
                max_drafts=max_drafts,
                draft_model=draft_model,
            )
            self.prompt_step = PromptStep(
                model,
                kv,
                backend,
                max_step_tokens=max_step_tokens,
                max_blocks=max_blocks,
                draft_model=draft_model,
                chunk_graphs=chunk_graphs,
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
        """See Drafter.lags."""
        return self._draft is not None and self._draft.lags

    def capture(self) -> None:
        """Records the CUDA graphs of all static steps."""
        for step in (self.decode_step, self.prompt_step, self.draft_graphs):
            if step is not None:
                step.capture()

    @torch.inference_mode()
    def launch(self, items: Sequence[ScheduledSequence], between: LaunchCallback | None = None) -> LaunchedStep:
        """Queues forward pass and sampling of all items; every item's lease covers its tokens. See StepRunner."""
        self._sampling.stage([item.seq for item in items if item.samples])
        self._kv.copy([item.block_copy for item in items if item.block_copy is not None])
        wanted = logprob_rows(items)
        self._replayed = None
        plain = not (
            self._sampling.uses_rejection(items)
            or _constrained_drafts(items)
            or any(item.seq.wants_embedding for item in items)
        )
        if plain and self.decode_step is not None and self.decode_step.fits(items):
            self._zero_new_blocks(items)
            self._replayed = rows, query = self.decode_step.stage(items)
            output = self.decode_step.run(rows, query)
            count = sum(1 + len(item.drafts) for item in items)
            results, logits, logit_rows = output.results[:count], output.logits, np.arange(count)
            undrawn = [item.seq.constraint is not None for item in items]
            scores: list[PromptLogprobTensors] = []
        else:
            results, logits, logit_rows, scores = self._launch_eager(items, between)
            undrawn = [item.samples and mask_unknown(item.seq) for item in items]
        if not any(undrawn):
            return self._send(items, results, wanted, logits, logit_rows, scores)
        again = DeferredSampling(
            [item for item, undone in zip(items, undrawn, strict=True) if undone],
            [int(row) for row, undone in zip(first_result_rows(items), undrawn, strict=True) if undone],
            logits,
            logit_rows,
        )
        launched = LaunchedStep(items, results, wanted, (), (), None, again, scores)
        return launched if any(mask_unknown(item.seq) for item in again.scheduled) else self.sample_deferred(launched)

    @torch.inference_mode()
    def sample_deferred(self, launched: LaunchedStep) -> LaunchedStep:
        """Draws again what was launched before its constraint knew the last token. Called once the steps before are
        accounted for; for most steps there is nothing to do.
        """
        undrawn, results = launched.deferred, launched.results
        if undrawn is None:
            return launched
        pairs = [
            (i, row)
            for i, row in zip(undrawn.scheduled, undrawn.result_rows, strict=True)
            if i.seq.finish_reason is None
        ]
        if pairs:
            self._sampling.resample([item for item, _ in pairs], [row for _, row in pairs], undrawn, results)
        return self._send(
            launched.scheduled,
            results,
            launched.logprob_rows,
            undrawn.logits,
            undrawn.logit_rows,
            launched.prompt_logprobs,
        )

    def is_done(self, launched: LaunchedStep) -> bool:
        """Whether `collect` would not wait."""
        return launched.copy_event is None or bool(launched.copy_event.query())  # type: ignore[no-untyped-call]

    def collect(self, launched: LaunchedStep) -> list[RunnerOutput]:
        """One result per item, in order; waits for the device."""
        return collect(launched)

    def time_replay(self, count: int) -> float | None:
        """Seconds that the last launched step takes when it is run `count` times back to back; None when it was not one
        from static buffers. Its sequences' KV and sampling state are spoilt: for measurements.
        """
        if self._replayed is None or self.decode_step is None or self._device.type != "cuda":
            return None
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            began.record()
            for _ in range(count):
                self.decode_step.run(*self._replayed)
            ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) * 1e-3 / count

    @torch.inference_mode()
    def warm_up(self, rows: StepRows, block: int) -> None:
        """Queues a step whose rows all sample, with log-probabilities, and use that block of the pool alone.

        A row with as many new tokens as one with drafts has is taken for one.
        """
        shape = self._warm_up_shape(rows, block)
        ends = np.cumsum(shape.num_new)
        counts = np.where(np.array(shape.num_new) == 1 + self._drafts, shape.num_new, 1)
        last = np.repeat(ends - np.cumsum(counts), counts) + np.arange(counts.sum())
        ids, at, sampled = upload([np.zeros(ends[-1], dtype=np.int64), _positions(shape), last], self._device)
        hidden, _ = self._forward(shape, ids, at, sampled, every=len(last) == len(ids))
        self._fill_draft(shape, ids, at, list(range(len(rows))))
        logits = self._model.logits(hidden)
        self._sampling.warm_up(counts, logits, last)

    @torch.inference_mode()
    def warm_up_attention(self, rows: StepRows, block: int) -> None:
        """`rehearse` for the plans that the step's attention builds, without the rest of the model where it can."""
        if self._model.capturable and isinstance(self._backend, TritonAttention):
            self._backend.warm_up(self._warm_up_shape(rows, block))
        else:
            self.warm_up(rows, block)

    def _warm_up_shape(self, rows: StepRows, block: int) -> StepShape:
        size = self._kv.layout.block_size
        starts, num_new = zip(*rows, strict=True)
        return StepShape(
            starts, num_new, [np.full(-(-(start + new) // size), block, dtype=np.int32) for start, new in rows]
        )

    def _launch_eager(
        self, items: Sequence[ScheduledSequence], between: LaunchCallback | None
    ) -> tuple[Tensor, Tensor, np.ndarray, list[PromptLogprobTensors]]:
        """results of any step, the logits that they are drawn from, each result's row of these, and scores."""
        self._zero_new_blocks(items)
        shape = StepShape(
            starts=[item.start for item in items],
            num_new=[item.num_new for item in items],
            blocks=[self._tables.row(item.seq) for item in items],
        )
        ends = np.cumsum(shape.num_new)
        tokens: list[int] = []
        unseen: list[int] = []  # items whose last token only the device knows
        for index, item in enumerate(items):
            tokens += item.seq.tokens[item.start : item.start + item.num_new - len(item.drafts)]
            tokens += item.drafts
            if len(tokens) < ends[index]:
                tokens.append(0)
                unseen.append(index)
        # A row is a token after which something is sampled, or the last one of an item that samples nothing.
        counts = np.array([1 + len(item.drafts) for item in items])
        item_of = np.repeat(np.arange(len(items)), counts)
        back = np.cumsum(counts)[item_of] - 1 - np.arange(len(item_of))
        samples = np.array([item.samples for item in items])[item_of]
        slots = np.array([item.seq.slot for item in items])
        positions_of = _positions(shape)
        last_of = ends[item_of] - 1 - back
        to_score = _prompt_logprob_ranges(items)
        shown_rows = [
            np.arange(first, end) + ends[i] - (item.start + item.num_new) - 1 for i, item, first, end in to_score
        ]
        ids, positions, last, rows, row_slots, sampled_at, late, late_slots, shown = upload(
            [
                np.array(tokens),
                positions_of,
                last_of,
                np.flatnonzero(samples),
                slots[item_of[samples]],
                positions_of[last_of[samples]] + 1,
                ends[unseen] - 1,
                slots[unseen],
                np.concatenate([last_of, *shown_rows]),
            ],
            self._device,
        )
        if unseen:
            ids.index_copy_(0, late, self._last_tokens.index_select(0, late_slots))
        prompts = [row for row, item in enumerate(items) if not item.is_decode]
        if self.prompt_step is not None and self.prompt_step.fits(shape, len(shown)):
            hidden, states = self.prompt_step.run(shape, ids, positions, shown, prompts)
        else:
            whole = len(last) == len(ids) and not to_score
            hidden, states = self._forward(shape, ids, positions, shown, every=whole, between=between)
            self._fill_draft(shape, ids, positions, prompts)
        scores = self._prompt_logprobs(to_score, hidden[len(last) :]) if to_score else []
        hidden = hidden[: len(last)]
        for item, end in zip(items, np.cumsum(counts), strict=True):
            if item.seq.wants_embedding and item.samples:
                item.seq.embedding = self._model.final_norm(hidden[end - 1 : end])[0]
        sampling = [item for item in items if item.samples]
        every = bool(samples.all())
        results = torch.zeros(len(item_of), dtype=torch.int64, device=self._device)
        if not every:
            results.masked_fill_(~torch.isfinite(hidden.float().sum(dim=-1)), -1)
        if not sampling:
            self._store_states(states, shape, results, ids, last_of, counts)
            return results, hidden, np.zeros(0), scores
        logits = self._model.logits(hidden if every else hidden.index_select(0, rows))
        before = None
        if len(item_of) > len(items):
            before = ids.index_select(0, last if every else last.index_select(0, rows))
        sampled = self._sampling.sample(sampling, logits, row_slots, sampled_at, before)
        drawn = torch.where(sampled.finite, sampled.tokens, -1)
        if every:
            results = drawn
        else:
            results.index_copy_(0, rows, torch.where(results.index_select(0, rows) < 0, -1, drawn))
        self._store_states(states, shape, results, ids, last_of, counts)
        return results, logits, np.cumsum(samples) - 1, scores

    def _forward(
        self,
        shape: StepShape,
        ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        *,
        every: bool,
        between: LaunchCallback | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Of these tokens, and states of all where a draft model follows; every: these are all, in order."""
        metadata = self._backend.prepare(shape)
        wanted = None if every else rows
        if self._draft is None or self._draft.lags:
            tap: LayerHook | None = None if between is None else lambda _layer, _stream: between()
            kept = self._model.forward(ids, positions, self._cache, self._backend, metadata, rows=wanted, layer_hook=tap)
            return kept, None
        links = state_links_of(shape, self._kv)
        return self._draft.forward_with_target(self._target_model, ids, positions, metadata, rows=wanted, links=links)

    def _fill_draft(self, shape: StepShape, ids: Tensor, positions: Tensor, rows: Sequence[int]) -> None:
        """A draft model that lags computes the tokens of these rows, which are prompts."""
        if self._draft is None or not self._draft.lags or not rows:
            return
        if len(rows) < len(shape.num_new):
            ends = np.cumsum(shape.num_new)
            (at,) = upload(
                [np.concatenate([np.arange(ends[r] - shape.num_new[r], ends[r]) for r in rows])], self._device
            )
            ids, positions = ids.index_select(0, at), positions.index_select(0, at)
            shape = StepShape(
                [shape.starts[r] for r in rows], [shape.num_new[r] for r in rows], [shape.blocks[r] for r in rows]
            )
        self._draft.write_kv(ids, positions, self._draft.backend.prepare(shape))

    def _store_states(
        self,
        states: Tensor | None,
        shape: StepShape,
        sampled: Tensor,
        ids: Tensor,
        last_of: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        """The draft's head leaves the states that it goes on from in their blocks."""
        if self._draft is not None and states is not None:
            store_step_states(
                self._draft, states, shape, sampled, ids, last_of, counts, kv=self._kv, query=1 + self._drafts
            )

    def _prompt_logprobs(self, to_score: Sequence[PromptLogprobRange], hidden: Tensor) -> list[PromptLogprobTensors]:
        """hidden: of the tokens before those that are scored, item after item. Few logits exist at a time."""
        scores: list[PromptLogprobTensors] = []
        for index, item, first, end in to_score:
            count = item.seq.request.sampling.prompt_logprobs or 0
            (targets,) = upload([np.array(item.seq.tokens[first:end])], self._device)
            before, hidden = hidden[: end - first], hidden[end - first :]
            parts: list[tuple[Tensor, ...]] = []
            for states, ids in zip(*(torch.split(x, LOGPROB_CHUNK) for x in (before, targets)), strict=True):
                logits = self._model.logits(states)
                chosen, top, top_ids = token_logprobs(logits, ids, count)
                ranks = (logits > logits.gather(1, ids[:, None])).sum(dim=-1) + 1
                if top is None or top_ids is None:
                    top, top_ids = chosen.new_empty(len(ids), 0), ids.new_empty(len(ids), 0)
                parts.append((chosen, ranks, top, top_ids))
            scores.append(PromptLogprobTensors(index, first, *(torch.cat(part) for part in zip(*parts, strict=True))))
        return scores

    def _send(
        self,
        items: Sequence[ScheduledSequence],
        results: Tensor,
        wanted: Sequence[int],
        logits: Tensor,
        logit_rows: np.ndarray,
        scores: Sequence[PromptLogprobTensors],
    ) -> LaunchedStep:
        forked = self._sampling.fork(items, logits, logit_rows)
        return send_to_host(items, results, wanted, logits, logit_rows, scores, forked)

    def _zero_new_blocks(self, items: Sequence[ScheduledSequence]) -> None:
        """Zeroes the blocks that this step starts to fill and leaves partly unwritten.

        A prompt's last block may travel to a pod that reads all of it; of one that decodes only a backend could that
        reads slots before they are written. Where a draft model lags, its loop has cleared them, and written there.
        """
        size = self._kv.layout.block_size
        begun: list[int] = []
        for item in items:
            if item.drafts and self.draft_model_lags:
                continue
            end = item.start + item.num_new
            if (
                end % size
                and end - end % size >= item.start
                and (self._backend.reads_unwritten_slots or not item.is_decode)
            ):
                assert item.seq.lease is not None
                begun.append(item.seq.lease.blocks[end // size])
        self._kv.zero(begun)


def _constrained_drafts(items: Sequence[ScheduledSequence]) -> bool:
    return any(item.drafts and item.seq.constraint is not None for item in items)


def _prompt_logprob_ranges(items: Sequence[ScheduledSequence]) -> list[PromptLogprobRange]:
    found: list[PromptLogprobRange] = []
    for index, item in enumerate(items):
        first = max(item.seq.next_prompt_logprob, item.start + 1)
        end = min(item.start + item.num_new + 1, item.seq.prompt_len)
        if first < end:
            found.append((index, item, first, end))
    return found


def _positions(shape: StepShape) -> np.ndarray:
    """int64 [T]"""
    num_new = np.asarray(shape.num_new)
    ends = np.cumsum(num_new)
    offsets: np.ndarray = np.repeat(np.asarray(shape.starts) - (ends - num_new), num_new)
    positions: np.ndarray = np.arange(int(ends[-1])) + offsets
    return positions
