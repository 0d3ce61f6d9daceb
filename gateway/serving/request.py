"""One client request: its body as the API parsed it, the ValidRequest for the pods, and its context while served."""

from __future__ import annotations

import asyncio
import math
import random
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal, Protocol

from common.errors import BatonError, ContextOverflow, InvalidRequest, Overloaded
from common.grammar.compiler import GrammarSource
from common.types import Grammar, SamplingParams, ValidRequest
from gateway.admission.api_keys import Caller
from gateway.admission.gate import Gate
from gateway.admission.limiter import LimitReservation
from gateway.admission.queue import QueueEntry
from gateway.pods.info import ModelLimits
from gateway.serving.models import ServedModel
from gateway.telemetry.timeline import Timeline
from gateway.text.tools.format import RequestTools

MAX_JSON_PARTS = 1 << 18  #: Arrays, objects, members and entries that a body may have besides one context of token ids.
MAX_PROMPT_SCORES = 1 << 18  #: Log-probabilities of prompt tokens in all answers of a request, with alternatives.
MAX_ALTERNATIVES = 20  #: Per token, from a pod. A beam search needs one for each beam and each stop token.

PromptInput = str | tuple[int, ...]  #: A prompt as the client sent it: text or token ids.


EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of one beam search."""

    width: int
    length_penalty: float = 1.0
    #: When the search ends once it has `width` hypotheses. True: at once. False: when no live beam scores better at its
    #: current length. "never": when no live beam could score better at any length.
    early_stopping: EarlyStopping = False

    def score(self, logprob: float, length: int) -> float:
        """Returns the score by which hypotheses are ranked."""
        return logprob / math.pow(max(1, length), self.length_penalty)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """What to generate, apart from the prompt. None means that the client left the choice to the gateway."""

    model: str
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"  # field of the client's body that `max_tokens` came from; errors name it
    lower_max_tokens: bool = False  # a max_tokens beyond the context becomes the rest of the context
    sampling: SamplingParams = field(default_factory=SamplingParams)  #: `to_valid_request` sets the rest.
    #: Fields of `sampling` that the client set; the model's defaults replace the others. None: all are set.
    given: frozenset[str] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  #: Alternatives to report per token; 0 reports the token alone, None nothing.
    cache_salt: str = ""
    priority: int = 0
    cache_priority: int = 0  #: As in ValidRequest.
    cache_ttl_s: int = 0
    n: int = 1
    best_of: int | None = None  #: Sequences to generate per prompt, of which the best `n` are answered.
    stream: bool = False
    include_usage: bool = False  # the stream ends with a chunk that carries the usage
    continuous_usage: bool = False  #: Every chunk of the stream carries the usage so far.
    grammar: GrammarSource | Grammar | None = None  # a Grammar once it is proven
    skip_special_tokens: bool = True
    bad_words: tuple[str, ...] = ()
    include_stop: bool = False  # a stop string is part of the answer's text
    prompt_logprobs: int | None = None  # alternatives to report per prompt token, None for no prompt log-probabilities
    echo: bool = False  #: The answer's text begins with the prompt.
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
    answer_start: str = ""  #: Text with which the answer begins; it is not repeated.


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
    adapter: str = "",
) -> ValidRequest:
    """Checks a tokenized request against the model's limits and adds defaults, stop tokens and a seed.

    max_tokens = 0 becomes 1; the one token is not shown to the client. Raises InvalidRequest, which names the field.

    Args:
        default_max_tokens: Limit of the answer when the client sent none; None means the rest of the context.
        prompt_field: Field that errors about the prompt name.
        bad_words: Token sequences of `spec.bad_words`.
        adapter: Digest of the LoRA adapter; "" for the base model.
    """
    length = len(prompt_ids)
    if not length:
        raise InvalidRequest("the prompt is empty", field=prompt_field)
    if length >= limits.max_model_len:
        raise context_overflow(limits, f"your {prompt_field} resulted in {length} tokens", prompt_field)
    sampling, max_tokens = spec.sampling, spec.max_tokens
    if max_tokens is None:
        room = max(1, limits.default_total_len - length)
        max_tokens = room if default_max_tokens is None else min(default_max_tokens, room)
    elif spec.lower_max_tokens:
        max_tokens = min(max_tokens, limits.max_model_len - length)
    elif length + max_tokens > limits.max_model_len:
        asked = f"{length} in the {prompt_field}, {max_tokens} in the completion"
        text = f"you requested {length + max_tokens} tokens ({asked})"
        raise context_overflow(limits, text, spec.max_tokens_field, f"{prompt_field} or completion")
    if sampling.min_tokens > max_tokens:
        text = f"min_tokens ({sampling.min_tokens}) is larger than {spec.max_tokens_field} ({max_tokens})"
        raise InvalidRequest(text, field="min_tokens")
    _require_ids(prompt_ids, limits.vocab_size, prompt_field)
    _require_ids(sampling.stop_token_ids, limits.vocab_size, "stop_token_ids")
    _require_ids([token for token, _ in sampling.logit_bias], limits.vocab_size, "logit_bias")
    _require_ids(sampling.allowed_token_ids, limits.vocab_size, "allowed_token_ids")
    allowed = set(sampling.allowed_token_ids)
    if allowed and allowed <= {word[0] for word in bad_words if len(word) == 1}:
        raise InvalidRequest("bad_words forbids all of allowed_token_ids", field="bad_words")
    scores = [s for s in (spec.prompt_logprobs, spec.logprobs if spec.echo else None) if s is not None]
    ends = () if spec.ignore_eos else (i for i in eos_ids if i < limits.vocab_size)  # a tokenizer may have more tokens
    stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *ends)))
    if spec.beam_search is not None:
        check_beam_search(spec.beam_search, stops)
    sampling = replace(
        sampling,
        seed=secrets.randbits(63) if spec.seed is None else spec.seed % 2**64,
        max_tokens=max(1, max_tokens),
        stop_token_ids=stops,
        logprobs=spec.logprobs if spec.candidates == spec.n else spec.logprobs or 0,
        n=1 if spec.beam_search is not None else spec.candidates,
        bad_words=tuple(bad_words),
        prompt_logprobs=max(scores, default=None),
    )
    assert not isinstance(spec.grammar, GrammarSource), "a grammar is proven before its request is made"
    salt, priority = spec.cache_salt, spec.priority
    return ValidRequest(
        request_id,
        spec.model,
        tuple(prompt_ids),
        sampling,
        salt,
        priority,
        spec.grammar,
        adapter=adapter,
        cache_priority=spec.cache_priority,
        cache_ttl_s=spec.cache_ttl_s,
    )


def check_prompt_scores(spec: GenerationSpec, prompt_tokens: int) -> None:
    """Raises InvalidRequest if the answers would report too many log-probabilities of prompt tokens.

    One small body could otherwise ask for an answer that fills the gateway's memory. `prompt_tokens` are the tokens of
    all prompts of the request.
    """
    asked = (("prompt_logprobs", spec.prompt_logprobs), ("logprobs", spec.logprobs if spec.echo else None))
    total = 0
    for name, num_top in asked:
        total += 0 if num_top is None else prompt_tokens * spec.candidates * (1 + num_top)
        if total > MAX_PROMPT_SCORES:
            said = f"{prompt_tokens} prompt tokens, {spec.candidates} answers each and {num_top} alternatives"
            text = f"{name} asks for {total} log-probabilities of prompt tokens ({said})"
            raise InvalidRequest(f"{text}; at most {MAX_PROMPT_SCORES} are served", field=name)


def context_overflow(limits: ModelLimits, problem: str, field: str, what: str = "") -> ContextOverflow:
    """Returns the error of a request that is too long, in OpenAI's words, which clients search for.

    `problem` says how long the request is. `what` names the part to shorten (default: `field`).
    """
    text = f"This model's maximum context length is {limits.max_model_len} tokens. However, {problem}."
    return ContextOverflow(f"{text} Please reduce the length of the {what or field}.", field=field)


def reject_too_long(text: str, model: ServedModel, limits: ModelLimits, field: str) -> None:
    """Rejects a text that is too long for any tokenization, before it is tokenized."""
    if len(text) > limits.max_model_len * model.tokenizer.max_chars_per_token:
        raise context_overflow(limits, f"your {field} has {len(text)} characters, which are more tokens", field)


def _require_ids(ids: Sequence[int], vocab_size: int, name: str) -> None:
    if ids and max(ids) >= vocab_size:
        text = f"{name} has token id {max(ids)}, but the model's vocabulary has {vocab_size} tokens"
        raise InvalidRequest(text, field=name)


def check_beam_search(beams: BeamSearchParams, stops: Sequence[int]) -> None:
    """Raises InvalidRequest for too many stop tokens. `stops` includes the model's own."""
    if beams.width + len(stops) > MAX_ALTERNATIVES:
        text = f"{beams.width} beams and {len(stops)} stop tokens are more than {MAX_ALTERNATIVES} together"
        raise InvalidRequest(f"with use_beam_search, {text}", field="stop_token_ids")


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a choice, or summed over choices."""

    prompt: int = 0  # prompt tokens
    completion: int = 0  # generated tokens that belong to the answer
    cached: int = 0  # prompt tokens found in the prefix cache of the pod that computed the prompt
    reasoning: int = 0  # completion tokens inside reasoning sections
    accepted: int = 0  # draft tokens of speculative decoding that were right; they are part of the completion
    rejected: int = 0  # draft tokens of speculative decoding that were wrong

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt + other.prompt,
            self.completion + other.completion,
            self.cached + other.cached,
            self.reasoning + other.reasoning,
            self.accepted + other.accepted,
            self.rejected + other.rejected,
        )


class OpenChoice(Protocol):
    """The part of a Choice that the end of its request needs."""

    @property
    def usage(self) -> Usage:
        """Token counts so far."""

    @property
    def charged_usage(self) -> Usage:
        """Token counts that the caller's limits are charged for."""

    def close(self) -> None:
        """Ends the choice; idempotent."""


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """The parts of an answer that come from its idempotency key, so that every gateway gives the same answer."""

    scope: bytes  #: Digest of the tenant and the key.
    answer_id: str  #: The id in the answer, without a prefix.
    created: int  #: Time of the first request with the key, in seconds since the epoch.

    def seed(self, number: int) -> int:
        """Returns the seed of prompt `number` of a request without a seed."""
        return self._derived(b"seed", number) >> 1  # as secrets.randbits(63)

    def id_source(self, number: int) -> random.Random:
        """Returns the source of the ids inside the answer, like those of tool calls; each part has a number."""
        return random.Random(self._derived(b"ids", number))

    def _derived(self, purpose: bytes, number: int) -> int:
        text = blake2b(b"%b%d" % (self.scope, number), digest_size=8, person=b"baton-" + purpose).digest()
        return int.from_bytes(text)


