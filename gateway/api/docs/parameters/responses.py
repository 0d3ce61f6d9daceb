"""Parameters of /v1/responses. A parameter that a chat has as well is the chat's, by name."""

from __future__ import annotations

from gateway.api.docs.parameter import Parameter, ignored, integer, limited, refused, text
from gateway.api.docs.parameters.generate import CHAT
from gateway.api.docs.parameters.shared import COMMON, FUNCTION
from gateway.api.http.json_fields import Json
from gateway.api.openai import requests as v
from gateway.api.openai.messages import MAX_MESSAGES

#: Names of the parameters of COMMON and CHAT with the same meaning here.
_SHARED = (
    *("model", "temperature", "top_p", "stream", "top_k", "min_p", "seed", "min_tokens", "stop", "stop_token_ids"),
    *("ignore_eos", "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "cache_salt"),
    *("priority", "chat_template_kwargs", "user", "safety_identifier", "prompt_cache_key", "service_tier"),
    *("prompt_cache_retention", "prompt_cache_options", "moderation"),
)
_TEXT_ITEM: Json = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"enum": ["input_text", "output_text", "text"]}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}
_ITEM: Json = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["message", None]},
                "role": {"enum": ["user", "assistant", "system", "developer"]},
                "content": _TEXT_ITEM,
                "id": {"type": ["string", "null"]},
            },
            "required": ["role", "content"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "function_call"},
                **{name: {"type": "string"} for name in ("call_id", "name", "arguments")},
                "id": {"type": ["string", "null"]},
            },
            "required": ["type", "call_id", "name", "arguments"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "function_call_output"},
                "call_id": {"type": "string"},
                "output": _TEXT_ITEM,
                "id": {"type": ["string", "null"]},
            },
            "required": ["type", "call_id", "output"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "reasoning"},
                "summary": {"type": "array", "maxItems": 0},
                "id": {"type": ["string", "null"]},
            },
            "required": ["type"],
        },
    ]
}

RESPONSES: tuple[Parameter, ...] = (
    Parameter(
        "input",
        "A text, or items: messages, function_call, function_call_output, reasoning.",
        {"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM, "minItems": 1, "maxItems": MAX_MESSAGES}]},
        required=True,
    ),
    Parameter("instructions", "A system message before the input; not stored for later responses.", {"type": "string"}),
    integer(
        "max_output_tokens",
        1,
        v.INT32_MAX,
        "Most tokens to generate; prompt and answer must fit the context.",
        default="the rest of the context",
    ),
    text(
        "previous_response_id",
        256,
        "Continues a stored response; needs Redis. 404 if it is not stored or has expired.",
    ),
    Parameter(
        "store",
        "Stores the response in Redis for --response-ttl-s; without Redis nothing is stored, and `store` in the answer "
        "is false.",
        {"type": "boolean", "default": True},
    ),
    Parameter("text", "How the answer is written.", {"type": "object"}),
    Parameter(
        "text.format",
        "text, json_object or json_schema, see response_format of chats.",
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
            "required": ["type"],
        },
        default="text",
    ),
    Parameter("reasoning", "Options of reasoning models.", {"type": "object"}),
    text("reasoning.effort", 32, "See reasoning_effort of chats."),
    Parameter(
        "include",
        "message.output_text.logprobs is supported; other entries have no effect.",
        {
            "type": "array",
            "items": {"type": "string"},
        },
    ),
    integer("top_logprobs", 0, v.MAX_LOGPROBS, "Number of alternatives per token.", default="0"),
    Parameter(
        "metadata",
        "Labels that the answer repeats.",
        {
            "type": "object",
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
            "maxProperties": 16,
        },
    ),
    Parameter(
        "tools",
        "Functions that the model may call; no other tools.",
        {
            "type": "array",
            "items": {
                **FUNCTION,
                "properties": {**FUNCTION["properties"], "type": {"const": "function"}},
                "required": ["type", "name"],
            },
        },
    ),
    Parameter(
        "tool_choice",
        "Which tools may or must be called: none, auto, required, a function, or allowed_tools.",
        {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {"type": "object", "properties": {"type": {"const": "function"}}, "required": ["type", "name"]},
                {
                    "type": "object",
                    "properties": {"type": {"const": "allowed_tools"}, "mode": {"enum": ["auto", "required"]}},
                    "required": ["type", "mode", "tools"],
                },
            ]
        },
        default="auto",
    ),
    Parameter("parallel_tool_calls", "Several calls in one answer.", {"type": "boolean", "default": True}),
    limited("background", [False], "Answering later."),
    limited("truncation", ["disabled"], "Dropping items that do not fit."),
    refused("conversation", "Conversations as objects."),
    refused("prompt", "Stored prompt templates."),
    refused("context_management", "Compaction of long conversations."),
    ignored("max_tool_calls", "A limit for built-in tools, of which there are none."),
    ignored("stream_options", "Padding against eavesdroppers."),
    *(p for p in (*COMMON, *CHAT) if p.name in _SHARED),
)
