"""The two generating routes: what a body asks for, as one JSON answer or as server-sent events.

Raw, because a response object per token would cost more than the token. Chunks are merged only when the client is
behind; a stream that fails ends without [DONE].
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

from common.errors import BatonError
from gateway.http_endpoint import Response, sse_event
from gateway.openai_schema import ChatFormat, CompletionFormat, Format, usage_json
from gateway.output import Piece
from gateway.service import Choice, Gateway, Ticket, Usage
from gateway.validation import Spec, parse_chat, parse_completion

_DONE = b"data: [DONE]\n\n"


class Generate:
    """Answers bodies of /v1/chat/completions, or of /v1/completions."""

    def __init__(self, gateway: Gateway, *, chat: bool) -> None:
        self._gateway = gateway
        self._chat = chat

    async def serve(self, body: Any, response: Response, ticket: Ticket) -> None:
        """See http_endpoint.Endpoint."""
        gateway = self._gateway
        spec: Spec
        if self._chat:
            chat = parse_chat(body)
            spec, choices = chat.spec, await gateway.chat(ticket, chat)
        else:
            completion = parse_completion(body)
            spec, choices = completion.spec, await gateway.completion(ticket, completion)
        make: Callable[..., Format] = ChatFormat if self._chat else CompletionFormat
        form = make(ticket.id, spec.model, gateway.tokenizer, logprobs=spec.logprobs is not None)
        if spec.stream:
            await _stream(choices, spec, form, response)
        else:
            answers = await _gather([choice.collect() for choice in choices])
            await response.json(200, form.answer(answers, _total(choices)))
        ticket.timeline.note(
            prompt_tokens=_total(choices).prompt,
            output_tokens=_total(choices).completion,
            cached_tokens=_total(choices).cached,
        )


async def _gather(works: Sequence[Any]) -> list[Any]:
    """All results; the first failure cancels the rest and is raised."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except* BatonError as e:
        raise _first(e) from e
    return [task.result() for task in tasks]


def _first(group: BaseExceptionGroup[BatonError]) -> BatonError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, BatonError)
    return error


async def _stream(choices: Sequence[Choice], spec: Spec, form: Format, response: Response) -> None:
    opened: set[int] = set()
    async with aclosing(_merged(choices)) as pieces:
        async for index, piece in pieces:
            chunks = form.chunks(index, piece)
            if index not in opened:
                opened.add(index)
                opening = form.opening(index)
                chunks = [opening, *chunks] if opening else chunks
            if not chunks:
                continue
            if spec.continuous_usage:
                for chunk in chunks:
                    chunk["usage"] = usage_json(choices[index].usage)
            elif spec.include_usage:
                for chunk in chunks:
                    chunk["usage"] = None
            await response.event(b"".join([sse_event(chunk) for chunk in chunks]))
    tail = b""
    if spec.include_usage:
        tail = sse_event({**form.usage_chunk(), "usage": usage_json(_total(choices))})
    await response.event(tail + _DONE)
    await response.end()


async def _merged(choices: Sequence[Choice]) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of all choices as they come."""
    if len(choices) == 1:
        async with aclosing(choices[0].pieces()) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
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
        async with aclosing(choice.pieces()) as pieces:
            async for piece in pieces:
                await queue.put((index, piece))
        await queue.put((index, None))
    except Exception as e:
        with suppress(asyncio.CancelledError):
            await queue.put((index, e))


def _total(choices: Sequence[Choice]) -> Usage:
    return sum((choice.usage for choice in choices), Usage())
