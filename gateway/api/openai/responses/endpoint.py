"""The routes under /v1/responses: create (whole or as a stream), read, list the input items, delete."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from common.errors import ContextOverflow, InvalidRequest, ObjectNotFound, Unavailable
from gateway.api.blocks import stream_blocks, write_blocks
from gateway.api.http.endpoint import DONE, HttpResponse, caller_of
from gateway.api.http.json import Json
from gateway.api.openai.generate import token_logprobs
from gateway.api.openai.responses.request import ResponseBody, ResponseItem, parse_response
from gateway.api.openai.responses.store import ResponseStore, StoredResponse
from gateway.api.openai.responses.writer import ResponseWriter
from gateway.serving.gateway import Gateway
from gateway.serving.request import RequestContext
from gateway.text.output import ReportedToken

MAX_LISTED = 100
_log = logging.getLogger(__name__)


class ResponsesHandler:
    """Answers the routes of one gateway."""

    def __init__(self, gateway: Gateway, store: ResponseStore | None) -> None:
        self._gateway = gateway
        self._store = store  #: None stores nothing, and rejects requests that need a stored response.

    async def create(self, body: Any, response: HttpResponse, context: RequestContext) -> None:
        """Answers one POST body; a RequestHandler."""
        parsed = parse_response(body)
        previous_items = await self._previous_items(context.caller.tenant, parsed.previous_response_id)
        chat = parsed.chat(previous_items)
        try:
            [choice] = await self._gateway.chat(context, chat)
        except InvalidRequest as e:
            text = e.message.replace("messages", "input") if isinstance(e, ContextOverflow) else e.message
            raise type(e)(text, field="input" if e.field == "messages" else e.field) from e
        response_id, ids = f"resp_{context.answer_id}", context.id_source()
        writer = ResponseWriter(response_id, parsed.echoed_fields, created=context.created, id_source=ids)
        stores = parsed.store and self._store is not None
        start = writer.start(store=stores)

        def logprobs(reported: Sequence[ReportedToken]) -> list[Json]:
            return token_logprobs(choice.model.tokenizer, reported)

        if chat.spec.stream:
            response.error_event = lambda error: writer.fail(error) + DONE
            finish, events = await stream_blocks(choice, writer, response, start, logprobs)
        else:
            answer = await choice.collect()
            finish, events = answer.finish, b""
            write_blocks(writer, answer, logprobs)
        whole, closing_events = writer.end(finish, choice.usage)
        if stores:
            whole["store"] = await self._save(context.caller.tenant, parsed, previous_items, whole)
        if chat.spec.stream:
            await response.send_event(events + closing_events + writer.final_event(whole))
            await response.end()
        else:
            await response.send_json(200, whole)
        context.record_usage(choice.usage)

    async def _previous_items(self, tenant: str, response_id: str | None) -> list[ResponseItem]:
        """Returns the conversation up to a previous response. Raises ObjectNotFound, Unavailable."""
        if response_id is None:
            return []
        if self._store is None:
            text = "no response is stored (no Redis); send all of the input instead of previous_response_id"
            raise ObjectNotFound(text, field="previous_response_id")
        stored = await self._store.find(tenant, response_id)
        if stored is None:
            text = f"previous_response_id {response_id[:80]!r} is not stored or has expired"
            raise ObjectNotFound(text, field="previous_response_id")
        return stored.conversation

    async def _save(self, tenant: str, parsed: ResponseBody, previous_items: list[ResponseItem], whole: Json) -> bool:
        """Stores a response and returns whether it was stored. The client gets its answer even if Redis is down."""
        assert self._store is not None
        conversation = [*previous_items, *parsed.input, *whole["output"]]
        try:
            return await self._store.save(tenant, StoredResponse(whole, list(parsed.input), conversation))
        except Unavailable as e:
            _log.warning("a response was not stored: %s", e)
            return False

    async def read(self, request: Request) -> Json:
        """Answers GET /v1/responses/{response_id}. Raises BatonError."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise InvalidRequest("a stored response cannot be streamed", field="stream")
        return (await self._find(request)).response

    async def delete(self, request: Request) -> Json:
        """Answers DELETE /v1/responses/{response_id}. Raises BatonError."""
        response_id, tenant = request.path_params["response_id"], caller_of(request.scope).tenant
        if self._store is None or not await self._store.delete(tenant, response_id):
            raise _missing(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def input_items(self, request: Request) -> Json:
        """Answers GET /v1/responses/{response_id}/input_items. Raises BatonError."""
        order, after = request.query_params.get("order", "desc"), request.query_params.get("after")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order must be asc or desc", field="order")
        limit = request.query_params.get("limit", "20")
        if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LISTED):
            raise InvalidRequest(f"limit must be between 1 and {MAX_LISTED}", field="limit")
        items = (await self._find(request)).input
        if order == "desc":
            items = items[::-1]
        if after is not None:
            place = next((i for i, item in enumerate(items) if item["id"] == after), None)
            if place is None:
                raise InvalidRequest("after names no item of this response's input", field="after")
            items = items[place + 1 :]
        page = items[: int(limit)]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return {"object": "list", "data": page, **ends, "has_more": len(items) > len(page)}

    async def _find(self, request: Request) -> StoredResponse:
        response_id, tenant = request.path_params["response_id"], caller_of(request.scope).tenant
        stored = None if self._store is None else await self._store.find(tenant, response_id)
        if stored is None:
            raise _missing(response_id)
        return stored


def _missing(response_id: str) -> ObjectNotFound:
    return ObjectNotFound(f"response {response_id[:80]!r} is not stored or has expired", field="response_id")
