"""What all parsers give out through: numbers the calls, holds back white space around them.

Invariant: white space between calls, and between text and calls, is dropped; all other white space is kept, in order.
"""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from gateway.text.tools.format import ContentDelta, InvalidToolCall, MessageDelta, ToolCallDelta
from gateway.text.tools.json_scanner import JsonCallScanner

_ALPHANUMERIC = string.ascii_letters + string.digits


def openai_call_id() -> str:
    """An id as OpenAI makes them."""
    return f"call_{secrets.token_hex(12)}"


def mistral_call_id() -> str:
    """Nine letters and digits: the templates of Mistral's models take nothing else."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class ToolDeltaBuilder:
    """Deltas of one answer. A call: open -> (named -> arguments...) -> close, or broken at any point.

    After max_calls complete calls nothing more is given out.
    """

    def __init__(self, max_calls: int | None, new_id: Callable[[], str] = openai_call_id) -> None:
        self._max_calls = max_calls
        self._new_id = new_id
        self._out: list[MessageDelta] = []
        self._space = ""  # white space that is content unless a call follows
        self._before = ""  # the same, of the call that is open
        self._next = 0
        self._named = False
        self.num_completed = 0

    @property
    def _full(self) -> bool:
        return self.num_completed == self._max_calls

    def take_deltas(self) -> list[MessageDelta]:
        """The deltas since the last take."""
        out, self._out = self._out, []
        return out

    def add_content(self, text: str) -> None:
        """Text outside of calls."""
        if not text or self._full:
            return
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._out.append(ContentDelta(kept))

    def begin_call(self) -> None:
        """A call begins, or what looks like one."""
        self._before, self._space = self._space, ""
        self._named = False

    def set_function(self, name: str) -> None:
        """The function of the open call."""
        self._named = True
        if not self._full:
            self._out.append(ToolCallDelta(self._next, "", self._new_id(), name))

    def add_arguments(self, text: str) -> None:
        """More of the open call's arguments."""
        if text and not self._full:
            self._out.append(ToolCallDelta(self._next, text))

    def end_call(self) -> None:
        """The open call is complete."""
        assert self._named
        if self._full:
            return
        self.num_completed += 1
        self._next += 1

    def reject_call(self, text: str) -> None:
        """The open call is none; text is all of it."""
        text, self._space = self._before + text, ""
        if self._full:
            return
        if not self._named:
            self.add_content(text)
            return
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._out.append(InvalidToolCall(self._next, kept))
        self._next += 1

    def finish(self) -> None:
        """The text ends."""
        if self._space and not self.num_completed:
            self._out.append(ContentDelta(self._space))
        self._space = ""


def split_at_marker(buffer: str, markers: tuple[str, ...]) -> tuple[str, str, str]:
    """Text before the first marker, that marker, the rest; without one: what cannot begin a marker, "", what may."""
    found = [(at, marker) for marker in markers if (at := buffer.find(marker)) >= 0]
    if found:
        at, marker = min(found, key=lambda f: (f[0], -len(f[1])))
        return buffer[:at], marker, buffer[at + len(marker) :]
    longest = max(map(len, markers), default=1) - 1
    for at in range(max(0, len(buffer) - longest), len(buffer)):
        if any(marker.startswith(buffer[at:]) for marker in markers):
            return buffer[:at], "", buffer[at:]
    return buffer, "", ""


class BufferedParser(ABC):
    """A ToolParser whose states are its own: `_step` works on the buffer, `_rest` gives up what is left at the end."""

    def __init__(
        self, names: frozenset[str], max_calls: int | None = None, new_id: Callable[[], str] = openai_call_id
    ) -> None:
        self._names = names
        self._builder = ToolDeltaBuilder(max_calls, new_id)
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
        """One state's work; False when it needs more text."""

    @abstractmethod
    def _flush_rest(self) -> None:
        """Gives out what no more text will complete."""


class JsonCallReader:
    """Opens a call; done: it was closed; broken: it is content, `lead` (what stood before the object) included."""

    def __init__(self, emit: ToolDeltaBuilder, names: Collection[str], lead: str = "") -> None:
        self.done = False
        self.invalid = False
        self._emit = emit
        self._object = JsonCallScanner(names)
        self._raw = [lead]
        self._named = False
        emit.begin_call()

    def feed(self, buffer: str) -> str:
        """Reads what belongs to the object and returns the rest."""
        at = self._object.feed(buffer, 0)
        self._raw.append(buffer[:at])
        if not self._named and self._object.name is not None:
            self._named = True
            self._emit.set_function(self._object.name)
        self._emit.add_arguments(self._object.take_arguments())
        if self._object.invalid:
            self.reject()
        elif self._object.done:
            self.done = True
            self._emit.end_call()
        return buffer[at:]

    def reject(self) -> None:
        """It stays unfinished: content."""
        self.invalid = True
        self._emit.reject_call("".join(self._raw))
