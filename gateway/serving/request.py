"""A checked request: what to generate, from which prompts, and the ValidRequest for the pods.

The API rooms parse bodies into CompletionBody and ChatBody. `to_valid_request` adds the model's limits.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import InvalidRequest
from common.types import Grammar, SamplingParams, ValidRequest
from gateway.pods.info import ModelLimits
from gateway.serving.beam_search import BeamSearchParams
from gateway.text.tools.format import RequestTools

#: Arrays, objects, members and entries that a body may have besides one context of token ids.
MAX_JSON_PARTS = 1 << 18
#: Alternatives per token that a pod reports. A beam search needs one for each beam and each stop token.
MAX_ALTERNATIVES = 20

#: A prompt as the client sent it: text or token ids.
PromptInput = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """What to generate, apart from the prompt. None means that the client left the choice to the gateway."""

    model: str
    max_tokens: int | None = None
    #: Field of the client's body that `max_tokens` came from; errors name it.
    max_tokens_field: str = "max_tokens"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    #: Pairs of token id and bias.
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    #: Alternatives to report per generated token; 0 reports the token alone, None reports nothing.
    logprobs: int | None = None
    cache_salt: str = ""
    priority: int = 0
    n: int = 1
    #: Sequences to generate per prompt, of which the best `n` are answered.
    best_of: int | None = None
    stream: bool = False
    #: The stream ends with a chunk that carries the usage.
    include_usage: bool = False
    #: Every chunk of the stream carries the usage so far.
    continuous_usage: bool = False
    grammar: Grammar | None = None
    skip_special_tokens: bool = True
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    #: A stop string is part of the answer's text.
    include_stop: bool = False
    #: Alternatives to report per prompt token, None for no prompt log-probabilities.
    prompt_logprobs: int | None = None
    #: The answer's text begins with the prompt.
    echo: bool = False
    beam_search: BeamSearchParams | None = None

    @property
    def candidates(self) -> int:
        """Number of sequences generated per prompt; for a beam search, the number of beams."""
        return self.best_of or self.n

    @property
    def complete_only(self) -> bool:
        """No part of an answer is known before all of it is: best_of above n, and beam search."""
        return self.candidates > self.n or self.beam_search is not None


@dataclass(frozen=True, slots=True)
class CompletionBody:
    """A checked /v1/completions body."""

    spec: GenerationSpec
    prompts: tuple[PromptInput, ...]


@dataclass(frozen=True, slots=True)
class ChatBody:
    """A checked /v1/chat/completions body. `messages` have the form that chat templates take."""

    spec: GenerationSpec
    messages: tuple[dict[str, Any], ...]
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: RequestTools | None = None
    include_reasoning: bool = True


def to_valid_request(
    spec: GenerationSpec,
    prompt_ids: Sequence[int],
    limits: ModelLimits,
    *,
    request_id: str,
    eos_ids: Sequence[int],
    default_max_tokens: int | None,
    prompt_field: str,
    bad_words: Sequence[tuple[int, ...]] = (),
) -> ValidRequest:
    """Checks a tokenized request against the model's limits and adds defaults, stop tokens and a seed.

    Raises InvalidRequest, which names the field.

    Args:
        default_max_tokens: Limit of the answer when the client sent none; None means the rest of the context.
        prompt_field: Field that errors about the prompt name.
        bad_words: Token sequences of `spec.bad_words`.

    max_tokens = 0 becomes 1 for the pods; the one token is not shown to the client.
    """
    length = len(prompt_ids)
    if not length:
        raise InvalidRequest("the prompt is empty", field=prompt_field)
    if length >= limits.max_model_len:
        text = f"the prompt has {length} tokens, and this model's context is {limits.max_model_len} tokens"
        raise InvalidRequest(f"{text}; one must be left for the answer", field=prompt_field)
    max_tokens = spec.max_tokens
    if max_tokens is None:
        room = max(1, limits.default_total_len - length)
        max_tokens = room if default_max_tokens is None else min(default_max_tokens, room)
    elif length + max_tokens > limits.max_model_len:
        text = f"the prompt's {length} tokens and {spec.max_tokens_field} ({max_tokens}) exceed this model's context of"
        raise InvalidRequest(f"{text} {limits.max_model_len} tokens", field=spec.max_tokens_field)
    if spec.min_tokens > max_tokens:
        text = f"min_tokens ({spec.min_tokens}) is larger than {spec.max_tokens_field} ({max_tokens})"
        raise InvalidRequest(text, field="min_tokens")
    _require_ids(prompt_ids, limits.vocab_size, prompt_field)
    _require_ids(spec.stop_token_ids, limits.vocab_size, "stop_token_ids")
    _require_ids([token for token, _ in spec.logit_bias], limits.vocab_size, "logit_bias")
    _require_ids(spec.allowed_token_ids, limits.vocab_size, "allowed_token_ids")
    if spec.allowed_token_ids and set(spec.allowed_token_ids) <= {word[0] for word in bad_words if len(word) == 1}:
        raise InvalidRequest("bad_words forbids all of allowed_token_ids", field="bad_words")
    scores = [s for s in (spec.prompt_logprobs, spec.logprobs if spec.echo else None) if s is not None]
    stops = tuple(dict.fromkeys((*spec.stop_token_ids, *(() if spec.ignore_eos else eos_ids))))
    if spec.beam_search is not None:
        check_beam_search(spec.beam_search, spec.grammar, stops)
    sampling = SamplingParams(
        temperature=spec.temperature,
        top_k=spec.top_k,
        top_p=spec.top_p,
        min_p=spec.min_p,
        repetition_penalty=spec.repetition_penalty,
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        logit_bias=spec.logit_bias,
        seed=secrets.randbits(63) if spec.seed is None else spec.seed % 2**64,
        max_tokens=max(1, max_tokens),
        min_tokens=spec.min_tokens,
        stop_token_ids=stops,
        logprobs=spec.logprobs if spec.candidates == spec.n else spec.logprobs or 0,
        n=1 if spec.beam_search is not None else spec.candidates,
        allowed_token_ids=spec.allowed_token_ids,
        bad_words=tuple(bad_words),
        prompt_logprobs=max(scores, default=None),
    )
    return ValidRequest(
        request_id, spec.model, tuple(prompt_ids), sampling, spec.cache_salt, spec.priority, spec.grammar
    )


def _require_ids(ids: Sequence[int], vocab_size: int, name: str) -> None:
    if ids and max(ids) >= vocab_size:
        text = f"{name} has token id {max(ids)}, but the model's vocabulary has {vocab_size} tokens"
        raise InvalidRequest(text, field=name)


def check_beam_search(beams: BeamSearchParams, grammar: Grammar | None, stops: Sequence[int]) -> None:
    """Raises InvalidRequest for a grammar or too many stop tokens. `stops` includes the model's own."""
    if grammar is not None:
        raise InvalidRequest(f"use_beam_search cannot be combined with {grammar.field}", field="use_beam_search")
    if beams.width + len(stops) > MAX_ALTERNATIVES:
        text = f"{beams.width} beams and {len(stops)} stop tokens are more than {MAX_ALTERNATIVES} together"
        raise InvalidRequest(f"with use_beam_search, {text}", field="stop_token_ids")
