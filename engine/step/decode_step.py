"""Decode steps in static buffers: one launch of a CUDA graph from the last tokens to the next ones.

`stage` tells the device what is new, in one copy of a few numbers a row; `run` computes: inputs, all layers, LM head,
sampling, and the sampled tokens into `last_tokens`, where the next step finds them. `capture` records `run` once for
each batch bucket and query length, the largest first, all in one memory pool; afterwards `run` replays. A step with
fewer rows than its bucket is padded with rows that have no tokens.

Query length 1 is a plain decode step. The other one is for rows with drafts: something is sampled after every token of
theirs, as if the drafts before it were right, and what is sampled after the accepted ones counts.

Everything goes to the current stream, so steps may be staged and run ahead of what the host knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention.triton_backend import DECODE_TOKENS, TritonAttention, TritonMetadata
from engine.cuda_graphs import CudaGraphs, unowned_view
from engine.device import pinned_copy, upload
from engine.kernels.decode_inputs import HEADER, DecodeInputs, blocks_touched, decode_inputs, packed_width
from engine.kv.block_tables import BlockTables
from engine.kv.layer_kv import LayerKV
from engine.models.base import Model
from engine.sampling.device_sampler import DeviceSampler
from engine.schedule.scheduler import ScheduledSequence
from engine.speculation.acceptance import accepted_mask
from engine.speculation.draft_model import DraftModel, StateLinks, TargetModel


def batch_buckets(max_rows: int) -> tuple[int, ...]:
    """Batch sizes that graphs are captured for, ascending; the last is max_rows."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 32)]
    return (*(size for size in steps if size < max_rows), max_rows)


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """results: int64 [T], what is sampled after each token, the rows' tokens following each other; -1 where logits were
    not finite. logits: float32 [T, vocab]. Both belong to the step: the next one overwrites them.
    """

    results: Tensor
    logits: Tensor


