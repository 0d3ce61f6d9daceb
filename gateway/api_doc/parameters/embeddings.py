"""Parameters of /v1/embeddings."""

from __future__ import annotations

from gateway import validation as v
from gateway.api_doc.parameter import Parameter, ignored, integer, text
from gateway.api_doc.parameters.shared import MODEL, TOKEN_ID
from gateway.embeddings import MAX_DIMENSIONS, MAX_INPUTS

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
        "So many of the first components, scaled to length 1; at most the model's.",
        default="all",
    ),
    text("cache_salt", v.MAX_SALT_CHARS, "Only requests with the same one share cached prefixes.", default="empty"),
    ignored("user", "Who asks, for OpenAI's abuse checks."),
)
