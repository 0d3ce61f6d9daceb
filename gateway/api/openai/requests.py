"""Checks the bodies of /v1/completions and /v1/chat/completions, and turns them into the gateway's requests.

`bodies.py` has their models. `serving.request.to_valid_request` then checks against the model's limits and makes the
ValidRequest for the pods.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from common.errors import InvalidRequest
from common.grammar.compiler import JSON_OBJECT, GrammarSource
from common.types import SamplingParams
from gateway.api.openai.bodies import (
    GRAMMAR_FORMS,
    GUIDED_FIELDS,
    SCHEMA_TEXT,
    ChatRequest,
    CompletionRequest,
    Generation,
    Sampling,
    StreamOptions,
)
from gateway.api.openai.conversation import chat_messages, chat_tools, template_variables
from gateway.api.openai.fields import validated
from gateway.serving.request import BeamSearchParams, ChatBody, CompletionBody, GenerationSpec

MAX_SEQUENCES = 1024  #: Sequences of all prompts of a body together.
MAX_ALLOWED_IDS = 1 << 20  #: Ids of allowed_token_ids, which go to the pods with each prompt, times the prompts.
MAX_BEAM_WIDTH = 10
#: Members of a schema that stands directly in `json_schema` instead of in its `schema`.
_SCHEMA_KEYWORDS = frozenset(("properties", "items", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs"))

#: Sampling parameters that the gateway passes on as they are.
_SAMPLING = {f.name for f in dataclasses.fields(SamplingParams)} - {f.name for f in dataclasses.fields(GenerationSpec)}


def generation_spec(r: Sampling, *, max_tokens: int | None, logprobs: int | None, **more: Any) -> GenerationSpec:
    """Returns what a body asks to generate. `more`: further fields of the spec."""
    sampling = SamplingParams(**{name: value for name, value in vars(r).items() if name in _SAMPLING})
    given = r.model_fields_set & _SAMPLING
    if sampling.top_p == 0:
        sampling, given = dataclasses.replace(sampling, temperature=0.0, top_p=1.0), given | {"temperature"}
    return GenerationSpec(
        model=r.model,
        sampling=sampling,
        given=frozenset(given),
        max_tokens=max_tokens,
        seed=r.seed,
        stop=(r.stop,) if isinstance(r.stop, str) else r.stop,
        ignore_eos=r.ignore_eos,
        logprobs=logprobs,
        cache_salt=r.cache_salt,
        priority=r.priority,
        cache_priority=r.cache_priority,
        cache_ttl_s=r.cache_ttl_s,
        stream=r.stream,
        **more,
    )


def _spec(
    r: Generation, *, max_tokens: int | None, logprobs: int | None, best_of: int | None = None, **more: Any
) -> GenerationSpec:
    """Returns what a chat or a completion asks to generate. Raises InvalidRequest for fields that do not fit."""
    if r.stream_options is not None and not r.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", field="stream_options")
    if r.prompt_logprobs is not None and r.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed: stream must be false", field="prompt_logprobs")
    if best_of is not None and best_of < r.n:
        raise InvalidRequest(f"best_of ({best_of}) must not be less than n ({r.n})", field="best_of")
    if best_of is not None and best_of > r.n and r.stream:
        raise InvalidRequest("best_of above n cannot be streamed: stream must be false", field="best_of")
    options = r.stream_options or StreamOptions()
    return generation_spec(
        r,
        max_tokens=max_tokens,
        logprobs=logprobs,
        n=r.n,
        best_of=best_of,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage_stats,
        grammar=_grammar(r),
        skip_special_tokens=r.skip_special_tokens,
        bad_words=r.bad_words,
        include_stop=r.include_stop_str_in_output,
        prompt_logprobs=r.prompt_logprobs,
        beam_search=_beam_search(r, best_of or r.n, "n" if best_of is None else "best_of"),
        **more,
    )


def parse_chat(body: object) -> ChatBody:
    """Checks a /v1/chat/completions body. Raises InvalidRequest, which names the field."""
    r = validated(ChatRequest, body)
    if r.top_logprobs and not r.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
    newer = r.max_completion_tokens is not None
    spec = _spec(
        r,
        max_tokens=r.max_completion_tokens if newer else r.max_tokens,
        max_tokens_field="max_completion_tokens" if newer else "max_tokens",
        logprobs=r.top_logprobs if r.logprobs else None,
    )
    return ChatBody(
        spec,
        chat_messages(r.messages),
        template_variables(r.chat_template_kwargs, r.reasoning_effort),
        chat_tools(r.tools, r.tool_choice, r.functions, r.function_call, parallel=r.parallel_tool_calls),
        include_reasoning=r.include_reasoning,
    )


def parse_completion(body: object) -> CompletionBody:
    """Checks a /v1/completions body. Raises InvalidRequest, which names the field."""
    r = validated(CompletionRequest, body)
    spec = _spec(r, max_tokens=r.max_tokens, logprobs=r.logprobs, best_of=r.best_of or None, echo=r.echo)
    if len(r.prompt) * spec.candidates > MAX_SEQUENCES:
        text = f"{len(r.prompt)} prompts with {spec.candidates} sequences each are more than {MAX_SEQUENCES}"
        raise InvalidRequest(text, field="n" if r.best_of is None else "best_of")
    if len(r.prompt) * (allowed := len(r.allowed_token_ids)) > MAX_ALLOWED_IDS:
        text = f"{allowed} ids for each of {len(r.prompt)} prompts are more than {MAX_ALLOWED_IDS}; send fewer prompts"
        raise InvalidRequest(f"allowed_token_ids: {text}", field="allowed_token_ids")
    return CompletionBody(spec, r.prompt)


def _grammar(r: Generation) -> GrammarSource | None:
    """Returns the grammar that the answer must match, None without one. Raises InvalidRequest."""
    grammars = {name: grammar for name, grammar in _grammars(r) if grammar is not None}
    if len(grammars) > 1:
        raise InvalidRequest(f"{' and '.join(grammars)} exclude each other", field=list(grammars)[1])
    outputs: Mapping[str, Any] = r.structured_outputs or {}
    complete = any(form in outputs for form in GRAMMAR_FORMS) or (grammars and "disable_any_whitespace" in outputs)
    if r.structured_outputs is not None and not complete:
        text = f"structured_outputs must have one of {', '.join(GRAMMAR_FORMS)}"
        raise InvalidRequest(text, field="structured_outputs")
    grammar = next(iter(grammars.values()), None)
    if grammar is not None and grammar.form == "json" and outputs.get("disable_any_whitespace") is False:
        return dataclasses.replace(grammar, form="json_any_space")
    return grammar


def _grammars(r: Generation) -> Iterator[tuple[str, GrammarSource | None]]:
    if r.response_format is not None:
        name = "response_format.json_schema"
        asked: Mapping[str, Any] | None = r.response_format.get("json_schema")
        if r.response_format.get("schema") is not None:
            if asked is not None:
                raise InvalidRequest(f"{name} and response_format.schema exclude each other", field=name)
            name, asked = "response_format", r.response_format
        yield "response_format", format_grammar(r.response_format["type"], asked, "response_format", name)
    for name, form in GUIDED_FIELDS.items():
        if (value := getattr(r, name)) is not None:
            yield name, _source(form, value, name)
    if r.structured_outputs is not None:
        given: Mapping[str, Any] = r.structured_outputs
        for form in (form for form in GRAMMAR_FORMS if form in given):
            name, value = f"structured_outputs.{form}", given[form]
            if form != "json_object":
                yield name, _source(form, value, name)
            elif value:
                yield name, GrammarSource("json", JSON_OBJECT, name)


def _source(form: str, value: Any, field: str) -> GrammarSource:
    """Checks what the API document says about the value. Other errors come when the grammar is proven."""
    if form == "json" and isinstance(value, str) and not SCHEMA_TEXT.match(value):
        raise InvalidRequest(f"{field} is not valid JSON: a schema is an object, true or false", field=field)
    if form == "choice" and not value:
        raise InvalidRequest(f"{field} must have at least one choice", field=field)
    if form == "grammar" and ":" not in value:
        raise InvalidRequest(f"{field} is not a grammar: it has no rules", field=field)
    return GrammarSource(form, value, field)


def format_grammar(kind: str, asked: Mapping[str, Any] | None, field: str, schema_field: str) -> GrammarSource | None:
    """Returns the grammar of a response format of type `kind`. `asked`, in `schema_field`, has the schema."""
    schema, place = None if asked is None else asked.get("schema"), f"{schema_field}.schema"
    if kind == "text":
        if schema is not None:
            raise InvalidRequest(f'{place} needs {field}.type to be "json_schema"', field=place)
        return None
    if kind == "json_object" and schema is None:
        return GrammarSource("json", JSON_OBJECT, field)
    if asked is None:
        raise InvalidRequest(f"{schema_field} is missing", field=schema_field)
    if schema is None and not _SCHEMA_KEYWORDS.isdisjoint(asked):
        raise InvalidRequest(f"{schema_field} is a schema itself; the schema must be in {place}", field=place)
    return GrammarSource("json", JSON_OBJECT if schema is None else schema, place)


#: Fields that a beam search cannot honour, unless they have their defaults. Other sampling parameters (temperature,
#: top_k, top_p, min_p, seed) are accepted and have no effect, because no token is sampled.
_NOT_WITH_BEAMS = (
    *("stream", "stop", "echo", "prompt_logprobs", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words"),
)


def _beam_search(r: Generation, width: int, width_field: str) -> BeamSearchParams | None:
    """Returns the parameters of a beam search, None without one. Raises InvalidRequest, which names the field."""
    if not r.use_beam_search:
        for name, given in (("length_penalty", r.length_penalty != 1.0), ("early_stopping", r.early_stopping)):
            if given:
                raise InvalidRequest(f"{name} needs use_beam_search to be true", field=name)
        return None
    for name in _NOT_WITH_BEAMS:
        if getattr(r, name) not in (None, type(r).model_fields[name].default):
            raise InvalidRequest(f"{name} cannot be combined with use_beam_search", field=name)
    if width > MAX_BEAM_WIDTH:
        raise InvalidRequest(f"a beam search has at most {MAX_BEAM_WIDTH} beams, not {width}", field=width_field)
    return BeamSearchParams(width, r.length_penalty, r.early_stopping)
