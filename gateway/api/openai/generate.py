"""The two generating routes: what a body asks for, as one JSON answer or as server-sent events.

Raw, because a response object per token would cost more than the token. While a client keeps up, its events are
written in the turn of the event loop in which a pod's message came, one after the other for all of its sequences: no
task is woken for a token. Chunks are merged only when the client is behind; a stream that fails ends without [DONE].
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
_TEXT_PLACEHOLDER = "\0text"  # stands for the text in an event that is encoded once; nothing else in it begins with NUL


class GenerateHandler:
    """Answers bodies of /v1/chat/completions, or of /v1/completions."""

    def __init__(self, gateway: Gateway, *, chat: bool) -> None:
        self._gateway = gateway
        self._chat = chat

    async def serve(self, body: Any, response: HttpResponse, context: RequestContext) -> None:
        """See http_endpoint.Endpoint."""
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
        form = make(context.id, spec.model, choices[0].model.tokenizer, logprobs=spec.logprobs is not None)
        if spec.stream:
            await _stream(choices, spec, form, response)
        else:
            answers = await complete_answers(choices, spec)
            await response.send_json(200, form.encode_answer(answers, total_usage(choices)))
        context.timeline.set_facts(
            prompt_tokens=total_usage(choices).prompt,
            output_tokens=total_usage(choices).completion,
            cached_tokens=total_usage(choices).cached,
        )


class _SseEncoder:
    """One choice's pieces as server-sent events.

    Most pieces are text and nothing else. Of their events only the text differs, so the rest is encoded once: `_plain`
    holds the bytes before and after it, None where more than the text differs (log-probabilities, a running usage,
    text that is more than content).
    """

    def __init__(self, choice: Choice, index: int, spec: GenerationSpec, form: AnswerEncoder) -> None:
        self._choice = choice
        self._index = index
        self._spec = spec
        self._form = form
        self._opened = False
        self._plain: tuple[bytes, bytes] | None = None

    def encode(self, piece: OutputPiece) -> bytes:
        """The events for one piece, b"" when it shows nothing."""
        if self._plain is not None and piece.finish is None:
            return self.encode_text(piece.text)
        chunks = self._form.encode_piece(self._index, piece)
        if not self._opened:
            self._opened = True
            if (opening := self._form.first_chunk(self._index)) is not None:
                chunks.insert(0, opening)
            plain = self._choice.parser_config is None and self._spec.logprobs is None
            if plain and not self._spec.continuous_usage:
                self._plain = self._around_text()
        return b"".join([self._event(chunk) for chunk in chunks])

    @property
    def text_only(self) -> bool:
        """Of a text alone, there is `of_text`."""
        return self._plain is not None

    def encode_text(self, text: str) -> bytes:
        """The events for a piece that is text and nothing else."""
        assert self._plain is not None
        before, after = self._plain
        return before + orjson.dumps(text) + after if text else b""

    def _around_text(self) -> tuple[bytes, bytes]:
        [chunk] = self._form.encode_piece(self._index, OutputPiece(_TEXT_PLACEHOLDER, (), ()))
        before, after = self._event(chunk).split(orjson.dumps(_TEXT_PLACEHOLDER))
        return before, after

    def _event(self, chunk: Json) -> bytes:
        if self._spec.continuous_usage:
            chunk["usage"] = usage_json(self._choice.usage)
        elif self._spec.include_usage:
            chunk["usage"] = None
        return sse_event(chunk)


async def _stream(choices: Sequence[Choice], spec: GenerationSpec, form: AnswerEncoder, response: HttpResponse) -> None:
    events = [_SseEncoder(choice, index, spec, form) for index, choice in enumerate(choices)]
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
        tail = sse_event({**form.usage_chunk(), "usage": usage_json(total_usage(choices))})
    await response.send_event(tail + _DONE)
    await response.end()


def _relay_callbacks(
    write: Callable[[bytes], bool], events: _SseEncoder
) -> tuple[Callable[[OutputPiece], bool], Callable[[str], bool] | None]:
    """What Choice.relay takes."""
    of, of_text = events.encode, events.encode_text
    return lambda piece: write(of(piece)), (lambda text: write(of_text(text))) if events.text_only else None
