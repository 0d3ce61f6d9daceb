"""The draft loop on a GPU: K steps of the draft model, with sampling, in one CUDA graph for each batch bucket.

The host sends four numbers a row (slot of the sampler, position of the newest token, how many drafts, the token) and
the rows' block tables, and reads K tokens a row back. A row that wants fewer drafts, and a padding row, computes along
and writes nowhere. Which tokens a row has drafted already is read by the sampler from the graph's own buffer.
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
from engine.speculation.proposer import DraftBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.sampling.device_sampler import DeviceSampler

SLOT, START, STEPS, TOKEN, HEADER = range(5)


class DraftGraphs:
    """buckets: rows that graphs are captured for, ascending; drafts: K; width: blocks of the longest lease. stage:
    makes the sampler know what sequences are sampled with.
    """

    def __init__(
        self,
        drafter: DraftModel,
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
        self._draft_model, self._sampler, self._stage = drafter, sampler, stage
        self._drafts, self._block_size, self._device = max_seq_drafts, block_size, device
        most = self.shapes[0]
        self._header = torch.zeros(most, HEADER, dtype=torch.int32, device=device)
        self._tables = torch.zeros(most, max_blocks, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(most, max_seq_drafts, dtype=torch.int64, device=device)
        self._graphs = CudaGraphs("draft", device, self._compute, keep=_nothing, describe="{} rows".format)

    def fits(self, rows: int) -> bool:
        return rows <= self.shapes[0]

    def run(self, seqs: Sequence[EngineSequence], steps: Sequence[int], blocks: Sequence[np.ndarray]) -> DraftBatch:
        """See DraftLoop.run; waits for the device."""
        self._stage(seqs)
        rows = min(size for size in self.shapes if size >= len(seqs))
        header = self._padding(rows)
        header[: len(seqs), SLOT] = [seq.slot for seq in seqs]
        header[: len(seqs), START] = [seq.start for seq in seqs]
        header[: len(seqs), STEPS] = steps
        header[: len(seqs), TOKEN] = [seq.tokens[seq.start] for seq in seqs]
        tables = np.zeros((len(seqs), max(len(row) for row in blocks)), dtype=np.int32)
        for line, row in zip(tables, blocks, strict=True):
            line[: len(row)] = row
        self._header[:rows].copy_(pinned_copy(header, self._device), non_blocking=True)
        there = pinned_copy(tables, self._device).to(self._device, non_blocking=True)
        self._tables[: len(seqs), : tables.shape[1]].copy_(there)
        self._graphs.run(rows)
        drawn = self._tokens[: len(seqs)].cpu().numpy()
        return DraftBatch(drawn[:, : max(steps)], np.array(steps, dtype=np.int64))

    def capture(self, shapes: Sequence[int] | None = None) -> None:
        """Records the graphs of all numbers of rows, or of some, the largest first."""
        self._graphs.capture(shapes or self.shapes, self._empty)

    def _empty(self, rows: int) -> None:
        self._header[:rows].copy_(pinned_copy(self._padding(rows), self._device), non_blocking=True)

    def _padding(self, rows: int) -> np.ndarray:
        header = np.zeros((rows, HEADER), dtype=np.int32)
        header[:, SLOT], header[:, START] = self._sampler.pad_slot, 1
        return header

    def _compute(self, rows: int) -> None:
        """Fills the tokens of the first `rows` rows."""
        size, backend = self._block_size, self._draft_model.backend
        assert isinstance(backend, TritonAttention)
        header, tables, drawn = self._header[:rows], self._tables[:rows], self._tokens[:rows]
        slots, start = header[:, SLOT].long(), header[:, START]
        # A model that lags computes its last draft as well: it may be right.
        count = self._drafts + self._draft_model.lags
        places = torch.arange(count, dtype=torch.int32, device=self._device)
        live = places[:, None] < (header[:, STEPS] + (header[:, STEPS] > 0) * self._draft_model.lags)[None, :]
        # [count, rows]; 0 where nothing is drawn, for rope tables and block tables may end before such a place.
        positions = (start[None, :] + places[:, None]) * live
        block = tables.t().gather(0, (positions // size).long())
        kv_slots = (block * size + positions % size).masked_fill(~live, -1)
        seq_lens = (positions + 1) * live
        cu_q = torch.arange(rows + 1, dtype=torch.int32, device=self._device)
        behind = tables.gather(1, ((start - 1).clamp(min=0) // size)[:, None].long()).squeeze(1).long()
        before: Any = self._draft_model.initial_states(behind)
        offsets = places[:, None].expand(-1, rows).contiguous()
        tokens = header[:, TOKEN].long()
        for place in range(count):
            metadata = backend.decode_metadata(kv_slots[place], cu_q, seq_lens[place], tables, max_new=1)
            if place == self._drafts:
                self._draft_model.write_kv(tokens, positions[place], metadata)
                break
            logits, before = self._draft_model.draft_step(tokens, before, positions[place], metadata)
            said = drawn[:, max(0, place - 1)]
            tokens, _ = self._sampler.sample(logits, slots, positions[place] + 1, drafts=(said, offsets[place]))
            drawn[:, place] = tokens


def _nothing(output: None) -> None:
    """The tokens are in a buffer of their own."""
