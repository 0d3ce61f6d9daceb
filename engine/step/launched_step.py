"""A step on the device, and its results on the host.

`ModelRunner.launch` makes a `LaunchedStep` without waiting for the device. `collect` waits for the step and gives every
scheduled sequence its `RunnerOutput`.

The results of a step form one flat dimension: each scheduled sequence has one result for its newest token and one more
for each of its drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.types import PromptLogprobs, Token, TokenLogprob
from engine.device import upload
from engine.sampling.sampler import token_logprobs
from engine.schedule.scheduler import ScheduledSequence
from engine.schedule.sequence import Sequence as EngineSequence
from engine.schedule.stepper import RunnerOutput
from engine.speculation.acceptance import accepted_tokens


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on the device; its results are on their way to the host."""

    scheduled: Sequence[ScheduledSequence]
    #: int64 [results]: the sampled token, 0 where the sequence does not sample, -1 where the logits were not finite.
    #: On the device while `deferred` is set, in host memory otherwise.
    results: Tensor
    #: Results with log-probabilities, ascending.
    logprob_rows: Sequence[int]
    #: Log-probabilities of the n `logprob_rows`: float32 [n] of the sampled tokens, float32 and int64 [n, N] of the N
    #: most likely tokens. Empty without `logprob_rows`; the last two are None for N = 0.
    logprobs: tuple[Tensor | None, ...]
    #: First tokens of the children of requests with n > 1.
    forked: Sequence[ForkedSamples]
    #: Recorded behind the copies to the host; None on a CPU.
    copy_event: torch.cuda.Event | None
    #: Tokens to sample again before the results are sent to the host.
    deferred: DeferredSampling | None = None
    prompt_logprobs: Sequence[PromptLogprobTensors] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobTensors:
    """Log-probabilities of n consecutive prompt tokens of one sequence."""

    #: Index of the sequence in the step.
    index: int
    #: Position of the first of these tokens.
    first: int
    #: float32 [n], log-probabilities of the prompt's tokens.
    chosen: Tensor
    #: int64 [n], ranks of the prompt's tokens; the most likely token has rank 1.
    ranks: Tensor
    #: float32 [n, N], log-probabilities of the most likely tokens.
    top: Tensor
    #: int64 [n, N], the most likely tokens.
    top_ids: Tensor


@dataclass(frozen=True, slots=True)
class DeferredSampling:
    """Tokens that were sampled without a mask, because the mask depends on a token that only the device knew."""

    #: Sequences to sample again; none of them has drafts.
    scheduled: Sequence[ScheduledSequence]
    #: The result of each of these sequences.
    result_rows: Sequence[int]
    #: float32 [rows, vocab], the logits of the step.
    logits: Tensor
    #: Row of `logits` of each result of the step.
    logit_rows: np.ndarray


@dataclass(frozen=True, slots=True)
class ForkedSamples:
    """First tokens of the children 1, 2, ... of one request."""

    #: Index of the request's sequence in the step.
    index: int
    #: int64 [n - 1]
    tokens: Tensor
    #: See LaunchedStep.logprobs; empty if the request asks for none.
    logprobs: tuple[Tensor | None, ...]


def first_result_rows(scheduled: Sequence[ScheduledSequence]) -> np.ndarray:
    """Returns the first result of each scheduled sequence."""
    return np.cumsum([0, *(1 + len(entry.drafts) for entry in scheduled)])[:-1]


def rows_with_logprobs(scheduled: Sequence[ScheduledSequence]) -> list[int]:
    """Returns the results of the requests that ask for log-probabilities."""
    logprob_rows: list[int] = []
    row = 0
    for entry in scheduled:
        rows = 1 + len(entry.drafts)
        if entry.samples and entry.seq.request.sampling.logprobs is not None:
            logprob_rows += range(row, row + rows)
        row += rows
    return logprob_rows


def send_to_host(
    scheduled: Sequence[ScheduledSequence],
    results: Tensor,
    logprob_rows: Sequence[int],
    logits: Tensor,
    logit_rows: np.ndarray,
    prompt_logprobs: Sequence[PromptLogprobTensors],
    forked: Sequence[ForkedSamples],
) -> LaunchedStep:
    """Starts the copy of all results and log-probabilities to the host."""
    logprobs = [_to_host(x) for x in _logprobs(scheduled, logprob_rows, logits, logit_rows, results)]
    prompt_logprobs = [
        PromptLogprobTensors(p.index, p.first, *map(_on_host, (p.chosen, p.ranks, p.top, p.top_ids)))
        for p in prompt_logprobs
    ]
    forked = [ForkedSamples(f.index, _on_host(f.tokens), tuple(_to_host(x) for x in f.logprobs)) for f in forked]
    results = _on_host(results)
    copy_event = None
    if logits.device.type == "cuda":
        copy_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copy_event.record()
    return LaunchedStep(
        scheduled, results, logprob_rows, tuple(logprobs), forked, copy_event, prompt_logprobs=prompt_logprobs
    )


