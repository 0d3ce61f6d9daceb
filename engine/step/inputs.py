"""The tensors that a step of any size computes from: tokens, positions, block tables, and the rows that sample.

`DecodeStep` builds its inputs on the device instead, from a few numbers for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.attention.base import StepShape
from engine.device import upload
from engine.kv.block_tables import BlockTables
from engine.schedule.scheduler import ScheduledSequence


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as device tensors, and as host arrays where the host needs them.

    A step has T tokens, R results, of which S are sampled, and H = R + prompt log-probabilities.

    Each scheduled sequence has `1 + len(drafts)` results: one for its newest known token and one for each draft. An
    inner chunk of a prompt samples nothing; it has one result, that of its last token.
    """

    shape: StepShape
    ids: Tensor  # int64 [T], the tokens of the step
    positions: Tensor  # int64 [T], the position of each token in its sequence
    num_results: np.ndarray  # Number of results of each sequence
    logits_indices: np.ndarray  # int64 [R], host: for each result, the index (in T) of the token before it
    #: int64 [H]: `logits_indices`, then the index of the token before each token of `logprob_ranges`.
    hidden_indices: Tensor
    samples: np.ndarray  # bool [R], host: the result is sampled
    sampled_results: Tensor  # int64 [S], the results (in R) that are sampled
    sampled_slots: Tensor  # int64 [S], the slot of the sequence of each sampled result
    sampled_positions: Tensor  # int64 [S], the position of the token that is sampled
    prefill_rows: list[int]  # Indices of the sequences that do not decode
    #: Prompt tokens with log-probabilities: index of the sequence, first position, position after the last one.
    logprob_ranges: list[tuple[int, int, int]]


def prepare_inputs(scheduled: Sequence[ScheduledSequence], tables: BlockTables, last_tokens: Tensor) -> StepInputs:
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
    slots = np.array([entry.seq.slot for entry in scheduled])
    # Tokens: known ones, drafts, and those that only the device knows.
    ends = np.cumsum(shape.num_new)
    positions = token_positions(shape)
    tokens: list[int] = []
    device_only: list[int] = []  # sequences with a last token that only the device knows
    for index, entry in enumerate(scheduled):
        tokens += entry.seq.tokens[entry.start : entry.start + entry.num_new - len(entry.drafts)]
        tokens += entry.drafts
        if len(tokens) < ends[index]:
            tokens.append(0)
            device_only.append(index)
    # Results: the last `1 + drafts` tokens of each sequence.
    num_results = np.array([1 + len(entry.drafts) for entry in scheduled])
    sequence_of = np.repeat(np.arange(len(scheduled)), num_results)
    results_after = np.cumsum(num_results)[sequence_of] - 1 - np.arange(len(sequence_of))
    logits_indices = ends[sequence_of] - 1 - results_after
    samples = np.array([entry.samples for entry in scheduled])[sequence_of]
    # Log-probabilities of prompt tokens: each comes from the token before.
    logprob_ranges: list[tuple[int, int, int]] = []
    hidden_indices = [logits_indices]
    for index, entry in enumerate(scheduled):
        step_end = entry.start + entry.num_new
        first = max(entry.seq.next_prompt_logprob, entry.start + 1)
        end = min(step_end + 1, entry.seq.prompt_len)
        if first < end:
            logprob_ranges.append((index, first, end))
            hidden_indices.append(np.arange(first, end) + ends[index] - step_end - 1)
    ids, device_positions, hidden, results, result_slots, result_positions, missing, missing_slots = upload(
        [
            np.array(tokens),
            positions,
            np.concatenate(hidden_indices),
            np.flatnonzero(samples),
            slots[sequence_of[samples]],
            positions[logits_indices[samples]] + 1,
            ends[device_only] - 1,
            slots[device_only],
        ],
        last_tokens.device,
    )
    if device_only:
        ids.index_copy_(0, missing, last_tokens.index_select(0, missing_slots))
    return StepInputs(
        shape=shape,
        ids=ids,
        positions=device_positions,
        num_results=num_results,
        logits_indices=logits_indices,
        hidden_indices=hidden,
        samples=samples,
        sampled_results=results,
        sampled_slots=result_slots,
        sampled_positions=result_positions,
        prefill_rows=[index for index, entry in enumerate(scheduled) if not entry.is_decode],
        logprob_ranges=logprob_ranges,
    )


def token_positions(shape: StepShape) -> np.ndarray:
    """Returns int64 [T], the position of each token of the step in its sequence."""
    num_new = np.asarray(shape.num_new)
    ends = np.cumsum(num_new)
    positions: np.ndarray = np.arange(int(ends[-1])) + np.repeat(np.asarray(shape.starts) - (ends - num_new), num_new)
    return positions
