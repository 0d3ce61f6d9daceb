"""From a step's logits to its tokens: who samples, with what noise, under which masks, after which drafts.

On a GPU the device's sampler keeps what a running sequence is sampled with in the sequence's slot, from `stage` on; on
a CPU, and for rejection sampling, torch samples and no state remains. Either way the token that was sampled last in a
slot is left in `last_tokens`, where the next step finds it before the host has seen it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.device import upload
from engine.kv.blocks import Lease
from engine.sampling.sampler import Sampled, SampleRow, sample, token_logprobs
from engine.schedule.drafts import DraftTokens
from engine.schedule.scheduler import ScheduledSequence
from engine.schedule.sequence import Sequence as EngineSequence
from engine.speculation.rejection import rejection_sample
from engine.step.launched_step import DeferredSampling, ForkedSamples, first_result_rows

if TYPE_CHECKING:
    from engine.sampling.device_sampler import DeviceSampler

MAX_LOGPROBS = 20  # alternatives beside a token, as SamplingParams allows


class StepSampler:
    """device: None samples with torch, which waits for the device: for a CPU. last_tokens: int64 [slots + 1], the
    token that was sampled last in each slot. drafts: most of an item. rejection: drafts are accepted by rejection
    sampling, in torch; on a GPU only those that were drawn, since for others sampling with their positions' noise has
    the same distribution.
    """

    def __init__(
        self, device: DeviceSampler | None, last_tokens: Tensor, *, slots: int, drafts: int, rejection: bool
    ) -> None:
        self._sampler, self._last_tokens = device, last_tokens
        self._drafts, self._rejection = drafts, rejection
        self._device = last_tokens.device
        self._staged: list[Lease | None] = [None] * slots

    def stage(self, seqs: Sequence[EngineSequence]) -> None:
        """The device's sampler, if there is one, learns what sequences are sampled with that sample for the first time
        with their lease.
        """
        sampler = self._sampler
        if sampler is None:
            return
        for seq in seqs:
            if self._staged[seq.slot] is not seq.lease:
                sampler.stage(seq.slot, SampleRow(seq.request.sampling, seq.tokens, seq.prompt_len, seq.child))
                self._staged[seq.slot] = seq.lease
        sampler.flush()

    def uses_rejection(self, items: Sequence[ScheduledSequence]) -> bool:
        """The step is sampled by rejection sampling."""
        if not self._rejection:
            return False
        return any(item.drafts if self._sampler is None else item.draft_probs is not None for item in items)

    def sample(
        self,
        items: Sequence[ScheduledSequence],
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        before: Tensor | None,
    ) -> Sampled:
        """Of all rows of the items, under the constraints of those whose last token is known. before: int64, the token
        before each row's, where some row follows drafts.
        """
        rejects = self.uses_rejection(items)
        if self._sampler is not None and before is not None and not rejects:
            counts = np.array([1 + len(item.drafts) for item in items])
            item_slots = [item.seq.slot for item in items]
            allowed = self._allowed(items)
            return self._sample_drafts(self._sampler, item_slots, counts, logits, slots, positions, before, allowed)
        if self._sampler is not None and not rejects:
            drawn, finite = self._sampler.sample(logits, slots, positions, self._allowed(items))
            self._last_tokens.index_copy_(0, slots, drawn)
            return Sampled(drawn, finite)
        rows: list[SampleRow] = []
        for item in items:
            seq, known = item.seq, item.start + item.num_new - len(item.drafts)
            tokens = seq.tokens if len(seq.tokens) == known else [*seq.tokens, int(self._last_tokens[seq.slot])]
            masks = _masks(item) if seq.constraint is not None and not seq.pending else None
            for taken in range(1 + len(item.drafts)):
                rows.append(_row(item, tokens, item.drafts[:taken], None if masks is None else masks[taken]))
        if rejects:
            sampled = rejection_sample(logits, rows, [DraftTokens(item.drafts, item.draft_probs) for item in items])
        else:
            sampled = sample(logits, rows)
        if self._sampler is None:
            self._last_tokens.index_copy_(0, slots, sampled.tokens)
        else:
            for item in items:  # the device's sampler has not seen what was sampled: it starts anew
                self._staged[item.seq.slot] = None
        return sampled

    def _sample_drafts(
        self,
        sampler: DeviceSampler,
        item_slots: Sequence[int],
        counts: np.ndarray,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        before: Tensor,
        allowed: Tensor | None = None,
    ) -> Sampled:
        """Rows of items that have so many each: after one known token, and after each draft."""
        ends = np.cumsum(counts)
        offsets = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        there, cu_q, row_slots = upload([offsets, np.concatenate([[0], ends]), np.array(item_slots)], self._device)
        tokens, finite = sampler.sample(logits, slots, positions, allowed, drafts=(before, there))
        sampler.accept_drafts(tokens, finite, before, cu_q, row_slots, self._last_tokens, query=1 + self._drafts)
        return Sampled(tokens, finite)

    def _allowed(self, items: Sequence[ScheduledSequence]) -> Tensor | None:
        """int32 [R, words] for all rows of these items; None when nothing is forbidden."""
        masks: list[np.ndarray] = []
        at: list[int] = []
        row = 0
        for item in items:
            rows = 1 + len(item.drafts)
            if item.seq.constraint is not None and not item.seq.pending:
                masks.append(_masks(item))
                at += range(row, row + rows)
            row += rows
        if not masks:
            return None
        words = np.concatenate(masks)
        allowed = torch.full((row, words.shape[1]), -1, dtype=torch.int32, device=self._device)
        index, there = upload([np.array(at, dtype=np.int32), words], self._device)
        return allowed.index_copy_(0, index.long(), there)

    def warm_up(self, counts: np.ndarray, logits: Tensor, positions: np.ndarray) -> None:
        """`sample` of so many rows of each item, with log-probabilities, in the slot that is nobody's; nothing where
        torch samples.
        """
        if self._sampler is None:
            return
        pad = [self._sampler.pad_slot] * len(counts)
        slots, there = upload([np.repeat(pad, counts), positions], self._device)
        if len(positions) > len(counts):
            tokens = self._sample_drafts(self._sampler, pad, counts, logits, slots, there, slots * 0).tokens
        else:
            tokens, _ = self._sampler.sample(logits, slots, there)
        token_logprobs(logits, tokens, MAX_LOGPROBS)

    def resample(
        self, items: Sequence[ScheduledSequence], rows: Sequence[int], undrawn: DeferredSampling, results: Tensor
    ) -> None:
        """Overwrites these results, and the last tokens of their slots."""
        masks = np.stack([mask for item in items for mask in _masks(item)])
        at, logit_rows, slots, positions = upload(
            [
                np.array(rows),
                undrawn.logit_rows[rows],
                np.array([item.seq.slot for item in items]),
                np.array([item.start + item.num_new for item in items]),
            ],
            self._device,
        )
        logits = undrawn.logits.index_select(0, logit_rows)
        if self._sampler is None:
            sampled = sample(logits, [_row(i, i.seq.tokens, (), m) for i, m in zip(items, masks, strict=True)])
        else:
            self._sampler.uncount_tokens(slots, results.index_select(0, at))
            (allowed,) = upload([masks], self._device)
            sampled = Sampled(*self._sampler.sample(logits, slots, positions, allowed))
        self._last_tokens.index_copy_(0, slots, sampled.tokens)
        results.index_copy_(0, at, torch.where(sampled.finite, sampled.tokens, -1))

    def fork(self, items: Sequence[ScheduledSequence], logits: Tensor, logit_rows: np.ndarray) -> list[ForkedSamples]:
        """First tokens of the children beside the one that was sampled, from the same logits.

        On a device the children take the sequence's slot in turn, so that each is sampled as it would be alone.
        """
        forked: list[ForkedSamples] = []
        for index, item in enumerate(items):
            seq, params = item.seq, item.seq.request.sampling
            if not item.samples or seq.num_samples == 1 or seq.finish_reason is not None:
                continue
            allowed = None if seq.constraint is None else _masks(item)[0]
            rows = [
                SampleRow(params, seq.tokens, seq.prompt_len, child, allowed_mask=allowed)
                for child in range(1, seq.num_samples)
            ]
            row = int(logit_rows[first_result_rows(items)[index]])
            same = logits[row : row + 1].expand(len(rows), -1)
            if self._sampler is None:
                tokens = sample(same, rows).tokens
            else:
                tokens = self._sample_children(seq.slot, rows, logits[row : row + 1], self._sampler)
            logprobs = () if params.logprobs is None else token_logprobs(same, tokens, params.logprobs)
            forked.append(ForkedSamples(index, tokens, logprobs))
        return forked

    def _sample_children(self, slot: int, rows: Sequence[SampleRow], logits: Tensor, sampler: DeviceSampler) -> Tensor:
        slots, positions = upload([np.array([slot]), np.array([rows[0].position])], self._device)
        allowed = None
        if rows[0].allowed_mask is not None:
            (allowed,) = upload([rows[0].allowed_mask[None]], self._device)
        drawn: list[Tensor] = []
        for row in rows:
            sampler.stage(slot, row)
            sampler.flush()
            drawn.append(sampler.sample(logits, slots, positions, allowed)[0].clone())
        self._staged[slot] = None  # the next step of the sequence in this slot brings its own state
        return torch.cat(drawn)


def mask_unknown(seq: EngineSequence) -> bool:
    """What may come next is not known before a token is that only the device knows."""
    return seq.constraint is not None and seq.pending > 0


def _masks(item: ScheduledSequence) -> np.ndarray:
    """int32 [1 + drafts, words]"""
    assert item.seq.constraint is not None
    masks = item.seq.constraint.masks(item.drafts)[1]
    missing = 1 + len(item.drafts) - len(masks)  # a matcher that fails is told when the token is accounted for
    return np.concatenate([masks, np.zeros((missing, masks.shape[1]), dtype=np.int32)]) if missing else masks


def _row(
    item: ScheduledSequence, tokens: Sequence[int], drafts: Sequence[int], allowed: np.ndarray | None
) -> SampleRow:
    seq = item.seq
    return SampleRow(seq.request.sampling, tokens, seq.prompt_len, seq.child, drafts=drafts, allowed_mask=allowed)