class DecodeStep:
    """max_rows: most rows of a step. drafts: most of a row, 0 for none; max_drafts: most of a step, which bounds the
    rows of steps that have any. draft: layers of a draft model, computed with every step.

    last_tokens: int64 [slots], the token that was sampled last in each slot; shared with steps that run elsewhere.
    tables: of all slots; width and slots are the pool's and the scheduler's.
    """

    def __init__(
        self,
        model: Model,
        cache: Sequence[LayerKV],
        backend: TritonAttention,
        sampler: DeviceSampler,
        tables: BlockTables,
        last_tokens: Tensor,
        *,
        max_rows: int,
        max_seq_drafts: int = 0,
        max_drafts: int = 0,
        draft_model: DraftModel | None = None,
    ) -> None:
        assert 0 <= max_seq_drafts < DECODE_TOKENS
        assert max_seq_drafts <= max_drafts
        self.max_rows = max_rows
        self._model, self._cache, self._backend, self._sampler = model, cache, backend, sampler
        self._tables, self._last_tokens = tables, last_tokens
        self._draft, self._target = draft_model, TargetModel(model, cache, backend)
        self._block_size, self._device = cache[0].block_size, last_tokens.device
        self._pad_block = cache[0].kv.shape[0] - 1  # the dummy one
        buckets, self._max_query = batch_buckets(max_rows), 1 + max_seq_drafts
        self._buckets = {1: buckets}
        if max_seq_drafts:
            self._buckets[self._max_query] = tuple(rows for rows in buckets if rows * max_seq_drafts <= max_drafts)
        self.shapes = sorted(
            ((rows, query) for query, sizes in self._buckets.items() for rows in sizes),
            key=lambda shape: (shape[0] * shape[1], shape),
            reverse=True,
        )
        most_tokens = max(rows * query for rows, query in self.shapes)
        # A line more than there are slots: the padding rows' own, like the sampler's.
        lines = (sampler.pad_slot + 1, tables.blocks.shape[1])
        self._slot_tables = torch.zeros(lines, dtype=torch.int32, device=self._device)
        words = max(rows * packed_width(query, self._block_size) for rows, query in self.shapes)
        self._packed = torch.zeros(words, dtype=torch.int32, device=self._device)
        self._inputs = DecodeInputs.empty(max_rows, most_tokens, lines[1], self._device)
        self._results = torch.zeros(most_tokens, dtype=torch.int64, device=self._device)
        self._graphs = CudaGraphs("decode", self._device, self._compute, keep=_without_ownership, describe=_described)

    @property
    def draft_buckets(self) -> tuple[int, ...]:
        """Rows of steps with drafts."""
        return self._buckets[self._max_query]

    def fits(self, items: Sequence[ScheduledSequence]) -> bool:
        """The step can run here: every item samples after its one token, and after each of its drafts."""
        query = self._query(items)
        return (
            query in self._buckets
            and len(items) <= self._buckets[query][-1]
            and all(item.samples and item.num_new == 1 + len(item.drafts) for item in items)
        )

    def stage(self, items: Sequence[ScheduledSequence]) -> tuple[int, int]:
        """Sends a step's rows; its bucket: rows and query length."""
        query = self._query(items)
        rows = next(size for size in self._buckets[query] if size >= len(items))
        size, live = self._block_size, len(items)
        for item in items:
            self._tables.row(item.seq)
        slots = np.array([item.seq.slot for item in items])
        starts = np.array([item.start for item in items])
        num_new = np.array([item.num_new for item in items])
        ends = np.cumsum(num_new)
        # Blocks from the one of the first new token on travel with the row; those before it are there, or go ahead.
        base, final = starts // size, (starts + num_new - 1) // size
        behind = self._tables.num_on_device[slots] < base
        if behind.any():
            self._copy_table_rows(slots[behind], int(base[behind].max()))
        self._tables.num_on_device[slots] = final + 1

        packed = np.zeros((rows, packed_width(query, size)), dtype=np.int32)
        packed[live:, 0] = self._sampler.pad_slot
        packed[live:, 2] = ends[-1]
        packed[:live, 0] = slots
        packed[:live, 1] = starts
        packed[:live, 2] = ends - num_new
        packed[:live, 3] = num_new
        packed[:live, HEADER : HEADER + query] = [
            (_token(item.seq.tokens, item.start), *item.drafts, *(0,) * (query - item.num_new)) for item in items
        ]
        touched = np.minimum(base[:, None] + np.arange(blocks_touched(query, size)), final[:, None])
        packed[:live, HEADER + query :] = self._tables.blocks[slots[:, None], touched]
        self._send(packed)
        return rows, query

    def run(self, rows: int, query: int) -> DecodeOutput:
        """Queues the staged step."""
        return self._graphs.run((rows, query))

    def capture(self, shapes: Sequence[tuple[int, int]] | None = None) -> None:
        """Records the graphs of all shapes, or of some, the largest first. The model must be capturable."""
        self._graphs.capture(shapes or self.shapes, lambda shape: self._send(self._padding(*shape)))

    def _compute(self, shape: tuple[int, int]) -> DecodeOutput:
        rows, query = shape
        packed = self._packed[: rows * packed_width(query, self._block_size)].view(rows, -1)
        inputs = self._inputs.slice_for(rows, query)
        decode_inputs(packed, self._slot_tables, self._last_tokens, inputs, query=query, block_size=self._block_size)
        metadata = self._backend.decode_metadata(
            inputs.slot_mapping, inputs.cu_q, inputs.seq_lens, inputs.tables, max_new=query
        )
        hidden, states = self._forward(inputs, metadata)
        logits = self._model.logits(hidden)
        drafts = None if query == 1 else (inputs.tokens, inputs.offsets)
        results = self._results[: rows * query]
        tokens, finite = self._sampler.sample(
            logits, inputs.token_slots, inputs.sample_positions, drafts=drafts, results=results
        )
        if drafts is None:
            self._last_tokens.index_copy_(0, inputs.row_slots, tokens)
        else:
            self._sampler.accept_drafts(
                tokens, finite, inputs.tokens, inputs.cu_q, inputs.row_slots, self._last_tokens, query=query
            )
        if self._draft is not None and states is not None:
            self._store_states(self._draft, states, inputs, results, query)
        return DecodeOutput(results, logits)

    def _forward(self, inputs: DecodeInputs, metadata: TritonMetadata) -> tuple[Tensor, Tensor | None]:
        """Of all tokens, and their states, if there is a draft model that follows."""
        if self._draft is None or self._draft.lags:
            return self._model.forward(inputs.tokens, inputs.positions, self._cache, self._backend, metadata), None
        # A row without tokens begins with one that nobody owns.
        firsts = inputs.cu_q[:-1].long()
        behind = (inputs.positions.index_select(0, firsts) - 1).clamp(min=0) // self._block_size
        links = StateLinks(firsts, inputs.tables.gather(1, behind.long()[:, None]).squeeze(1).long())
        return self._draft.forward_with_target(
            self._target, inputs.tokens, inputs.positions, metadata, rows=None, links=links
        )

    def _store_states(
        self, draft: DraftModel, states: Tensor, inputs: DecodeInputs, sampled: Tensor, query: int
    ) -> None:
        """Leaves the states of tokens that count in their blocks, see draft_model.py; of others in nobody's block."""
        size = self._block_size
        counted, final = accepted_mask(sampled, inputs.tokens, inputs.offsets, query)
        wanted = (final | (counted & ((inputs.positions + 1) % size == 0))) & (inputs.slot_mapping >= 0)
        blocks = (inputs.slot_mapping // size).masked_fill(~wanted, self._pad_block).long()
        draft.store_states(states, torch.arange(len(blocks), device=self._device), blocks)

    def _query(self, items: Sequence[ScheduledSequence]) -> int:
        return self._max_query if any(item.drafts for item in items) else 1

    def _send(self, packed: np.ndarray) -> None:
        self._packed[: packed.size].copy_(pinned_copy(packed.reshape(-1), self._device), non_blocking=True)

    def _copy_table_rows(self, slots: np.ndarray, width: int) -> None:
        """Brings the lead of these slots' block tables to the device."""
        lines, at = upload([self._tables.blocks[slots, :width], slots.astype(np.int32)], self._device)
        self._slot_tables[:, :width].index_copy_(0, at.long(), lines)

    def _padding(self, rows: int, query: int) -> np.ndarray:
        packed = np.zeros((rows, packed_width(query, self._block_size)), dtype=np.int32)
        packed[:, 0] = self._sampler.pad_slot
        return packed


def _token(tokens: Sequence[int], index: int) -> int:
    """-1 for the one that only the device knows."""
    return tokens[index] if index < len(tokens) else -1


def _described(shape: tuple[int, int]) -> str:
    rows, query = shape
    return f"{rows} rows of {query} tokens"


def _without_ownership(output: DecodeOutput) -> DecodeOutput:
    """results are a buffer of ours."""
    return DecodeOutput(output.results, unowned_view(output.logits))
