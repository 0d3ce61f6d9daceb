"""Steps with prompt tokens in static buffers: all layers of the model in one launch of a CUDA graph.

Two kinds of steps are captured, each for a different cost on the host:

- Small steps. Without a graph a step takes about ten launches per layer. Below about 1024 tokens a GPU computes them
  faster than the host queues them (8B shape: 24 to 34 ms for the host, 7 to 23 ms for an H100). A small step is padded
  to a captured number of tokens. All its rows use the paged kernel, which reads their lengths on the device.
- Chunks of chosen lengths after chosen prefixes, alone in their step. The GPU is busy for longer than the host takes
  to queue them, but queueing holds the GIL, and other threads of the pod wait for it. Nothing is padded: which
  kernels a chunk uses depends on both lengths.

LM head and sampling stay outside: their inputs depend on which rows sample. The layers of a draft model are inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import StepShape
from engine.attention.triton_backend import TritonAttention, TritonMetadata
from engine.cuda_graphs import CudaGraphs, unowned_view
from engine.device import upload
from engine.kv.kv_pool import KVPool
from engine.models.base import ForwardContext, Model
from engine.speculation.draft_model import DraftModel, StateLinks, TargetModel, state_links_of

TOKEN_BUCKETS = (32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)  # Tokens of captured small steps
MAX_ROWS = 8  # Max rows of a step, and max tokens with requested hidden states
MAX_SCORES = 2 << 20  # New tokens x keys of a step; above it the dense kernels save more time than the launches take


class PromptBucket(NamedTuple):
    """Shape of one graph: a step of up to `tokens` tokens, or one chunk of exactly `tokens` tokens."""

    tokens: int
    start: int = -1  # Number of cached tokens before a chunk; -1 for a padded step

    @property
    def is_chunk(self) -> bool:
        return self.start >= 0

    def __str__(self) -> str:
        return f"{self.tokens} tokens after {self.start}" if self.is_chunk else f"{self.tokens} tokens"


class PromptStep:
    """The layers of steps with prompt tokens."""

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        backend: TritonAttention,
        *,
        max_step_tokens: int,
        max_blocks: int,
        draft_model: DraftModel | None = None,  # A draft model, whose layers are computed in the same graph
        chunk_graphs: Sequence[tuple[int, int]] = (),  # Cached and new tokens; those without a cuDNN plan are left out
    ) -> None:
        self._target, self._kv, self._draft = TargetModel(model, kv.layers(), backend), kv, draft_model
        self._backend, self._block_size, self._device = backend, kv.layout.block_size, kv.data.device
        self._sizes = tuple(sorted({min(size, max_step_tokens) for size in TOKEN_BUCKETS}))
        chunks = chunk_graphs if draft_model is None else ()
        self._chunks = {PromptBucket(new, start) for start, new in chunks if backend.has_cudnn_plan(start, new)}
        self.shapes = tuple(sorted((*map(PromptBucket, self._sizes), *self._chunks), reverse=True))
        max_tokens = self.shapes[0].tokens
        self._tokens, self._positions = self._zeros(max_tokens), self._zeros(max_tokens)
        self._rows = self._zeros(MAX_ROWS)
        self._slots = self._zeros(max_tokens, dtype=torch.int32)
        self._cu_q = self._zeros(MAX_ROWS + 1, dtype=torch.int32)
        self._seq_lens = self._zeros(MAX_ROWS, dtype=torch.int32)
        self._tables = self._zeros(MAX_ROWS, max_blocks, dtype=torch.int32)
        self._draft_slots = self._zeros(max_tokens, dtype=torch.int32)  # Written to by a draft model that lags
        self._state_links = StateLinks(self._zeros(MAX_ROWS), self._zeros(MAX_ROWS))  # An EAGLE head continues from it
        self._graphs = CudaGraphs("prompt", self._device, self._compute, keep=_without_ownership, describe=str)

    def fits(self, shape: StepShape, rows: int) -> bool:
        """Returns whether the step can run here; `rows` is the number of tokens with requested hidden states."""
        return self._bucket(shape, rows) is not None

    def _bucket(self, shape: StepShape, rows: int) -> PromptBucket | None:
        if max(len(shape.num_new), rows) > MAX_ROWS:
            return None
        count = sum(shape.num_new)
        if len(shape.num_new) == 1 and (chunk := PromptBucket(count, shape.starts[0])) in self._chunks:
            return chunk
        scores = sum(new * (start + new) for start, new in zip(shape.starts, shape.num_new, strict=True))
        return next((PromptBucket(s) for s in self._sizes if s >= count), None) if scores <= MAX_SCORES else None

    def run(
        self, shape: StepShape, tokens: Tensor, positions: Tensor, rows: Tensor, prompts: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Returns hidden states of the tokens `rows`, and states of all tokens for an EAGLE head, if there is one.

        The next step overwrites both. Tokens and positions are int64 [T], `rows` is int64 [R]. `prompts` are the
        rows of the step that do not decode.
        """
        count, num_rows = len(tokens), len(shape.num_new)
        bucket = self._bucket(shape, len(rows))
        assert bucket is not None, "the step does not fit"
        size = bucket.tokens
        starts, num_new = np.asarray(shape.starts), np.asarray(shape.num_new)
        ends = starts + num_new
        num_blocks = -(-ends // self._block_size)
        tables = np.zeros((num_rows, int(num_blocks.max())), dtype=np.int32)
        for row, (blocks, used) in enumerate(zip(shape.blocks, num_blocks.tolist(), strict=True)):
            tables[row, :used] = blocks[:used]
        row_of = np.repeat(np.arange(num_rows), num_new)
        first_tokens = np.concatenate([[0], np.cumsum(num_new)])
        in_sequence = np.arange(count) - first_tokens[row_of] + starts[row_of]
        slots = np.full(size, -1, dtype=np.int32)
        slots[:count] = (
            tables[row_of, in_sequence // self._block_size] * self._block_size + in_sequence % self._block_size
        )
        cu_q = np.full(MAX_ROWS + 1, count, dtype=np.int32)
        cu_q[: num_rows + 1] = first_tokens
        seq_lens = np.zeros(MAX_ROWS, dtype=np.int32)
        seq_lens[:num_rows] = ends
        draft_slots = np.full(size, -1, dtype=np.int32)
        draft_slots[:count] = np.where(np.isin(row_of, prompts), slots[:count], -1)
        device_slots, device_draft_slots, device_cu_q, device_lens, device_tables = upload(
            [slots, draft_slots, cu_q, seq_lens, tables], self._device
        )
        self._slots[:size].copy_(device_slots)
        self._draft_slots[:size].copy_(device_draft_slots)
        self._cu_q.copy_(device_cu_q)
        self._seq_lens.copy_(device_lens)
        self._tables[:num_rows, : tables.shape[1]].copy_(device_tables)
        self._tokens[:count].copy_(tokens)
        self._positions[:count].copy_(positions)
        self._rows[: len(rows)].copy_(rows)
        self._rows[len(rows) :].zero_()  # an index of a larger step may lie beyond this step's end
        if self._draft is not None and not self._draft.lags:
            links = state_links_of(shape, self._kv)
            buffers = self._state_links
            for buffer, values in (buffers.firsts, links.firsts), (buffers.blocks_before, links.blocks_before):
                buffer[:num_rows].copy_(values)
                buffer[num_rows:].copy_(values[:1].expand(MAX_ROWS - num_rows))  # padding repeats the first row
        hidden, states = self._graphs.run(bucket)
        return hidden[: len(rows)], None if states is None else states[:count]

    def capture(self, shapes: Sequence[PromptBucket] | None = None) -> None:
        """Captures the graphs of these shapes (None for all), the largest first. The model must be capturable."""
        self._graphs.capture(shapes or self.shapes, self._empty)

    def _compute(self, bucket: PromptBucket) -> tuple[Tensor, Tensor | None]:
        """Returns hidden states of MAX_ROWS tokens, and states of all tokens for an EAGLE head."""
        model, cache, _ = self._target
        size = bucket.tokens
        tokens, positions = self._tokens[:size], self._positions[:size]
        if bucket.is_chunk:
            metadata = self._backend.chunk_metadata(
                self._slots[:size], self._cu_q[:2], self._seq_lens[:1], self._tables[:1], start=bucket.start
            )
        else:
            metadata = self._metadata(self._backend, self._slots[:size])
        if self._draft is not None and not self._draft.lags:
            return self._draft.forward_with_target(
                self._target, tokens, positions, metadata, rows=self._rows, links=self._state_links
            )
        hidden = model.forward(tokens, positions, ForwardContext(cache, self._backend, metadata), rows=self._rows)
        if self._draft is not None:
            backend = self._draft.backend
            assert isinstance(backend, TritonAttention)
            self._draft.write_kv(tokens, positions, self._metadata(backend, self._draft_slots[:size]))
        return hidden, None

    def _metadata(self, backend: TritonAttention, slots: Tensor) -> TritonMetadata:
        return backend.paged_metadata(slots, self._cu_q, self._seq_lens, self._tables, max_new=len(slots))

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _empty(self, bucket: PromptBucket) -> None:
        """Fills the buffers for a capture: rows without tokens, or a chunk that writes to no block."""
        self._slots.fill_(-1)
        self._draft_slots.fill_(-1)
        for buffer in (self._tokens, self._positions, self._cu_q, self._seq_lens, self._rows, self._state_links.firsts):
            buffer.zero_()
        self._state_links.blocks_before.fill_(self._kv.dummy_block)


def _without_ownership(output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Returns the output without ownership of the graph's memory."""
    hidden, states = output
    return unowned_view(hidden), None if states is None else unowned_view(states)
