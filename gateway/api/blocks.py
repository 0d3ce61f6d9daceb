"""One answer as typed blocks (text, reasoning, calls), streamed or whole, for the Responses and Messages APIs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Protocol

from common.types import FinishReason
from gateway.api.http.endpoint import HttpResponse
from gateway.api.http.json import Json
from gateway.serving.choice import Choice, CompleteAnswer
from gateway.text.output import OutputPiece, ReportedToken
from gateway.text.tools.format import ContentDelta, InvalidToolCall, ReasoningDelta, ToolCallDelta

Logprobs = Callable[[Sequence[ReportedToken]], list[Json]]
"""Returns the log-probabilities of tokens as the API shows them."""


def no_logprobs(_reported: Sequence[ReportedToken]) -> list[Json]:
    """The `Logprobs` function of an API without log-probabilities."""
    return []


class BlockWriter(Protocol):
    """Builds the blocks of one answer. Each method returns the events that it causes."""

    def text(self, text: str, logprobs: Sequence[Json]) -> bytes:
        """Adds text, with the log-probabilities of its tokens if the API shows them."""

    def reasoning(self, text: str) -> bytes:
        """Adds to the reasoning section."""

    def call(self, call_id: str, name: str, arguments: str) -> bytes:
        """Begins a call if there is a name, else adds arguments to the open call."""

    def invalid_call(self, text: str) -> bytes:
        """Ends the open call, which is malformed; its text becomes text of the answer."""


async def stream_blocks(
    choice: Choice,
    writer: BlockWriter,
    response: HttpResponse,
    start: bytes,
    logprobs: Logprobs = no_logprobs,
) -> tuple[FinishReason, bytes]:
    """Sends the events of a choice as they come. Returns the finish reason and the events that were not sent yet.

    `start` is sent when a decode pod has reserved, so an earlier error still sets the HTTP status.
    """
    await choice.reserve()
    await response.send_event(start)
    last: list[OutputPiece] = []

    def callbacks(write: Callable[[bytes], bool]) -> tuple[Callable[[OutputPiece], bool], Callable[[str], bool]]:
        def on_piece(piece: OutputPiece) -> bool:
            if piece.finish is not None:
                last.append(piece)
                return False
            return write(_piece_events(writer, piece, logprobs))

        return on_piece, lambda text: write(writer.text(text, []) if text else b"")

    with closing(choice):
        async for piece in choice:
            if piece.finish is not None:
                last.append(piece)
                break
            if events := _piece_events(writer, piece, logprobs):
                await response.send_event(events)
            if (write := response.fast_write) is not None:
                await choice.relay(*callbacks(write))
    [piece] = last
    assert piece.finish is not None
    return piece.finish, _piece_events(writer, piece, logprobs)


def _piece_events(writer: BlockWriter, piece: OutputPiece, logprobs: Logprobs) -> bytes:
    """Returns the events of one piece. Only content tokens show their log-probabilities."""
    shown = logprobs(piece.reported)
    if piece.deltas is None:
        return writer.text(piece.text, shown) if piece.text or shown else b""
    events = b""
    for delta in piece.deltas:
        match delta:
            case ContentDelta(text):
                events += writer.text(text, shown)
                shown = []
            case ReasoningDelta(text):
                events += writer.reasoning(text)
            case ToolCallDelta(arguments=arguments, id=call_id, name=name):
                events += writer.call(call_id, name, arguments)
            case InvalidToolCall(text=text):
                events += writer.invalid_call(text)
    return events


def write_blocks(writer: BlockWriter, answer: CompleteAnswer, logprobs: Logprobs = no_logprobs) -> None:
    """Writes the blocks of a complete answer, in the order in which the model wrote them."""
    shown = logprobs(answer.reported)
    if answer.deltas is None:
        writer.text(answer.text, shown)
        return
    for delta in _without_invalid_calls(answer):
        match delta:
            case ContentDelta(text) | InvalidToolCall(text=text):
                writer.text(text, shown)
                shown = []
            case ReasoningDelta(text):
                writer.reasoning(text)
            case ToolCallDelta(arguments=arguments, id=call_id, name=name):
                writer.call(call_id, name, arguments)


def _without_invalid_calls(
    answer: CompleteAnswer,
) -> list[ContentDelta | ReasoningDelta | ToolCallDelta | InvalidToolCall]:
    """Returns the deltas without malformed calls; the text of these calls stays."""
    deltas = answer.deltas or ()
    invalid = {delta.index for delta in deltas if isinstance(delta, InvalidToolCall)}
    return [delta for delta in deltas if not (isinstance(delta, ToolCallDelta) and delta.index in invalid)]
