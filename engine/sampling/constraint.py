"""Which tokens may come next in one sequence: grammar, allowed tokens and bad words together.

`advance` is called once for each final token of a sequence, never for a token that a step only proposes. So a
preemption changes nothing, and another pod builds the same Constraint from the output.

The end: a grammar that may end here allows the stop tokens of the request, unless min_tokens forbids them. A grammar
that can only end is complete, and the sequence stops there without a stop token, regardless of min_tokens and
ignore_eos. A grammar allows EOS tokens only as stop tokens.

Speculation: `masks(drafts)` returns the drafts that may be accepted and the mask of each position. It leaves the state
unchanged. Accepted tokens are then advanced one by one; no token may follow one that completes the grammar.

Time: a token may take a second, so the matcher works only in jobs of helper threads (mask_jobs.py). If a job is late,
the step goes on without the sequence, and the constraint is `busy` until the job is done. Then the same tokens are
sampled again, and `advance` takes the job's results. A token over MASK_LIMIT_S is cancelled and fails the request.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from common.errors import InvalidRequest
from common.grammar.compiler import MASK_LIMIT_S, CompiledGrammar
from common.grammar.matcher import Matcher, MatcherState
from common.json_schema.refusals import in_words
from common.types import ValidRequest
from engine.sampling.digit_limits import NO_NUMBER, DigitLimits, NumberTail, digit_limits
from engine.sampling.mask_jobs import STEP_WAIT_S, MaskJob, run_jobs

#: Processor seconds that all tokens of a sequence may take together, less FREE_S for each token.
TOTAL_LIMIT_S, FREE_S = 6.0, 0.05
Mask = np.ndarray  # int32 [ceil(vocab / 32)]: bit i % 32 of word i // 32 allows token i.


def needs_constraint(request: ValidRequest) -> bool:
    """Returns whether the request needs a Constraint."""
    sampling = request.sampling
    return request.grammar is not None or bool(sampling.allowed_token_ids or sampling.bad_words)


class _Followed(NamedTuple):
    """A token that the matcher has taken although `advance` has not been called for it."""

    token: int
    state: MatcherState  # After the token
    accepted: bool  # The matcher allows the token
    consumed: bool  # The matcher must take it back by a rollback; not for a stop token


class Constraint:
    """The constraint of one sequence after `output`. Raises InvalidRequest if `output` violates it.

    `vocab_size` is the size of the logits; `grammar` is the request's grammar, compiled. If the matcher needs more than
    STEP_WAIT_S for the output, the constraint is `busy` for a while, and the first `advance` raises the error.
    """

    def __init__(
        self, request: ValidRequest, vocab_size: int, *, grammar: CompiledGrammar | None, output: Sequence[int] = ()
    ) -> None:
        assert (grammar is None) == (request.grammar is None)
        self._grammar = grammar
        sampling = request.sampling
        self.num_words = -(-vocab_size // 32)
        self._min_tokens = sampling.min_tokens
        self._stop_tokens = sampling.stop_token_ids
        self._field = None if request.grammar is None else request.grammar.field
        self._always = self._eos = np.zeros(self.num_words, dtype=np.int32)
        self._always = self._mask_of(sampling.allowed_token_ids) if sampling.allowed_token_ids else ~self._eos
        self._always &= ~self._mask_of([word[0] for word in sampling.bad_words if len(word) == 1])
        self._long_bad_words = [word for word in sampling.bad_words if len(word) > 1]
        self._recent: deque[int] = deque(request.prompt_ids, maxlen=max(map(len, self._long_bad_words), default=1) - 1)
        self._num_output = 0
        self._digit_limits: DigitLimits | None = None  # None unless the grammar has JSON
        self._number = NO_NUMBER  # The number at the end of the output
        self._mask: Mask | None = None
        self._complete = False
        self._matcher: Matcher | None = None  # Made by the first job, since a copy takes up to 40 ms
        self._state: MatcherState | None = None  # State of the matcher after the output; None without a grammar
        self._lock = threading.Lock()  # Held by the job that uses the matcher
        self._jobs: list[MaskJob] = []  # Jobs that may still run
        self._ahead: list[_Followed] = []
        self._drafts: tuple[list[int], np.ndarray, list[MatcherState]] | None = None  # From the last `masks`
        self._spent_s = 0.0
        self._children: dict[int, tuple[int, Constraint]] = {}  # First token and constraint of other samples
        if grammar is not None:
            if grammar.too_slow:
                raise self._error(self._failure())
            self._eos = self._mask_of([i for i in grammar.tokenizer.eos_tokens if i < vocab_size])
            self._state = grammar.start
            if grammar.with_json:
                self._digit_limits = digit_limits(grammar.prototype.tokenizer, self.num_words)
        if grammar is None:
            for token in output:
                self.advance(token)
        elif output:
            self._jobs = [MaskJob(lambda job: self._replay(output, job), self._cancel)]
            run_jobs(self._jobs, STEP_WAIT_S, MASK_LIMIT_S)
            if not self.busy and self._num_output < len(output):
                raise self._error(self._state)

    def copy(self) -> Constraint:
        """Returns a Constraint in the same state, for a sequence that continues differently from here."""
        with self._lock:
            other = copy.copy(self)
            other._matcher = None if self._matcher is None else self._matcher.copy()
        other._recent, other._ahead, other._lock = self._recent.copy(), list(self._ahead), threading.Lock()
        other._jobs, other._children = [], {}
        return other

    def child(self, number: int) -> Constraint:
        """Returns the Constraint of another sample of the request, without output. `start` may have made it."""
        return self._children.pop(number)[1] if number in self._children else self.copy()

    def mask(self) -> Mask:
        """Returns the read-only mask of the next token. Never raises; after a failure the next `advance` raises."""
        if self._mask is None:
            self._mask, self._complete = self._compute(self._recent, self._num_output, self._state, self._number)
        return self._mask

    @property
    def is_complete(self) -> bool:
        """Whether the grammar can only end here."""
        if self._grammar is None:
            return False
        self.mask()
        return self._complete

    @property
    def busy(self) -> bool:
        """Whether a late job still uses the matcher. Ends the job if a token takes too long. Any thread."""
        for job in self._jobs:
            job.cancel_after(MASK_LIMIT_S)
        return not all(job.done for job in self._jobs)

    def close(self) -> None:
        """Ends a late job: the sequence has ended."""
        if self.busy:
            self._cancel()

    def start(self, tokens: Sequence[int], children: Mapping[int, int] | None = None) -> list[MaskJob]:
        """Returns jobs after which `advance` takes these tokens without waiting, for this sequence and other samples.

        `children` has the first token of each other sample. Jobs that are done already are left out.
        """
        if self._grammar is None:
            return []
        jobs: list[MaskJob] = []
        for number, token in (children or {}).items():
            if number not in self._children or self._children[number][0] != token:
                self._children[number] = token, self.copy()
            jobs += self._children[number][1].start([token])
        if [followed.token for followed in self._ahead[: len(tokens)]] != [*tokens]:
            job = MaskJob(lambda job: self._follow(tokens, job), self._cancel)
            self._jobs = [*(other for other in self._jobs if not other.done), job]
            jobs.append(job)
        return jobs

    def advance(self, token: int) -> None:
        """Appends the next token. InvalidRequest if the mask forbids it (no token is allowed) or the matcher failed."""
        if not _allows(self.mask(), token):
            raise self._error(self._state)
        if self._grammar is not None:
            if not self._ahead or self._ahead[0].token != token:
                self._wait(self.start([token]))
            followed = self._ahead.pop(0)
            self._state = followed.state
            if not followed.accepted:
                raise self._error(followed.state)
        self._append(token)

    def _append(self, token: int) -> None:
        self._recent.append(token)
        self._num_output += 1
        self._number = self._number_after(self._number, token)
        self._mask = self._drafts = None

    def masks(self, drafts: Sequence[int]) -> tuple[list[int], np.ndarray]:
        """Returns the longest prefix of the drafts that may be accepted, and masks of its positions and the next one.

        The masks are int32 [n + 1, num_words] for n drafts. No token follows a stop token or one that completes the
        grammar; the last mask then allows all tokens, and the token sampled there is not used. Drafts with masks that
        take too long are not accepted.
        """
        if not drafts or self.busy:
            return [], self.mask()[None]
        if self._grammar is None:
            return self._try_drafts(drafts, None)[:2]
        count = len(drafts)
        if self._drafts is not None and self._drafts[0][:count] == [*drafts]:
            return [*drafts], self._drafts[1][: count + 1]
        self.mask()

        def work(job: MaskJob) -> None:
            with self._lock:
                self._roll_back(0)
                self._drafts = self._try_drafts(drafts, job)

        self._drafts = None
        self._jobs = [MaskJob(work, self._cancel)]
        run_jobs(self._jobs, STEP_WAIT_S, MASK_LIMIT_S)
        if self.busy or self._drafts is None:
            return [], self.mask()[None]
        return self._drafts[:2]

    def _try_drafts(
        self, drafts: Sequence[int], job: MaskJob | None
    ) -> tuple[list[int], np.ndarray, list[MatcherState]]:
        """Returns accepted drafts and masks as `masks` does, and the states after the drafts. Needs `mask` before."""
        accepted: list[int] = []
        masks, states = [self.mask()], list[MatcherState]()
        recent, state, number, consumed = self._recent.copy(), self._state, self._number, 0
        for token in drafts:
            if not _allows(masks[-1], token):
                break
            if token in self._stop_tokens:
                # Kept: verifying only drafts that do not end the answer would make answers longer.
                accepted.append(token)
                masks.append(~np.zeros_like(masks[0]))
                break
            if job is not None:
                state = self._take(token, job)
                if state is None:
                    break
                consumed += 1
                states.append(state)
            accepted.append(token)
            recent.append(token)
            number = self._number_after(number, token)
            mask, complete = self._compute(recent, self._num_output + len(accepted), state, number)
            masks.append(~np.zeros_like(mask) if complete else mask)
            if complete:
                break
        if consumed and self._matcher is not None and not self._matcher.rollback(consumed):
            self._state, self._mask = self._failure(), None  # the next `advance` raises
            return [], np.stack([self.mask()]), []
        return accepted, np.stack(masks), states

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def _cancel(self) -> None:
        if self._matcher is not None:
            self._matcher.cancel()

    def _wait(self, jobs: Sequence[MaskJob]) -> None:
        if jobs:
            run_jobs(jobs, float("inf"), MASK_LIMIT_S)

    def _replay(self, output: Sequence[int], job: MaskJob) -> None:
        """Advances by a given output, up to the first token that is not allowed."""
        with self._lock:
            for token in output:
                if not _allows(self.mask(), token):
                    self._state = MatcherState(None, False, self._error(self._state).message)
                    break
                if token not in self._stop_tokens:
                    self._state = taken = self._take(token, job) or self._failure()
                    if taken.failure is not None:
                        break
                self._append(token)
            self._mask = None

    def _follow(self, tokens: Sequence[int], job: MaskJob) -> None:
        """Advances the matcher by these tokens, ahead of `advance`."""
        with self._lock:
            same = 0
            while same < min(len(tokens), len(self._ahead)) and self._ahead[same].token == tokens[same]:
                same += 1
            self._roll_back(same)
            drafted = self._drafts
            for index, token in enumerate(tokens[same:], same):
                state = self._ahead[-1].state if self._ahead else self._state
                assert state is not None
                if token in self._stop_tokens:
                    self._ahead.append(_Followed(token, state, accepted=True, consumed=False))
                    continue
                if state.mask is None:
                    self._ahead.append(_Followed(token, state, accepted=False, consumed=False))
                    continue
                known = None
                if drafted is not None and drafted[0][: index + 1] == [*tokens[: index + 1]]:
                    known = drafted[2][index] if index < len(drafted[2]) else None
                taken = self._take(token, job, known)
                self._ahead.append(_Followed(token, taken or self._failure(), taken is not None, taken is not None))

    def _take(self, token: int, job: MaskJob, known: MatcherState | None = None) -> MatcherState | None:
        """Advances the matcher by a token. Returns the state after it, None if the token is not allowed.

        `known` is this state if the caller has it.
        """
        grammar = self._grammar
        assert grammar is not None
        matcher = self._matcher = self._matcher or grammar.matcher()
        job.begin_token()
        state = (known or matcher.look()) if matcher.consume_token(token) else None
        taken_s = job.token_s()
        self._spent_s = max(0.0, self._spent_s + taken_s - FREE_S)
        if job.cancelled or taken_s > MASK_LIMIT_S:
            grammar.too_slow = True
            self._spent_s = float("inf")
        if state is not None and (state.failure is not None or self._spent_s > TOTAL_LIMIT_S):
            return self._failure()
        return state

    def _roll_back(self, count: int) -> None:
        """Takes back the tokens by which the matcher is ahead, except the first `count`."""
        consumed = sum(followed.consumed for followed in self._ahead[count:])
        if self._matcher is not None and consumed:
            self._matcher.rollback(consumed)
        del self._ahead[count:]

    # -- masks --------------------------------------------------------------------------------------------------------

    def _number_after(self, number: NumberTail, token: int) -> NumberTail:
        return number if self._digit_limits is None else self._digit_limits.after(number, token)

    def _compute(
        self, recent: Sequence[int], num_output: int, state: MatcherState | None, number: NumberTail
    ) -> tuple[Mask, bool]:
        """Returns the mask in a state of the matcher, and whether the grammar can only end."""
        mask = self._always
        if state is not None:
            if state.mask is None:
                return np.zeros_like(mask), state.failure is None
            mask = mask & ~self._eos & np.frombuffer(state.mask, dtype=np.int32)[: self.num_words]
            if self._digit_limits is not None:
                mask = self._digit_limits.limited(mask, number, may_end=state.is_accepting)
        banned = [word[-1] for word in self._long_bad_words if _ends_with(recent, word[:-1])]
        if num_output < self._min_tokens:
            banned += self._stop_tokens
        if banned:
            mask = mask & ~self._mask_of(banned)
        if state is None or not state.is_accepting:
            return mask, False
        if not mask.any():
            return mask, True
        if num_output >= self._min_tokens and self._stop_tokens:
            mask |= self._mask_of(self._stop_tokens) & self._always
        return mask, False

    def _mask_of(self, tokens: Sequence[int]) -> Mask:
        """Returns the mask that allows only these tokens."""
        mask = np.zeros(self.num_words, dtype=np.uint32)
        for token in tokens:
            mask[token >> 5] |= np.uint32(1 << (token & 31))
        return mask.view(np.int32)

    def _failure(self) -> MatcherState:
        """Returns the state of a matcher that has failed or has taken too long."""
        if self._matcher is None or self._spent_s > TOTAL_LIMIT_S:
            reason = f"is too costly: finding its next token takes more than {MASK_LIMIT_S * 1000:.0f} ms"
        else:  # the grammar has too many states
            reason = in_words(self._matcher.get_error())[:300]
        return MatcherState(None, False, f"{self._field} {reason}")

    def _error(self, state: MatcherState | None) -> InvalidRequest:
        if state is not None and state.failure is not None:
            return InvalidRequest(state.failure, field=self._field)
        return InvalidRequest("no token is left that allowed_token_ids, bad_words, min_tokens and the grammar allow")


def _allows(mask: Mask, token: int) -> bool:
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)


def _ends_with(recent: Sequence[int], suffix: Sequence[int]) -> bool:
    start = len(recent) - len(suffix)
    return start >= 0 and all(recent[start + i] == token for i, token in enumerate(suffix))
