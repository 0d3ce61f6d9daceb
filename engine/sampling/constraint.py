"""Which tokens may come next in one sequence: grammar, allowed tokens and bad words together.

A Constraint follows the output of a sequence. `advance` is called once for each final token, never for a token that a
step only proposes. So a preemption changes nothing, and another pod builds the same Constraint from the output so far.
The sampler applies `mask` to the next token.

The end: a grammar that may end here allows the stop tokens of the request, unless min_tokens forbids them. A grammar
that can only end is complete, and the sequence stops there without a stop token, regardless of min_tokens and
ignore_eos. A grammar allows EOS tokens only as stop tokens.

Speculation: `masks(drafts)` returns the drafts that may be accepted and the mask of each position, and leaves the state
unchanged. Accepted tokens are then advanced one by one; no token may follow one that completes the grammar.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from common.errors import InvalidRequest
from common.grammar import MASK_LIMIT_S, CompiledGrammar, public_reason
from common.types import ValidRequest

Mask = np.ndarray  # int32 [ceil(vocab / 32)]: bit i % 32 of word i // 32 allows token i.


def needs_constraint(request: ValidRequest) -> bool:
    """Returns whether the request needs a Constraint."""
    sampling = request.sampling
    return request.grammar is not None or bool(sampling.allowed_token_ids or sampling.bad_words)


class Constraint:
    """The constraint of one sequence after `output`. InvalidRequest if `output` violates it.

    `vocab_size` is the size of the logits; `grammar` is the request's grammar, compiled.
    """

    def __init__(
        self, request: ValidRequest, vocab_size: int, *, grammar: CompiledGrammar | None, output: Sequence[int] = ()
    ) -> None:
        assert (grammar is None) == (request.grammar is None)
        self._grammar = grammar
        self._too_slow = grammar is not None and grammar.too_slow
        sampling = request.sampling
        self.num_words = -(-vocab_size // 32)
        self._min_tokens = sampling.min_tokens
        self._stop_tokens = sampling.stop_token_ids
        self._matcher = None if grammar is None else grammar.matcher()
        self._field = None if request.grammar is None else request.grammar.field
        if self._too_slow:
            raise self._error()
        self._always = self._eos = np.zeros(self.num_words, dtype=np.int32)
        self._always = self._mask_of(sampling.allowed_token_ids) if sampling.allowed_token_ids else ~self._eos
        self._always &= ~self._mask_of([word[0] for word in sampling.bad_words if len(word) == 1])
        self._long_bad_words = [word for word in sampling.bad_words if len(word) > 1]
        self._recent: deque[int] = deque(request.prompt_ids, maxlen=max(map(len, self._long_bad_words), default=1) - 1)
        if grammar is not None:
            self._eos = self._mask_of([i for i in grammar.tokenizer.eos_tokens if i < vocab_size])
            self._buffer = np.zeros(-(-grammar.tokenizer.vocab_size // 32), dtype=np.int32)
        self._num_output = 0
        self._mask: Mask | None = None
        self._complete = False
        for token in output:
            self.advance(token)

    def copy(self) -> Constraint:
        """Returns a Constraint in the same state, for a sequence that continues differently from here."""
        other = copy.copy(self)
        other._matcher = None if self._matcher is None else self._matcher.deep_copy()
        other._recent = self._recent.copy()
        return other

    def mask(self) -> Mask:
        """Returns the read-only mask of the next token. Never raises; after a failure the next `advance` raises."""
        if self._mask is None:
            self._mask, self._complete = self._compute(self._recent, self._num_output)
        return self._mask

    @property
    def is_complete(self) -> bool:
        """Whether the grammar can only end here."""
        if self._matcher is None:
            return False
        self.mask()
        return self._complete

    def advance(self, token: int) -> None:
        """Appends the next token. InvalidRequest if the mask forbids it (no token is allowed) or the matcher failed."""
        if not _allows(self.mask(), token):
            raise self._error()
        if self._matcher is not None and token not in self._stop_tokens and not self._consume(token):
            raise self._error()
        self._recent.append(token)
        self._num_output += 1
        self._mask = None

    def masks(self, drafts: Sequence[int]) -> tuple[list[int], np.ndarray]:
        """Returns the longest prefix of the drafts that may be accepted, and masks of its positions and the next one.

        The masks are int32 [n + 1, num_words] for n drafts. No token follows a stop token or one that completes the
        grammar; the last mask then allows all tokens, and the token sampled there is not used.
        """
        accepted: list[int] = []
        masks = [self.mask()]
        recent, consumed = self._recent.copy(), 0
        for token in drafts:
            if not _allows(masks[-1], token):
                break
            if token in self._stop_tokens:
                # Kept: verifying only drafts that do not end the answer would make answers longer.
                accepted.append(token)
                masks.append(~np.zeros_like(masks[0]))
                break
            if self._matcher is not None:
                if not self._consume(token):
                    break
                consumed += 1
            accepted.append(token)
            recent.append(token)
            mask, complete = self._compute(recent, self._num_output + len(accepted))
            masks.append(~np.zeros_like(mask) if complete else mask)
            if complete:
                break
        if self._matcher is not None and consumed and not self._matcher.rollback(consumed):
            return [], np.stack(masks[:1])  # the matcher failed; the next `advance` raises
        return accepted, np.stack(masks)

    def _compute(self, recent: Sequence[int], num_output: int) -> tuple[Mask, bool]:
        """Returns the mask for the current state of the matcher, and whether the grammar can only end."""
        matcher = self._matcher
        mask = self._always
        if matcher is not None:
            if matcher.is_error():
                return np.zeros_like(mask), False
            if matcher.is_stopped():
                return np.zeros_like(mask), True
            began = time.thread_time()
            matcher.unsafe_compute_mask_ptr(self._buffer.ctypes.data, self._buffer.nbytes)
            self._check_time(began)
            if self._too_slow:
                return np.zeros_like(mask), False
            mask = mask & ~self._eos & self._buffer[: self.num_words]
        banned = [word[-1] for word in self._long_bad_words if _ends_with(recent, word[:-1])]
        if num_output < self._min_tokens:
            banned += self._stop_tokens
        if banned:
            mask = mask & ~self._mask_of(banned)
        if matcher is None or not matcher.is_accepting():
            return mask, False
        if not mask.any():
            return mask, True
        if num_output >= self._min_tokens and self._stop_tokens:
            mask |= self._mask_of(self._stop_tokens) & self._always
        return mask, False

    def _consume(self, token: int) -> bool:
        """Advances the matcher. Returns False if it failed or takes too long; then the next `advance` raises."""
        if self._matcher is None or self._too_slow:
            return False
        began = time.thread_time()
        accepted: bool = self._matcher.consume_token(token)
        self._check_time(began)
        return accepted and not self._too_slow

    def _check_time(self, began: float) -> None:
        """Gives the sequence up after MASK_LIMIT_S of processor time, and the grammar after ten times of that."""
        taken = time.thread_time() - began
        if taken > MASK_LIMIT_S and self._grammar is not None:
            self._too_slow = True
            self._grammar.too_slow |= taken > 10 * MASK_LIMIT_S

    def _mask_of(self, tokens: Sequence[int]) -> Mask:
        """Returns the mask that allows only these tokens."""
        mask = np.zeros(self.num_words, dtype=np.uint32)
        for token in tokens:
            mask[token >> 5] |= np.uint32(1 << (token & 31))
        return mask.view(np.int32)

    def _error(self) -> InvalidRequest:
        if self._too_slow:
            reason = f"finding its next token takes more than {MASK_LIMIT_S * 1000:.0f} ms"
            return InvalidRequest(f"{self._field} is too costly: {reason}", field=self._field)
        if self._matcher is not None and self._matcher.is_error():  # the grammar has too many states
            reason = public_reason(self._matcher.get_error())[:300]
            return InvalidRequest(f"{self._field} cannot be followed: {reason}", field=self._field)
        return InvalidRequest("no token is left that allowed_token_ids, bad_words, min_tokens and the grammar allow")


def _allows(mask: Mask, token: int) -> bool:
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)


def _ends_with(recent: Sequence[int], suffix: Sequence[int]) -> bool:
    start = len(recent) - len(suffix)
    return start >= 0 and all(recent[start + i] == token for i, token in enumerate(suffix))
