"""Every parameter of every endpoint that takes a body. tests/unit/test_api_doc.py holds it equal to the validators.

To add a parameter: let the validator read it through Fields (gateway/fields.py), put it into the list of its endpoint
here (COMMON for both generating ones) with a schema that has the validator's bounds, and run
`python -m gateway.api_doc`, which writes the tables of docs/api.md. A name that a validator reads and that is not here,
one that is here and nobody reads, a bound that the validator does not keep: each fails a test.
"""

from __future__ import annotations

from common.types import MAX_N
from gateway import validation as v
from gateway.api_doc.parameter import Json, Parameter, boolean, ignored, integer, limited, number, refused, text
from gateway.beam_fields import MAX_LENGTH_PENALTY
from gateway.embeddings import MAX_DIMENSIONS, MAX_INPUTS
from gateway.messages import MAX_MESSAGES
from gateway.structured import MAX_CHOICES

_TOKEN_ID: Json = {"type": "integer", "minimum": 0, "maximum": v.INT32_MAX}
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
_FUNCTION: Json = {
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
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["type", "function"],
}
_NAMED: Json = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": {"type": "object", "required": ["name"]}},
    "required": ["type", "function"],
}
_ALLOWED: Json = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": _NAMED}},
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
    number("top_p", 0, 1, "Keeps the smallest set of tokens whose probability reaches it.", default=1.0, open_low=True),
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
        "seed", v.INT64_MIN, v.INT64_MAX, "Makes sampling repeatable, whatever else is in the batch.", default="random"
    ),
    integer("min_tokens", 0, v.INT32_MAX, "No stop token ends the answer before; at most max_tokens.", default="0"),
    Parameter(
        "stop",
        "Strings that end the answer; not part of it.",
        {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": v.MAX_STOPS}]},
    ),
    Parameter(
        "stop_token_ids",
        "Tokens that end the answer, beside the model's own.",
        {"type": "array", "items": _TOKEN_ID, "maxItems": v.MAX_STOP_TOKEN_IDS},
    ),
    boolean("ignore_eos", "Goes on past the model's end-of-sequence token."),
    text("cache_salt", v.MAX_SALT_CHARS, "Only requests with the same one share cached prefixes.", default="empty"),
    integer("priority", -v.INT32_MAX, v.INT32_MAX, "Higher runs earlier.", default="0"),
    boolean("stream", "Server-sent events instead of one answer.", grpc=""),
    Parameter("stream_options", "Only with stream.", {"type": "object"}, grpc=""),
    boolean("stream_options.include_usage", "One more chunk, with the usage and no choices.", grpc=""),
    boolean("stream_options.continuous_usage_stats", "The usage so far, in every chunk.", grpc=""),
    integer("n", 1, MAX_N, "Answers per prompt, for one prefill.", default="1"),
    boolean("use_beam_search", "Looks for the likeliest answers instead of drawing; not streamed. See Beam search."),
    number(
        "length_penalty",
        -MAX_LENGTH_PENALTY,
        MAX_LENGTH_PENALTY,
        "Beams are ranked by log-probability / length ** length_penalty.",
        default=1.0,
    ),
    Parameter(
        "early_stopping",
        "When the search ends once it has as many answers as beams: at once, or when no live beam is better by its "
        "length now (false) or could become better at any length (never).",
        {"enum": [False, True, "never"], "default": False},
    ),
    Parameter(
        "allowed_token_ids",
        "Nothing else is generated; tokens that end the answer are named too if they may come.",
        {"type": "array", "items": _TOKEN_ID, "minItems": 1, "maxItems": v.MAX_ALLOWED_TOKEN_IDS},
    ),
    Parameter(
        "bad_words",
        "Words that are not generated, at the start of a text or behind a space.",
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
        "What the answer has to match; enforced, strict or not.",
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
    ignored("user", "Who asks, for OpenAI's abuse checks."),
    refused("lora_request", "LoRA adapters are not offered."),
    refused("lora_path", "LoRA adapters are not offered."),
    refused("adapter_id", "LoRA adapters are not offered."),
)

COMPLETION: tuple[Parameter, ...] = (
    Parameter(
        "prompt",
        "A text, texts, token ids, or lists of them; each is answered by a choice of its own.",
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1},
                    "minItems": 1,
                    "maxItems": v.MAX_PROMPTS,
                },
                {"type": "array", "items": _TOKEN_ID, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": _TOKEN_ID, "minItems": 1},
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
    integer("logprobs", 0, v.MAX_LOGPROBS, "So many alternatives per token, with log-probabilities.", default="none"),
    limited("suffix", [""], "Text behind the answer (no model of ours fills in)."),
    integer(
        "best_of",
        1,
        MAX_N,
        "Candidates, the n of which are answered whose tokens have the highest mean log-probability; not streamed.",
        default="n",
    ),
)

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
    integer("max_tokens", 1, v.INT32_MAX, "The older name of max_completion_tokens, which goes first."),
    boolean("logprobs", "Log-probabilities of the answer's tokens."),
    integer(
        "top_logprobs",
        0,
        v.MAX_LOGPROBS,
        "So many alternatives per token; needs logprobs.",
        default="0",
        grpc="logprobs",
    ),
    Parameter("chat_template_kwargs", "Variables for the chat template.", {"type": "object"}),
    TOOLS,
    Parameter(
        "tool_choice",
        "none: no calls, the model does not see the tools. required, or one function: enforced.",
        {"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED]},
        default="auto with tools",
    ),
    Parameter("parallel_tool_calls", "Whether an answer may have several calls.", {"type": "boolean", "default": True}),
    Parameter("functions", "The older form of tools.", {"type": "array", "items": _FUNCTION}),
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
    refused("web_search_options", "Search in the web."),
    refused("chat_template", "A template of the client's own."),
    ignored("metadata", "Labels of stored answers; nothing is stored."),
    ignored("store", "Keeps the answer at OpenAI; nothing is kept here."),
    ignored("service_tier", "There is one."),
    ignored("safety_identifier", "Who asks, for OpenAI's abuse checks."),
    ignored("prompt_cache_key", "Routing looks for cached prefixes anyway; x-session-affinity is the hint to give."),
    ignored("prompt_cache_retention", "Cached prefixes stay while there is room."),
    ignored("prompt_cache_options", "Cached prefixes stay while there is room."),
    ignored("verbosity", "How long answers are."),
    ignored("moderation", "There is none."),
)

# Of /v1/responses: what it shares with chats is their parameter, by name.
_SHARED = (
    *("model", "temperature", "top_p", "stream", "top_k", "min_p", "seed", "min_tokens", "stop", "stop_token_ids"),
    *("ignore_eos", "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "cache_salt"),
    *("priority", "chat_template_kwargs", "user", "safety_identifier", "prompt_cache_key", "service_tier"),
    *("prompt_cache_retention", "prompt_cache_options", "moderation"),
)
_TEXT_ITEM: Json = {"anyOf": [{"type": "string"}, {"type": "array", "items": {
    "type": "object",
    "properties": {"type": {"enum": ["input_text", "output_text", "text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}}]}  # fmt: skip
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
    Parameter("instructions", "A system message before the input; not kept for later responses.", {"type": "string"}),
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
        "Goes on after a response that is kept; needs Redis, and 404 says that it is not there (any more).",
    ),
    Parameter(
        "store",
        "Keeps the response in Redis for --response-ttl-s; without Redis nothing is kept, and `store` in the answer is "
        "false.",
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
    Parameter("reasoning", "Of reasoning models.", {"type": "object"}),
    text("reasoning.effort", 32, "See reasoning_effort of chats."),
    Parameter(
        "include",
        "message.output_text.logprobs; what else there is has no effect.",
        {
            "type": "array",
            "items": {"type": "string"},
        },
    ),
    integer("top_logprobs", 0, v.MAX_LOGPROBS, "So many alternatives per token.", default="0"),
    Parameter(
        "metadata",
        "Labels; the answer has them too.",
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
                **_FUNCTION,
                "properties": {**_FUNCTION["properties"], "type": {"const": "function"}},
                "required": ["type", "name"],
            },
        },
    ),
    Parameter(
        "tool_choice",
        "Which of them: none, auto, required, a function, or allowed_tools.",
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

_KWARGS = Parameter("chat_template_kwargs", "Variables for the chat template.", {"type": "object"})
_ANY_MODEL = Parameter("model", "Name of a served model, see /v1/models.", {"type": "string", "maxLength": 1024})

TOKENIZE: tuple[Parameter, ...] = (
    _ANY_MODEL,
    Parameter("prompt", "A text; this or messages.", {"type": "string"}),
    Parameter("messages", "A conversation, as in a chat; this or prompt.", MESSAGES),
    Parameter(
        "add_special_tokens",
        "Adds what the tokenizer puts around a text.",
        {"type": "boolean"},
        default="true for a prompt",
    ),
    boolean("return_token_strs", "Also tells each token's text in the vocabulary."),
    _KWARGS,
    limited("continue_final_message", [False], "Goes on with the last message."),
    limited("add_generation_prompt", [True], "The template's start of an answer."),
    TOOLS,
    refused("chat_template", "A template of the client's own."),
    refused("mm_processor_kwargs", "Images and the like."),
)

DETOKENIZE: tuple[Parameter, ...] = (
    _ANY_MODEL,
    Parameter("tokens", "Token ids.", {"type": "array", "items": _TOKEN_ID, "maxItems": 1 << 20}, required=True),
)

EMBEDDINGS: tuple[Parameter, ...] = (
    MODEL,
    Parameter(
        "input",
        "A text, texts, token ids, or lists of them.",
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_INPUTS},
                {"type": "array", "items": _TOKEN_ID, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": _TOKEN_ID, "minItems": 1},
                    "minItems": 1,
                    "maxItems": MAX_INPUTS,
                },
            ]
        },
        required=True,
    ),
    Parameter("encoding_format", "base64: float32, little-endian.", {"enum": ["float", "base64"], "default": "float"}),
    integer(
        "dimensions",
        1,
        MAX_DIMENSIONS,
        "So many of the first components, scaled to length 1; at most the model's.",
        default="all",
    ),
    text("cache_salt", v.MAX_SALT_CHARS, "Only requests with the same one share cached prefixes.", default="empty"),
    ignored("user", "Who asks, for OpenAI's abuse checks."),
)

BODIES: dict[str, tuple[Parameter, ...]] = {
    "/v1/chat/completions": (*CHAT[:1], *COMMON, *CHAT[1:]),
    "/v1/completions": (*COMPLETION[:1], *COMMON, *COMPLETION[1:]),
    "/v1/embeddings": EMBEDDINGS,
    "/v1/responses": RESPONSES,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}
