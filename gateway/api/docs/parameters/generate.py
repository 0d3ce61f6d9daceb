"""Parameters of /v1/chat/completions and of /v1/completions, beside COMMON."""

from __future__ import annotations

from common.types import MAX_N
from gateway.api.docs.parameter import Parameter, boolean, ignored, integer, limited, refused, text
from gateway.api.docs.parameters.shared import ALLOWED_TOOLS, FUNCTION, NAMED_TOOL, TOKEN_ID, TOOLS
from gateway.api.http.json_fields import Json
from gateway.api.openai import requests as v
from gateway.api.openai.messages import MAX_MESSAGES

_TEXT_PART: Json = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CALLED: Json = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "arguments": {"type": ["string", "object", "null"]}},
    "required": ["name"],
}
_CALLS: Json = {
    "type": "array",
    "items": {"type": "object", "properties": {"function": _CALLED}, "required": ["function"]},
}
_MESSAGE: Json = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
                "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
                "tool_calls": {"anyOf": [_CALLS, {"type": "null"}]},
            },
            "required": ["role", "content"],
        },
        {
            "type": "object",
            "properties": {
                "role": {"const": "assistant"},
                "content": {"type": "null"},
                "tool_calls": {**_CALLS, "minItems": 1},
            },
            "required": ["role", "tool_calls"],
        },
    ]
}
MESSAGES: Json = {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES}

CHAT: tuple[Parameter, ...] = (
    Parameter(
        "messages",
        "The conversation, oldest first; content is text or text parts.",
        MESSAGES,
        required=True,
        grpc="chat",
    ),
    integer(
        "max_completion_tokens",
        1,
        v.INT32_MAX,
        "Most tokens to generate; prompt and answer must fit the context.",
        default="the rest of the context",
        grpc="max_tokens",
    ),
    integer("max_tokens", 1, v.INT32_MAX, "The older name of max_completion_tokens, which has precedence."),
    boolean("logprobs", "Log-probabilities of the answer's tokens."),
    integer(
        "top_logprobs",
        0,
        v.MAX_LOGPROBS,
        "Number of alternatives per token; needs logprobs.",
        default="0",
        grpc="logprobs",
    ),
    Parameter("chat_template_kwargs", "Variables for the chat template.", {"type": "object"}),
    TOOLS,
    Parameter(
        "tool_choice",
        "none: no calls, the model does not see the tools. required, or one function: enforced.",
        {"anyOf": [{"enum": ["none", "auto", "required"]}, NAMED_TOOL, ALLOWED_TOOLS]},
        default="auto with tools",
    ),
    Parameter("parallel_tool_calls", "Whether an answer may have several calls.", {"type": "boolean", "default": True}),
    Parameter("functions", "The older form of tools.", {"type": "array", "items": FUNCTION}),
    Parameter(
        "function_call",
        "The older form of tool_choice.",
        {"anyOf": [{"enum": ["none", "auto"]}, {"type": "object", "required": ["name"]}]},
    ),
    Parameter(
        "include_reasoning",
        "Whether the answer shows the model's reasoning section, as reasoning_content.",
        {"type": "boolean", "default": True},
    ),
    text(
        "reasoning_effort",
        32,
        "How long a reasoning model thinks: a variable for the chat template; none also sets enable_thinking to false.",
    ),
    limited("echo", [False], "The prompt before the answer."),
    limited("modalities", [["text"]], "Kinds of output."),
    limited("continue_final_message", [False], "Goes on with the last message."),
    limited("add_generation_prompt", [True], "The template's start of an answer."),
    limited("documents", [[]], "Documents for the template."),
    refused("audio", "Spoken answers."),
    refused("prediction", "Predicted outputs."),
    refused("web_search_options", "Web search."),
    refused("chat_template", "A template of the client's own."),
    ignored("metadata", "Labels of stored answers; nothing is stored."),
    ignored("store", "Stores the answer at OpenAI; nothing is stored here."),
    ignored("service_tier", "Service class; there is only one."),
    ignored("safety_identifier", "Id of the end user, for OpenAI's abuse checks."),
    ignored("prompt_cache_key", "Routing finds cached prefixes without it; use X-Session-Affinity as a hint."),
    ignored("prompt_cache_retention", "Cached prefixes stay while there is room."),
    ignored("prompt_cache_options", "Cached prefixes stay while there is room."),
    ignored("verbosity", "How long answers are."),
    ignored("moderation", "Content moderation; there is none."),
)


COMPLETION: tuple[Parameter, ...] = (
    Parameter(
        "prompt",
        "A text, texts, token ids, or lists of them; each gets its own choice.",
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1},
                    "minItems": 1,
                    "maxItems": v.MAX_PROMPTS,
                },
                {"type": "array", "items": TOKEN_ID, "minItems": 1, "maxItems": v.MAX_IDS},
                {
                    "type": "array",
                    "items": {"type": "array", "items": TOKEN_ID, "minItems": 1, "maxItems": v.MAX_IDS},
                    "minItems": 1,
                    "maxItems": v.MAX_PROMPTS,
                },
            ]
        },
        required=True,
        grpc="text, tokens",
    ),
    integer(
        "max_tokens",
        0,
        v.INT32_MAX,
        "Most tokens to generate; prompt and answer must fit the context. 0 with echo only.",
        default="16",
    ),
    boolean("echo", "The prompt comes before the answer, with its log-probabilities if there are any."),
    integer(
        "logprobs", 0, v.MAX_LOGPROBS, "Log-probabilities, with this number of alternatives per token.", default="none"
    ),
    limited("suffix", [""], "Text after the answer; infilling is not supported."),
    integer(
        "best_of",
        1,
        MAX_N,
        "Candidates per prompt; the n with the highest mean log-probability are answered. Cannot be streamed.",
        default="n",
    ),
)
