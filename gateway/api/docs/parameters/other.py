"""Parameters of /tokenize, /detokenize and /v1/embeddings."""

from __future__ import annotations

from gateway.api.docs.parameter import Parameter, boolean, ignored, integer, limited, refused, text
from gateway.api.docs.parameters.generate import MESSAGES
from gateway.api.docs.parameters.shared import MODEL, TOKEN_ID, TOOLS
from gateway.api.openai import requests as v
from gateway.api.openai.embeddings import MAX_DIMENSIONS, MAX_INPUTS

_KWARGS = Parameter("chat_template_kwargs", "Variables for the chat template.", {"type": "object"})
_ANY_MODEL = Parameter("model", "Name of a served model, see /v1/models.", {"type": "string", "maxLength": 1024})

TOKENIZE: tuple[Parameter, ...] = (
    _ANY_MODEL,
    Parameter("prompt", "A text; either this or messages.", {"type": "string"}),
    Parameter("messages", "A conversation, as in a chat; either this or prompt.", MESSAGES),
    Parameter(
        "add_special_tokens",
        "Adds what the tokenizer puts around a text.",
        {"type": "boolean"},
        default="true for a prompt",
    ),
    boolean("return_token_strs", "Also returns each token's text in the vocabulary."),
    _KWARGS,
    limited("continue_final_message", [False], "Goes on with the last message."),
    limited("add_generation_prompt", [True], "The template's start of an answer."),
    TOOLS,
    refused("chat_template", "A template of the client's own."),
    refused("mm_processor_kwargs", "Images and the like."),
)

DETOKENIZE: tuple[Parameter, ...] = (
    _ANY_MODEL,
    Parameter("tokens", "Token ids.", {"type": "array", "items": TOKEN_ID, "maxItems": v.MAX_IDS}, required=True),
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
                {"type": "array", "items": TOKEN_ID, "minItems": 1, "maxItems": v.MAX_IDS},
                {
                    "type": "array",
                    "items": {"type": "array", "items": TOKEN_ID, "minItems": 1, "maxItems": v.MAX_IDS},
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
        "Number of first components to return, scaled to length 1; at most the model's.",
        default="all",
    ),
    text("cache_salt", v.MAX_SALT_CHARS, "Only requests with the same one share cached prefixes.", default="empty"),
    ignored("user", "Id of the end user, for OpenAI's abuse checks."),
)
