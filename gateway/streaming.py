"""The two generating routes: what a body asks for, as one JSON answer or as server-sent events.

Raw, because a response object per token would cost more than the token. While a client keeps up, its events are
written in the turn of the event loop in which a pod's message came, one after the other for all of its sequences: no
task is woken for a token. Chunks are merged only when the client is behind; a stream that fails ends without [DONE].
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, closing, suppress
from typing import Any

import orjson

from gateway.best_of import answers_of
from gateway.choice import Choice, Usage
from gateway.http_endpoint import Response, sse_event
from gateway.openai_schema import ChatFormat, CompletionFormat, Format, Json, usage_json
from gateway.output import Piece
from gateway.service import Gateway
from gateway.ticket import Ticket
from gateway.validation import Spec, parse_chat, parse_completion

_DONE = b"data: [DONE]\n\n"
_MARK = "\0text"  # stands for the text in an event that is encoded once; nothing else in it begins with NUL


class Generate:
    """Answers bodies of /v1/chat/completions, or of /v1/completions."""

    def __init__(self, gateway: Gateway, *, chat: bool) -> None:
        self._gateway = gateway
        self._chat = chat

    async def serve(self, body: Any, response: Response, ticket: Ticket) -> None:
        """See http_endpoint.Endpoint."""
        gateway = self._gateway
        spec: Spec
        make: Callable[..., Format] = CompletionFormat
        if self._chat:
            chat = parse_chat(body)
            spec, choices = chat.spec, await gateway.chat(ticket, chat)
            make = functools.partial(ChatFormat, legacy=chat.tools is not None and chat.tools.legacy)
        else:
            completion = parse_completion(body)
            spec, choices = completion.spec, await gateway.completion(ticket, completion)
        form = make(ticket.id, spec.model, choices[0].model.tokenizer, logprobs=spec.logprobs is not None)
        if spec.stream:
            await _stream(choices, spec, form, response)
        else:
            answers = await answers_of(choices, spec)
            await response.send_json(200, form.encode_answer(answers, total(choices)))
        ticket.timeline.set_facts(
            prompt_tokens=total(choices).prompt,
            output_tokens=total(choices).completion,
            cached_tokens=total(choices).cached,
        )


class _Events:
    """One choice's pieces as server-sent events.

    Most pieces are text and nothing else. Of their events only the text differs, so the rest is encoded once: `_plain`
    holds the bytes before and after it, None where more than the text differs (log-probabilities, a running usage,
    text that is more than content).
    """

    def __init__(self, choice: Choice, index: int, spec: Spec, form: Format) -> None:
        self._choice = choice
        self._index = index
        self._spec = spec
        self._form = form
        self._opened = False
        self._plain: tuple[bytes, bytes] | None = None

    def encode(self, piece: Piece) -> bytes:
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
        [chunk] = self._form.encode_piece(self._index, Piece(_MARK, (), ()))
        before, after = self._event(chunk).split(orjson.dumps(_MARK))
        return before, after

    def _event(self, chunk: Json) -> bytes:
        if self._spec.continuous_usage:
            chunk["usage"] = usage_json(self._choice.usage)
        elif self._spec.include_usage:
            chunk["usage"] = None
        return sse_event(chunk)


async def _stream(choices: Sequence[Choice], spec: Spec, form: Format, response: Response) -> None:
    events = [_Events(choice, index, spec, form) for index, choice in enumerate(choices)]
    if len(choices) == 1:
        with closing(choices[0]) as choice:
            async for piece in choice:
                if raw := events[0].encode(piece):
                    await response.send_event(raw)
                if (write := response.fast_write) is not None:
                    await choice.relay(*_onto(write, events[0]))
    else:
        async with aclosing(merged(choices)) as pieces:
            async for index, piece in pieces:
                if raw := events[index].encode(piece):
                    await response.send_event(raw)
    tail = b""
    if spec.include_usage:
        tail = sse_event({**form.usage_chunk(), "usage": usage_json(total(choices))})
    await response.send_event(tail + _DONE)
    await response.end()


def _onto(
    write: Callable[[bytes], bool], events: _Events
) -> tuple[Callable[[Piece], bool], Callable[[str], bool] | None]:
    """What Choice.relay takes."""
    of, of_text = events.encode, events.encode_text
    return lambda piece: write(of(piece)), (lambda text: write(of_text(text))) if events.text_only else None


async def merged(choices: Sequence[Choice]) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of all choices as they come."""
    # One slot: a choice whose piece is not taken yet waits, and its next piece merges what came meanwhile.
    queue: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue(maxsize=1)
    tasks = [asyncio.create_task(_pump(i, choice, queue)) for i, choice in enumerate(choices)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, choice: Choice, queue: asyncio.Queue[tuple[int, Piece | BaseException | None]]) -> None:
    try:
        with closing(choice):
            async for piece in choice:
                await queue.put((index, piece))
        await queue.put((index, None))
    except Exception as e:
        with suppress(asyncio.CancelledError):
            await queue.put((index, e))


def total(choices: Sequence[Choice]) -> Usage:
    """Tokens spent on all of them; a prompt counts once."""
    return sum((choice.usage_share for choice in choices), Usage())
