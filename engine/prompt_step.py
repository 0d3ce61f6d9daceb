"""Steps with few prompt tokens in static buffers: all layers are one launch of a CUDA graph.

A step of its own size is some ten launches a layer, and below about 1024 tokens a GPU computes them faster than a host
queues them (8B shape: 24 to 34 ms for the host, 7 to 23 for an H100). So such a step is padded to a captured number of
tokens. Its rows, prompts or chunks and sequences that decode beside them, all take the paged kernel, which finds their
lengths on the device. LM head and sampling stay outside: they depend on who samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import StepShape
from engine.attention.triton_backend import TritonAttention
from engine.graphs import Graphs, borrowed
from engine.layer_kv import LayerKV
from engine.models.base import Model
from engine.upload import upload

SIZES = (32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)  # tokens
MOST_ROWS = 8  # of a step, and of the tokens whose states are asked for
MOST_SCORES = 2 << 20  # new tokens x keys: with more the other kernels' speed is worth the launches


class PromptStep:
    """most_tokens: of any step; max_blocks: of the longest lease."""

    def __init__(
        self, model: Model, cache: Sequence[LayerKV], backend: TritonAttention, *, most_tokens: int, max_blocks: int
    ) -> None:
        self._model, self._cache, self._backend = model, cache, backend
        self._block_size, self._device = cache[0].block_size, cache[0].kv.device
        self.shapes = tuple(sorted({min(size, most_tokens) for size in SIZES}, reverse=True))
        most = self.shapes[0]
        self._tokens, self._positions, self._rows = self._zeros(most), self._zeros(most), self._zeros(MOST_ROWS)
        self._slots = self._zeros(most, dtype=torch.int32)
        self._cu_q = self._zeros(MOST_ROWS + 1, dtype=torch.int32)
        self._seq_lens = self._zeros(MOST_ROWS, dtype=torch.int32)
        self._tables = self._zeros(MOST_ROWS, max_blocks, dtype=torch.int32)
        self._graphs = Graphs("prompt", self._device, self._compute, keep=borrowed)

    def fits(self, shape: StepShape, rows: int) -> bool:
        """The step can run here. rows: tokens whose states are asked for."""
        if max(len(shape.num_new), rows) > MOST_ROWS or sum(shape.num_new) > self.shapes[0]:
            return False
        return sum(new * (start + new) for start, new in zip(shape.starts, shape.num_new, strict=True)) <= MOST_SCORES

    def run(self, shape: StepShape, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """What Model.hidden returns for these rows; it belongs to the step, the next one overwrites it.

        tokens, positions: int64 [T] of the step; rows: int64 [R], which of them.
        """
        count, live = len(tokens), len(shape.num_new)
        size = next(size for size in reversed(self.shapes) if size >= count)
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
        cu_q = np.full(MOST_ROWS + 1, count, dtype=np.int32)
        cu_q[: live + 1] = firsts
        seq_lens = np.zeros(MOST_ROWS, dtype=np.int32)
        seq_lens[:live] = ends
        there_slots, there_cu_q, there_lens, there_tables = upload([slots, cu_q, seq_lens, tables], self._device)
        self._slots[:size].copy_(there_slots)
        self._cu_q.copy_(there_cu_q)
        self._seq_lens.copy_(there_lens)
        self._tables[:live, : tables.shape[1]].copy_(there_tables)
        self._tokens[:count].copy_(tokens)
        self._positions[:count].copy_(positions)
        self._rows[: len(rows)].copy_(rows)
        self._rows[len(rows) :].zero_()  # what a larger step left may lie beyond this one's end
        return self._graphs.run(size)[: len(rows)]

    def capture(self, shapes: Sequence[int] | None = None) -> None:
        """Records the graphs of all sizes, or of some, the largest first. The model must be capturable."""
        self._graphs.capture(shapes or self.shapes, self._empty)

    def _compute(self, size: int) -> Tensor:
        """States of MOST_ROWS tokens."""
        metadata = self._backend.paged_metadata(
            self._slots[:size], self._cu_q, self._seq_lens, self._tables, max_new=size
        )
        return self._model.hidden(
            self._tokens[:size], self._positions[:size], self._cache, self._backend, metadata, rows=self._rows
        )

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _empty(self, size: int) -> None:
        """A step whose rows have no tokens."""
        self._slots.fill_(-1)
        for buffer in (self._tokens, self._positions, self._cu_q, self._seq_lens, self._rows):
            buffer.zero_()
