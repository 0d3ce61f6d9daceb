"""The draft loop: draws drafts from a draft model, one token after the other, for several sequences at a time.

Step 0 computes the newest token of each sequence, which has no KV yet, at its own position. Each further step computes
the draft before it. KV goes to the slots behind the end of the sequence, inside its lease; the verify step writes those
slots again.

Coupled acceptance: a draft is drawn with the parameters and the noise that the target will use for the same position.
Rejection sampling: a draft is drawn with noise of its own, and its distribution is kept.

On a GPU the loop is one CUDA graph, for coupled acceptance with a capturable draft model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import StepShape
from engine.attention.triton_backend import TritonAttention
from engine.cuda_graphs import CudaGraphs
from engine.device import pinned_copy, upload
from engine.kv.kv_pool import KVPool
from engine.sampling.sampler import NoiseKeys, SampleRow, gumbel, sample, token_probs
from engine.schedule.sequence import BlockTables
from engine.schedule.sequence import Sequence as EngineSequence
from engine.speculation.acceptance import split_by_weight
from engine.speculation.draft_model import DraftModel
from engine.speculation.proposer import DraftBatch

if TYPE_CHECKING:
    from engine.sampling.device_sampler import DeviceSampler

CATCH_UP_TOKENS = 1024  # Max tokens of one catch-up batch.
DRAFT_STREAM = 3  # Noise stream from which drafts for rejection sampling are drawn.


class ModelProposer:
    """A proposer over a draft model (Leviathan et al. 2023) or an EAGLE head (Li et al. 2024).

    It keeps no state: the KV of the drafts lies in the blocks.

    Args:
        loop: draws the drafts.
        reserve: `reserve(seq, end)` extends the lease of the sequence to `end` tokens as far as the pool has spare
            blocks, and returns the number of tokens that fit. The scheduler takes unused blocks back.
    """

    def __init__(self, loop: DraftLoop, reserve: Callable[[EngineSequence, int], int]) -> None:
        self.name = loop.name
        self._loop, self._reserve = loop, reserve

    def new_state(self, seq: EngineSequence) -> None:
        """Returns None: there is no state."""

    def catch_up(self, seqs: Sequence[EngineSequence]) -> None:
        """Computes the missing KV of the draft model. The host must know all tokens of the sequences."""
        self._loop.catch_up(seqs)

    def propose(self, seqs: Sequence[EngineSequence], states: Sequence[Any], limits: Sequence[int]) -> DraftBatch:
        num_drafts = [self._num_drafts(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]
        return self._loop.run(seqs, num_drafts) if any(num_drafts) else DraftBatch.empty(len(seqs), max(limits))

    def _num_drafts(self, seq: EngineSequence, limit: int) -> int:
        """Returns how many drafts fit in the lease after the newest token, in blocks that no other sequence reads."""
        assert seq.lease is not None
        most = min(limit, seq.max_len - seq.length - 1)
        if most <= 0 or seq.lease.cow_index == seq.start // seq.block_size:
            return 0
        return max(0, min(most, self._reserve(seq, seq.start + 1 + most) - seq.start - 1))

    def expects_drafts(self, seq: EngineSequence, state: Any) -> bool:
        """Returns True: a model always has drafts."""
        return True

    def on_verified(self, seq: EngineSequence, state: Any, drafts: int, accepted: int) -> None:
        """Does nothing: the verify step has computed the layers of the draft model."""


class DraftLoop:
    """The loop over one draft model.

    With `rejection` it draws for rejection sampling. `graphs` runs it as CUDA graphs; None: step by step.
    """

    def __init__(
        self, draft_model: DraftModel, kv: KVPool, tables: BlockTables, *, rejection: bool, graphs: DraftGraphs | None
    ) -> None:
        self.name = draft_model.name
        self._draft_model, self._kv, self._tables = draft_model, kv, tables
        self._rejection, self._graphs = rejection, graphs
        self._device = kv.data.device

    @torch.inference_mode()
    def run(self, seqs: Sequence[EngineSequence], num_drafts: Sequence[int]) -> DraftBatch:
        """Draws num_drafts[i] drafts of each sequence, fewer if the draft model's logits are not finite.

        All tokens are known. A lease has room for the newest token and all drafts. Waits for the device.
        """
        rows = [row for row, count in enumerate(num_drafts) if count]
        self.catch_up([seqs[row] for row in rows if seqs[row].draft_lag])
        blocks = [self._tables.row(seq) for seq in seqs]
        drafts = DraftBatch.empty(len(seqs), max(num_drafts))
        if self._graphs is not None and len(rows) <= self._graphs.shapes[0]:
            counts = [num_drafts[row] for row in rows]
            drafts.tokens[rows] = self._graphs.run([seqs[row] for row in rows], counts, [blocks[row] for row in rows])
            drafts.lengths[rows] = counts
            return drafts
        self._zero_new_blocks([(seqs[row], num_drafts[row]) for row in rows])
        probs: Tensor | None = None
        starts = np.array([seq.start for seq in seqs])
        last_blocks = [int(blocks[row][(starts[row] - 1) // self._kv.layout.block_size]) for row in rows]
        states = self._draft_model.initial_states(upload([np.array(last_blocks)], self._device)[0])
        tokens = np.array([seqs[row].tokens[seqs[row].start] for row in rows])
        for step in range(max(num_drafts)):
            active = [i for i, row in enumerate(rows) if num_drafts[row] > step and drafts.lengths[row] == step]
            if not active:
                break
            if len(active) < len(rows):
                rows, tokens = [rows[i] for i in active], tokens[active]
                if states is not None:
                    states = states.index_select(0, upload([np.array(active)], self._device)[0])
            positions_now = starts[rows] + step
            shape = StepShape(positions_now.tolist(), [1] * len(rows), [blocks[row] for row in rows])
            ids, positions = upload([tokens, positions_now], self._device)
            metadata = self._draft_model.backend.prepare(shape)
            logits, states = self._draft_model.draft_step(ids, states, positions, metadata)
            sample_rows = [_row(seqs[r], drafts.tokens[r, :step]) for r in rows]
            drawn, finite, draft_probs = draw_drafts(logits, sample_rows, rejection=self._rejection)
            tokens = drawn.cpu().numpy()
            drafts.tokens[rows, step] = tokens
            drafts.lengths[rows] += finite.cpu().numpy()
            if draft_probs is not None:
                if probs is None:
                    probs = draft_probs.new_zeros(len(seqs), max(num_drafts), draft_probs.shape[1])
                probs[rows, step] = draft_probs
        if self._draft_model.lags:
            # The last draft may be accepted and then needs KV too.
            rows = np.flatnonzero(drafts.lengths).tolist()
            lengths = drafts.lengths[rows]
            last_drafts = drafts.tokens[rows, lengths - 1, None].tolist()
            self._write_kv([seqs[row] for row in rows], starts[rows] + lengths, last_drafts)
            self._wait()
        return DraftBatch(drafts.tokens, drafts.lengths, probs)

    @torch.inference_mode()
    def catch_up(self, seqs: Sequence[EngineSequence]) -> None:
        """Computes the draft KV of all tokens for which it is missing. Waits for the device."""
        if not seqs:
            return
        for batch in split_by_weight(seqs, [seq.draft_lag for seq in seqs], CATCH_UP_TOKENS):
            starts = np.array([seq.complete_len for seq in batch])
            self._write_kv(batch, starts, [seq.tokens[seq.complete_len : seq.computed] for seq in batch])
            for seq in batch:
                seq.draft_lag = 0
        self._wait()

    def _wait(self) -> None:
        """Waits for the writes. No step fence covers them, and blocks of drafts that are not verified may be reused."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _write_kv(self, seqs: Sequence[EngineSequence], starts: np.ndarray, tokens: Sequence[Sequence[int]]) -> None:
        """Writes the draft KV of tokens[i] of each sequence, at positions from starts[i] on."""
        if not seqs:
            return
        assert self._draft_model.lags
        counts = [len(tokens_of) for tokens_of in tokens]
        shape = StepShape(starts.tolist(), counts, [self._tables.row(seq) for seq in seqs])
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts.tolist(), counts, strict=True)])
        ids, device_positions = upload([np.concatenate(tokens), positions], self._device)
        self._draft_model.write_kv(ids, device_positions, self._draft_model.backend.prepare(shape))

    def _zero_new_blocks(self, rows: Sequence[tuple[EngineSequence, int]]) -> None:
        """Zeroes the blocks that rows (sequence, number of drafts) begin, if the attention reads unwritten slots."""
        if not self._draft_model.backend.reads_unwritten_slots:
            return
        size = self._kv.layout.block_size
        new_blocks: list[int] = []
        for seq, count in rows:
            assert seq.lease is not None
            new_blocks += seq.lease.blocks[-(-seq.start // size) : -(-(seq.start + count + 1) // size)]
        self._kv.zero(new_blocks)


def draw_drafts(logits: Tensor, rows: Sequence[SampleRow], *, rejection: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draws one draft per row.

    Args:
        logits: float32 [R, vocab] of the draft model.

    Returns:
        The drafts, int64 [R]; whether their logits were finite, bool [R]; and for rejection sampling the distributions
        that they were drawn from, float32 [R, vocab].
    """
    if not rejection:
        sampled = sample(logits, rows)
        return sampled.tokens, sampled.finite, None
    probs = token_probs(logits, rows)
    noise = gumbel(*NoiseKeys.for_rows(rows, logits), logits.shape[1], stream=DRAFT_STREAM)
    return (probs.log() + noise).argmax(dim=-1), torch.isfinite(probs.sum(dim=-1)), probs


def _row(seq: EngineSequence, drafts: np.ndarray) -> SampleRow:
    """Returns the sampling state of the draft that follows `drafts`."""
    earlier, allowed = drafts.tolist(), None
    if seq.constraint is not None:
        allowed_drafts, masks = seq.constraint.masks(earlier)
        # After a forbidden draft no mask is needed: forbidden drafts are trimmed before the verify step.
        allowed = masks[-1] if len(allowed_drafts) == len(earlier) else None
    return SampleRow(seq.request.sampling, seq.tokens, seq.prompt_len, seq.child, drafts=earlier, allowed_mask=allowed)


SLOT, START, NUM_DRAFTS, TOKEN, NUM_COLUMNS = range(5)  # Columns of the header, then their number.


class DraftGraphs:
    """The CUDA graphs that draw the drafts of a batch. They support coupled acceptance only.

    The host sends four numbers for each row (slot, position of the newest token, number of drafts, the token) and the
    block tables, and reads the drafts back. Rows with fewer drafts than the graph's passes, and padding rows, are
    computed to the end without writing KV. The sampler reads earlier drafts from the graph's own buffer.

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
        last_steps = header[:, NUM_DRAFTS] + (header[:, NUM_DRAFTS] > 0) * self._draft_model.lags
        active = steps[:, None] < last_steps[None, :]
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
