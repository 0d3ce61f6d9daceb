"""What the next token of one sequence may be, whatever its probability: its grammar, its allowed tokens, its bad words.

A Constraint follows the sequence's output: `advance` once for each token that is final, never for one that a step only
proposes. So a preemption changes nothing, and a pod that takes a sequence over builds one from the tokens so far.
`mask` is what the sampler has to respect for the token after them; what it drew is `advance`d or the sequence fails.

The end. A grammar that may end here allows the request's stop tokens, unless min_tokens forbids them; a grammar that
can only end is `complete`, and the sequence stops there without an end-of-sequence token, whatever min_tokens or
ignore_eos say. Tokens that end text for the model alone are never part of an answer.

For speculation: `masks(draft)` gives the part of a draft that may be accepted and a mask for each of its positions and
the one behind them, and leaves the state as it was. `advance` the accepted tokens, one by one, and ask `complete` after
each: nothing may follow one after which it is.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence

import numpy as np

from common.errors import InvalidRequest
from common.grammar import CompiledGrammar
from common.types import ValidRequest

Mask = np.ndarray  # int32 [ceil(vocab / 32)]: bit i % 32 of word i // 32 allows token i


def needs_constraint(request: ValidRequest) -> bool:
    """The request needs a Constraint."""
    sampling = request.sampling
    return request.grammar is not None or bool(sampling.allowed_token_ids or sampling.bad_words)


class Constraint:
    """Of a sequence with these output tokens. vocab_size: of the logits. grammar: the request's, compiled.

    Raises what `advance` raises.
    """

    def __init__(
        self, request: ValidRequest, vocab_size: int, *, grammar: CompiledGrammar | None, output: Sequence[int] = ()
    ) -> None:
        assert (grammar is None) == (request.grammar is None)
        sampling = request.sampling
        self.num_words = -(-vocab_size // 32)
        self._min_tokens = sampling.min_tokens
        self._stops = sampling.stop_token_ids
        self._matcher = None if grammar is None else grammar.matcher()
        self._field = None if grammar is None else grammar.grammar.field
        self._always = self._ends = np.zeros(self.num_words, dtype=np.int32)
        self._always = self._set(sampling.allowed_token_ids) if sampling.allowed_token_ids else ~self._ends
        self._always &= ~self._set([word[0] for word in sampling.bad_words if len(word) == 1])
        self._longer = [word for word in sampling.bad_words if len(word) > 1]
        self._recent: deque[int] = deque(request.prompt_ids, maxlen=max(map(len, self._longer), default=1) - 1)
        if grammar is not None:
            self._ends = self._set([i for i in grammar.tokenizer.eos_tokens if i < vocab_size])
            self._buffer = np.zeros(-(-grammar.tokenizer.vocab_size // 32), dtype=np.int32)
        self._num_output = 0
        self._mask: Mask | None = None
        self._complete = False
        for token in output:
            self.advance(token)

    def copy(self) -> Constraint:
        """Another one in the same state, for a sequence that goes its own way from here."""
        other = copy.copy(self)
        other._matcher = None if self._matcher is None else self._matcher.deep_copy()
        other._recent = self._recent.copy()
        return other

    def mask(self) -> Mask:
        """Tokens that may come next; the caller does not write to it. Never raises: what went wrong, and that nothing
        may come, is told by `advance` of whatever is drawn.
        """
        if self._mask is None:
            self._mask, self._complete = self._compute(self._recent, self._num_output)
        return self._mask

    @property
    def is_complete(self) -> bool:
        """Nothing but the end may come."""
        if self._matcher is None:
            return False
        self.mask()
        return self._complete

    def advance(self, token: int) -> None:
        """The token that comes next is this one.

        Raises InvalidRequest when the mask forbade it, since no token was left, or when the matcher gave up.
        """
        if not _allows(self.mask(), token):
            raise self._refusal()
        if self._matcher is not None and token not in self._stops and not self._matcher.consume_token(token):
            raise self._refusal()
        self._recent.append(token)
        self._num_output += 1
        self._mask = None

    def masks(self, draft: Sequence[int]) -> tuple[list[int], np.ndarray]:
        """The longest head of a draft that may be accepted, n tokens, and int32 [n + 1, num_words]: the mask of each of
        its positions and of the one behind it. Where a draft is a stop token, or makes the grammar complete, nothing
        follows it, and the last mask allows all: what is drawn there is not used.
        """
        taken: list[int] = []
        masks = [self.mask()]
        recent, consumed = self._recent.copy(), 0
        for token in draft:
            if not _allows(masks[-1], token):
                break
            if token in self._stops:
                # Not left out: were a drawn draft only tested when it does not end the answer, answers would grow.
                taken.append(token)
                masks.append(~np.zeros_like(masks[0]))
                break
            if self._matcher is not None:
                if not self._matcher.consume_token(token):
                    break
                consumed += 1
            taken.append(token)
            recent.append(token)
            mask, complete = self._compute(recent, self._num_output + len(taken))
            masks.append(~np.zeros_like(mask) if complete else mask)
            if complete:
                break
        if self._matcher is not None and consumed and not self._matcher.rollback(consumed):
            return [], np.stack(masks[:1])  # the matcher is broken, and the next `advance` says so
        return taken, np.stack(masks)

    def _compute(self, recent: Sequence[int], num_output: int) -> tuple[Mask, bool]:
        """The mask of the state that the matcher is in, and whether nothing but the end may come."""
        matcher = self._matcher
        mask = self._always
        if matcher is not None:
            if matcher.is_error():
                return np.zeros_like(mask), False
            if matcher.is_stopped():
                return np.zeros_like(mask), True
            matcher.unsafe_compute_mask_ptr(self._buffer.ctypes.data, self._buffer.nbytes)
            mask = mask & ~self._ends & self._buffer[: self.num_words]
        banned = [word[-1] for word in self._longer if _ends_with(recent, word[:-1])]
        if num_output < self._min_tokens:
            banned += self._stops
        if banned:
            mask = mask & ~self._set(banned)
        if matcher is None or not matcher.is_accepting():
            return mask, False
        if not mask.any():
            return mask, True
        if num_output >= self._min_tokens and self._stops:
            mask |= self._set(self._stops) & self._always
        return mask, False

    def _set(self, tokens: Sequence[int]) -> Mask:
        mask = np.zeros(self.num_words, dtype=np.uint32)
        for token in tokens:
            mask[token >> 5] |= np.uint32(1 << (token & 31))
        return mask.view(np.int32)

    def _refusal(self) -> InvalidRequest:
        if self._matcher is not None and self._matcher.is_error():  # a state of the grammar is beyond its limits
            reason = self._matcher.get_error().strip()[:300]
            return InvalidRequest(f"{self._field} cannot be followed: {reason}", field=self._field)
        return InvalidRequest("no token is left that allowed_token_ids, bad_words, min_tokens and the grammar allow")


def _allows(mask: Mask, token: int) -> bool:
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)


def _ends_with(recent: Sequence[int], head: Sequence[int]) -> bool:
    start = len(recent) - len(head)
    return start >= 0 and all(recent[start + i] == token for i, token in enumerate(head))
