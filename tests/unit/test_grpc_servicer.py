"""The public gRPC API refuses a call before its costly work: without an API key, and with too many JSON parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import InvalidApiKey, InvalidRequest, RequestTooLarge
from common.pb import inference_pb2 as pb
from gateway.admission.api_keys import KeySet
from gateway.api.grpc.servicer import InferenceServicer
from gateway.serving.request import MAX_JSON_PARTS

TOO_MANY = '{"a":[' + "0," * MAX_JSON_PARTS + "0]}"


def servicer() -> InferenceServicer:
    gateway: Any = SimpleNamespace(keys=SimpleNamespace(current=KeySet(plain=["secret"])))
    gateway.max_json_parts = lambda: MAX_JSON_PARTS
    return InferenceServicer(gateway)


def context(*metadata: tuple[str, str]) -> Any:
    return SimpleNamespace(
        invocation_metadata=lambda: metadata, peer=lambda: "ipv4:1.2.3.4:5", time_remaining=lambda: 10.0
    )


KEYED = context(("authorization", "Bearer secret"))


def tools(*parameters: str) -> pb.TokenizeRequest:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")])
    return pb.TokenizeRequest(chat=chat, tools=[pb.Function(name="f", parameters=text) for text in parameters])


async def test_the_key_is_checked_before_the_request() -> None:
    for request in (tools("["), tools(TOO_MANY)):
        with pytest.raises(InvalidApiKey):
            await servicer().Tokenize(request, context())
    with pytest.raises(InvalidApiKey):
        await servicer().Detokenize(pb.DetokenizeRequest(ids=range(MAX_JSON_PARTS + 1)), context())
    with pytest.raises(InvalidRequest, match="must be the text of a JSON object"):
        await servicer().Tokenize(tools("["), KEYED)


async def test_json_texts_count_for_the_parts_of_a_request() -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")])
    many = ['{"a":[' + "0," * (MAX_JSON_PARTS // 8) + "0]}"] * 8
    for request, field in (
        (tools(TOO_MANY), "parameters"),
        (tools(*many), "parameters"),
        (pb.TokenizeRequest(chat=chat, chat_template_kwargs=TOO_MANY), "chat_template_kwargs"),
    ):
        with pytest.raises(RequestTooLarge) as error:
            await servicer().Tokenize(request, KEYED)
        assert error.value.field == field


async def test_json_texts_within_the_bound_are_parsed() -> None:
    half = '{"a":[' + "0," * (MAX_JSON_PARTS // 2) + "0]}"
    with pytest.raises(InvalidRequest, match=r"tools\[1\].parameters must be the text of a JSON object"):
        await servicer().Tokenize(tools(half, "["), KEYED)
