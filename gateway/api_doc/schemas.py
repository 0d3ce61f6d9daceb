"""JSON Schemas of what the gateway answers, by the name that /openapi.json gives them."""

from __future__ import annotations

from gateway.api_doc.parameter import Json

_STRING: Json = {"type": "string"}
_INT: Json = {"type": "integer", "minimum": 0}
_NUMBER: Json = {"type": "number"}
_BOOL: Json = {"type": "boolean"}
_FINISH: Json = {"enum": ["stop", "length", "tool_calls", "function_call", "content_filter", None]}


def ref(name: str) -> Json:
    """A reference to one of SCHEMAS."""
    return {"$ref": f"#/components/schemas/{name}"}


def obj(required: Json, optional: Json | None = None) -> Json:
    """An object with these members; more may come in later versions."""
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def array(items: Json) -> Json:
    return {"type": "array", "items": items}


def nullable(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


_TOKEN_LOGPROB = obj({"token": _STRING, "logprob": _NUMBER, "bytes": nullable(array(_INT))})
_CHAT_LOGPROBS = nullable(
    obj(
        {
            "content": nullable(array({**_TOKEN_LOGPROB, "properties": {
                **_TOKEN_LOGPROB["properties"], "top_logprobs": array(_TOKEN_LOGPROB)}})),
        }
    )
)  # fmt: skip
_COMPLETION_LOGPROBS = nullable(
    obj(
        {
            "tokens": array(_STRING),
            "token_logprobs": array(nullable(_NUMBER)),
            "top_logprobs": nullable(array(nullable({"type": "object", "additionalProperties": _NUMBER}))),
            "text_offset": array(_INT),
        }
    )
)
_TOOL_CALL = obj(
    {"id": _STRING, "type": {"const": "function"}, "function": obj({"name": _STRING, "arguments": _STRING})}
)
_TOOL_CALL_DELTA = obj(
    {"index": _INT},
    {"id": _STRING, "type": _STRING, "function": obj({}, {"name": _STRING, "arguments": _STRING})},
)
_HEAD: Json = {"id": _STRING, "created": _INT, "model": _STRING}

SCHEMAS: Json = {
    "Error": obj(
        {
            "error": obj(
                {"message": _STRING, "type": _STRING, "param": nullable(_STRING), "code": nullable(_STRING)},
            )
        }
    ),
    "Usage": obj(
        {"prompt_tokens": _INT, "completion_tokens": _INT, "total_tokens": _INT},
        {
            "prompt_tokens_details": obj({"cached_tokens": _INT}),
            "completion_tokens_details": nullable({"type": "object"}),
        },
    ),
    "ChatCompletion": obj(
        {
            **_HEAD,
            "object": {"const": "chat.completion"},
            "choices": array(
                obj(
                    {
                        "index": _INT,
                        "message": obj(
                            {"role": {"const": "assistant"}, "content": nullable(_STRING), "refusal": {"type": "null"}},
                            {"reasoning_content": nullable(_STRING), "tool_calls": array(_TOOL_CALL)},
                        ),
                        "logprobs": _CHAT_LOGPROBS,
                        "finish_reason": _FINISH,
                    }
                )
            ),
            "usage": ref("Usage"),
        }
    ),
    "ChatCompletionChunk": obj(
        {
            **_HEAD,
            "object": {"const": "chat.completion.chunk"},
            "choices": array(
                obj(
                    {
                        "index": _INT,
                        "delta": obj(
                            {},
                            {
                                "role": {"const": "assistant"},
                                "content": nullable(_STRING),
                                "reasoning_content": nullable(_STRING),
                                "tool_calls": array(_TOOL_CALL_DELTA),
                            },
                        ),
                        "finish_reason": _FINISH,
                    },
                    {"logprobs": _CHAT_LOGPROBS},
                )
            ),
        },
        {"usage": nullable(ref("Usage"))},
    ),
    "Completion": obj(
        {
            **_HEAD,
            "object": {"const": "text_completion"},
            "choices": array(
                obj({"index": _INT, "text": _STRING, "logprobs": _COMPLETION_LOGPROBS, "finish_reason": _FINISH})
            ),
        },
        {"usage": nullable(ref("Usage"))},
    ),
    "Model": obj(
        {
            "id": _STRING,
            "object": {"const": "model"},
            "created": _INT,
            "owned_by": _STRING,
            "root": _STRING,
        },
        {"max_model_len": _INT},
    ),
    "ModelList": obj({"object": {"const": "list"}, "data": array(ref("Model"))}),
    "Tokenized": obj(
        {
            "count": _INT,
            "max_model_len": nullable(_INT),
            "tokens": array(_INT),
            "token_strs": nullable(array(nullable(_STRING))),
        }
    ),
    "Detokenized": obj({"prompt": _STRING}),
    "PrefixCacheReset": obj(
        {
            "object": {"const": "prefix_cache.reset"},
            "cleared": _INT,
            "kept": _INT,
            "pods": array(obj({"pod": _STRING, "cleared": _INT, "kept": _INT, "indexed": _BOOL})),
        }
    ),
    "Status": obj({"status": _STRING}),
    "Version": obj({"version": _STRING}),
    "Timeline": {"type": "object"},
}
