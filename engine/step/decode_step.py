"""Decode steps in static buffers: from the last sampled tokens to the next ones in one launch of a CUDA graph.

`stage` copies a few numbers for each row to the device. `run` computes the inputs, all layers, the LM head, sampling,
and writes the sampled tokens to `last_tokens`, where the next step reads them, maybe before the host knows the results.
`capture` records `run` once for each batch bucket and query length. A step with fewer rows than its bucket is padded
with rows that have no tokens.

Query length 1 is a plain decode step. The other query length, 1 + max_seq_drafts, is for rows with drafts: the step
samples after every token of a row as if all drafts before it were right, and the samples after accepted drafts count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.adapters.rows import StepAdapters
from engine.adapters.slots import AdapterSlots
from engine.attention.grouped import GroupedAttention, GroupedMetadata
from engine.attention.triton_backend import DECODE_TOKENS, TritonAttention, TritonMetadata
from engine.cuda_graphs import CudaGraphs, GraphMirror, batch_buckets, unowned_view
from engine.device import pinned_copy
from engine.kernels.decode_inputs import HEADER, DecodeInputs, blocks_touched, decode_inputs, packed_width
from engine.kv.kv_pool import LayerKV
from engine.models.base import ForwardContext, Model
from engine.sampling.device_sampler import DeviceSampler
from engine.schedule.scheduler import ScheduledSequence
from engine.schedule.sequence import WindowTables
from engine.speculation.acceptance import accepted_mask
from engine.speculation.draft_model import DraftModel, EagleDraftModel, StateLinks, TargetModel
from engine.step.states import StateTable
from engine.step.step_tensors import SlotTables, token_slots, uses_adapters


class DecodeBucket(NamedTuple):
    """Shape of one graph."""

    rows: int
    query: int  # Tokens of a row
    adapted: bool = False  # Rows may have adapters

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.query} tokens{' with adapters' if self.adapted else ''}"


class DecodeStep:
    """Steps in which every sequence decodes."""

    def __init__(
        self,
        model: Model,
        cache: Sequence[LayerKV],
        backend: TritonAttention | GroupedAttention,
        sampler: DeviceSampler,
        slot_tables: SlotTables,
        last_tokens: Tensor,  # int64 [slots + 1], the token sampled last in each slot; shared with all other steps
        *,
        max_rows: int,  # Max sequences of a step
        max_seq_drafts: int = 0,
        max_drafts: int = 0,  # Max drafts of a step. It bounds the number of sequences of a step with drafts
        draft_model: DraftModel | None = None,  # An EAGLE head's layers are in each step, a lagging model's in none
        adapters: AdapterSlots | None = None,
        states: StateTable | None = None,
        mirror: GraphMirror | None = None,  # The other ranks, which compute the layers too
    ) -> None:
        assert 0 <= max_seq_drafts < DECODE_TOKENS
        assert max_seq_drafts <= max_drafts
        self.max_rows = max_rows
        self._model, self._cache, self._backend, self._sampler = model, cache, backend, sampler
        self._states = states
        self._slot_tables, self._last_tokens = slot_tables.groups, last_tokens
        self._draft, self._target = draft_model, TargetModel(model, cache, backend)
        self._block_size, self._device = cache[0].block_size, last_tokens.device
        self._pad_block = cache[0].kv.shape[0] - 1  # the dummy block
        buckets, self._max_query = batch_buckets(max_rows), 1 + max_seq_drafts
        self._buckets = {1: buckets}
        if max_seq_drafts:
            self._buckets[self._max_query] = tuple(rows for rows in buckets if rows * max_seq_drafts <= max_drafts)
        kinds = (False,) if adapters is None else (True, False)
        shapes = [
            DecodeBucket(rows, query, adapted)
            for query, sizes in self._buckets.items()
            for rows in sizes
            for adapted in kinds
        ]
        self.shapes = sorted(shapes, key=lambda shape: (shape.rows * shape.query, shape), reverse=True)
        most_tokens = max(shape.rows * shape.query for shape in shapes)
        words = max(shape.rows * self._packed_width(shape.query) for shape in shapes)
        self._adapters = None if adapters is None else adapters.buffer(most_tokens)
        self._packed = torch.zeros(words, dtype=torch.int32, device=self._device)
        self._inputs = DecodeInputs.empty(max_rows, most_tokens, slot_tables.width, self._device)
        # The window groups have slot mappings and block tables of their own.
        self._group_inputs = [(self._inputs.slot_mapping, self._inputs.tables)]
        self._group_inputs += [
            (torch.zeros_like(s), torch.zeros_like(t)) for s, t in self._group_inputs * (len(self._slot_tables) - 1)
        ]
        self._results = torch.zeros(most_tokens, dtype=torch.int64, device=self._device)
        self._graphs = CudaGraphs(
            "decode", self._device, self._compute, keep=_without_ownership, describe=str, mirror=mirror
        )

    @property
    def draft_buckets(self) -> tuple[int, ...]:
        """Batch sizes of steps with drafts, ascending."""
        return self._buckets[self._max_query]

    def fits(self, scheduled: Sequence[ScheduledSequence]) -> bool:
        """Returns whether the step fits: each sequence has one token beside its drafts and samples after each token."""
        query = self._query(scheduled)
        return (
            query in self._buckets
            and len(scheduled) <= self._buckets[query][-1]
            and all(entry.samples and entry.num_new == 1 + len(entry.drafts) for entry in scheduled)
        )

    def stage(self, scheduled: Sequence[ScheduledSequence]) -> DecodeBucket:
        """Copies the rows of a step to the device. Returns its bucket."""
        query = self._query(scheduled)
        rows = next(size for size in self._buckets[query] if size >= len(scheduled))
        size, count = self._block_size, len(scheduled)
        for slot_tables in self._slot_tables:
            for entry in scheduled:
                slot_tables.tables.row(entry.seq)
        slots = np.array([entry.seq.slot for entry in scheduled])
        starts = np.array([entry.start for entry in scheduled])
        num_new = np.array([entry.num_new for entry in scheduled])
        ends = np.cumsum(num_new)
        # The blocks of the new tokens travel with the row. All blocks before are on the device, or are copied first.
        base, last = starts // size, (starts + num_new - 1) // size
        for slot_tables in self._slot_tables:
            missing = slot_tables.tables.num_on_device[slots] < base
            if missing.any():
                slot_tables.copy(slots[missing], int(base[missing].max()))
            slot_tables.tables.num_on_device[slots] = last + 1

        packed = np.zeros((rows, self._packed_width(query)), dtype=np.int32)
        packed[count:, 0] = self._sampler.pad_slot
        packed[count:, 2] = ends[-1]
        packed[:count, 0] = slots
        packed[:count, 1] = starts
        packed[:count, 2] = ends - num_new
        packed[:count, 3] = num_new
        packed[:count, HEADER : HEADER + query] = [
            (_token(entry.seq.tokens, entry.start), *entry.drafts, *(0,) * (query - entry.num_new))
            for entry in scheduled
        ]
        touched = np.minimum(base[:, None] + np.arange(blocks_touched(query, size)), last[:, None])
        for group, slot_tables in enumerate(self._slot_tables):
            first = HEADER + query + group * touched.shape[1]
            blocks = slot_tables.tables.blocks[slots[:, None], touched]
            packed[:count, first : first + touched.shape[1]] = blocks
        self._send(packed)
        if self._states is not None:
            self._states.stage(scheduled)
        bucket = DecodeBucket(rows, query, self._adapters is not None and uses_adapters(scheduled))
        if self._adapters is not None and bucket.adapted:
            self._adapters.stage(token_slots(scheduled), rows * query)
        return bucket

    def run(self, bucket: DecodeBucket) -> tuple[Tensor, Tensor]:
        """Queues the staged step, whose bucket `stage` has returned.

        Returns two buffers that the next step overwrites: the results, int64 [T], the token sampled after each token of
        the rows in order, -1 where the logits were not finite; and the logits, float32 [T, vocab].
        """
        return self._graphs.run(bucket)

    def capture(self, shapes: Sequence[DecodeBucket] | None = None) -> None:
        """Captures the graphs of these shapes (None for all), the largest first. The model must be capturable."""
        self._graphs.capture(shapes or self.shapes, self._stage_padding)

    def _compute(self, shape: DecodeBucket) -> tuple[Tensor, Tensor]:
        rows, query, adapted = shape
        packed = self._packed[: rows * self._packed_width(query)].view(rows, -1)
        inputs, metadata = self._expand(packed, rows, query)
        adapters = self._adapters.rows(rows * query) if self._adapters is not None and adapted else None
        hidden, states = self._forward(inputs, metadata, None if adapters is None else StepAdapters(adapters))
        logits = self._model.logits(hidden, adapters)
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
        if isinstance(self._draft, EagleDraftModel) and states is not None:
            self._store_states(self._draft, states, inputs, results, query)
        return results, logits

    def _expand(self, packed: Tensor, rows: int, query: int) -> tuple[DecodeInputs, TritonMetadata | GroupedMetadata]:
        """Makes the inputs and the attention's metadata of a step from its packed rows."""
        sizes = {"query": query, "block_size": self._block_size}
        inputs = self._inputs.slice_for(rows, query)
        if not isinstance(self._backend, GroupedAttention):
            decode_inputs(packed, self._slot_tables[0].device_tables, self._last_tokens, inputs, **sizes)
            metadata = self._backend.decode_metadata(
                inputs.slot_mapping, inputs.cu_q, inputs.seq_lens, inputs.tables, max_new=query
            )
            return inputs, metadata
        mappings, tables = [m[: rows * query] for m, _ in self._group_inputs], [t[:rows] for _, t in self._group_inputs]
        for group, slot_tables in enumerate(self._slot_tables):
            out = inputs._replace(slot_mapping=mappings[group], tables=tables[group])
            tail = slot_tables.tables.tail if isinstance(slot_tables.tables, WindowTables) else None
            place: dict[str, Any] = {"group": group, "groups": len(self._slot_tables), "tail": tail}
            place |= {"pad_block": self._pad_block, **sizes}
            decode_inputs(packed, slot_tables.device_tables, self._last_tokens, out, **place)
        return inputs, self._backend.decode_metadata(mappings, inputs.cu_q, inputs.seq_lens, tables, max_new=query)

    def _packed_width(self, query: int) -> int:
        return packed_width(query, self._block_size, len(self._slot_tables))

    def _forward(
        self, inputs: DecodeInputs, metadata: TritonMetadata | GroupedMetadata, adapters: StepAdapters | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns hidden states of all tokens, and their states for an EAGLE head, if there is one."""
        if self._draft is None or self._draft.lags:
            states = None if self._states is None else self._states.of_graph(inputs.row_slots)
            context = ForwardContext(self._cache, self._backend, metadata, adapters=adapters, states=states)
            return self._model.forward(inputs.tokens, inputs.positions, context), None
        # A padding row has no tokens. Its "first token" is a padding token, and the state of that is not used.
        firsts = inputs.cu_q[:-1].long()
        last_blocks = (inputs.positions.index_select(0, firsts) - 1).clamp(min=0) // self._block_size
        links = StateLinks(firsts, inputs.tables.gather(1, last_blocks.long()[:, None]).squeeze(1).long())
        return self._draft.forward_with_target(
            self._target, inputs.tokens, inputs.positions, metadata, rows=None, links=links, adapters=adapters
        )

    def _store_states(
        self, draft: EagleDraftModel, states: Tensor, inputs: DecodeInputs, sampled: Tensor, query: int
    ) -> None:
        """Stores the states of accepted tokens in their blocks (draft_model.py), all others in the dummy block."""
        size = self._block_size
        accepted, last = accepted_mask(sampled, inputs.tokens, inputs.offsets, query)
        stored = (last | (accepted & ((inputs.positions + 1) % size == 0))) & (inputs.slot_mapping >= 0)
        blocks = (inputs.slot_mapping // size).masked_fill(~stored, self._pad_block).long()
        draft.store_states(states, torch.arange(len(blocks), device=self._device), blocks)

    def _query(self, scheduled: Sequence[ScheduledSequence]) -> int:
        return self._max_query if any(entry.drafts for entry in scheduled) else 1

    def _send(self, packed: np.ndarray) -> None:
        self._packed[: packed.size].copy_(pinned_copy(packed.reshape(-1), self._device), non_blocking=True)

    def _stage_padding(self, shape: DecodeBucket) -> None:
        packed = np.zeros((shape.rows, self._packed_width(shape.query)), dtype=np.int32)
        packed[:, 0] = self._sampler.pad_slot
        self._send(packed)
        if self._adapters is not None and shape.adapted:
            self._adapters.stage(np.zeros(0, dtype=np.int64), shape.rows * shape.query)


def _token(tokens: Sequence[int], index: int) -> int:
    """Returns the token, or -1 if only the device knows it."""
    return tokens[index] if index < len(tokens) else -1


def _without_ownership(output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the output without ownership of the graph's memory; the results are in a buffer of DecodeStep."""
    return output[0], unowned_view(output[1])
