"""The parts that all tool call parsers share: deltas and buffering.

Invariant: white space between calls, and between text and calls, is dropped. All other white space is kept, in order.
"""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable

from gateway.text.tools.format import ContentDelta, InvalidToolCall, MessageDelta, ToolCallDelta


def openai_call_id() -> str:
    """Returns a new call id of OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def mistral_call_id() -> str:
    """Returns a new call id of nine letters and digits; the templates of Mistral's models accept no other."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class ToolDeltaBuilder:
    """Builds the deltas of one answer and numbers its calls.

        begin_call -> [set_function -> add_arguments*] -> end_call, or reject_call at any point

    After `max_calls` complete calls it adds no more deltas.
    """

    def __init__(self, max_calls: int | None, new_id: Callable[[], str]) -> None:
        self._max_calls = max_calls
        self._new_id = new_id
        self._out: list[MessageDelta] = []
        self._space = ""  # white space that is content unless a call follows
        self._space_before_call = ""  #: White space before the open call; content if the call is rejected.
        self._next_index = 0
        self._named = False
        self.num_completed = 0  # calls completed so far
        self._full = False  # `max_calls` are complete

    def take_deltas(self) -> list[MessageDelta]:
        """Returns the deltas since the last call of this method."""
        out, self._out = self._out, []
        return out

    def add_content(self, text: str) -> None:
        """Adds text outside of calls."""
        if not text or self._full:
            return
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._out.append(ContentDelta(kept))

    def begin_call(self) -> None:
        """Begins a call, or a text that looks like one."""
        self._space_before_call, self._space = self._space, ""
        self._named = False

    def set_function(self, name: str) -> None:
        """Sets the function of the open call."""
        self._named = True
        if not self._full:
            self._out.append(ToolCallDelta(self._next_index, "", self._new_id(), name))

    def add_arguments(self, text: str) -> None:
        """Adds arguments to the open call."""
        if text and not self._full:
            self._out.append(ToolCallDelta(self._next_index, text))

    def end_call(self) -> None:
        """Completes the open call."""
        assert self._named
        if not self._full:
            self.num_completed += 1
            self._next_index += 1
            self._full = self.num_completed == self._max_calls

    def reject_call(self, text: str) -> None:
        """Turns the open call into content; `text` is its whole text."""
        text, self._space = self._space_before_call + text, ""
        if self._full:
            return
        if not self._named:
            self.add_content(text)
            return
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._out.append(InvalidToolCall(self._next_index, kept))
        self._next_index += 1

    def finish(self) -> None:
        """Ends the text."""
        if self._space and not self.num_completed:
            self._out.append(ContentDelta(self._space))
        self._space = ""


def split_at_marker(buffer: str, marker: str) -> tuple[str, str, str]:
    """Returns the text before the marker, the marker, and the rest.

    Without the marker: the text that cannot begin it, "", and the text that may.
    """
    if marker in buffer:
        return buffer.partition(marker)
    for at in range(max(0, len(buffer) - len(marker) + 1), len(buffer)):
        if marker.startswith(buffer[at:]):
            return buffer[:at], "", buffer[at:]
    return buffer, "", ""


class BufferedParser(ABC):
    """A ToolParser that buffers text; subclasses define the states."""

    new_id = staticmethod(openai_call_id)

    def __init__(self, function_names: frozenset[str], max_calls: int | None = None) -> None:
        self._function_names = function_names
        self._builder = ToolDeltaBuilder(max_calls, self.new_id)
        self._buffer = ""

    @property
    def num_completed(self) -> int:
        return self._builder.num_completed

    def feed(self, text: str) -> list[MessageDelta]:
        self._buffer += text
        while self._buffer and self._step():
            pass
        return self._builder.take_deltas()

    def finish(self) -> list[MessageDelta]:
        self._flush_rest()
        self._builder.finish()
        return self._builder.take_deltas()

    @abstractmethod
    def _step(self) -> bool:
        """Does one state's work on the buffer. Returns False when it needs more text."""

    @abstractmethod
    def _flush_rest(self) -> None:
        """Adds the buffered text that no further text will complete."""
