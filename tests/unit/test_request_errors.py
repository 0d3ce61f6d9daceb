"""Errors of request bodies name the field as the client wrote it, and say what the value must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.errors import InvalidRequest
from gateway.api.openai.requests import parse_chat, parse_completion
from gateway.api.openai.responses.request import parse_response

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "m", "prompt": "Hi"}
RESPONSE = {"model": "m", "input": "Hi"}


def error_of(parse: Callable[[object], object], body: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        parse(body)
    return error.value


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"model": None}, "model", "model is missing"),
        ({"temperature": 3}, "temperature", "temperature must be at least 0 and at most 2, not 3"),
        ({"top_p": -1}, "top_p", "top_p must be at least 0 and at most 1, not -1"),
        ({"temperature": True}, "temperature", "temperature must be a number, not boolean"),
        ({"n": "1"}, "n", "n must be an integer, not string"),
        ({"n": 1.5}, "n", "n must be an integer, not number"),
        ({"stop": 5}, "stop", "stop must be a string or an array, not integer"),
        ({"stop": ["x", 5]}, "stop", "an entry of stop must be a string, not integer"),
        ({"stop": ["x"] * 17}, "stop", "stop may have at most 16 entries"),
        ({"cache_salt": "x" * 257}, "cache_salt", "cache_salt must have at most 256 characters"),
        ({"early_stopping": "x"}, "early_stopping", 'early_stopping must be true, false or "never"'),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "an entry of stop_token_ids must be at least 0, not -1"),
        ({"lora_path": "x"}, "lora_path", "lora_path is not supported"),
    ],
)
def test_a_field_of_all_generating_requests(fields: dict[str, Any], field: str, message: str) -> None:
    for parse, body in ((parse_chat, CHAT), (parse_completion, COMPLETION)):
        error = error_of(parse, {**body, **fields})
        assert (error.field, error.message) == (field, message)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"messages": ["x"]}, "messages[0]", "messages[0] must be an object, not string"),
        ({"messages": [None]}, "messages[0]", "messages[0] must be an object, not null"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "messages[0].content is missing"),
        ({"messages": [{"role": None, "content": "x"}]}, "messages[0].role", "messages[0].role is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "messages[0].content[0].type 'image_url' is not supported, only text and refusal",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "messages[0].tool_calls[0].function.arguments must be a string or an object, not integer",
        ),
        (
            {"tool_choice": 5},
            "tool_choice",
            "tool_choice must be none, auto, required, or an object with the type function or allowed_tools",
        ),
        (
            {"chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs.tools",
            "chat_template_kwargs.tools is not supported",
        ),
    ],
)
def test_a_part_of_a_chat(fields: dict[str, Any], field: str, message: str) -> None:
    error = error_of(parse_chat, {**CHAT, **fields})
    assert (error.field, error.message) == (field, message)


def test_an_unknown_item_of_a_response() -> None:
    error = error_of(parse_response, {**RESPONSE, "input": [{"role": "user", "content": "x"}, {"type": "file"}]})
    kinds = "message, function_call, function_call_output, reasoning"
    assert (error.field, error.message) == ("input[1].type", f"input[1].type 'file' is not supported, only {kinds}")
    assert error_of(parse_response, {**RESPONSE, "input": [5]}).message == "input[0] must be an object, not integer"


def test_a_field_that_is_not_served_is_named_before_other_mistakes() -> None:
    assert error_of(parse_chat, {"model": 5, "messages": [], "audio": {}}).field == "audio"


@pytest.mark.parametrize("body", [[], "x", 5, None])
def test_a_body_that_is_no_object(body: object) -> None:
    error = error_of(parse_chat, body)
    assert error.field is None
    assert error.message.startswith("the request body must be a JSON object, not ")


def test_whole_numbers_may_be_written_as_floats_and_null_is_absent() -> None:
    given = parse_completion({**COMPLETION, "n": 2.0, "max_tokens": 5.0, "seed": None, "temperature": 1, "zzz": 1})
    assert given == parse_completion({**COMPLETION, "n": 2, "max_tokens": 5, "temperature": 1.0})


def test_a_long_array_of_wrong_entries_stops_at_the_first() -> None:
    error = error_of(parse_completion, {**COMPLETION, "prompt": [[]] * 100_000})
    assert (error.field, error.message) == ("prompt", "an entry of prompt is empty")


def test_messages_and_tools_keep_the_order_of_their_members() -> None:
    tool = {"function": {"parameters": {}, "name": "f"}, "type": "function"}
    chat = parse_chat({**CHAT, "messages": [{"name": "x", "content": "Hi", "role": "user"}], "tools": [tool]})
    assert list(chat.messages[0]) == ["name", "content", "role"]
    assert chat.tools is not None
    assert list(chat.tools.template_tools[0]) == ["function", "type"]
    assert list(chat.tools.template_tools[0]["function"]) == ["parameters", "name"]
