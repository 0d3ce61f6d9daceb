"""/v1/chat/completions and /v1/completions: one JSON answer, or server-sent events.

The routes are raw ASGI, because a response object per token would cost more than the token. While a client keeps up,
its events are written in the event loop turn in which the pod's message arrives, without waking a task per token.
Chunks are merged only when the client reads too slowly. A stream that fails ends without [DONE].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import aclosing, closing
from typing import Any

import orjson

from gateway.api.http.endpoint import HttpResponse, sse_event
from gateway.api.http.json_fields import Json
from gateway.api.openai.encoders import AnswerEncoder, ChatEncoder, CompletionEncoder, usage_json
from gateway.api.openai.requests import parse_chat, parse_completion
from gateway.serving.answers import complete_answers, merge_choices, total_usage
from gateway.serving.choice import Choice
from gateway.serving.gateway import Gateway
from gateway.serving.request import GenerationSpec
from gateway.serving.request_context import RequestContext
from gateway.text.output import OutputPiece

_DONE = b"data: [DONE]\n\n"
#: Stands for the text in an event that is encoded once. No other value of the event begins with NUL.
_TEXT_PLACEHOLDER = "\0text"


class GenerateHandler:
    """Answers bodies of /v1/chat/completions, or of /v1/completions."""

    def __init__(self, gateway: Gateway, *, chat: bool) -> None:
        self._gateway = gateway
        self._chat = chat

    async def serve(self, body: Any, response: HttpResponse, context: RequestContext) -> None:
        """Answers one body; a RequestHandler."""
        gateway = self._gateway
        spec: GenerationSpec
        make: Callable[..., AnswerEncoder] = CompletionEncoder
        if self._chat:
            chat = parse_chat(body)
            spec, choices = chat.spec, await gateway.chat(context, chat)
            make = functools.partial(ChatEncoder, legacy=chat.tools is not None and chat.tools.legacy)
        else:
            completion = parse_completion(body)
            spec, choices = completion.spec, await gateway.completion(context, completion)
        encoder = make(context.id, spec.model, choices[0].model.tokenizer, logprobs=spec.logprobs is not None)
        if spec.stream:
            await _stream(choices, spec, encoder, response)
        else:
            answers = await complete_answers(choices, spec)
            await response.send_json(200, encoder.encode_answer(answers, total_usage(choices)))
        context.timeline.set_facts(
            prompt_tokens=total_usage(choices).prompt,
            output_tokens=total_usage(choices).completion,
            cached_tokens=total_usage(choices).cached,
        )


class _SseEncoder:
    """Encodes the pieces of one choice as server-sent events.

    Most pieces are only text, and their events differ only in it. That event is encoded once: `_plain` holds the
    bytes before and after the text. It is None while events differ in more (log-probabilities, running usage, parsed
    text).
    """

    def __init__(self, choice: Choice, index: int, spec: GenerationSpec, encoder: AnswerEncoder) -> None:
        self._choice = choice
        self._index = index
        self._spec = spec
        self._encoder = encoder
        self._opened = False
        self._plain: tuple[bytes, bytes] | None = None

    def encode(self, piece: OutputPiece) -> bytes:
        """Returns the events of one piece, b"" if it shows nothing."""
        if self._plain is not None and piece.finish is None:
            return self.encode_text(piece.text)
        chunks = self._encoder.encode_piece(self._index, piece)
        if not self._opened:
            self._opened = True
            if (opening := self._encoder.first_chunk(self._index)) is not None:
                chunks.insert(0, opening)
            plain = self._choice.parser_config is None and self._spec.logprobs is None
            if plain and not self._spec.continuous_usage:
                self._plain = self._around_text()
        return b"".join([self._event(chunk) for chunk in chunks])

    @property
    def text_only(self) -> bool:
        """`encode_text` may be used."""
        return self._plain is not None

    def encode_text(self, text: str) -> bytes:
        """Returns the events of a piece that is only text."""
        assert self._plain is not None
        before, after = self._plain
        return before + orjson.dumps(text) + after if text else b""

    def _around_text(self) -> tuple[bytes, bytes]:
        """Returns the bytes of a text-only event before and after its text."""
        [chunk] = self._encoder.encode_piece(self._index, OutputPiece(_TEXT_PLACEHOLDER, (), ()))
        before, after = self._event(chunk).split(orjson.dumps(_TEXT_PLACEHOLDER))
        return before, after

    def _event(self, chunk: Json) -> bytes:
        if self._spec.continuous_usage:
            chunk["usage"] = usage_json(self._choice.usage)
        elif self._spec.include_usage:
            chunk["usage"] = None
        return sse_event(chunk)


async def _stream(
    choices: Sequence[Choice], spec: GenerationSpec, encoder: AnswerEncoder, response: HttpResponse
) -> None:
    """Sends the pieces of all choices as events, then the usage, if requested, and [DONE]."""
    events = [_SseEncoder(choice, index, spec, encoder) for index, choice in enumerate(choices)]
    if len(choices) == 1:
        with closing(choices[0]) as choice:
            async for piece in choice:
                if raw := events[0].encode(piece):
                    await response.send_event(raw)
                if (write := response.fast_write) is not None:
                    await choice.relay(*_relay_callbacks(write, events[0]))
    else:
        async with aclosing(merge_choices(choices)) as pieces:
            async for index, piece in pieces:
                if raw := events[index].encode(piece):
                    await response.send_event(raw)
    tail = b""
    if spec.include_usage:
        tail = sse_event({**encoder.usage_chunk(), "usage": usage_json(total_usage(choices))})
    await response.send_event(tail + _DONE)
    await response.end()


def _relay_callbacks(
    write: Callable[[bytes], bool], events: _SseEncoder
) -> tuple[Callable[[OutputPiece], bool], Callable[[str], bool] | None]:
    """Returns the arguments of Choice.relay."""
    encode, encode_text = events.encode, events.encode_text
    return lambda piece: write(encode(piece)), (lambda text: write(encode_text(text))) if events.text_only else None
