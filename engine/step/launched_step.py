"""A step on the device, and its results on the host.

    ModelRunner.launch  ->  LaunchedStep  ->  send_to_host  ->  collect  ->  one RunnerOutput per scheduled sequence

The results of a step form one flat dimension R: each scheduled sequence has one result for its newest token and one
more for each of its drafts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

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

#: Log-probabilities of n tokens: float32 [n] of the tokens, float32 and int64 [n, N] of the N most likely tokens. Empty
#: if none are wanted; the last two are None for N = 0.
Logprobs = tuple[Tensor | None, ...]


@dataclass(slots=True)
class LaunchedStep:
    """A step on the device; after `send_to_host` its results are on their way to the host."""

    scheduled: Sequence[ScheduledSequence]
    #: int64 [R]: the sampled token, 0 where the sequence does not sample, -1 where the logits were not finite.
    #: On the device until they are sent, in host memory afterwards.
    results: Tensor
    logits: Tensor | None  # float32 [rows, vocab]; None once the results are sent
    logit_rows: np.ndarray  # int64 [R], host: the row of `logits` of each result that is sampled
    #: Indices of the sequences that were sampled without their masks. They are sampled again before the results are
    #: sent, and have no drafts.
    unmasked: Sequence[int] = ()
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
            self.logprobs = _to_host(token_logprobs(logits.index_select(0, logit_rows), tokens, num_top))
        self.prompt_logprobs = {
            i: (first, tuple(map(_on_host, tensors))) for i, (first, tensors) in self.prompt_logprobs.items()
        }
        self.child_tokens = {
            i: (_on_host(tokens), _to_host(logprobs)) for i, (tokens, logprobs) in self.child_tokens.items()
        }
        self.results = _on_host(self.results)
        if logits.device.type == "cuda":
            self.copy_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copy_event.record()

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
    return Token(token.index, token.id, float(chosen[row]), top, token.child)
