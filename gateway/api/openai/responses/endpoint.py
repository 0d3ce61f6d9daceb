"""The routes under /v1/responses: create (whole or as a stream), read, list what went in, delete."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from starlette.requests import Request

from common.errors import InvalidRequest, ObjectNotFound, Unavailable
from common.types import FinishReason
from gateway.api.http.auth import caller_of
from gateway.api.http.endpoint import HttpResponse
from gateway.api.http.json_fields import Json
from gateway.api.openai.encoders import token_logprobs
from gateway.api.openai.responses.items import ResponseItem
from gateway.api.openai.responses.request import ResponseBody, parse_response, rename_fields
from gateway.api.openai.responses.store import ResponseStore, StoredResponse
from gateway.api.openai.responses.writer import ResponseWriter
from gateway.serving.choice import Choice, CompleteAnswer
from gateway.serving.gateway import Gateway
from gateway.serving.request_context import RequestContext
from gateway.text.output import OutputPiece, ReportedToken
from gateway.text.tools.format import ContentDelta, InvalidToolCall, ReasoningDelta, ToolCallDelta

MAX_LISTED = 100

_log = logging.getLogger(__name__)


class ResponsesHandler:
    """store None: nothing is kept, and whatever needs that is refused."""

    def __init__(self, gateway: Gateway, store: ResponseStore | None) -> None:
        self._gateway = gateway
        self._store = store

    async def create(self, body: Any, response: HttpResponse, context: RequestContext) -> None:
        """See http_endpoint.Endpoint."""
        asked = parse_response(body)
        before = await self._previous_items(context.caller.tenant, asked.previous_response_id)
        chat = asked.chat_body if not before else asked.chat_body_after(before)
        try:
            [choice] = await self._gateway.chat(context, chat)
        except InvalidRequest as e:
            raise rename_fields(e) from e
        writer = ResponseWriter(f"resp_{context.id}", asked.echoed_fields)
        keep = asked.store and self._store is not None
        start = writer.start(store=keep)
        if chat.spec.stream:
            response.error_event = writer.fail
            finish, events = await _stream(choice, writer, response, start)
        else:
            answer = await choice.collect()
            finish, events = answer.finish, b""
            _write_answer(writer, choice, answer)
        whole, closing_events = writer.end(finish, choice.usage)
        if keep:
            whole["store"] = await self._keep(context.caller.tenant, asked, before, whole)
        if chat.spec.stream:
            await response.send_event(events + closing_events + writer.final_event(whole))
            await response.end()
        else:
            await response.send_json(200, whole)
        usage = choice.usage
        context.timeline.set_facts(
            prompt_tokens=usage.prompt, output_tokens=usage.completion, cached_tokens=usage.cached
        )

    async def _previous_items(self, tenant: str, response_id: str | None) -> list[ResponseItem]:
        """The conversation up to a previous response. Raises ObjectNotFound, Unavailable."""
        if response_id is None:
            return []
        if self._store is None:
            text = (
                "responses are not kept here (no Redis), so previous_response_id cannot be found; send all of the input"
            )
            raise ObjectNotFound(text, field="previous_response_id")
        kept = await self._store.find(tenant, response_id)
        if kept is None:
            text = f"previous_response_id {response_id[:80]!r} is not kept here (any more)"
            raise ObjectNotFound(text, field="previous_response_id")
        return kept.conversation

    async def _keep(self, tenant: str, asked: ResponseBody, before: list[ResponseItem], whole: Json) -> bool:
        """Whether it was kept; a client that asks for an answer gets it whether Redis is there or not."""
        assert self._store is not None
        conversation = [*before, *asked.input, *whole["output"]]
        try:
            return await self._store.save(tenant, StoredResponse(whole, list(asked.input), conversation))
        except Unavailable as e:
            _log.warning("a response is not kept: %s", e)
            return False

    async def read(self, request: Request) -> Json:
        """GET /v1/responses/{response_id}. Raises BatonError."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise InvalidRequest("a kept response cannot be streamed", field="stream")
        return (await self._find(request)).response

    async def delete(self, request: Request) -> Json:
        """DELETE /v1/responses/{response_id}. Raises BatonError."""
        response_id, tenant = request.path_params["response_id"], caller_of(request.scope).tenant
        if self._store is None or not await self._store.delete(tenant, response_id):
            raise _missing(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def input_items(self, request: Request) -> Json:
        """GET /v1/responses/{response_id}/input_items. Raises BatonError."""
        order, after = request.query_params.get("order", "desc"), request.query_params.get("after")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order must be asc or desc", field="order")
        limit = _limit(request.query_params.get("limit", "20"))
        items = (await self._find(request)).input
        if order == "desc":
            items = items[::-1]
        if after is not None:
            places = [i for i, item in enumerate(items) if item["id"] == after]
            if not places:
                raise InvalidRequest("after names no item of this response's input", field="after")
            items = items[places[0] + 1 :]
        page = items[:limit]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return {"object": "list", "data": page, **ends, "has_more": len(items) > limit}

    async def _find(self, request: Request) -> StoredResponse:
        response_id, tenant = request.path_params["response_id"], caller_of(request.scope).tenant
        kept = None if self._store is None else await self._store.find(tenant, response_id)
        if kept is None:
            raise _missing(response_id)
        return kept


def _missing(response_id: str) -> ObjectNotFound:
    return ObjectNotFound(f"no response {response_id[:80]!r} is kept here (any more)", field="response_id")


def _limit(value: str) -> int:
    if not (value.isascii() and value.isdecimal() and 1 <= int(value[:9]) <= MAX_LISTED):
        raise InvalidRequest(f"limit must be between 1 and {MAX_LISTED}", field="limit")
    return int(value)


async def _stream(
    choice: Choice, writer: ResponseWriter, response: HttpResponse, start: bytes
) -> tuple[FinishReason, bytes]:
    """Sends events as they come, `start` with the first ones, so that what fails before has a status of its own.

    Returns the finish reason and the events that are not sent yet.
    """
    last: list[OutputPiece] = []

    def onto(write: Callable[[bytes], bool]) -> tuple[Callable[[OutputPiece], bool], Callable[[str], bool]]:
        def take(piece: OutputPiece) -> bool:
            if piece.finish is not None:
                last.append(piece)
                return False
            return write(_written(writer, choice, piece))

        return take, lambda text: write(writer.text(text, []) if text else b"")

    with closing(choice):
        async for piece in choice:
            if piece.finish is not None:
                last.append(piece)
                break
            if events := start + _written(writer, choice, piece):
                await response.send_event(events)
            start = b""
            if (write := response.fast_write) is not None:
                await choice.relay(*onto(write))
    [piece] = last
    assert piece.finish is not None
    return piece.finish, start + _written(writer, choice, piece)


def _written(writer: ResponseWriter, choice: Choice, piece: OutputPiece) -> bytes:
    """The events for one piece. Log-probabilities go with content, those of other tokens are not shown."""
    logprobs = _logprobs(choice, piece.reported)
    if piece.deltas is None:
        return writer.text(piece.text, logprobs) if piece.text or logprobs else b""
    events = b""
    for delta in piece.deltas:
        match delta:
            case ContentDelta(text):
                events += writer.text(text, logprobs)
                logprobs = []
            case ReasoningDelta(text):
                events += writer.reasoning(text)
            case ToolCallDelta(arguments=arguments, id=call_id, name=name):
                events += writer.call(call_id, name, arguments)
            case InvalidToolCall(text=text):
                events += writer.invalid_call(text)
    return events


def _write_answer(writer: ResponseWriter, choice: Choice, answer: CompleteAnswer) -> None:
    """A complete answer's items."""
    logprobs, message = _logprobs(choice, answer.reported), answer.message
    if message is None:
        writer.text(answer.text, logprobs)
        return
    if message.reasoning is not None:
        writer.reasoning(message.reasoning)
    if message.content is not None:
        writer.text(message.content, logprobs)
    for call in message.tool_calls:
        writer.call(call.id, call.name, call.arguments)


def _logprobs(choice: Choice, shown: Sequence[ReportedToken]) -> list[Json]:
    return token_logprobs(choice.model.tokenizer, shown)
