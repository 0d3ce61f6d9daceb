"""Parses and checks the bodies of /v1/completions and /v1/chat/completions, as far as no model is needed.

`serving.request.to_valid_request` then checks against the model's limits and makes the ValidRequest for the pods.
Unknown fields are ignored, as the OpenAI API does. Known fields without support are rejected by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import orjson

from common.errors import InvalidRequest
from common.types import MAX_N
from gateway.api.http.json_fields import JsonFields, wrong_type
from gateway.api.openai.messages import parse_messages
from gateway.api.openai.structured_output import parse_structured_output
from gateway.api.openai.tools import parse_tools
from gateway.serving.beam_search import BeamSearchParams
from gateway.serving.request import ChatBody, CompletionBody, GenerationSpec, PromptInput

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_PROMPTS = 64
#: Sequences of all prompts of a body together.
MAX_SEQUENCES = 1024
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_SALT_CHARS = 256
MAX_ALLOWED_TOKEN_IDS = 1 << 18
#: Token ids in one array.
MAX_IDS = 1 << 20
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_BEAM_WIDTH = 10
MAX_LENGTH_PENALTY = 10

#: Fields without support that OpenAI or other servers define, and for each the values that have no effect.
_COMMON_ACCEPTED_VALUES: dict[str, tuple[object, ...]] = {
    "lora_request": (),
    "lora_path": (),
    "adapter_id": (),
}
_COMPLETION_ACCEPTED_VALUES: dict[str, tuple[object, ...]] = {
    **_COMMON_ACCEPTED_VALUES,
    "suffix": ("",),
}
_CHAT_ACCEPTED_VALUES: dict[str, tuple[object, ...]] = {
    **_COMMON_ACCEPTED_VALUES,
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "documents": ([],),
    "echo": (False,),
}

_RESERVED_TEMPLATE_KWARGS: dict[str, tuple[object, ...]] = {
    "messages": (),
    "tools": (),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


def parse_completion(body: object) -> CompletionBody:
    """Checks a /v1/completions body. Raises InvalidRequest, which names the field."""
    fields = JsonFields.of_body(body)
    refuse_unsupported(fields, _COMPLETION_ACCEPTED_VALUES)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    echo = fields.boolean("echo") or False
    max_tokens = fields.integer("max_tokens", 0, INT32_MAX)
    if max_tokens == 0 and not echo:
        raise InvalidRequest("max_tokens must be at least 1 without echo", field="max_tokens")
    best_of = fields.integer("best_of", 1, MAX_N)
    spec = replace(_spec(fields, logprobs=logprobs, max_tokens=max_tokens, best_of=best_of), echo=echo)
    prompts = _prompts(fields.raw("prompt"))
    if len(prompts) * spec.candidates > MAX_SEQUENCES:
        text = f"{len(prompts)} prompts with {spec.candidates} sequences each are more than {MAX_SEQUENCES}"
        raise InvalidRequest(text, field="n" if best_of is None else "best_of")
    return CompletionBody(spec, prompts)


def parse_chat(body: object) -> ChatBody:
    """Checks a /v1/chat/completions body. Raises InvalidRequest, which names the field."""
    fields = JsonFields.of_body(body)
    refuse_unsupported(fields, _CHAT_ACCEPTED_VALUES)
    logprobs = fields.boolean("logprobs") or False
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top and not logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
    name = "max_completion_tokens" if fields.raw("max_completion_tokens") is not None else "max_tokens"
    spec = _spec(
        fields,
        logprobs=(top or 0) if logprobs else None,
        max_tokens=fields.integer(name, 1, INT32_MAX),
        max_tokens_field=name,
    )
    return ChatBody(
        spec,
        parse_messages(fields.raw("messages")),
        _template_kwargs(fields),
        parse_tools(fields),
        include_reasoning=fields.boolean("include_reasoning") is not False,
    )


def _template_kwargs(fields: JsonFields) -> dict[str, Any]:
    """Returns the template variables. Templates of reasoning models use reasoning_effort or enable_thinking, if any."""
    variables: dict[str, Any] = {}
    if (effort := fields.string("reasoning_effort", 32)) is not None:
        variables["reasoning_effort"] = effort
        if effort == "none":
            variables["enable_thinking"] = False
    return variables | template_variables(fields)


def template_variables(fields: JsonFields) -> dict[str, Any]:
    """Returns chat_template_kwargs. Raises InvalidRequest for variables that other fields of the request set."""
    variables = fields.mapping("chat_template_kwargs") or {}
    for name, accepted in _RESERVED_TEMPLATE_KWARGS.items():
        _refuse_unless(variables.get(name), accepted, f"chat_template_kwargs.{name}")
    return variables


def refuse_unsupported(fields: JsonFields, accepted_values: Mapping[str, tuple[object, ...]]) -> None:
    """Raises InvalidRequest for a known field with a value outside of its accepted values."""
    for name, accepted in accepted_values.items():
        _refuse_unless(fields.raw(name), accepted, name)


def _refuse_unless(value: object, accepted: tuple[object, ...], name: str) -> None:
    if value is None or any(type(value) is type(h) and value == h for h in accepted):
        return
    if not accepted:
        raise InvalidRequest(f"{name} is not supported", field=name)
    served = " or ".join(orjson.dumps(h).decode() for h in accepted)
    raise InvalidRequest(f"{name} must be {served}", field=name)


def _spec(
    fields: JsonFields,
    *,
    logprobs: int | None,
    max_tokens: int | None,
    max_tokens_field: str = "max_tokens",
    best_of: int | None = None,
) -> GenerationSpec:
    """Parses the fields that chats and completions share. Raises InvalidRequest, which names the field."""
    model = fields.string("model", 1024)
    if not model:
        raise InvalidRequest("model is missing", field="model")
    stream = fields.boolean("stream") or False
    options = fields.mapping("stream_options")
    if options is not None and not stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", field="stream_options")
    stream_fields = JsonFields(options or {}, "stream_options.")
    continuous = stream_fields.boolean("continuous_usage_stats") or False
    top_k = fields.integer("top_k", -1, INT32_MAX) or 0
    prompt_logprobs = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    if prompt_logprobs is not None and stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed: stream must be false", field="prompt_logprobs")
    n = fields.integer("n", 1, MAX_N) or 1
    if best_of is not None and best_of < n:
        raise InvalidRequest(f"best_of ({best_of}) must not be less than n ({n})", field="best_of")
    if best_of is not None and best_of > n and stream:
        raise InvalidRequest("best_of above n cannot be streamed: stream must be false", field="best_of")
    return GenerationSpec(
        model=model,
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        temperature=_or(fields.number("temperature", 0, 2), 1.0),
        top_k=max(0, top_k),
        top_p=_or(fields.number("top_p", 0, 1, open_low=True), 1.0),
        min_p=_or(fields.number("min_p", 0, 1), 0.0),
        repetition_penalty=_or(fields.number("repetition_penalty", 0, 2, open_low=True), 1.0),
        presence_penalty=_or(fields.number("presence_penalty", -2, 2), 0.0),
        frequency_penalty=_or(fields.number("frequency_penalty", -2, 2), 0.0),
        logit_bias=_logit_bias(fields.mapping("logit_bias")),
        seed=fields.integer("seed", INT64_MIN, INT64_MAX),
        min_tokens=fields.integer("min_tokens", 0, INT32_MAX) or 0,
        stop=_stops(fields.raw("stop")),
        stop_token_ids=_stop_token_ids(fields.raw("stop_token_ids")),
        ignore_eos=fields.boolean("ignore_eos") or False,
        logprobs=logprobs,
        n=n,
        best_of=best_of,
        cache_salt=fields.string("cache_salt", MAX_SALT_CHARS) or "",
        priority=fields.integer("priority", -INT32_MAX, INT32_MAX) or 0,
        stream=stream,
        include_usage=stream_fields.boolean("include_usage") or False,
        continuous_usage=continuous,
        grammar=parse_structured_output(fields),
        skip_special_tokens=fields.boolean("skip_special_tokens") is not False,
        allowed_token_ids=_allowed_token_ids(fields.raw("allowed_token_ids")),
        bad_words=_bad_words(fields.raw("bad_words")),
        include_stop=fields.boolean("include_stop_str_in_output") or False,
        prompt_logprobs=prompt_logprobs,
        beam_search=parse_beam_search(fields, best_of or n, "n" if best_of is None else "best_of"),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise wrong_type("stop", "a string or an array of strings", value)
    check_stops(stops)
    return tuple(stops)


def check_stops(stops: Sequence[object]) -> None:
    """Raises InvalidRequest unless these are at most MAX_STOPS usable stop strings."""
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop may have at most {MAX_STOPS} entries", field="stop")
    for stop in stops:
        if not isinstance(stop, str):
            raise wrong_type("stop", "a string or an array of strings", stop)
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"a stop string must have 1 to {MAX_STOP_CHARS} characters", field="stop")


def _stop_token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong_type("stop_token_ids", "an array of token ids", value)
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"stop_token_ids may have at most {MAX_STOP_TOKEN_IDS} entries", field="stop_token_ids")
    return parse_token_ids(value, "stop_token_ids")


def _allowed_token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong_type("allowed_token_ids", "an array of token ids", value)
    if not 1 <= len(value) <= MAX_ALLOWED_TOKEN_IDS:
        raise InvalidRequest(
            f"allowed_token_ids must have 1 to {MAX_ALLOWED_TOKEN_IDS} entries", field="allowed_token_ids"
        )
    return tuple(dict.fromkeys(parse_token_ids(value, "allowed_token_ids")))


def _bad_words(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong_type("bad_words", "an array of strings", value)
    if len(value) > MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words may have at most {MAX_BAD_WORDS} entries", field="bad_words")
    for word in value:
        if not isinstance(word, str):
            raise wrong_type("bad_words", "an array of strings", word)
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
            raise InvalidRequest(f"a bad word must have 1 to {MAX_BAD_WORD_CHARS} characters", field="bad_words")
    return tuple(dict.fromkeys(value))


def _logit_bias(value: Mapping[str, Any] | None) -> tuple[tuple[int, float], ...]:
    if not value:
        return ()
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias may have at most {MAX_LOGIT_BIAS} entries", field="logit_bias")
    out: dict[int, float] = {}
    inner = JsonFields(value, "logit_bias.")
    for key in value:
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise InvalidRequest(f"logit_bias: the key {key[:40]!r} is not a token id", field="logit_bias")
        bias = inner.number(key, -100, 100)
        if bias is not None:
            out[int(key)] = bias
    return tuple(out.items())


def parse_token_ids(values: Sequence[object], name: str) -> tuple[int, ...]:
    """Returns at most MAX_IDS token ids, not compared with the vocabulary. Raises InvalidRequest with the field."""
    if len(values) > MAX_IDS:
        raise InvalidRequest(f"{name} may have at most {MAX_IDS} entries", field=name)
    if set(map(type, values)) - {int}:
        other = next(value for value in values if type(value) is not int)
        raise wrong_type(name, "an array of token ids (integers)", other)
    ids = cast("Sequence[int]", values)
    for extreme in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= extreme <= INT32_MAX:
            raise InvalidRequest(f"{name} has {extreme}, which is not a token id", field=name)
    return tuple(ids)


def _prompts(value: object) -> tuple[PromptInput, ...]:
    """Parses a string, an array of strings, an array of token ids, or an array of arrays of token ids."""
    if value is None:
        raise InvalidRequest("prompt is missing", field="prompt")
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise wrong_type("prompt", "a string, an array of strings, or token ids", value)
    if not value:
        raise InvalidRequest("the prompt is empty", field="prompt")
    if isinstance(value[0], int):
        return (parse_token_ids(value, "prompt"),)
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt may have at most {MAX_PROMPTS} entries", field="prompt")
    prompts: list[PromptInput] = []
    for entry in value:
        if type(entry) is not type(value[0]) or not isinstance(entry, str | list):
            raise wrong_type("prompt", "a string, an array of strings, or token ids", entry)
        if not entry:
            raise InvalidRequest("the prompt is empty", field="prompt")
        prompts.append(entry if isinstance(entry, str) else parse_token_ids(entry, "prompt"))
    return tuple(prompts)


#: Fields that a beam search cannot honour, and for each the value that has no effect. The sampling parameters
#: (temperature, top_k, top_p, min_p, seed) are accepted and have no effect, because no token is sampled.
_REJECTED_WITH_BEAMS: dict[str, object] = {
    "stream": False,
    "stop": [],
    "echo": False,
    "prompt_logprobs": None,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "allowed_token_ids": None,
    "bad_words": [],
}


def parse_beam_search(fields: JsonFields, width: int, width_field: str) -> BeamSearchParams | None:
    """Returns the parameters of a beam search, None without one. Raises InvalidRequest, which names the field."""
    enabled = fields.boolean("use_beam_search") or False
    penalty = fields.number("length_penalty", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    early = fields.raw("early_stopping")
    if early is None:
        early = False
    if not (isinstance(early, bool) or early == "never"):
        raise InvalidRequest('early_stopping must be true, false or "never"', field="early_stopping")
    if not enabled:
        if penalty not in (None, 1.0):
            raise InvalidRequest("length_penalty needs use_beam_search to be true", field="length_penalty")
        if early is not False:
            raise InvalidRequest("early_stopping needs use_beam_search to be true", field="early_stopping")
        return None
    for name, neutral in _REJECTED_WITH_BEAMS.items():
        value = fields.raw(name)
        if value is not None and value != neutral:
            raise InvalidRequest(f"{name} cannot be combined with use_beam_search", field=name)
    if width > MAX_BEAM_WIDTH:
        raise InvalidRequest(f"a beam search has at most {MAX_BEAM_WIDTH} beams, not {width}", field=width_field)
    return BeamSearchParams(width, 1.0 if penalty is None else penalty, early)