def _logprobs(
    scheduled: Sequence[ScheduledSequence],
    logprob_rows: Sequence[int],
    logits: Tensor,
    logit_rows: np.ndarray,
    results: Tensor,
) -> tuple[Tensor | None, ...]:
    """Returns log-probabilities of these results, with as many alternatives as the largest request asks for."""
    if not logprob_rows:
        return ()
    num_top = max(entry.seq.request.sampling.logprobs or 0 for entry in scheduled)
    result_rows, rows = upload([np.array(logprob_rows), logit_rows[list(logprob_rows)]], logits.device)
    return token_logprobs(logits.index_select(0, rows), results.index_select(0, result_rows).clamp(min=0), num_top)


def _to_host(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _on_host(tensor)


def _on_host(tensor: Tensor) -> Tensor:
    """Starts a copy to host memory; torch pins the memory of a non-blocking copy from a GPU."""
    return tensor.to("cpu", non_blocking=True, copy=True)


def collect(launched: LaunchedStep) -> list[RunnerOutput]:
    """Returns the output of each scheduled sequence, in order. Waits for the device."""
    if launched.copy_event is not None:
        launched.copy_event.synchronize()
    results: list[int] = launched.results.tolist()
    logprob_index = {row: index for index, row in enumerate(launched.logprob_rows)}
    prompt_logprobs = {p.index: _prompt_logprobs(p) for p in launched.prompt_logprobs}
    child_tokens = {f.index: _first_tokens(launched.scheduled[f.index].seq, f) for f in launched.forked}
    outputs: list[RunnerOutput] = []
    end = 0
    for index, entry in enumerate(launched.scheduled):
        row = end
        end += 1 + len(entry.drafts)
        accepted = accepted_tokens(entry.drafts, results[row:end])
        if accepted[-1] < 0:
            outputs.append(RunnerOutput(False))
        elif not entry.samples:
            outputs.append(RunnerOutput(True, prompt_logprobs=prompt_logprobs.get(index)))
        else:
            seq = entry.seq
            tokens = [Token(i, token, child=seq.child) for i, token in enumerate(accepted, seq.num_output)]
            if row in logprob_index:
                first = logprob_index[row]
                tokens = [_with_logprobs(t, seq, first + i, launched.logprobs) for i, t in enumerate(tokens)]
            outputs.append(RunnerOutput(True, tuple(tokens), prompt_logprobs.get(index), child_tokens.get(index, ())))
    return outputs


def _prompt_logprobs(tensors: PromptLogprobTensors) -> PromptLogprobs:
    return PromptLogprobs(
        tensors.first,
        tuple(tensors.chosen.tolist()),
        tuple(tensors.ranks.tolist()),
        tuple(tensors.top_ids.flatten().tolist()),
        tuple(tensors.top.flatten().tolist()),
    )


def _first_tokens(seq: EngineSequence, forked: ForkedSamples) -> tuple[Token, ...]:
    tokens = [Token(0, token, child=child) for child, token in enumerate(forked.tokens.tolist(), 1)]
    if forked.logprobs:
        tokens = [_with_logprobs(token, seq, row, forked.logprobs) for row, token in enumerate(tokens)]
    return tuple(tokens)


def _with_logprobs(token: Token, seq: EngineSequence, row: int, logprobs: Sequence[Tensor | None]) -> Token:
    """Returns the token with the log-probabilities of `row`, and as many alternatives as the request asks for."""
    chosen, values, ids = logprobs
    assert chosen is not None
    count = seq.request.sampling.logprobs or 0
    top: tuple[TokenLogprob, ...] = ()
    if count and values is not None and ids is not None:
        pairs = zip(ids[row, :count].tolist(), values[row, :count].tolist(), strict=True)
        top = tuple(TokenLogprob(i, v) for i, v in pairs)
    return Token(token.index, token.id, float(chosen[row]), top, token.child)
