"""Checks of a request that a pod makes before it spends anything on it.

The gateway has validated the request for the client's sake. A pod checks again because one bad number must not reach a
batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.errors import InvalidRequest, ModelNotFound
from common.types import MAX_N, SamplingParams, ValidRequest

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class PodLimits:
    """Limits of this pod."""

    served_name: str
    vocab_size: int
    max_model_len: int  # Prompt plus output tokens
    block_size: int
    num_blocks: int  # Blocks of the longest sequence that fits: without KV groups all of the pool
    find_adapter: Callable[[str], object]  # Raises InvalidRequest for the digest of an adapter that the pod lacks

    def check(self, request: ValidRequest, *, generates: bool) -> None:
        """Raises InvalidRequest or ModelNotFound, with the field, if this pod can never serve the request.

        generates: this pod generates the whole output, so its KV must fit the pool together with the prompt's.
        """
        if not request.request_id:
            raise InvalidRequest("the request has no id", field="request_id")
        if request.model != self.served_name:
            raise ModelNotFound(f"this pod serves {self.served_name!r}, not {request.model!r}", field="model")
        if request.adapter:
            self.find_adapter(request.adapter)
        if request.prompt_len == 0:
            raise InvalidRequest("the prompt is empty", field="prompt_ids")
        length = request.context_len
        if length >= (most := self.max_model_len):
            fit = f"with one token of output at most {most} fit"
            raise InvalidRequest(f"the prompt has {length} tokens; {fit}", field="prompt_ids")
        if generates and request.prompt_len + (new := request.sampling.max_tokens) > most:
            tokens = f"{request.prompt_len} prompt tokens and {new} new ones"
            raise InvalidRequest(f"{tokens} exceed a context of {most}", field="max_tokens")
        if not self._known(request.prompt_ids):
            raise InvalidRequest(f"a token id of the prompt is outside [0, {self.vocab_size})", field="prompt_ids")
        if not -1 <= request.cache_priority <= 2:
            raise InvalidRequest(f"cache_priority is {request.cache_priority}, outside [-1, 2]", field="cache_priority")
        self._check_output(request)
        self._check_sampling(request.sampling)
        if generates and (need := self.initial_blocks(request)) > self.num_blocks >= self.initial_blocks(request, n=1):
            raise self._too_large(f"{request.sampling.n} sequences of {length} prompt tokens need", need, "n")
        prompt_blocks = self._blocks(length)
        need = self.max_blocks(request) if generates else prompt_blocks
        if need > self.num_blocks:
            field = "prompt_ids" if prompt_blocks > self.num_blocks else "max_tokens"
            raise self._too_large("the request needs", need, field)

    def _too_large(self, what: str, need: int, field: str) -> InvalidRequest:
        had = f"the pool has {self.num_blocks}"
        return InvalidRequest(f"{what} {need} KV blocks of {self.block_size} tokens, {had}", field=field)

    def max_blocks(self, request: ValidRequest) -> int:
        """Returns the most blocks that the request can fill. The KV of the last token is never computed."""
        return self._blocks(request.prompt_len + request.sampling.max_tokens - 1)

    def initial_blocks(self, request: ValidRequest, n: int | None = None) -> int:
        """Returns the blocks with which n sequences can start: the prompt's, and one per sequence that has to write."""
        alone = min(self._blocks(request.context_len) + 1, self.max_blocks(request))
        more = 0 if request.sampling.max_tokens == 1 else (n or request.sampling.n) - 1
        return alone + more

    def _check_output(self, request: ValidRequest) -> None:
        output, s = request.output_ids, request.sampling
        if not self._known(output):
            raise InvalidRequest(f"a token id of the output is outside [0, {self.vocab_size})", field="output_ids")
        if output and len(output) >= s.max_tokens:
            full = f"the output has {len(output)} tokens already and max_tokens is {s.max_tokens}"
            raise InvalidRequest(full, field="output_ids")
        if not 0 <= request.child < MAX_N:
            raise InvalidRequest(f"child is {request.child}, outside [0, {MAX_N - 1}]", field="child")
        if s.n != 1 and (output or request.child):
            raise InvalidRequest(f"n is {s.n}; a resumed request has one sequence", field="n")
        if output and s.prompt_logprobs is not None:
            raise InvalidRequest("a resumed request cannot have prompt_logprobs", field="prompt_logprobs")

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _check_sampling(self, s: SamplingParams) -> None:
        bounds: tuple[tuple[str, float, float, float], ...] = (
            ("temperature", s.temperature, 0.0, math.inf),
            ("top_k", s.top_k, 0, math.inf),
            ("min_p", s.min_p, 0.0, 1.0),
            ("presence_penalty", s.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", s.frequency_penalty, -2.0, 2.0),
            ("max_tokens", s.max_tokens, 1, math.inf),
            ("min_tokens", s.min_tokens, 0, s.max_tokens),
            ("n", s.n, 1, MAX_N),
            ("logprobs", s.logprobs or 0, 0, MAX_LOGPROBS),
            ("prompt_logprobs", s.prompt_logprobs or 0, 0, MAX_LOGPROBS),
        )
        for name, value, low, high in bounds:
            if not (low <= value <= high and math.isfinite(value)):
                raise InvalidRequest(f"{name} is {value}, outside [{low}, {high}]", field=name)
        for name, value, high in (("top_p", s.top_p, 1), ("repetition_penalty", s.repetition_penalty, math.inf)):
            if not (0 < value <= high and math.isfinite(value)):
                raise InvalidRequest(f"{name} is {value}, which is out of range", field=name)
        for token, bias in s.logit_bias:
            if not (self._known([token]) and math.isfinite(bias)):
                raise InvalidRequest(f"bias {bias} of token {token} is out of range", field="logit_bias")
        if not self._known(s.stop_token_ids):
            raise InvalidRequest(f"a stop token is outside [0, {self.vocab_size})", field="stop_token_ids")
        if not self._known(s.allowed_token_ids):
            raise InvalidRequest(f"a token is outside [0, {self.vocab_size})", field="allowed_token_ids")
        if not all(word and self._known(word) for word in s.bad_words):
            raise InvalidRequest(f"a word is empty, or a token outside [0, {self.vocab_size})", field="bad_words")

    def _known(self, tokens: Sequence[int]) -> bool:
        """Returns whether every token is in the vocabulary."""
        return not tokens or 0 <= min(tokens) <= max(tokens) < self.vocab_size
