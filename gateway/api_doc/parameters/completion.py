"""Parameters of /v1/completions, beside COMMON."""

from __future__ import annotations

from common.types import MAX_N
from gateway import validation as v
from gateway.api_doc.parameter import Parameter, boolean, integer, limited
from gateway.api_doc.parameters.shared import TOKEN_ID

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
