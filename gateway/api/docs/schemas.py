"""JSON Schemas of the answers, by their names in /openapi.json."""

from __future__ import annotations

from gateway.api.http.json_value import Json

_STRING: Json = {"type": "string"}
_INT: Json = {"type": "integer", "minimum": 0}
_NUMBER: Json = {"type": "number"}
_BOOL: Json = {"type": "boolean"}
_FINISH: Json = {"enum": ["stop", "length", "tool_calls", "function_call", "content_filter", None]}


def ref(name: str) -> Json:
    """Returns a reference to one of SCHEMAS."""
    return {"$ref": f"#/components/schemas/{name}"}


def obj(required: Json, optional: Json | None = None) -> Json:
    """Returns the schema of an object with these members; later versions may add members."""
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def array(items: Json) -> Json:
    return {"type": "array", "items": items}


def nullable(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


_TOKEN_LOGPROB = obj({"token": _STRING, "logprob": _NUMBER, "bytes": nullable(array(_INT))})
_CHAT_LOGPROBS = nullable(
    obj(
        {
            "content": nullable(
                array(
                    {
                        **_TOKEN_LOGPROB,
                        "properties": {**_TOKEN_LOGPROB["properties"], "top_logprobs": array(_TOKEN_LOGPROB)},
                    }
                )
            )
        }
    )
)
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
    {"index": _INT}, {"id": _STRING, "type": _STRING, "function": obj({}, {"name": _STRING, "arguments": _STRING})}
)
_HEAD: Json = {"id": _STRING, "created": _INT, "model": _STRING}

_OUTPUT_ITEM: Json = {
    "anyOf": [
        obj(
            {
                "id": _STRING,
                "type": {"const": "message"},
                "role": {"const": "assistant"},
                "status": _STRING,
                "content": array(obj({"type": {"const": "output_text"}, "text": _STRING, "annotations": array({})})),
            }
        ),
        obj({"id": _STRING, "type": {"const": "reasoning"}, "content": array({"type": "object"})}),
        obj(
            {
                "id": _STRING,
                "type": {"const": "function_call"},
                "call_id": _STRING,
                "name": _STRING,
                "arguments": _STRING,
            }
        ),
    ]
}

SCHEMAS: Json = {
    "Error": obj(
        {"error": obj({"message": _STRING, "type": _STRING, "param": nullable(_STRING), "code": nullable(_STRING)})}
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
        {"id": _STRING, "object": {"const": "model"}, "created": _INT, "owned_by": _STRING, "root": _STRING},
        {"max_model_len": _INT},
    ),
    "ModelList": obj({"object": {"const": "list"}, "data": array(ref("Model"))}),
    "Embeddings": obj(
        {
            "object": {"const": "list"},
            "data": array(
                obj(
                    {"object": {"const": "embedding"}, "index": _INT, "embedding": {"anyOf": [array(_NUMBER), _STRING]}}
                )
            ),
            "model": _STRING,
            "usage": obj({"prompt_tokens": _INT, "total_tokens": _INT}),
        }
    ),
    "Response": obj(
        {
            "id": _STRING,
            "object": {"const": "response"},
            "created_at": _INT,
            "status": {"enum": ["completed", "incomplete", "in_progress", "failed"]},
            "error": nullable(obj({"code": _STRING, "message": _STRING})),
            "incomplete_details": nullable(obj({"reason": _STRING})),
            "instructions": nullable(_STRING),
            "max_output_tokens": nullable(_INT),
            "metadata": {"type": "object", "additionalProperties": _STRING},
            "model": _STRING,
            "output": array(_OUTPUT_ITEM),
            "parallel_tool_calls": _BOOL,
            "previous_response_id": nullable(_STRING),
            "store": _BOOL,
            "temperature": _NUMBER,
            "text": {"type": "object"},
            "tool_choice": {},
            "tools": array({"type": "object"}),
            "top_p": _NUMBER,
        },
        {
            "usage": obj(
                {
                    "input_tokens": _INT,
                    "input_tokens_details": obj({"cached_tokens": _INT}),
                    "output_tokens": _INT,
                    "output_tokens_details": obj({"reasoning_tokens": _INT}),
                    "total_tokens": _INT,
                }
            )
        },
    ),
    "ResponseEvent": obj({"type": _STRING, "sequence_number": _INT}),
    "ResponseDeleted": obj({"id": _STRING, "object": {"const": "response"}, "deleted": {"const": True}}),
    "ResponseItems": obj(
        {
            "object": {"const": "list"},
            "data": array({"type": "object"}),
            "first_id": nullable(_STRING),
            "last_id": nullable(_STRING),
            "has_more": _BOOL,
        }
    ),
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
    "DashboardState": {"type": "object"},
    "DashboardRequests": obj({"cursor": _NUMBER, "requests": array(ref("DashboardRequest"))}),
    "DashboardRequest": {"type": "object"},
}
