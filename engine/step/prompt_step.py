"""Steps with prompt tokens in static buffers: all layers of the model in one launch of a CUDA graph.

Without a graph a step takes about ten launches per layer. Below about 1024 tokens a GPU computes them faster than the
host queues them (8B shape: 14 to 34 ms for the host, 5 to 24 ms for the GPU). A step is padded to a captured number of
tokens. `stage` copies one packed array to the device. The graph reads all facts about the rows from this array:

    tokens    [ decoding rows | chunk | chunk  | padding ]
    kernel      split KV        prefill tiles    none

There are two graphs for each number of tokens. Steps of few prompts use the one without decoding rows, because the
kernels for these rows take time even if there are none.

LM head and sampling have their own graph (`SampleStep`), because their inputs depend on the rows that sample. The
layers of a draft model are part of the prompt graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.adapters.rows import StepAdapters
from engine.adapters.slots import AdapterSlots
from engine.attention.grouped import GroupedAttention, GroupedMetadata
from engine.attention.triton_backend import DecodeRows, TritonAttention, TritonMetadata
from engine.cuda_graphs import CudaGraphs, GraphMirror, unowned_view
from engine.device import ALIGNMENT
from engine.kv.kv_pool import KVPool
from engine.models.base import ForwardContext, Model
from engine.schedule.scheduler import ScheduledSequence
from engine.schedule.sequence import WindowTables
from engine.speculation.draft_model import DraftModel, StateLinks, TargetModel
from engine.step.sample_step import SampleStep
from engine.step.step_tensors import SlotTables, StepPlan

if TYPE_CHECKING:
    from engine.sampling.device_sampler import DeviceSampler

#: Tokens of captured steps. On an H200 448 tokens take longer than 512, because cuBLAS selects a slow kernel.
TOKEN_BUCKETS = (32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024)
FEW_ROWS = 8  # Max rows of a step of few prompts, and max tokens with requested hidden states in it
MAX_SCORES = (
    4 << 20
)  # New tokens x keys of all chunks; above it the dense kernels save more time than the launches take
MAX_NEW_ENTRIES = 1024  # New entries of block tables in the packed array; more are copied before the step


class PromptBucket(NamedTuple):
    """Shape of one graph: a step of up to `tokens` tokens."""

    tokens: int
    decodes: bool  # The step may have decoding rows and many prompts; else it has few prompts
    adapted: bool = False  # Rows may have adapters

    def __str__(self) -> str:
        parts = ["decoding rows"] * self.decodes + ["adapters"] * self.adapted
        return f"{self.tokens} tokens{' with ' if parts else ''}{' and '.join(parts)}"


class PromptStep:
    """The layers of steps with prompt tokens, and their sampling."""

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        backend: TritonAttention | GroupedAttention,
        sampler: DeviceSampler,
        slot_tables: SlotTables,
        last_tokens: Tensor,  # int64 [slots + 1], the token sampled last in each slot; shared with all other steps
        *,
        max_rows: int,  # Max sequences of a step
        max_step_tokens: int,
        max_seq_drafts: int = 0,
        max_drafts: int = 0,  # Max drafts of a step
        draft_model: DraftModel | None = None,  # A draft model; its layers are in the same graph
        adapters: AdapterSlots | None = None,
        mirror: GraphMirror | None = None,  # The other ranks, which compute the layers too
    ) -> None:
        self._target, self._kv, self._draft = TargetModel(model, kv.layers(), backend), kv, draft_model
        self._draft_backend: TritonAttention | None = None  # The attention of a draft model that lags
        if draft_model is not None and draft_model.lags:
            assert isinstance(draft_model.backend, TritonAttention)
            self._draft_backend = draft_model.backend
        self._backend, self._block_size, self._device = backend, kv.layout.block_size, kv.data.device
        self._slot_tables, self._last_tokens, self._pad_slot = slot_tables, last_tokens, sampler.pad_slot
        self._max_rows, self._max_results = max_rows, max_rows + max_drafts
        self._max_new = 1 + max_seq_drafts  # Max tokens of a row that decodes
        self._sizes = tuple(sorted({min(size, max_step_tokens) for size in TOKEN_BUCKETS}))
        kinds = (False,) if adapters is None else (True, False)
        self.shapes = tuple(
            PromptBucket(size, decodes, adapted)
            for size in reversed(self._sizes)
            for decodes in (True, False)
            for adapted in kinds
        )
        self._token_adapters = None if adapters is None else adapters.buffer(self._sizes[-1])
        self._result_adapters = None if adapters is None else adapters.buffer(self._max_results)
        tokens = self._sizes[-1]
        self._window_groups = range(1, len(slot_tables.groups))
        fields = {
            "tokens": tokens,  # -1 - slot for the token that was sampled last in the slot
            "positions": tokens,
            "slot_mapping": tokens,
            "rows": self._max_results,  # The tokens with requested hidden states
            "row_slots": max_rows,
            "cu_q": max_rows + 1,
            "seq_lens": max_rows,
            "decode_cu_q": max_rows + 1,
            "decode_lens": max_rows,
            "tiles": max(backend.tile_list_size(size, max_rows) for size in self._sizes),
            "new_places": MAX_NEW_ENTRIES,  # New entries of block tables: place in the table of all slots, and block
            "new_blocks": MAX_NEW_ENTRIES,
            # The same of each KV group with a window.
            **{_of_group("slot_mapping", group): tokens for group in self._window_groups},
            **{_of_group("new_places", group): MAX_NEW_ENTRIES for group in self._window_groups},
            **{_of_group("new_blocks", group): MAX_NEW_ENTRIES for group in self._window_groups},
            "sample_slots": max_rows,
            "sample_positions": max_rows,
        }
        if self._draft_backend is not None:
            fields["draft_slots"] = tokens  # Written to by a draft model that lags
            fields["draft_tiles"] = max(self._draft_backend.tile_list_size(size, max_rows) for size in self._sizes)
        elif draft_model is not None:
            fields |= {"first_tokens": max_rows, "blocks_before": max_rows}  # An EAGLE head continues from them
        self._fields, total = _slices(fields)
        self._blank = np.zeros(total, dtype=np.int32)  # A step without rows
        blank = self._views(self._blank)
        for group in range(len(slot_tables.groups)):
            blank[_of_group("slot_mapping", group)][:] = -1
            blank[_of_group("new_places", group)][:] = self._pad_slot * slot_tables.width
        for name in "row_slots", "sample_slots":
            blank[name][:] = self._pad_slot
        for name, value in ("draft_slots", -1), ("blocks_before", kv.dummy_block):
            if name in blank:
                blank[name][:] = value
        self._packed = torch.from_numpy(self._blank).to(self._device, copy=True)
        self._inputs: Mapping[str, Tensor] = {name: self._packed[place] for name, place in self._fields.items()}
        slots, positions = self._inputs["sample_slots"], self._inputs["sample_positions"]
        self.sample_step = SampleStep(model, sampler, last_tokens, slots, positions, adapters)
        self._graphs = CudaGraphs(
            "prompt", self._device, self._compute, keep=_without_ownership, describe=str, mirror=mirror
        )

    def bucket(self, scheduled: Sequence[ScheduledSequence], plan: StepPlan) -> PromptBucket | None:
        """Returns the bucket of a step; None if it does not fit. Its decoding rows must come first."""
        count, num_hidden = len(plan.tokens), len(plan.hidden_indices)
        num_decodes = len(scheduled) - len(plan.prefill_rows)
        chunks = scheduled[num_decodes:]
        if count > self._sizes[-1] or len(scheduled) > self._max_rows or any(entry.is_decode for entry in chunks):
            return None
        if sum(entry.num_new * (entry.start + entry.num_new) for entry in chunks) > MAX_SCORES:
            return None
        size = next(size for size in self._sizes if size >= count)
        decodes = num_decodes > 0 or max(len(scheduled), num_hidden) > FEW_ROWS
        bucket = PromptBucket(size, decodes, plan.adapter_slots is not None)
        return bucket if num_hidden <= self._num_hidden(bucket) else None

    def stage(self, plan: StepPlan, bucket: PromptBucket) -> None:
        """Copies the inputs of a step to the device."""
        shape, slots, size = plan.shape, plan.slots, self._block_size
        starts, num_new = np.asarray(shape.starts), np.asarray(shape.num_new)
        num_rows, num_decodes, count = len(slots), len(slots) - len(plan.prefill_rows), len(plan.tokens)
        ends, first_tokens = starts + num_new, np.zeros(num_rows + 1, dtype=np.int64)
        np.cumsum(num_new, out=first_tokens[1:])
        host = torch.empty(len(self._blank), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        packed = host.numpy()
        packed[:] = self._blank
        inputs = self._views(packed)
        token_slots = np.repeat(slots, num_new)
        for group, slot_tables in enumerate(self._slot_tables.groups):
            places, blocks = self._new_entries(slot_tables, slots, starts, ends)
            inputs[_of_group("new_places", group)][: len(places)] = places
            inputs[_of_group("new_blocks", group)][: len(places)] = blocks
            block = slot_tables.tables.blocks[token_slots, plan.positions // size]
            inputs[_of_group("slot_mapping", group)][:count] = block * size + plan.positions % size
        inputs["tokens"][:count] = plan.tokens
        inputs["positions"][:count] = plan.positions
        inputs["rows"][: len(plan.hidden_indices)] = plan.hidden_indices
        inputs["row_slots"][:num_rows] = slots
        inputs["cu_q"][:] = count
        inputs["cu_q"][: num_rows + 1] = first_tokens
        inputs["seq_lens"][:num_rows] = ends
        inputs["decode_cu_q"][:] = first_tokens[num_decodes]
        inputs["decode_cu_q"][: num_decodes + 1] = first_tokens[: num_decodes + 1]
        inputs["decode_lens"][:num_decodes] = ends[:num_decodes]
        chunks = starts[num_decodes:], num_new[num_decodes:], num_decodes, bucket.tokens
        tiles = self._backend.list_tiles(*chunks)
        inputs["tiles"][: len(tiles)] = tiles
        num_results = min(
            len(plan.logits_indices), self._max_rows
        )  # more only with drafts, which `sample` does not get
        results = plan.logits_indices[:num_results]
        inputs["sample_slots"][:num_results] = np.where(plan.samples, plan.result_slots, self._pad_slot)[:num_results]
        inputs["sample_positions"][:num_results] = plan.positions[results] + 1
        if self._draft_backend is not None:
            tiles = self._draft_backend.list_tiles(*chunks)
            inputs["draft_tiles"][: len(tiles)] = tiles
            inputs["draft_slots"][:count] = inputs["slot_mapping"][:count]
            inputs["draft_slots"][: first_tokens[num_decodes]] = -1
        elif self._draft is not None:
            table = self._slot_tables.tables.blocks
            before = np.where(starts > 0, table[slots, np.maximum(starts - 1, 0) // size], self._kv.dummy_block)
            for name, values in ("first_tokens", first_tokens[:-1]), ("blocks_before", before):
                inputs[name][:] = values[0]  # padding repeats the first row
                inputs[name][:num_rows] = values
        self._packed.copy_(host, non_blocking=True)
        if plan.adapter_slots is not None:
            self._stage_adapters(plan.adapter_slots, plan.hidden_indices, bucket)

    def _stage_adapters(self, slots: np.ndarray, results: np.ndarray, bucket: PromptBucket) -> None:
        """Copies the adapter slots of the tokens and of the tokens `results`, which need hidden states."""
        assert self._token_adapters is not None
        assert self._result_adapters is not None
        self._token_adapters.stage(slots, bucket.tokens)
        self._result_adapters.stage(slots[results], self._num_hidden(bucket))

    def run(self, bucket: PromptBucket) -> tuple[Tensor, Tensor | None]:
        """Queues the layers of the staged step. Returns two buffers that the next step overwrites.

        The first has the hidden states of the tokens `plan.hidden_indices`, then unused rows. The second has the states
        of all tokens for an EAGLE head, None without one.
        """
        return self._graphs.run(bucket)

    def sample(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Queues LM head and sampling of the step that runs. The step must have no drafts.

        Returns the buffers of `SampleStep.run`. A result that is not sampled has a meaningless token, or -1.
        """
        slots = None if plan.adapter_slots is None else plan.adapter_slots[plan.logits_indices]
        return self.sample_step.run(len(plan.logits_indices), slots)

    def capture(self, shapes: Sequence[PromptBucket] | None = None) -> None:
        """Captures the graphs of these shapes (None for all), the largest first. The model must be capturable."""
        self._graphs.capture(shapes or self.shapes, self._stage_padding)

    def _stage_padding(self, bucket: PromptBucket) -> None:
        self._packed.copy_(torch.from_numpy(self._blank))
        if bucket.adapted:
            nothing = np.zeros(0, dtype=np.int64)
            self._stage_adapters(nothing, nothing, bucket)

    def _new_entries(
        self, slot_tables: SlotTables, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the entries of the rows' block tables that the device lacks: their places, and their blocks."""
        tables, size = slot_tables.tables, self._block_size
        current = np.minimum(tables.num_on_device[slots], starts // size)
        needed = -(-ends // size)
        tables.num_on_device[slots] = needed
        missing = needed - current
        if missing.sum() > MAX_NEW_ENTRIES:
            slot_tables.copy(slots, int(needed.max()))
            return slots[:0], slots[:0]
        index = np.arange(missing.sum()) + np.repeat(current - (np.cumsum(missing) - missing), missing)
        entry_slots = np.repeat(slots, missing)
        return entry_slots * slot_tables.width + index, tables.blocks[entry_slots, index]

    def _num_hidden(self, bucket: PromptBucket) -> int:
        """Returns the number of hidden states that a graph returns."""
        return min(bucket.tokens, self._max_results if bucket.decodes else FEW_ROWS, self._max_results)

    def _compute(self, bucket: PromptBucket) -> tuple[Tensor, Tensor | None]:
        model, cache, _ = self._target
        inputs, size = self._inputs, bucket.tokens
        num_rows = min(self._max_rows, size if bucket.decodes else FEW_ROWS)
        tables: list[Tensor] = []
        for group, slot_tables in enumerate(self._slot_tables.groups):
            places, blocks = inputs[_of_group("new_places", group)], inputs[_of_group("new_blocks", group)]
            slot_tables.device_tables.view(-1).index_copy_(0, places.long(), blocks)
            tables.append(slot_tables.device_tables.index_select(0, inputs["row_slots"][:num_rows]))
        tokens, positions = inputs["tokens"][:size], inputs["positions"][:size]
        tokens = torch.where(tokens < 0, self._last_tokens.index_select(0, (-1 - tokens).clamp_(min=0)), tokens)
        cu_q, seq_lens = inputs["cu_q"][: num_rows + 1], inputs["seq_lens"][:num_rows]
        rows = inputs["rows"][: self._num_hidden(bucket)].long()
        decode: DecodeRows | None = None
        if bucket.decodes:
            decode_rows = inputs["decode_cu_q"][: num_rows + 1], inputs["decode_lens"][:num_rows]
            decode = DecodeRows(*decode_rows, self._max_new)
        metadata: TritonMetadata | GroupedMetadata
        if not isinstance(self._backend, GroupedAttention):
            slot_mapping = inputs["slot_mapping"][:size]
            metadata = self._backend.listed_metadata(slot_mapping, cu_q, seq_lens, tables[0], inputs["tiles"], decode)
        else:
            mappings = [inputs[_of_group("slot_mapping", group)][:size] for group in range(len(tables))]
            tables[1:] = self._mask_tables(tables[1:], cu_q, seq_lens)
            metadata = self._backend.listed_metadata(mappings, cu_q, seq_lens, tables, inputs["tiles"], decode)
        adapters: StepAdapters | None = None
        if bucket.adapted:
            assert self._token_adapters is not None
            assert self._result_adapters is not None
            adapters = StepAdapters(self._token_adapters.rows(size), self._result_adapters.rows(len(rows)))
        states: Tensor | None = None
        if self._draft is not None and not self._draft.lags:
            links = StateLinks(inputs["first_tokens"][:num_rows].long(), inputs["blocks_before"][:num_rows].long())
            hidden, states = self._draft.forward_with_target(
                self._target, tokens, positions, metadata, rows=rows, links=links, adapters=adapters
            )
        else:
            context = ForwardContext(cache, self._backend, metadata, adapters=adapters)
            hidden = model.forward(tokens, positions, context, rows=rows)
        if self._draft is not None and self._draft.lags:
            assert self._draft_backend is not None
            draft_slots, draft_tiles = inputs["draft_slots"][:size], inputs["draft_tiles"]
            self._draft.write_kv(
                tokens,
                positions,
                self._draft_backend.listed_metadata(draft_slots, cu_q, seq_lens, tables[0], draft_tiles),
            )
        self.sample_step.keep(hidden)
        return hidden, states

    def _mask_tables(self, tables: Sequence[Tensor], cu_q: Tensor, seq_lens: Tensor) -> list[Tensor]:
        """Returns the tables of the window groups with the dummy block before the window: others may use the blocks."""
        base = (seq_lens - cu_q.diff()) // self._block_size
        masked: list[Tensor] = []
        for slot_tables, table in zip(self._slot_tables.groups[1:], tables, strict=True):
            assert isinstance(slot_tables.tables, WindowTables)
            index = torch.arange(table.shape[1], device=self._device)
            unseen = index < (base - slot_tables.tables.tail)[:, None]
            masked.append(table.masked_fill(unseen, self._kv.dummy_block))
        return masked

    def _views(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        return {name: packed[place] for name, place in self._fields.items()}


def _of_group(name: str, group: int) -> str:
    """Returns the name of a field of a KV group; the first group has the plain name."""
    return f"{name}_{group}" if group else name


def _slices(sizes: Mapping[str, int]) -> tuple[dict[str, slice], int]:
    """Returns the place of each int32 field in a packed array, aligned, and the size of the array."""
    step = ALIGNMENT // 4
    ends = list(itertools.accumulate((-(-size // step) * step for size in sizes.values()), initial=0))
    return {name: slice(end, end + size) for (name, size), end in zip(sizes.items(), ends, strict=False)}, ends[-1]


def _without_ownership(output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Returns the output without ownership of the graph's memory."""
    hidden, states = output
    return unowned_view(hidden), None if states is None else unowned_view(states)
