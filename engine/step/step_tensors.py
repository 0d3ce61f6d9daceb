"""The tensors of steps: block tables of all slots, inputs, and results until the host has them.

    plan_step  ->  ModelRunner.launch  ->  LaunchedStep  ->  send_to_host  ->  collect  ->  RunnerOutputs

A step has T tokens and R results. Each scheduled sequence has one result for its newest token and one more for each of
its drafts. `DecodeStep` builds its inputs on the device instead, from a few numbers for each row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from common.types import PromptLogprobs, Token, TokenLogprob
from engine.attention.base import StepShape
from engine.device import upload
from engine.sampling.sampler import token_logprobs
from engine.schedule.scheduler import ScheduledSequence
from engine.schedule.sequence import BlockTables, WindowTables
from engine.schedule.sequence import Sequence as EngineSequence
from engine.schedule.stepper import RunnerOutput
from engine.speculation.acceptance import accepted_tokens

#: float32 [n] of n tokens, float32 and int64 [n, N] of the N most likely ones (None for N = 0). Empty if not wanted.
Logprobs = tuple[Tensor | None, ...]
StepRows = Sequence[tuple[int, int]]  # Cached and new tokens of each row of a step


class SlotTables:
    """The device's copy of block tables, with one of each KV group; the last row is for padding and names no block.

    A step brings the blocks of its new tokens along. `num_on_device` says how many entries before them are current.
    """

    def __init__(self, tables: BlockTables | WindowTables, device: torch.device) -> None:
        slots, self.width = tables.blocks.shape
        self.tables = tables
        #: Those of all KV groups, this one first.
        self.groups: tuple[SlotTables, ...] = (self,)
        if isinstance(tables, BlockTables):
            self.groups += tuple(SlotTables(group, device) for group in tables.groups)
        self.device_tables = torch.zeros(slots + 1, self.width, dtype=torch.int32, device=device)  # [slots + 1, width]

    def copy(self, slots: np.ndarray, width: int) -> None:
        """Copies the first `width` entries of these slots to the device."""
        rows = [self.tables.blocks[slots, :width], slots.astype(np.int32)]
        entries, device_slots = upload(rows, self.device_tables.device)
        self.device_tables[:, :width].index_copy_(0, device_slots.long(), entries)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step as host arrays, all int64 unless stated otherwise.

    Sizes: T tokens; R results, S of them sampled; H = R + prompt log-probabilities + pooled tokens. An inner chunk of a
    prompt samples nothing; its one result belongs to its last token.
    """

    shape: StepShape
    slots: np.ndarray  # The slot of each sequence
    tokens: np.ndarray  # [T], the tokens; -1 - slot for a token that only the device knows
    positions: np.ndarray  # [T], the position of each token in its sequence
    num_results: np.ndarray  # Number of results of each sequence
    logits_indices: np.ndarray  # [R], for each result, the index (in T) of the token before it
    samples: np.ndarray  # bool [R], the result is sampled
    hidden_indices: np.ndarray  # [H]: `logits_indices`, then the tokens of `logprob_ranges` and `pooled_ranges`
    prefill_rows: list[int]  # Indices of the sequences that do not decode
    logprob_ranges: list[tuple[int, int, int]]  # Prompt log-probabilities: index of the sequence, first position, end
    pooled_ranges: list[tuple[int, int, int]]  # Pooled tokens: index of the sequence, first position, end
    adapter_slots: np.ndarray | None = None  # [T], the adapter slot of each token; None if no sequence has an adapter

    @property
    def result_slots(self) -> np.ndarray:
        """The slot of the sequence of each result, [R]."""
        slots: np.ndarray = np.repeat(self.slots, self.num_results)
        return slots


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The device tensors of a step that runs layer by layer, all int64."""

    ids: Tensor  # [T], the tokens of the step
    positions: Tensor  # [T], the position of each token in its sequence
    hidden_indices: Tensor  # [H], as in the plan
    sampled_results: Tensor  # [S], the results (in R) that are sampled
    sampled_slots: Tensor  # [S], the slot of the sequence of each sampled result
    sampled_positions: Tensor  # [S], the position of the token that is sampled


def plan_step(scheduled: Sequence[ScheduledSequence], tables: BlockTables) -> StepPlan:
    """Builds the host arrays of a step."""
    shape = StepShape(
        starts=[entry.start for entry in scheduled],
        num_new=[entry.num_new for entry in scheduled],
        blocks=[tables.row(entry.seq) for entry in scheduled],
        groups=[[group.row(entry.seq) for entry in scheduled] for group in tables.groups],
    )
    # Tokens: known ones, drafts, and those that only the device knows.
    ends = np.cumsum(shape.num_new)
    tokens: list[int] = []
    for end, entry in zip(ends.tolist(), scheduled, strict=True):
        tokens += entry.seq.tokens[entry.start : entry.start + entry.num_new - len(entry.drafts)]
        tokens += entry.drafts
        if len(tokens) < end:
            tokens.append(-1 - entry.seq.slot)
    # Results: the last `1 + drafts` tokens of each sequence.
    num_results = np.array([1 + len(entry.drafts) for entry in scheduled])
    results_after = np.repeat(np.cumsum(num_results), num_results) - 1 - np.arange(num_results.sum())
    logits_indices = np.repeat(ends, num_results) - 1 - results_after
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
    pooled_ranges: list[tuple[int, int, int]] = []
    for index, entry in enumerate(scheduled):
        step_end = entry.start + entry.num_new
        first, end = max(entry.seq.next_pooled, entry.start), min(step_end, entry.seq.pooled_end)
        if first < end:
            pooled_ranges.append((index, first, end))
            hidden_indices.append(np.arange(first, end) + ends[index] - step_end)
    return StepPlan(
        shape=shape,
        slots=np.array([entry.seq.slot for entry in scheduled]),
        tokens=np.array(tokens),
        positions=token_positions(shape),
        num_results=num_results,
        logits_indices=logits_indices,
        samples=np.repeat([entry.samples for entry in scheduled], num_results),
        hidden_indices=np.concatenate(hidden_indices),
        prefill_rows=[index for index, entry in enumerate(scheduled) if not entry.is_decode],
        logprob_ranges=logprob_ranges,
        pooled_ranges=pooled_ranges,
        adapter_slots=token_slots(scheduled) if uses_adapters(scheduled) else None,
    )


def uses_adapters(scheduled: Sequence[ScheduledSequence]) -> bool:
    """Returns whether a sequence of the step has an adapter."""
    return any(entry.seq.adapter is not None for entry in scheduled)


def token_slots(scheduled: Sequence[ScheduledSequence]) -> np.ndarray:
    """Returns the adapter slot of each token of a step, int64."""
    slots = [entry.seq.adapter_slot for entry in scheduled]
    assert None not in slots, "a sequence runs without its adapter"
    tokens: np.ndarray = np.repeat(np.array(slots, dtype=np.int64), [entry.num_new for entry in scheduled])
    return tokens


def upload_inputs(plan: StepPlan, last_tokens: Tensor) -> StepInputs:
    """Copies the inputs of a step to the device. Waits for nothing.

    The step takes the tokens that the host does not know yet from `last_tokens`, int64 [slots + 1] on the device.
    """
    missing = np.flatnonzero(plan.tokens < 0)
    ids, *uploaded, device_missing, missing_slots = upload(
        [
            plan.tokens,
            plan.positions,
            plan.hidden_indices,
            np.flatnonzero(plan.samples),
            plan.result_slots[plan.samples],
            plan.positions[plan.logits_indices[plan.samples]] + 1,
            missing,
            -1 - plan.tokens[missing],
        ],
        last_tokens.device,
    )
    if len(missing):
        ids.index_copy_(0, device_missing, last_tokens.index_select(0, missing_slots))
    return StepInputs(ids, *uploaded)


def token_positions(shape: StepShape) -> np.ndarray:
    """Returns int64 [T], the position of each token of the step in its sequence."""
    num_new = np.asarray(shape.num_new)
    ends = np.cumsum(num_new)
    positions: np.ndarray = np.arange(int(ends[-1])) + np.repeat(np.asarray(shape.starts) - (ends - num_new), num_new)
    return positions


@dataclass(slots=True)
class LaunchedStep:
    """A step on the device; after `send_to_host` its results are in host memory, or on their way there."""

    scheduled: Sequence[ScheduledSequence]
    results: Tensor  # int64 [R]: the sampled token, 0 where none is sampled, -1 where the logits were not finite
    logits: Tensor | None  # float32 [rows, vocab]; None once the results are sent
    logit_rows: np.ndarray  # int64 [R], host: the row of `logits` of each result that is sampled
    deferred: Sequence[int] = ()  # Indices of the sequences with deferred sampling, which have no drafts
    #: By index of the sequence: the position of the first of n prompt tokens, and chosen float32 [n], ranks int64 [n]
    #: (the most likely token has rank 1), top_ids int64 [n, N] and top float32 [n, N].
    prompt_logprobs: dict[int, tuple[int, tuple[Tensor, ...]]] = field(default_factory=dict)
    logprob_rows: Sequence[int] = ()  # Results with log-probabilities, ascending, and these
    logprobs: Logprobs = ()
    #: By index of the sequence: the first tokens of the children 1, 2, ... int64 [n - 1], and their log-probabilities.
    child_tokens: dict[int, tuple[Tensor, Logprobs]] = field(default_factory=dict)
    copy_event: torch.cuda.Event | None = None  # Recorded behind the copies to the host; None on a CPU

    def first_results(self) -> list[int]:
        """Returns the first result of each scheduled sequence."""
        return list(itertools.accumulate((1 + len(entry.drafts) for entry in self.scheduled), initial=0))[:-1]

    def send_to_host(self) -> None:
        """Starts the copy of all results and log-probabilities to the host."""
        logits, self.logits = self.logits, None
        assert logits is not None
        self.logprob_rows = [
            row + i
            for row, entry in zip(self.first_results(), self.scheduled, strict=True)
            if entry.samples and entry.seq.request.sampling.logprobs is not None
            for i in range(1 + len(entry.drafts))
        ]
        if self.logprob_rows:
            # As many alternatives as the largest request asks for.
            num_top = max(entry.seq.request.sampling.logprobs or 0 for entry in self.scheduled)
            rows = [np.array(self.logprob_rows), self.logit_rows[self.logprob_rows]]
            result_rows, logit_rows = upload(rows, logits.device)
            tokens = self.results.index_select(0, result_rows).clamp(min=0)
            masks = self._alternative_masks()
            self.logprobs = _to_host(token_logprobs(logits.index_select(0, logit_rows), tokens, num_top, masks))
        self.prompt_logprobs = {
            i: (first, tuple(map(_on_host, tensors))) for i, (first, tensors) in self.prompt_logprobs.items()
        }
        self.child_tokens = {i: (_on_host(ids), _to_host(logprobs)) for i, (ids, logprobs) in self.child_tokens.items()}
        self.results = _on_host(self.results)
        if logits.device.type == "cuda":
            self.copy_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copy_event.record()

    def _alternative_masks(self) -> np.ndarray | None:
        """Returns the masks of the alternatives of `logprob_rows`, int32 [rows, words]; None if none is masked."""
        masks: list[np.ndarray | None] = []
        for entry in self.scheduled:
            params, constraint = entry.seq.request.sampling, entry.seq.constraint
            if not entry.samples or params.logprobs is None:
                continue
            rows = 1 + len(entry.drafts)
            masked = params.allowed_logprobs and constraint is not None
            masks += list(allowed_masks(entry)) if masked else [None] * rows
        known = next((mask for mask in masks if mask is not None), None)
        if known is None:
            return None
        every = np.full_like(known, -1)
        return np.stack([every if mask is None else mask for mask in masks])

    def collect(self) -> list[RunnerOutput]:
        """Returns the output of each scheduled sequence, in order. Waits for the device."""
        if self.copy_event is not None:
            self.copy_event.synchronize()
        results: list[int] = self.results.tolist()
        logprob_index = {row: index for index, row in enumerate(self.logprob_rows)}
        outputs: list[RunnerOutput] = []
        end = 0
        for index, entry in enumerate(self.scheduled):
            row, end = end, end + 1 + len(entry.drafts)
            accepted = accepted_tokens(entry.drafts, results[row:end])
            if accepted[-1] < 0:
                outputs.append(RunnerOutput(False))
                continue
            tokens: list[Token] = []
            if entry.samples:
                seq = entry.seq
                tokens = [Token(i, token, child=seq.child) for i, token in enumerate(accepted, seq.num_output)]
                if row in logprob_index:
                    first = logprob_index[row]
                    tokens = [_with_logprobs(t, seq, first + i, self.logprobs) for i, t in enumerate(tokens)]
            outputs.append(RunnerOutput(True, tuple(tokens), self._prompt_logprobs(index), self._child_tokens(index)))
        return outputs

    def _prompt_logprobs(self, index: int) -> PromptLogprobs | None:
        if index not in self.prompt_logprobs:
            return None
        first, tensors = self.prompt_logprobs[index]
        return PromptLogprobs(first, *(tuple(tensor.flatten().tolist()) for tensor in tensors))

    def _child_tokens(self, index: int) -> tuple[Token, ...]:
        if index not in self.child_tokens:
            return ()
        ids, logprobs = self.child_tokens[index]
        tokens = [Token(0, token, child=child) for child, token in enumerate(ids.tolist(), 1)]
        if logprobs:
            seq = self.scheduled[index].seq
            tokens = [_with_logprobs(token, seq, row, logprobs) for row, token in enumerate(tokens)]
        return tuple(tokens)


def allowed_masks(entry: ScheduledSequence) -> np.ndarray:
    """Returns int32 [1 + drafts, words], the masks after the known tokens and after each draft."""
    assert entry.seq.constraint is not None
    masks = entry.seq.constraint.masks(entry.drafts)[1]
    # Masks are missing if the matcher failed; the error is raised once the token is accounted for.
    missing = 1 + len(entry.drafts) - len(masks)
    return np.concatenate([masks, np.zeros((missing, masks.shape[1]), dtype=np.int32)]) if missing else masks


def _on_host(tensor: Tensor) -> Tensor:
    """Starts a copy to host memory; torch pins the memory of a non-blocking copy from a GPU."""
    return tensor.to("cpu", non_blocking=True, copy=True)


def _to_host(logprobs: Logprobs) -> Logprobs:
    return tuple(None if tensor is None else _on_host(tensor) for tensor in logprobs)


def _with_logprobs(token: Token, seq: EngineSequence, row: int, logprobs: Logprobs) -> Token:
    """Returns the token with the log-probabilities of `row`, and as many alternatives as the request asks for."""
    chosen, values, ids = logprobs
    assert chosen is not None
    count = seq.request.sampling.logprobs or 0
    top: tuple[TokenLogprob, ...] = ()
    if count and values is not None and ids is not None:
        top = tuple(map(TokenLogprob, ids[row, :count].tolist(), values[row, :count].tolist()))
        if seq.request.sampling.allowed_logprobs:
            top = tuple(alternative for alternative in top if alternative.logprob > -math.inf)
    return Token(token.index, token.id, float(chosen[row]), top, token.child)
