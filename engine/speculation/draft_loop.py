"""The draft loop: draws drafts from a draft model, one token after the other, for several sequences at a time.

Step 0 computes the newest token of each sequence, which has no KV yet, at its own position. Each further step computes
the draft before it. KV goes to the slots behind the end of the sequence, inside its lease; the verify step writes those
slots again.

Coupled acceptance: a draft is drawn with the parameters and the noise that the target will use for the same position.
Rejection sampling: a draft is drawn with noise of its own, and its distribution is kept.

On a GPU the loop is one CUDA graph (draft_graphs.py), for coupled acceptance with a capturable draft model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import StepShape
from engine.device import upload
from engine.kv.block_tables import BlockTables
from engine.kv.kv_pool import KVPool
from engine.sampling.sampler import NoiseKeys, SampleRow, sample, token_probs
from engine.schedule.sequence import Sequence as EngineSequence
from engine.speculation.draft_graphs import DraftGraphs
from engine.speculation.draft_model import DraftModel
from engine.speculation.proposer import DraftBatch
from engine.speculation.rejection import split_by_weight

CATCH_UP_TOKENS = 1024  # Most tokens of one catch-up batch.
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

    Args:
        tables: block tables of the running sequences.
        rejection: draw for rejection sampling.
        graphs: runs the loop as a CUDA graph; None: step by step.
    """

    def __init__(
        self,
        draft_model: DraftModel,
        kv: KVPool,
        tables: BlockTables,
        *,
        rejection: bool,
        graphs: DraftGraphs | None = None,
    ) -> None:
        self.name = draft_model.name
        self._draft_model, self._kv, self._tables = draft_model, kv, tables
        self._rejection, self._graphs = rejection, graphs
        self._device = kv.data.device

    @torch.inference_mode()
    def run(self, seqs: Sequence[EngineSequence], num_drafts: Sequence[int]) -> DraftBatch:
        """Draws num_drafts[i] drafts of each sequence, fewer if the draft model's logits are not finite.

        All tokens of the sequences are known. The lease of a sequence that drafts has room for the newest token and
        all drafts. Waits for the device.
        """
        rows = [row for row, count in enumerate(num_drafts) if count]
        self.catch_up([seqs[row] for row in rows if seqs[row].draft_lag])
        blocks = [self._tables.row(seq) for seq in seqs]
        drafts = DraftBatch.empty(len(seqs), max(num_drafts))
        if self._graphs is not None and self._graphs.fits(len(rows)):
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
            rows = [row for row in range(len(seqs)) if drafts.lengths[row]]
            self._write_kv(
                [seqs[row] for row in rows],
                starts[rows] + drafts.lengths[rows],
                [drafts.tokens[row, drafts.lengths[row] - 1 : drafts.lengths[row]].tolist() for row in rows],
            )
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
    noise = NoiseKeys.for_rows(rows, logits).for_vocab(logits.shape[1], stream=DRAFT_STREAM)
    return (probs.log() + noise).argmax(dim=-1), torch.isfinite(probs.sum(dim=-1)), probs


def _row(seq: EngineSequence, drafts: np.ndarray) -> SampleRow:
    """Returns the sampling state of the draft that follows `drafts`."""
    earlier: list[int] = drafts.tolist()
    allowed = None
    if seq.constraint is not None:
        allowed_drafts, masks = seq.constraint.masks(earlier)
        # After a forbidden draft no mask is needed: forbidden drafts are trimmed before the verify step.
        allowed = masks[-1] if len(allowed_drafts) == len(earlier) else None
    return SampleRow(seq.request.sampling, seq.tokens, seq.prompt_len, seq.child, drafts=earlier, allowed_mask=allowed)
