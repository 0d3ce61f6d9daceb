"""Parameters of several endpoints: the model, the tools, and COMMON, which both generating endpoints have."""

from __future__ import annotations

from common.types import MAX_N
from gateway.api.docs.parameter import Parameter, boolean, ignored, integer, number, refused, text
from gateway.api.http.json_fields import Json
from gateway.api.openai import requests as v
from gateway.api.openai.requests import MAX_LENGTH_PENALTY
from gateway.api.openai.structured_output import MAX_CHOICES

TOKEN_ID: Json = {"type": "integer", "minimum": 0, "maximum": v.INT32_MAX}
_STOP: Json = {"type": "string", "minLength": 1, "maxLength": v.MAX_STOP_CHARS}

_SCHEMA: Json = {"type": ["object", "null"]}
_RESPONSE_FORMAT: Json = {
    "anyOf": [
        {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {"type": "object", "properties": {"schema": _SCHEMA}},
            },
            "required": ["type", "json_schema"],
        },
    ]
}
_STRUCTURED: dict[str, Json] = {
    "json": {"anyOf": [{"type": ["object", "boolean"]}, {"type": "string", "pattern": r"^\s*(\{|true|false)"}]},
    "regex": {"type": "string", "minLength": 1},
    "choice": {
        "type": "array",
        "items": {"type": "string", "minLength": 1},
        "minItems": 1,
        "maxItems": MAX_CHOICES,
    },
    "grammar": {"type": "string", "pattern": ":"},
    "json_object": {"type": "boolean"},
}
FUNCTION: Json = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"},
        "description": {"type": ["string", "null"]},
        "parameters": _SCHEMA,
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["name"],
}
_TOOL: Json = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": FUNCTION},
    "required": ["type", "function"],
}
NAMED_TOOL: Json = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": {"type": "object", "required": ["name"]}},
    "required": ["type", "function"],
}
ALLOWED_TOOLS: Json = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": NAMED_TOOL}},
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}
TOOLS = Parameter("tools", "Functions that the model may call, at most 512.", {"type": "array", "items": _TOOL})

MODEL = Parameter(
    "model",
    "Name of a served model, see /v1/models.",
    {"type": "string", "minLength": 1, "maxLength": 1024},
    required=True,
)

COMMON: tuple[Parameter, ...] = (
    MODEL,
    number("temperature", 0, 2, "Softmax temperature; 0 is greedy.", default=1.0),
    number(
        "top_p",
        0,
        1,
        "Keeps the smallest set of most likely tokens with at least this probability in sum.",
        default=1.0,
        open_low=True,
    ),
    integer("top_k", -1, v.INT32_MAX, "Keeps the k most likely tokens; 0 and -1 are off.", default="0"),
    number("min_p", 0, 1, "Drops tokens less likely than min_p times the likeliest.", default=0.0),
    number(
        "repetition_penalty",
        0,
        2,
        "Divides (or multiplies) logits of tokens seen in prompt or output.",
        default=1.0,
        open_low=True,
    ),
    number("presence_penalty", -2, 2, "Subtracted once from tokens seen in the output.", default=0.0),
    number("frequency_penalty", -2, 2, "Subtracted per occurrence in the output.", default=0.0),
    Parameter(
        "logit_bias",
        "Added to the logits of single tokens; keys are token ids.",
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": v.MAX_LOGIT_BIAS,
        },
    ),
    integer(
        "seed",
        v.INT64_MIN,
        v.INT64_MAX,
        "Makes sampling repeatable, whatever other requests are in the batch.",
        default="random",
    ),
    integer(
        "min_tokens",
        0,
        v.INT32_MAX,
        "No stop token ends the answer before this many tokens; at most max_tokens.",
        default="0",
    ),
    Parameter(
        "stop",
        "Strings that end the answer; not part of it.",
        {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": v.MAX_STOPS}]},
    ),
    Parameter(
        "stop_token_ids",
        "Tokens that end the answer, beside the model's own.",
        {"type": "array", "items": TOKEN_ID, "maxItems": v.MAX_STOP_TOKEN_IDS},
    ),
    boolean("ignore_eos", "Goes on past the model's end-of-sequence token."),
    text("cache_salt", v.MAX_SALT_CHARS, "Only requests with the same one share cached prefixes.", default="empty"),
    integer("priority", -v.INT32_MAX, v.INT32_MAX, "Higher runs earlier.", default="0"),
    boolean("stream", "Server-sent events instead of one answer.", grpc=""),
    Parameter("stream_options", "Only with stream.", {"type": "object"}, grpc=""),
    boolean("stream_options.include_usage", "One more chunk, with the usage and no choices.", grpc=""),
    boolean("stream_options.continuous_usage_stats", "The usage so far, in every chunk.", grpc=""),
    integer("n", 1, MAX_N, "Answers per prompt, for one prefill.", default="1"),
    boolean(
        "use_beam_search", "Searches the likeliest answers instead of sampling; cannot be streamed. See Beam search."
    ),
    number(
        "length_penalty",
        -MAX_LENGTH_PENALTY,
        MAX_LENGTH_PENALTY,
        "Beams are ranked by log-probability / length ** length_penalty.",
        default=1.0,
    ),
    Parameter(
        "early_stopping",
        "When a search that has as many answers as beams ends: at once (true), when no live beam scores better at its "
        "current length (false), or when none could score better at any length (never).",
        {"enum": [False, True, "never"], "default": False},
    ),
    Parameter(
        "allowed_token_ids",
        "Only these tokens are generated; include the tokens that end the answer.",
        {"type": "array", "items": TOKEN_ID, "minItems": 1, "maxItems": v.MAX_ALLOWED_TOKEN_IDS},
    ),
    Parameter(
        "bad_words",
        "Words that are not generated, at the start of a text or after a space.",
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": v.MAX_BAD_WORD_CHARS},
            "maxItems": v.MAX_BAD_WORDS,
        },
    ),
    boolean("include_stop_str_in_output", "The stop string that ends the answer is part of it."),
    integer(
        "prompt_logprobs",
        0,
        v.MAX_LOGPROBS,
        "Alternatives reported per prompt token; no prefix cache is used. Not with stream.",
    ),
    Parameter(
        "response_format",
        "Format that the answer has to match; always enforced, strict or not.",
        _RESPONSE_FORMAT,
        grpc="structured_output",
    ),
    Parameter(
        "structured_outputs",
        "The same in vLLM's form: one of json (a schema), regex, choice, grammar (Lark or GBNF), json_object.",
        {"type": "object", "anyOf": [{"properties": {k: v}, "required": [k]} for k, v in _STRUCTURED.items()]},
        grpc="structured_output",
    ),
    *(
        Parameter(f"guided_{name}", f"The older name of structured_outputs.{name}.", _STRUCTURED[name], grpc="")
        for name in ("json", "regex", "choice", "grammar")
    ),
    Parameter(
        "skip_special_tokens",
        "Whether special tokens stay out of the text; the one that ends an answer always does.",
        {"type": "boolean", "default": True},
    ),
    ignored("user", "Id of the end user, for OpenAI's abuse checks."),
    refused("lora_request", "LoRA adapters are not offered."),
    refused("lora_path", "LoRA adapters are not offered."),
    refused("adapter_id", "LoRA adapters are not offered."),
)
