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
    row: int
    scheduled: ScheduledSequence
    #: Positions first ... end - 1.
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as device tensors, and as host arrays where the host needs them.

    Each scheduled sequence has `1 + drafts` results: one for its newest known token and one for each draft. A sequence
    that samples nothing, an inner chunk of a prompt, has the one result of its last token.
    """

    shape: StepShape
    #: int64 [T], the tokens of the step.
    ids: Tensor
    #: int64 [T], the position of each token in its sequence.
    positions: Tensor
    #: Number of results of each sequence.
    num_results: np.ndarray
    #: int64 [results], host: the index in the step of the token that each result follows.
    host_logits_indices: np.ndarray
    #: The same on the device.
    logits_indices: Tensor
    #: int64 [H]: `logits_indices`, then the index of the token before each token of `logprob_ranges`.
    hidden_indices: Tensor
    #: bool [results], host: the result is sampled.
    samples: np.ndarray
    #: int64 [S], the results that are sampled.
    sampled_rows: Tensor
    #: int64 [S], the slot of the sequence of each of them.
    sampled_slots: Tensor
    #: int64 [S], the position of the token that is sampled.
    sampled_positions: Tensor
    #: Indices of the sequences that do not decode.
    prompts: list[int]
    logprob_ranges: list[PromptLogprobRange]


def step_inputs(scheduled: Sequence[ScheduledSequence], tables: BlockTables, last_tokens: Tensor) -> StepInputs:
    """The inputs of a step. Waits for nothing.

    Args:
        tables: block tables of the running sequences.
        last_tokens: int64 [slots + 1] on the device, the token that was sampled last in each slot. The step takes
            tokens that the host does not know yet from it.
    """
    shape = StepShape(
        starts=[entry.start for entry in scheduled],
        num_new=[entry.num_new for entry in scheduled],
        blocks=[tables.row(entry.seq) for entry in scheduled],
    )
    ends = np.cumsum(shape.num_new)
    tokens: list[int] = []
    unknown: list[int] = []  # sequences with a last token that only the device knows
    for index, entry in enumerate(scheduled):
        tokens += entry.seq.tokens[entry.start : entry.start + entry.num_new - len(entry.drafts)]
        tokens += entry.drafts
        if len(tokens) < ends[index]:
            tokens.append(0)
            unknown.append(index)
    num_results = np.array([1 + len(entry.drafts) for entry in scheduled])
    sequence_of = np.repeat(np.arange(len(scheduled)), num_results)
    results_after = np.cumsum(num_results)[sequence_of] - 1 - np.arange(len(sequence_of))  # in the same sequence
    samples = np.array([entry.samples for entry in scheduled])[sequence_of]
    slots = np.array([entry.seq.slot for entry in scheduled])
    positions = token_positions(shape)
    host_indices = ends[sequence_of] - 1 - results_after
    logprob_ranges = _prompt_logprob_ranges(scheduled)
    preceding = [np.arange(r.first, r.end) + ends[r.row] - _end(r.scheduled) - 1 for r in logprob_ranges]
    (
        device_ids,
        device_positions,
        logits_indices,
        sampled_rows,
        sampled_slots,
        sampled_positions,
        unknown_ids,
        unknown_slots,
        hidden_indices,
    ) = upload(
        [
            np.array(tokens),
            positions,
            host_indices,
            np.flatnonzero(samples),
            slots[sequence_of[samples]],
            positions[host_indices[samples]] + 1,
            ends[unknown] - 1,
            slots[unknown],
            np.concatenate([host_indices, *preceding]),
        ],
        last_tokens.device,
    )
    if unknown:
        device_ids.index_copy_(0, unknown_ids, last_tokens.index_select(0, unknown_slots))
    return StepInputs(
        shape=shape,
        ids=device_ids,
        positions=device_positions,
        num_results=num_results,
        host_logits_indices=host_indices,
        logits_indices=logits_indices,
        hidden_indices=hidden_indices,
        samples=samples,
        sampled_rows=sampled_rows,
        sampled_slots=sampled_slots,
        sampled_positions=sampled_positions,
        prompts=[row for row, entry in enumerate(scheduled) if not entry.is_decode],
        logprob_ranges=logprob_ranges,
    )


def token_positions(shape: StepShape) -> np.ndarray:
    """int64 [T], the position of each token of the step in its sequence."""
    num_new = np.asarray(shape.num_new)
    ends = np.cumsum(num_new)
    offsets: np.ndarray = np.repeat(np.asarray(shape.starts) - (ends - num_new), num_new)
    positions: np.ndarray = np.arange(int(ends[-1])) + offsets
    return positions


def partly_filled_blocks(
    scheduled: Sequence[ScheduledSequence], block_size: int, *, decodes: bool, with_drafts: bool
) -> list[int]:
    """Blocks that this step begins and does not fill, one of each sequence at most.

    Args:
        decodes: include the sequences that decode.
        with_drafts: include the sequences with drafts.
    """
    found: list[int] = []
    for entry in scheduled:
        if entry.drafts and not with_drafts:
            continue
        end = _end(entry)
        if end % block_size and end - end % block_size >= entry.start and (decodes or not entry.is_decode):
            assert entry.seq.lease is not None
            found.append(entry.seq.lease.blocks[end // block_size])
    return found


def _end(entry: ScheduledSequence) -> int:
    """Position after the last token of the step."""
    return entry.start + entry.num_new


def _prompt_logprob_ranges(scheduled: Sequence[ScheduledSequence]) -> list[PromptLogprobRange]:
    found: list[PromptLogprobRange] = []
    for row, entry in enumerate(scheduled):
        first = max(entry.seq.next_prompt_logprob, entry.start + 1)
        end = min(_end(entry) + 1, entry.seq.prompt_len)
        if first < end:
            found.append(PromptLogprobRange(row, entry, first, end))
    return found
