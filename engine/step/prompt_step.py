"""Steps with prompt tokens in static buffers: all layers are one launch of a CUDA graph.

A step of its own size is some ten launches a layer, and below about 1024 tokens a GPU computes them faster than a host
queues them (8B shape: 24 to 34 ms for the host, 7 to 23 for an H100). So such a step is padded to a captured number of
tokens. Its rows, prompts or chunks and sequences that decode beside them, all take the paged kernel, which finds their
lengths on the device. LM head and sampling stay outside: they depend on who samples. The layers of a draft model are
inside, as in any step: see engine/speculation/draft_model.py.

A longer chunk keeps the GPU busy for longer than the host takes to queue it, but the interpreter is busy all that time,
and other threads of the pod wait for it. Chunks of chosen lengths after chosen prefixes, each alone in its step, are
captured too, with the kernels that they would have anyway: what these do depends on both lengths, so nothing is padded.
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
from engine.models.base import Model
from engine.speculation.draft_model import DraftModel, StateLinks, TargetModel, state_links_of

TOKEN_BUCKETS = (32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)  # tokens
MAX_ROWS = 8  # of a step, and of the tokens whose states are asked for
MAX_SCORES = 2 << 20  # new tokens x keys: with more the other kernels' speed is worth the launches


class PromptBucket(NamedTuple):
    """What one graph computes: a step of up to so many tokens; or, with a start, one chunk of just so many after so
    many cached ones.
    """

    tokens: int
    start: int = -1

    @property
    def chunk(self) -> bool:
        return self.start >= 0

    def __str__(self) -> str:
        return f"{self.tokens} tokens after {self.start}" if self.chunk else f"{self.tokens} tokens"


class PromptStep:
    """kv: the pool; most_tokens: of any step; max_blocks: of the longest lease. draft: layers of a draft model. chunks:
    cached and new tokens of chunks that are captured, as far as they have plans of their own.
    """

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        backend: TritonAttention,
        *,
        max_step_tokens: int,
        max_blocks: int,
        draft_model: DraftModel | None = None,
        chunk_graphs: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._target, self._kv, self._draft = TargetModel(model, kv.layers(), backend), kv, draft_model
        self._backend, self._block_size, self._device = backend, kv.layout.block_size, kv.data.device
        self._sizes = tuple(sorted({min(size, max_step_tokens) for size in TOKEN_BUCKETS}))
        self._chunks = {
            PromptBucket(new, start)
            for start, new in chunk_graphs
            if draft_model is None and backend.has_cudnn_plan(start, new)
        }
        self.shapes = tuple(sorted((*map(PromptBucket, self._sizes), *self._chunks), reverse=True))
        most = self.shapes[0].tokens
        self._tokens, self._positions, self._rows = self._zeros(most), self._zeros(most), self._zeros(MAX_ROWS)
        self._slots = self._zeros(most, dtype=torch.int32)
        self._cu_q = self._zeros(MAX_ROWS + 1, dtype=torch.int32)
        self._seq_lens = self._zeros(MAX_ROWS, dtype=torch.int32)
        self._tables = self._zeros(MAX_ROWS, max_blocks, dtype=torch.int32)
        # Of a draft model: where it writes if it lags, and what it goes on from if it follows.
        self._draft_slots = self._zeros(most, dtype=torch.int32)
        self._state_links = StateLinks(self._zeros(MAX_ROWS), self._zeros(MAX_ROWS))
        self._graphs = CudaGraphs("prompt", self._device, self._compute, keep=_without_ownership, describe=str)

    def fits(self, shape: StepShape, rows: int) -> bool:
        """The step can run here. rows: tokens whose states are asked for."""
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
        """What Model.hidden returns for these rows, and the states of all tokens if a draft model follows; both belong
        to the step, the next one overwrites them.

        tokens, positions: int64 [T] of the step; rows: int64 [R], which of them; prompts: rows of the step that do not
        decode.
        """
        count, live = len(tokens), len(shape.num_new)
        bucket = self._bucket(shape, len(rows))
        assert bucket is not None, "the step does not fit"
        size = bucket.tokens
        starts, num_new = np.asarray(shape.starts), np.asarray(shape.num_new)
        ends = starts + num_new
        used = -(-ends // self._block_size)
        tables = np.zeros((live, int(used.max())), dtype=np.int32)
        for row, (blocks, there) in enumerate(zip(shape.blocks, used.tolist(), strict=True)):
            tables[row, :there] = blocks[:there]
        row_of = np.repeat(np.arange(live), num_new)
        firsts = np.concatenate([[0], np.cumsum(num_new)])
        at = np.arange(count) - firsts[row_of] + starts[row_of]
        slots = np.full(size, -1, dtype=np.int32)
        slots[:count] = tables[row_of, at // self._block_size] * self._block_size + at % self._block_size
        cu_q = np.full(MAX_ROWS + 1, count, dtype=np.int32)
        cu_q[: live + 1] = firsts
        seq_lens = np.zeros(MAX_ROWS, dtype=np.int32)
        seq_lens[:live] = ends
        draft_slots = np.full(size, -1, dtype=np.int32)
        draft_slots[:count] = np.where(np.isin(row_of, prompts), slots[:count], -1)
        there_slots, there_draft, there_cu_q, there_lens, there_tables = upload(
            [slots, draft_slots, cu_q, seq_lens, tables], self._device
        )
        self._slots[:size].copy_(there_slots)
        self._draft_slots[:size].copy_(there_draft)
        self._cu_q.copy_(there_cu_q)
        self._seq_lens.copy_(there_lens)
        self._tables[:live, : tables.shape[1]].copy_(there_tables)
        self._tokens[:count].copy_(tokens)
        self._positions[:count].copy_(positions)
        self._rows[: len(rows)].copy_(rows)
        self._rows[len(rows) :].zero_()  # what a larger step left may lie beyond this one's end
        if self._draft is not None and not self._draft.lags:
            links = state_links_of(shape, self._kv)
            for buffer, there in (
                (self._state_links.firsts, links.firsts),
                (self._state_links.blocks_before, links.blocks_before),
            ):
                buffer[:live].copy_(there)
                buffer[live:].copy_(there[:1].expand(MAX_ROWS - live))  # once more what the first row says
        hidden, states = self._graphs.run(bucket)
        return hidden[: len(rows)], None if states is None else states[:count]

    def capture(self, shapes: Sequence[PromptBucket] | None = None) -> None:
        """Records the graphs of all shapes, or of some, the largest first. The model must be capturable."""
        self._graphs.capture(shapes or self.shapes, self._empty)

    def _compute(self, bucket: PromptBucket) -> tuple[Tensor, Tensor | None]:
        """Of MOST_ROWS tokens, and states of all."""
        model, cache, _ = self._target
        size = bucket.tokens
        tokens, positions = self._tokens[:size], self._positions[:size]
        if bucket.chunk:
            metadata = self._backend.chunk_metadata(
                self._slots[:size], self._cu_q[:2], self._seq_lens[:1], self._tables[:1], start=bucket.start
            )
        else:
            metadata = self._metadata(self._backend, self._slots[:size])
        if self._draft is not None and not self._draft.lags:
            return self._draft.forward_with_target(
                self._target, tokens, positions, metadata, rows=self._rows, links=self._state_links
            )
        hidden = model.forward(tokens, positions, cache, self._backend, metadata, rows=self._rows)
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
        """A step whose rows have no tokens. A chunk's have, of blocks that it only reads."""
        self._slots.fill_(-1)
        self._draft_slots.fill_(-1)
        for buffer in (self._tokens, self._positions, self._cu_q, self._seq_lens, self._rows, self._state_links.firsts):
            buffer.zero_()
        self._state_links.blocks_before.fill_(self._kv.dummy_block)


def _without_ownership(output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    hidden, states = output
    return unowned_view(hidden), None if states is None else unowned_view(states)
