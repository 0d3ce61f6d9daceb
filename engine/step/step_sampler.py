"""Sampling of a step: from logits to tokens, with each sequence's parameters, noise, masks and drafts.

On a GPU `DeviceSampler` keeps the sampling state of a running sequence in its slot, from `stage` on. On a CPU, and for
rejection sampling, torch samples and keeps no state. Both write the sampled token to `last_tokens` for the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.device import upload
from engine.kv.lease import Lease
from engine.sampling.sampler import Sampled, SampleRow, sample, token_logprobs
from engine.schedule.scheduler import ScheduledSequence
from engine.schedule.sequence import DraftTokens
from engine.schedule.sequence import Sequence as EngineSequence
from engine.speculation.acceptance import rejection_sample
from engine.step.step_tensors import LaunchedStep, Logprobs, allowed_masks

if TYPE_CHECKING:
    from engine.sampling.device_sampler import DeviceSampler

MAX_LOGPROBS = 20  # Max alternatives that SamplingParams allows


class StepSampler:
    """Samples the tokens of all steps of a runner. Without `sampler` torch samples, and waits for the device.

    `last_tokens`, int64 [slots + 1], has the token that was sampled last in each slot. `rejection` accepts drafts by
    rejection sampling, in torch. With a `sampler` only drafts with probabilities need it: for other drafts coupled
    acceptance has the same distribution.
    """

    def __init__(
        self, sampler: DeviceSampler | None, last_tokens: Tensor, *, slots: int, max_seq_drafts: int, rejection: bool
    ) -> None:
        self._sampler, self._last_tokens = sampler, last_tokens
        self._max_seq_drafts, self._rejection = max_seq_drafts, rejection
        self._device = last_tokens.device
        self._staged: list[Lease | None] = [None] * slots  # Lease of the sequence with its state in each slot

    def stage(self, seqs: Sequence[EngineSequence]) -> None:
        """Stages the sampling state of each sequence that has a new lease since its state was staged."""
        if (sampler := self._sampler) is None:
            return
        for seq in seqs:
            if self._staged[seq.slot] is not seq.lease:
                sampler.stage(seq.slot, SampleRow(seq.request.sampling, seq.tokens, seq.prompt_len, seq.child))
                self._staged[seq.slot] = seq.lease
        sampler.flush()

    def uses_rejection(self, scheduled: Sequence[ScheduledSequence]) -> bool:
        """Returns whether the step is sampled by rejection sampling."""
        if not self._rejection:
            return False
        return any(entry.drafts if self._sampler is None else entry.draft_probs is not None for entry in scheduled)

    def sample(
        self,
        scheduled: Sequence[ScheduledSequence],
        logits: Tensor,  # float32 [R, vocab], `1 + drafts` rows of each sequence
        slots: Tensor,  # int64 [R], the slot of the sequence of each row
        positions: Tensor,  # int64 [R], the position of the token that is sampled
        previous: Tensor | None,  # int64 [R], the token before the sampled one; None if no sequence has drafts
    ) -> Sampled:
        """Samples all results of these sequences. A mask applies to a sequence with no token in flight."""
        if self._sampler is None or self.uses_rejection(scheduled):
            return self._sample_with_torch(scheduled, logits, slots)
        allowed = self._allowed(scheduled)
        if previous is not None:
            num_results = np.array([1 + len(entry.drafts) for entry in scheduled])
            entry_slots = [entry.seq.slot for entry in scheduled]
            return self._sample_drafts(entry_slots, num_results, logits, slots, positions, previous, allowed)
        sampled = self._sampler.sample(logits, slots, positions, allowed)
        self._last_tokens.index_copy_(0, slots, sampled.tokens)
        return sampled

    def _sample_with_torch(self, scheduled: Sequence[ScheduledSequence], logits: Tensor, slots: Tensor) -> Sampled:
        rows: list[SampleRow] = []
        for entry in scheduled:
            seq, num_tokens = entry.seq, entry.start + entry.num_new - len(entry.drafts)
            tokens = seq.tokens if len(seq.tokens) == num_tokens else [*seq.tokens, int(self._last_tokens[seq.slot])]
            masks = allowed_masks(entry) if seq.constraint is not None and not seq.pending else None
            for num_taken in range(1 + len(entry.drafts)):
                rows.append(_row(seq, tokens, entry.drafts[:num_taken], None if masks is None else masks[num_taken]))
        if self.uses_rejection(scheduled):
            drafts = [DraftTokens(entry.drafts, entry.draft_probs) for entry in scheduled]
            sampled = rejection_sample(logits, rows, drafts)
        else:
            sampled = sample(logits, rows)
        if self._sampler is None:
            self._last_tokens.index_copy_(0, slots, sampled.tokens)
        else:
            # The device sampler has not counted these tokens: stage the sequences again.
            for entry in scheduled:
                self._staged[entry.seq.slot] = None
        return sampled

    def _sample_drafts(
        self,
        entry_slots: Sequence[int],  # The slot of each sequence
        num_results: np.ndarray,  # The number of rows of each sequence
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        previous: Tensor,
        allowed: Tensor | None = None,
    ) -> Sampled:
        """Samples after the known token and each draft of each sequence, and accepts drafts; see `sample`."""
        sampler = self._sampler
        assert sampler is not None
        ends = np.cumsum(num_results)
        offsets = np.arange(ends[-1]) - np.repeat(ends - num_results, num_results)
        arrays = [offsets, np.concatenate([[0], ends]), np.array(entry_slots)]
        device_offsets, cu_q, row_slots = upload(arrays, self._device)
        sampled = sampler.sample(logits, slots, positions, allowed, drafts=(previous, device_offsets))
        sampler.accept_drafts(*sampled, previous, cu_q, row_slots, self._last_tokens, query=1 + self._max_seq_drafts)
        return sampled

    def _allowed(self, scheduled: Sequence[ScheduledSequence]) -> Tensor | None:
        """Returns int32 [R, words], masks of all rows of these sequences; None if no mask applies."""
        masks: list[np.ndarray] = []
        indices: list[int] = []
        row = 0
        for entry in scheduled:
            rows = 1 + len(entry.drafts)
            if entry.seq.constraint is not None and not entry.seq.pending:
                masks.append(allowed_masks(entry))
                indices += range(row, row + rows)
            row += rows
        if not masks:
            return None
        words = np.concatenate(masks)
        allowed = torch.full((row, words.shape[1]), -1, dtype=torch.int32, device=self._device)
        index, device_words = upload([np.array(indices, dtype=np.int32), words], self._device)
        return allowed.index_copy_(0, index.long(), device_words)

    def warm_up(self, num_results: np.ndarray, logits: Tensor, positions: np.ndarray) -> None:
        """Runs `sample` and log-probabilities in the padding slot, with `num_results` rows of each sequence."""
        if self._sampler is None:
            return
        pad = [self._sampler.pad_slot] * len(num_results)
        slots, device_positions = upload([np.repeat(pad, num_results), positions], self._device)
        if len(positions) > len(num_results):
            tokens = self._sample_drafts(pad, num_results, logits, slots, device_positions, slots * 0).tokens
        else:
            tokens = self._sampler.sample(logits, slots, device_positions).tokens
        token_logprobs(logits, tokens, MAX_LOGPROBS)

    def resample(self, step: LaunchedStep) -> None:
        """Samples sequences with deferred sampling again, under their masks. Overwrites results and `last_tokens`."""
        first_results = step.first_results()
        pairs = [(step.scheduled[i], first_results[i]) for i in step.deferred]
        pairs = [(entry, result) for entry, result in pairs if entry.seq.slot >= 0]  # else ended or preempted
        if not pairs:
            return
        assert step.logits is not None
        scheduled, results = zip(*pairs, strict=True)
        masks = np.stack([mask for entry in scheduled for mask in allowed_masks(entry)])
        indices, logit_rows, slots, positions = upload(
            [
                np.array(results),
                step.logit_rows[list(results)],
                np.array([entry.seq.slot for entry in scheduled]),
                np.array([entry.start + entry.num_new for entry in scheduled]),
            ],
            self._device,
        )
        logits = step.logits.index_select(0, logit_rows)
        if self._sampler is None:
            sampled = sample(logits, [_row(e.seq, e.seq.tokens, (), m) for e, m in zip(scheduled, masks, strict=True)])
        else:
            self._sampler.uncount_tokens(slots, step.results.index_select(0, indices))
            (allowed,) = upload([masks], self._device)
            sampled = self._sampler.sample(logits, slots, positions, allowed)
        self._last_tokens.index_copy_(0, slots, sampled.tokens)
        step.results.index_copy_(0, indices, torch.where(sampled.finite, sampled.tokens, -1))

    def sample_children(self, step: LaunchedStep) -> None:
        """Samples the first tokens of children 1, 2, ... of each request from the logits of child 0.

        On a GPU the children use the sequence's slot one after the other, so each is sampled as it would be alone.
        """
        for index, entry in enumerate(step.scheduled):
            seq, params = entry.seq, entry.seq.request.sampling
            if not entry.samples or seq.num_samples == 1 or seq.slot < 0:
                continue
            assert step.logits is not None
            mask = None if seq.constraint is None else allowed_masks(entry)[0]
            children = range(1, seq.num_samples)
            rows = [SampleRow(params, seq.tokens, seq.prompt_len, child, allowed_mask=mask) for child in children]
            row = int(step.logit_rows[step.first_results()[index]])
            logits = step.logits[row : row + 1]
            same = logits.expand(len(rows), -1)
            if self._sampler is None:
                tokens = sample(same, rows).tokens
            else:
                slots, positions = upload([np.array([seq.slot]), np.array([rows[0].position])], self._device)
                allowed = None if mask is None else upload([mask[None]], self._device)[0]
                drawn: list[Tensor] = []
                for child_row in rows:
                    self._sampler.stage(seq.slot, child_row)
                    self._sampler.flush()
                    drawn.append(self._sampler.sample(logits, slots, positions, allowed)[0].clone())
                self._staged[seq.slot] = None  # the next step of the sequence stages its own state again
                tokens = torch.cat(drawn)
            logprobs: Logprobs = () if params.logprobs is None else token_logprobs(same, tokens, params.logprobs)
            step.child_tokens[index] = tokens, logprobs


def mask_unknown(seq: EngineSequence) -> bool:
    """Returns whether the mask of the next token depends on a token that only the device knows."""
    return seq.constraint is not None and seq.pending > 0


def _row(seq: EngineSequence, tokens: Sequence[int], drafts: Sequence[int], allowed: np.ndarray | None) -> SampleRow:
    return SampleRow(seq.request.sampling, tokens, seq.prompt_len, seq.child, drafts=drafts, allowed_mask=allowed)