@dataclass(eq=False, slots=True)
class RequestContext:
    """One client request in progress, from its arrival to its end, for all protocols."""

    timeline: Timeline
    endpoint: str  # name of the endpoint in metrics and timelines
    deadline: float  #: Deadline as a time.monotonic() value.
    caller: Caller
    affinity: str = ""  #: Hint of the client; the router prefers the same pods for equal values. "" is none.
    choices: Sequence[OpenChoice] = ()  # the choices of the answer; empty until the request is tokenized
    response_headers: dict[str, str] = field(default_factory=dict)  # rate limit headers of the answer
    reservation: LimitReservation | None = None  #: Of the caller's key; None for a key without limits.
    admitted: tuple[ServedModel, QueueEntry] | None = None  #: Its place in the gate; None before it passes.
    stage: str = "arrival"  #: How far it has come, for the metric of refusals: arrival, waiting (in the gate) or pods.
    abort_error: BatonError | None = None  #: The error of the first `abort`, None while the request was not aborted.
    identity: AnswerIdentity | None = None  #: From the idempotency key; None for a request without one.
    client_ids: Collection[str] = ()  #: Ids that clients gave to further requests which read the same answer.
    _task: asyncio.Task[Any] | None = None
    _num_id_sources: int = 0

    @property
    def id(self) -> str:
        """The gateway's id of the request."""
        return self.timeline.request_id

    @property
    def answer_id(self) -> str:
        """The id that the answer shows, without its prefix."""
        return self.timeline.request_id if self.identity is None else self.identity.answer_id

    @property
    def created(self) -> int:
        """The time that the answer shows, in seconds since the epoch."""
        return int(time.time()) if self.identity is None else self.identity.created

    def id_source(self) -> random.Random | None:
        """Returns the source of the ids inside the next part of the answer, None for ids from the system."""
        if self.identity is None:
            return None
        self._num_id_sources += 1
        return self.identity.id_source(self._num_id_sources)

    def has_id(self, name: str) -> bool:
        """Returns whether `name` is an id of the request that a client knows: the answer's id, or the client's own."""
        return name in (self.timeline.client_id, self.answer_id) or name in self.client_ids

    def set_task(self, task: asyncio.Task[Any]) -> None:
        """Sets the task that `abort` cancels. An abort that came earlier cancels it now."""
        self._task = task
        if self.abort_error is not None:
            task.cancel()

    def record_usage(self, used: Usage) -> None:
        """Adds the token counts of the whole answer to the timeline."""
        self.timeline.set_facts(prompt_tokens=used.prompt, output_tokens=used.completion, cached_tokens=used.cached)

    def enter_tier(self, gate: Gate, priority: int) -> int | None:
        """Names the request's tier in the answer's headers. Returns the longest answer if the tier is overloaded."""
        tier = gate.tier(priority)
        if tier is None:
            return None
        self.response_headers["x-baton-tier"] = tier.name
        return gate.answer_limit(self.caller, priority)

    def shorten(self, request: ValidRequest, answer_limit: int, gate: Gate) -> ValidRequest:
        """Returns `request` with at most `answer_limit` output tokens, but at least its min_tokens."""
        sampling, headers = request.sampling, self.response_headers
        limit = max(answer_limit, sampling.min_tokens)
        if sampling.max_tokens <= limit:
            return request
        if "x-baton-max-tokens" not in headers:
            gate.count_shortened(request.priority)
            self.timeline.set_facts(max_tokens_lowered_to=limit)
        headers["x-baton-max-tokens"] = str(limit)
        return replace(request, sampling=replace(sampling, max_tokens=limit))

    def on_wait(self) -> None:
        """The request begins to wait in the gate."""
        self.stage = "waiting"
        self.timeline.mark("queued")

    def on_first_token(self) -> None:
        """The first token of one of the prompts has come."""
        if self.admitted is not None:
            model, entry = self.admitted
            model.gate.on_first_token(entry)

    def on_no_room(self, error: Overloaded) -> float:
        """Returns the pause before full decode pods are asked again. Raises `error` if that would be too late."""
        if self.admitted is None:
            raise error
        model, entry = self.admitted
        return model.gate.on_no_room(entry, error)

    def abort(self, error: BatonError) -> None:
        """Cancels the request's task (Abort call, shutdown). The client gets the first error given."""
        self.abort_error = self.abort_error or error
        if self._task is not None:
            self._task.cancel()
