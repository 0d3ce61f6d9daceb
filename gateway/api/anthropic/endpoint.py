"""POST /v1/messages and /v1/messages/count_tokens, and the list of models in Anthropic's form."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from common.types import FinishReason
from gateway.api.anthropic.requests import parse_count, parse_message
from gateway.api.anthropic.writer import PING, MessageWriter
from gateway.api.blocks import stream_blocks, write_blocks
from gateway.api.http.endpoint import HttpResponse
from gateway.api.http.json import Json
from gateway.serving.choice import Choice
from gateway.serving.gateway import Gateway
from gateway.serving.request import RequestContext


class MessagesHandler:
    """Answers both routes for one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, body: Any, response: HttpResponse, context: RequestContext) -> None:
        """Answers one /v1/messages body; a RequestHandler."""
        request_id = response.request_id or context.id
        response.headers["request-id"] = request_id
        chat = parse_message(body)
        [choice] = await self._gateway.chat(context, chat)
        writer = MessageWriter(f"msg_{context.answer_id}", chat.spec.model, request_id)
        events = b""
        if chat.spec.stream:
            response.error_event, response.ping_event = writer.fail, PING
            finish, events = await stream_blocks(choice, writer, response, writer.start(choice.usage))
        else:
            answer = await choice.collect()
            finish = answer.finish
            write_blocks(writer, answer)
        message, last_events = writer.end(_stop_reason(choice, finish), choice.stop_string, choice.usage)
        if chat.spec.stream:
            await response.send_event(events + last_events)
            await response.end()
        else:
            await response.send_json(200, message)
        context.record_usage(choice.usage)

    async def count(self, body: Any, response: HttpResponse, context: RequestContext) -> None:
        """Answers one /v1/messages/count_tokens body; a RequestHandler. Needs no pods."""
        response.headers["request-id"] = response.request_id or context.id
        chat = parse_count(body)
        model = self._gateway.model_for(context.caller, chat.spec.model)
        tools = chat.tools.template_tools if chat.tools is not None else ()
        prompt = await model.chat_format.render(chat.messages, chat.template_kwargs, tools)
        if chat.answer_start:
            prompt = model.chat_format.begun(prompt, chat.answer_start)
        async with model.tokenizer.turn(prompt.text):
            ids = await model.tokenizer.encode_chat(prompt)
        context.timeline.mark("tokenized", prompt_tokens=len(ids))
        await response.send_json(200, {"input_tokens": len(ids)})


def _stop_reason(choice: Choice, finish: FinishReason) -> str:
    if finish is FinishReason.LENGTH:
        cut = choice.request.sampling.max_tokens < (choice.spec.max_tokens or 0)
        return "model_context_window_exceeded" if cut else "max_tokens"
    if finish is FinishReason.TOOL_CALLS:
        return "tool_use"
    return "end_turn" if choice.stop_string is None else "stop_sequence"


def model_list(models: list[Json]) -> Json:
    """Returns /v1/models in the form that the `anthropic` SDK reads. `models` have OpenAI's form."""
    data = [model_card(model) for model in models]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"data": data, "has_more": False, **ends}


def model_card(model: Json) -> Json:
    """Returns a model in Anthropic's form."""
    created = datetime.fromtimestamp(model["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": model["id"], "display_name": model["id"], "created_at": created}
