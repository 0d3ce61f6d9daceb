"""The tensors that a step of any size computes from: tokens, positions, block tables, and the rows that sample.

`DecodeStep` builds its inputs on the device instead, from a few numbers for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.attention.base import StepShape
from engine.device import upload
from engine.kv.block_tables import BlockTables
from engine.schedule.scheduler import ScheduledSequence


class PromptLogprobRange(NamedTuple):
    """Range of prompt tokens of one sequence; the step computes their log-probabilities."""

    #: Index of the sequence in the step.
    sequence_index: int
    scheduled: ScheduledSequence
    #: Positions first ... end - 1.
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as device tensors, and as host arrays where the host needs them.

    A step has T tokens, R results, of which S are sampled, and H = R + prompt log-probabilities.

    Each scheduled sequence has `1 + len(drafts)` results: one for its newest known token and one for each draft. An
    inner chunk of a prompt samples nothing; it has one result, that of its last token.
    """

    shape: StepShape
    #: int64 [T], the tokens of the step.
    ids: Tensor
    #: int64 [T], the position of each token in its sequence.
    positions: Tensor
    #: Number of results of each sequence.
    num_results: np.ndarray
    #: int64 [R], host: for each result, the index (in T) of the token before it.
    host_logits_indices: np.ndarray
    #: `host_logits_indices` on the device.
    logits_indices: Tensor
    #: int64 [H]: `logits_indices`, then the index of the token before each token of `logprob_ranges`.
    hidden_indices: Tensor
    #: bool [R], host: the result is sampled.
    samples: np.ndarray
    #: int64 [S], the results (in R) that are sampled.
    sampled_results: Tensor
    #: int64 [S], the slot of the sequence of each sampled result.
    sampled_slots: Tensor
    #: int64 [S], the position of the token that is sampled.
    sampled_positions: Tensor
    #: Indices of the sequences that do not decode.
    prefill_rows: list[int]
    logprob_ranges: list[PromptLogprobRange]


def make_step_inputs(scheduled: Sequence[ScheduledSequence], tables: BlockTables, last_tokens: Tensor) -> StepInputs:
    """Builds the inputs of a step. Waits for nothing.

    Args:
        tables: Block tables of the running sequences.
        last_tokens: int64 [slots + 1] on the device, the token that was sampled last in each slot. From it the step
            takes the tokens that the host does not know yet.
    """
    shape = StepShape(
        starts=[entry.start for entry in scheduled],
        num_new=[entry.num_new for entry in scheduled],
        blocks=[tables.row(entry.seq) for entry in scheduled],
    )
    ends = np.cumsum(shape.num_new)
    tokens: list[int] = []
    device_only_rows: list[int] = []  # sequences with a last token that only the device knows
    for index, entry in enumerate(scheduled):
        tokens += entry.seq.tokens[entry.start : entry.start + entry.num_new - len(entry.drafts)]
        tokens += entry.drafts
        if len(tokens) < ends[index]:
            tokens.append(0)
            device_only_rows.append(index)
    num_results = np.array([1 + len(entry.drafts) for entry in scheduled])
    sequence_of = np.repeat(np.arange(len(scheduled)), num_results)
    # For each result, the number of results of its sequence that follow.
    results_after = np.cumsum(num_results)[sequence_of] - 1 - np.arange(len(sequence_of))
    samples = np.array([entry.samples for entry in scheduled])[sequence_of]
    slots = np.array([entry.seq.slot for entry in scheduled])
    positions = token_positions(shape)
    host_indices = ends[sequence_of] - 1 - results_after
    logprob_ranges = _prompt_logprob_ranges(scheduled)
    # The index (in T) of the token before each prompt token with a log-probability.
    preceding = [np.arange(r.first, r.end) + ends[r.sequence_index] - _end(r.scheduled) - 1 for r in logprob_ranges]
    (
        device_ids,
        device_positions,
        logits_indices,
        sampled_results,
        sampled_slots,
        sampled_positions,
        device_only_indices,
        device_only_slots,
        hidden_indices,
    ) = upload(
        [
            np.array(tokens),
            positions,
            host_indices,
            np.flatnonzero(samples),
            slots[sequence_of[samples]],
            positions[host_indices[samples]] + 1,
            ends[device_only_rows] - 1,
            slots[device_only_rows],
            np.concatenate([host_indices, *preceding]),
        ],
        last_tokens.device,
    )
    if device_only_rows:
        device_ids.index_copy_(0, device_only_indices, last_tokens.index_select(0, device_only_slots))
    return StepInputs(
        shape=shape,
        ids=device_ids,
        positions=device_positions,
        num_results=num_results,
        host_logits_indices=host_indices,
        logits_indices=logits_indices,
        hidden_indices=hidden_indices,
        samples=samples,
        sampled_results=sampled_results,
        sampled_slots=sampled_slots,
        sampled_positions=sampled_positions,
        prefill_rows=[row for row, entry in enumerate(scheduled) if not entry.is_decode],
        logprob_ranges=logprob_ranges,
    )


def token_positions(shape: StepShape) -> np.ndarray:
    """Returns int64 [T], the position of each token of the step in its sequence."""
    num_new = np.asarray(shape.num_new)
    ends = np.cumsum(num_new)
    offsets: np.ndarray = np.repeat(np.asarray(shape.starts) - (ends - num_new), num_new)
    positions: np.ndarray = np.arange(int(ends[-1])) + offsets
    return positions


def partly_filled_blocks(
    scheduled: Sequence[ScheduledSequence], block_size: int, *, decodes: bool, with_drafts: bool
) -> list[int]:
    """Returns the last block of each sequence, if this step writes its first token and leaves it partly filled.

    Args:
        decodes: Include the sequences that decode.
        with_drafts: Include the sequences with drafts.
    """
    blocks: list[int] = []
    for entry in scheduled:
        if entry.drafts and not with_drafts:
            continue
        end = _end(entry)
        if end % block_size and end - end % block_size >= entry.start and (decodes or not entry.is_decode):
            assert entry.seq.lease is not None
            blocks.append(entry.seq.lease.blocks[end // block_size])
    return blocks


def _end(entry: ScheduledSequence) -> int:
    """Returns the position after the last token of the step."""
    return entry.start + entry.num_new


def _prompt_logprob_ranges(scheduled: Sequence[ScheduledSequence]) -> list[PromptLogprobRange]:
    ranges: list[PromptLogprobRange] = []
    for index, entry in enumerate(scheduled):
        first = max(entry.seq.next_prompt_logprob, entry.start + 1)
        end = min(_end(entry) + 1, entry.seq.prompt_len)
        if first < end:
            ranges.append(PromptLogprobRange(index, entry, first, end))
    return ranges
