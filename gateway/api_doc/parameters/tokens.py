"""Parameters of /tokenize and /detokenize."""

from __future__ import annotations

from gateway import validation as v
from gateway.api_doc.parameter import Parameter, boolean, limited, refused
from gateway.api_doc.parameters.chat import MESSAGES
from gateway.api_doc.parameters.shared import TOKEN_ID, TOOLS

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
    Parameter("tokens", "Token ids.", {"type": "array", "items": TOKEN_ID, "maxItems": v.MAX_IDS}, required=True),
)
