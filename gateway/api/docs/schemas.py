"""JSON Schemas of the answers, by their names in /openapi.json."""

from __future__ import annotations

from gateway.api.http.json import Json

_STRING: Json = {"type": "string"}
_INT: Json = {"type": "integer", "minimum": 0}
_NUMBER: Json = {"type": "number"}
_BOOL: Json = {"type": "boolean"}
_OBJECT: Json = {"type": "object"}
_FINISH: Json = {"enum": ["stop", "length", "tool_calls", "function_call", "content_filter", None]}


def ref(name: str) -> Json:
    """Returns a reference to one of SCHEMAS."""
    return {"$ref": f"#/components/schemas/{name}"}


def _object(optional: Json | None = None, /, **required: Json) -> Json:
    """Returns the schema of an object with these members; later versions may add members."""
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def _array(items: Json) -> Json:
    return {"type": "array", "items": items}


def _nullable(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _const(value: str | bool) -> Json:
    return {"const": value}


def _choices(optional: Json | None = None, /, **required: Json) -> Json:
    """Returns the schema of `choices`. `required` and `optional` are the members of a choice beside its index."""
    return _array(_object(optional, index=_INT, **required))


_TOKEN_LOGPROB = _object(token=_STRING, logprob=_NUMBER, bytes=_nullable(_array(_INT)))
_TOKEN_LOGPROBS = {**_TOKEN_LOGPROB["properties"], "top_logprobs": _array(_TOKEN_LOGPROB)}
_CHAT_LOGPROBS = _nullable(_object(content=_nullable(_array({**_TOKEN_LOGPROB, "properties": _TOKEN_LOGPROBS}))))
_COMPLETION_LOGPROBS = _nullable(
    _object(
        tokens=_array(_STRING),
        token_logprobs=_array(_nullable(_NUMBER)),
        top_logprobs=_nullable(_array(_nullable({"type": "object", "additionalProperties": _NUMBER}))),
        text_offset=_array(_INT),
    )
)
_TOOL_CALL = _object(id=_STRING, type=_const("function"), function=_object(name=_STRING, arguments=_STRING))
_CALL_DELTA: Json = {"id": _STRING, "type": _STRING, "function": _object({"name": _STRING, "arguments": _STRING})}
_MESSAGE = _object(
    {"reasoning_content": _nullable(_STRING), "tool_calls": _array(_TOOL_CALL)},
    role=_const("assistant"),
    content=_nullable(_STRING),
    refusal={"type": "null"},
)
_DELTA: Json = {
    "role": _const("assistant"),
    "content": _nullable(_STRING),
    "reasoning_content": _nullable(_STRING),
    "tool_calls": _array(_object(_CALL_DELTA, index=_INT)),
}
_HEAD: Json = {"id": _STRING, "created": _INT, "model": _STRING}
_USAGE: Json = {"usage": _nullable(ref("Usage"))}
_TEXT_PART = _object(type=_const("output_text"), text=_STRING, annotations=_array({}))
_OUTPUT_ITEM: Json = {
    "anyOf": [
        _object(
            id=_STRING, type=_const("message"), role=_const("assistant"), status=_STRING, content=_array(_TEXT_PART)
        ),
        _object(id=_STRING, type=_const("reasoning"), content=_array(_OBJECT)),
        _object(id=_STRING, type=_const("function_call"), call_id=_STRING, name=_STRING, arguments=_STRING),
    ]
}
_CONTENT_BLOCK: Json = {
    "anyOf": [
        _object(type=_const("text"), text=_STRING),
        _object(type=_const("thinking"), thinking=_STRING, signature=_STRING),
        _object(type=_const("tool_use"), id=_STRING, name=_STRING, input=_OBJECT),
    ]
}
_RESPONSE_USAGE = _object(
    input_tokens=_INT,
    input_tokens_details=_object(cached_tokens=_INT),
    output_tokens=_INT,
    output_tokens_details=_object(reasoning_tokens=_INT),
    total_tokens=_INT,
)

SCHEMAS: Json = {
    "Error": _object(error=_object(message=_STRING, type=_STRING, param=_nullable(_STRING), code=_nullable(_STRING))),
    "Usage": _object(
        {"prompt_tokens_details": _object(cached_tokens=_INT), "completion_tokens_details": _nullable(_OBJECT)},
        prompt_tokens=_INT,
        completion_tokens=_INT,
        total_tokens=_INT,
    ),
    "ChatCompletion": _object(
        **_HEAD,
        object=_const("chat.completion"),
        choices=_choices(message=_MESSAGE, logprobs=_CHAT_LOGPROBS, finish_reason=_FINISH),
        usage=ref("Usage"),
    ),
    "ChatCompletionChunk": _object(
        _USAGE,
        **_HEAD,
        object=_const("chat.completion.chunk"),
        choices=_choices({"logprobs": _CHAT_LOGPROBS}, delta=_object(_DELTA), finish_reason=_FINISH),
    ),
    "Completion": _object(
        _USAGE,
        **_HEAD,
        object=_const("text_completion"),
        choices=_choices(text=_STRING, logprobs=_COMPLETION_LOGPROBS, finish_reason=_FINISH),
    ),
    "Model": _object(
        {
            "max_model_len": _INT,
            "quantization": _STRING,
            "generation_defaults": {"type": "object"},
            "parent": _STRING,
            "digest": _STRING,
            "rank": _INT,
        },
        id=_STRING,
        object=_const("model"),
        created=_INT,
        owned_by=_STRING,
        root=_STRING,
    ),
    "ModelList": _object(object=_const("list"), data=_array(ref("Model"))),
    "Adapter": _object(
        {"deleted": _BOOL},
        id=_STRING,
        object=_const("adapter"),
        parent=_STRING,
        root=_STRING,
        digest=_STRING,
        rank=_INT,
    ),
    "Embeddings": _object(
        object=_const("list"),
        data=_array(_object(object=_const("embedding"), index=_INT, embedding={"anyOf": [_array(_NUMBER), _STRING]})),
        model=_STRING,
        usage=_object(prompt_tokens=_INT, total_tokens=_INT),
    ),
    "Response": _object(
        {"usage": _RESPONSE_USAGE},
        id=_STRING,
        object=_const("response"),
        created_at=_INT,
        status={"enum": ["completed", "incomplete", "in_progress", "failed"]},
        error=_nullable(_object(code=_STRING, message=_STRING)),
        incomplete_details=_nullable(_object(reason=_STRING)),
        instructions=_nullable(_STRING),
        max_output_tokens=_nullable(_INT),
        metadata={"type": "object", "additionalProperties": _STRING},
        model=_STRING,
        output=_array(_OUTPUT_ITEM),
        parallel_tool_calls=_BOOL,
        previous_response_id=_nullable(_STRING),
        store=_BOOL,
        temperature=_NUMBER,
        text=_OBJECT,
        tool_choice={},
        tools=_array(_OBJECT),
        top_p=_NUMBER,
    ),
    "ResponseEvent": _object(type=_STRING, sequence_number=_INT),
    "ResponseDeleted": _object(id=_STRING, object=_const("response"), deleted=_const(True)),
    "ResponseItems": _object(
        object=_const("list"),
        data=_array(_OBJECT),
        first_id=_nullable(_STRING),
        last_id=_nullable(_STRING),
        has_more=_BOOL,
    ),
    "Message": _object(
        id=_STRING,
        type=_const("message"),
        role=_const("assistant"),
        model=_STRING,
        content=_array(_CONTENT_BLOCK),
        stop_reason={
            "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded", None]
        },
        stop_sequence=_nullable(_STRING),
        usage=ref("MessageUsage"),
    ),
    "MessageUsage": _object(
        input_tokens=_INT, cache_creation_input_tokens=_INT, cache_read_input_tokens=_INT, output_tokens=_INT
    ),
    "MessageEvent": _object(type=_STRING),
    "MessageError": _object(type=_const("error"), error=_object(type=_STRING, message=_STRING), request_id=_STRING),
    "TokenCount": _object(input_tokens=_INT),
    "Reranked": _object(
        id=_STRING,
        object=_const("list"),
        model=_STRING,
        results=_array(_object({"document": _object(text=_STRING)}, index=_INT, relevance_score=_NUMBER)),
        usage=_object(prompt_tokens=_INT, total_tokens=_INT),
    ),
    "Scores": _object(
        id=_STRING,
        object=_const("list"),
        created=_INT,
        model=_STRING,
        data=_array(_object(index=_INT, object=_const("score"), score=_NUMBER)),
        usage=_object(prompt_tokens=_INT, total_tokens=_INT),
    ),
    "TokenizerInfo": _object(tokenizer_class=_STRING, chat_template=_nullable(_STRING)),
    "Tokenized": _object(
        count=_INT, max_model_len=_nullable(_INT), tokens=_array(_INT), token_strs=_nullable(_array(_nullable(_STRING)))
    ),
    "Detokenized": _object(prompt=_STRING),
    "PrefixCacheReset": _object(
        object=_const("prefix_cache.reset"),
        cleared=_INT,
        kept=_INT,
        pods=_array(_object(pod=_STRING, cleared=_INT, kept=_INT, indexed=_BOOL)),
    ),
    "Status": _object(status=_STRING),
    "Version": _object(version=_STRING),
    "Timeline": _OBJECT,
    "DashboardState": _OBJECT,
    "DashboardRequests": _object(cursor=_NUMBER, requests=_array(ref("DashboardRequest"))),
    "DashboardRequest": _OBJECT,
}
