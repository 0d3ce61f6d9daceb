"""The draft loop on a GPU: all passes of the draft model, with sampling, in one CUDA graph for each batch size.

The host sends four numbers for each row (slot, position of the newest token, number of drafts, the token) and the block
tables, and reads the drafts back. Rows with fewer drafts than the graph's passes, and padding rows, are computed to the
end without writing KV. The sampler reads the drafts of earlier passes from the graph's own buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.attention.triton_backend import TritonAttention
from engine.cuda_graphs import CudaGraphs
from engine.device import pinned_copy
from engine.schedule.sequence import Sequence as EngineSequence
from engine.speculation.draft_model import DraftModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.sampling.device_sampler import DeviceSampler

SLOT, START, NUM_DRAFTS, TOKEN, NUM_COLUMNS = range(5)  # Columns of the header, then their number.


class DraftGraphs:
    """The CUDA graphs that draw the drafts of a batch. They support coupled acceptance only.

    Args:
        stage: uploads the sampling state of these sequences to their slots.
        buckets: batch sizes to capture.
        max_seq_drafts: number of draft passes in each graph.
        max_blocks: largest number of blocks in a lease.
    """

    def __init__(
        self,
        draft_model: DraftModel,
        sampler: DeviceSampler,
        stage: Callable[[Sequence[EngineSequence]], None],
        *,
        buckets: Sequence[int],
        max_seq_drafts: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.shapes = tuple(sorted(buckets, reverse=True))
        self._draft_model, self._sampler, self._stage = draft_model, sampler, stage
        self._max_seq_drafts, self._block_size, self._device = max_seq_drafts, block_size, device
        max_rows = self.shapes[0]
        self._header = torch.zeros(max_rows, NUM_COLUMNS, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(max_rows, max_seq_drafts, dtype=torch.int64, device=device)
        # A graph leaves its output in `_tokens`, so there is no output to keep.
        self._graphs = CudaGraphs("draft", device, self._compute, keep=lambda _: None, describe="{} rows".format)

    def fits(self, rows: int) -> bool:
        """Returns whether there is a graph for this many rows."""
        return rows <= self.shapes[0]

    def run(
        self, seqs: Sequence[EngineSequence], num_drafts: Sequence[int], blocks: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Draws num_drafts[i] >= 1 drafts of each sequence, int64 [R, max(num_drafts)]. Waits for the device."""
        self._stage(seqs)
        rows = min(size for size in self.shapes if size >= len(seqs))
        header = self._padding_rows(rows)
        header[: len(seqs), SLOT] = [seq.slot for seq in seqs]
        header[: len(seqs), START] = [seq.start for seq in seqs]
        header[: len(seqs), NUM_DRAFTS] = num_drafts
        header[: len(seqs), TOKEN] = [seq.tokens[seq.start] for seq in seqs]
        tables = np.zeros((len(seqs), max(len(row) for row in blocks)), dtype=np.int32)
        for table, row in zip(tables, blocks, strict=True):
            table[: len(row)] = row
        self._header[:rows].copy_(pinned_copy(header, self._device), non_blocking=True)
        device_tables = pinned_copy(tables, self._device).to(self._device, non_blocking=True)
        self._tables[: len(seqs), : tables.shape[1]].copy_(device_tables)
        self._graphs.run(rows)
        drafts: np.ndarray = self._tokens[: len(seqs), : max(num_drafts)].cpu().numpy()
        return drafts

    def capture(self, shapes: Sequence[int] | None = None) -> None:
        """Captures the graphs of these batch sizes (None: all), the largest first."""
        self._graphs.capture(shapes or self.shapes, self._fill_with_padding)

    def _fill_with_padding(self, rows: int) -> None:
        self._header[:rows].copy_(pinned_copy(self._padding_rows(rows), self._device), non_blocking=True)

    def _padding_rows(self, rows: int) -> np.ndarray:
        header = np.zeros((rows, NUM_COLUMNS), dtype=np.int32)
        header[:, SLOT], header[:, START] = self._sampler.pad_slot, 1
        return header

    def _compute(self, rows: int) -> None:
        """Writes the drafts of the first `rows` rows to `_tokens`."""
        block_size, backend = self._block_size, self._draft_model.backend
        assert isinstance(backend, TritonAttention)
        header, tables, drafts = self._header[:rows], self._tables[:rows], self._tokens[:rows]
        slots, start = header[:, SLOT].long(), header[:, START]
        # A model that lags (`lags` is 1) also computes its last draft, which may be accepted and then needs KV.
        num_steps = self._max_seq_drafts + self._draft_model.lags
        steps = torch.arange(num_steps, dtype=torch.int32, device=self._device)
        active = (
            steps[:, None] < (header[:, NUM_DRAFTS] + (header[:, NUM_DRAFTS] > 0) * self._draft_model.lags)[None, :]
        )
        # int32 [steps, rows]. Inactive steps get position 0: RoPE and block tables may end before the real position.
        positions = (start[None, :] + steps[:, None]) * active
        block = tables.t().gather(0, (positions // block_size).long())
        slot_mapping = (block * block_size + positions % block_size).masked_fill(~active, -1)
        seq_lens = (positions + 1) * active
        cu_q = torch.arange(rows + 1, dtype=torch.int32, device=self._device)
        last_blocks = tables.gather(1, ((start - 1).clamp(min=0) // block_size)[:, None].long()).squeeze(1).long()
        states: Any = self._draft_model.initial_states(last_blocks)
        offsets = steps[:, None].expand(-1, rows).contiguous()
        tokens = header[:, TOKEN].long()
        for step in range(num_steps):
            metadata = backend.decode_metadata(slot_mapping[step], cu_q, seq_lens[step], tables, max_new=1)
            if step == self._max_seq_drafts:
                assert self._draft_model.lags
                self._draft_model.write_kv(tokens, positions[step], metadata)
                break
            logits, states = self._draft_model.draft_step(tokens, states, positions[step], metadata)
            previous = drafts[:, max(0, step - 1)]
            tokens, _ = self._sampler.sample(logits, slots, positions[step] + 1, drafts=(previous, offsets[step]))
            drafts[:, step] = tokens
