"""K tokens drawn one after the other from a draft model, for several sequences at a time.

Step 0 computes a sequence's newest token, which has no KV yet, at its own position; each further one computes the draft
before it. Keys and values go to the slots behind the sequence's end, which its lease has room for and in which nothing
counts: the step that verifies the drafts writes there again.

For coupled acceptance a draft is drawn as the target would draw the token there: same parameters, same noise. For
rejection sampling it is drawn with noise of its own, and what it was drawn from is kept.
On a GPU the loop is one CUDA graph (draft_graphs.py), for coupled acceptance and drafters that can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence

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

CATCH_UP_TOKENS = 1024  # tokens that are made up for at a time
DRAFT_STREAM = 3  # stream of noise of drafts that are accepted by rejection sampling


class DraftLoop:
    """tables: of the running sequences. rejection: what drafts are drawn from is kept. graphs: None computes step by
    step.
    """

    def __init__(
        self,
        drafter: DraftModel,
        kv: KVPool,
        tables: BlockTables,
        *,
        rejection: bool,
        graphs: DraftGraphs | None = None,
    ) -> None:
        self.name = drafter.name
        self._draft_model, self._kv, self._tables = drafter, kv, tables
        self._rejection, self.graphs = rejection, graphs
        self._device = kv.data.device

    @torch.inference_mode()
    def run(self, seqs: Sequence[EngineSequence], steps: Sequence[int]) -> DraftBatch:
        """steps[i] >= 1 drafts of each sequence, all of whose tokens are known and whose lease has room for the newest
        token and all drafts; fewer where the draft's output is not a number. Waits for the device.
        """
        self.catch_up([seq for seq in seqs if seq.draft_lag])
        if self.graphs is not None and self.graphs.fits(len(seqs)):
            return self.graphs.run(seqs, steps, [self._tables.row(seq) for seq in seqs])
        self._zero_new_blocks(seqs, steps)
        drafts = DraftBatch.empty(len(seqs), max(steps))
        probs: Tensor | None = None
        blocks = [self._tables.row(seq) for seq in seqs]
        starts = np.array([seq.start for seq in seqs])
        (behind,) = upload([_block_at(blocks, starts - 1, self._kv.layout.block_size)], self._device)
        before = self._draft_model.initial_states(behind)
        rows, tokens = list(range(len(seqs))), np.array([seq.tokens[seq.start] for seq in seqs])
        for place in range(max(steps)):
            going = [i for i, row in enumerate(rows) if steps[row] > place and drafts.lengths[row] == place]
            if not going:
                break
            if len(going) < len(rows):
                rows = [rows[i] for i in going]
                tokens = tokens[going]
                if before is not None:
                    (at,) = upload([np.array(going)], self._device)
                    before = before.index_select(0, at)
            at_now = starts[rows] + place
            shape = StepShape(at_now.tolist(), [1] * len(rows), [blocks[row] for row in rows])
            ids, positions = upload([tokens, at_now], self._device)
            metadata = self._draft_model.backend.prepare(shape)
            logits, before = self._draft_model.draft_step(ids, before, positions, metadata)
            sampled_as = [_row(seqs[r], drafts.tokens[r, :place]) for r in rows]
            drawn, finite, drawn_from = draw_drafts(logits, sampled_as, rejection=self._rejection)
            tokens = drawn.cpu().numpy()
            drafts.tokens[rows, place] = tokens
            drafts.lengths[rows] += finite.cpu().numpy()
            if drawn_from is not None:
                if probs is None:
                    probs = drawn_from.new_zeros(len(seqs), max(steps), drawn_from.shape[1])
                probs[rows, place] = drawn_from
        if self._draft_model.lags:
            # The last draft of all may be right, and then it has KV like the others.
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
        """Makes up for the tokens that the draft model has not computed; waits for the device."""
        if not seqs:
            return
        for part in _parts(seqs):
            starts = np.array([seq.complete_len for seq in part])
            self._write_kv(part, starts, [seq.tokens[seq.complete_len : seq.computed] for seq in part])
            for seq in part:
                seq.draft_lag = 0
        self._wait()

    def _wait(self) -> None:
        """No step fence keeps the blocks that were written: those for drafts that no step verifies may go to others."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _write_kv(self, seqs: Sequence[EngineSequence], starts: np.ndarray, tokens: Sequence[Sequence[int]]) -> None:
        """The draft model's layers for tokens of each sequence, from starts[i] on."""
        if not seqs:
            return
        counts = [len(some) for some in tokens]
        shape = StepShape(starts.tolist(), counts, [self._tables.row(seq) for seq in seqs])
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts.tolist(), counts, strict=True)])
        ids, at = upload([np.array([token for some in tokens for token in some]), positions], self._device)
        self._draft_model.write_kv(ids, at, self._draft_model.backend.prepare(shape))

    def _zero_new_blocks(self, seqs: Sequence[EngineSequence], steps: Sequence[int]) -> None:
        """Zeroes the blocks in which nothing is yet, where attention reads slots before they are written."""
        if not self._draft_model.backend.reads_unwritten_slots:
            return
        size = self._kv.layout.block_size
        begun: list[int] = []
        for seq, count in zip(seqs, steps, strict=True):
            assert seq.lease is not None
            begun += seq.lease.blocks[-(-seq.start // size) : -(-(seq.start + count + 1) // size)]
        self._kv.zero(begun)


def draw_drafts(logits: Tensor, rows: Sequence[SampleRow], *, rejection: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """A draft of each row of float32 [R, vocab] logits of the draft, int64 [R]; whether it means something, bool [R];
    and for rejection sampling what it was drawn from, float32 [R, vocab].
    """
    if not rejection:
        sampled = sample(logits, rows)
        return sampled.tokens, sampled.finite, None
    chances = token_probs(logits, rows)
    noise = NoiseKeys.for_rows(rows, logits).for_vocab(logits.shape[1], stream=DRAFT_STREAM)
    return (chances.log() + noise).argmax(dim=-1), torch.isfinite(chances.sum(dim=-1)), chances


def _row(seq: EngineSequence, drafts: np.ndarray) -> SampleRow:
    said: list[int] = drafts.tolist()
    allowed = None
    if seq.constraint is not None:
        taken, masks = seq.constraint.masks(said)
        allowed = masks[-1] if len(taken) == len(said) else None  # else they are trimmed there anyway
    return SampleRow(seq.request.sampling, seq.tokens, seq.prompt_len, seq.child, drafts=said, allowed_mask=allowed)


def _parts(seqs: Sequence[EngineSequence]) -> list[list[EngineSequence]]:
    """Sequences that lag by no more than MADE_UP tokens together, or by more alone."""
    parts: list[list[EngineSequence]] = []
    tokens = 0
    for seq in seqs:
        tokens += seq.draft_lag
        if not parts or tokens > CATCH_UP_TOKENS:
            parts.append([])
            tokens = seq.draft_lag
        parts[-1].append(seq)
    return parts


def _block_at(blocks: Sequence[np.ndarray], positions: np.ndarray, size: int) -> np.ndarray:
    """int64 [R]"""
    return np.array([row[at // size] for row, at in zip(blocks, positions.tolist(), strict=True)], dtype=np.int64)
