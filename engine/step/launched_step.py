"""A step on the device, and what it comes to on the host.

The runner makes a Launched without waiting for anything; `collect` waits, and gives every item its result.
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
    """A step on the device. results: int64 per item and draft, on its way to the host: the token that follows, 0 where
    none was asked for, -1 where the model's output was not a number. wanted: results with log-probabilities; logprobs:
    theirs (chosen, top, top ids). forked: first tokens of further children. arrived: None on a CPU. undrawn: what is to
    be drawn again before all that is sent; until then results are still on the device. scores: of prompt tokens.
    """

    scheduled: Sequence[ScheduledSequence]
    results: Tensor
    logprob_rows: Sequence[int]
    logprobs: tuple[Tensor | None, ...]
    forked: Sequence[ForkedSamples]
    copy_event: torch.cuda.Event | None
    deferred: DeferredSampling | None = None
    prompt_logprobs: Sequence[PromptLogprobTensors] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobTensors:
    """Log-probabilities of an item's prompt tokens from position `first` on: float32 chosen [n] and top [n, N], int64
    ranks [n] and top_ids [n, N].
    """

    index: int
    first: int
    chosen: Tensor
    ranks: Tensor
    top: Tensor
    top_ids: Tensor


@dataclass(frozen=True, slots=True)
class DeferredSampling:
    """Tokens that were drawn without regard to constraints. items: theirs, without drafts; rows: theirs of the results.

    logits: of the step; logit_rows: result -> row of logits.
    """

    scheduled: Sequence[ScheduledSequence]
    result_rows: Sequence[int]
    logits: Tensor
    logit_rows: np.ndarray


@dataclass(frozen=True, slots=True)
class ForkedSamples:
    """Of the item at `index`. tokens: int64 [n - 1], of child 1 and on; logprobs: as in Launched, () if not wanted."""

    index: int
    tokens: Tensor
    logprobs: tuple[Tensor | None, ...]


def first_result_rows(items: Sequence[ScheduledSequence]) -> np.ndarray:
    """Each item's first result."""
    return np.cumsum([0, *(1 + len(item.drafts) for item in items)])[:-1]


def logprob_rows(items: Sequence[ScheduledSequence]) -> list[int]:
    """Results whose log-probabilities somebody wants."""
    wanted: list[int] = []
    row = 0
    for item in items:
        rows = 1 + len(item.drafts)
        if item.samples and item.seq.request.sampling.logprobs is not None:
            wanted += range(row, row + rows)
        row += rows
    return wanted


def send_to_host(
    items: Sequence[ScheduledSequence],
    results: Tensor,
    wanted: Sequence[int],
    logits: Tensor,
    logit_rows: np.ndarray,
    scores: Sequence[PromptLogprobTensors],
    forked: Sequence[ForkedSamples],
) -> LaunchedStep:
    """All that was drawn, and log-probabilities of what is wanted of it, on its way to the host."""
    logprobs = [_to_host(x) for x in _logprobs(items, wanted, logits, logit_rows, results)]
    there = [
        PromptLogprobTensors(s.index, s.first, *map(_on_host, (s.chosen, s.ranks, s.top, s.top_ids))) for s in scores
    ]
    forked = [ForkedSamples(f.index, _on_host(f.tokens), tuple(_to_host(x) for x in f.logprobs)) for f in forked]
    results = _on_host(results)
    arrived = None
    if logits.device.type == "cuda":
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
    return LaunchedStep(items, results, wanted, tuple(logprobs), forked, arrived, prompt_logprobs=there)


def _logprobs(
    items: Sequence[ScheduledSequence], wanted: Sequence[int], logits: Tensor, logit_rows: np.ndarray, results: Tensor
) -> tuple[Tensor | None, ...]:
    """Of the `wanted` results; as many alternatives as any item wants."""
    if not wanted:
        return ()
    most = max(item.seq.request.sampling.logprobs or 0 for item in items)
    at, rows = upload([np.array(wanted), logit_rows[list(wanted)]], logits.device)
    return token_logprobs(logits.index_select(0, rows), results.index_select(0, at).clamp(min=0), most)


def _to_host(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _on_host(tensor)


def _on_host(tensor: Tensor) -> Tensor:
    """On a GPU torch allocates what goes to the host without waiting in pinned memory."""
    return tensor.to("cpu", non_blocking=True, copy=True)


def collect(launched: LaunchedStep) -> list[RunnerOutput]:
    """One result per item, in order; waits for the device."""
    if launched.copy_event is not None:
        launched.copy_event.synchronize()
    results: list[int] = launched.results.tolist()
    logprob_of = {row: at for at, row in enumerate(launched.logprob_rows)}
    scores = {found.index: _prompt_logprobs(found) for found in launched.prompt_logprobs}
    others = {f.index: _first_tokens(launched.scheduled[f.index].seq, f) for f in launched.forked}
    collected: list[RunnerOutput] = []
    first = 0
    for index, item in enumerate(launched.scheduled):
        row = first
        first += 1 + len(item.drafts)
        run = accepted_tokens(item.drafts, results[row:first])
        if run[-1] < 0:
            collected.append(RunnerOutput(False))
        elif not item.samples:
            collected.append(RunnerOutput(True, prompt_logprobs=scores.get(index)))
        else:
            seq = item.seq
            tokens = [Token(i, token, child=seq.child) for i, token in enumerate(run, seq.num_output)]
            if row in logprob_of:
                at = logprob_of[row]
                tokens = [_with_logprobs(t, seq, at + i, launched.logprobs) for i, t in enumerate(tokens)]
            collected.append(RunnerOutput(True, tuple(tokens), scores.get(index), others.get(index, ())))
    return collected


def _prompt_logprobs(found: PromptLogprobTensors) -> PromptLogprobs:
    return PromptLogprobs(
        found.first,
        tuple(found.chosen.tolist()),
        tuple(found.ranks.tolist()),
        tuple(found.top_ids.flatten().tolist()),
        tuple(found.top.flatten().tolist()),
    )


def _first_tokens(seq: EngineSequence, forked: ForkedSamples) -> tuple[Token, ...]:
    tokens = [Token(0, token, child=child) for child, token in enumerate(forked.tokens.tolist(), 1)]
    if forked.logprobs:
        tokens = [_with_logprobs(token, seq, at, forked.logprobs) for at, token in enumerate(tokens)]
    return tuple(tokens)


def _with_logprobs(token: Token, seq: EngineSequence, at: int, logprobs: Sequence[Tensor | None]) -> Token:
    chosen, values, ids = logprobs
    assert chosen is not None
    count = seq.request.sampling.logprobs or 0
    top: tuple[TokenLogprob, ...] = ()
    if count and values is not None and ids is not None:
        pairs = zip(ids[at, :count].tolist(), values[at, :count].tolist(), strict=True)
        top = tuple(TokenLogprob(i, v) for i, v in pairs)
    return Token(token.index, token.id, float(chosen[at]), top, token.child)
