"""The frame of a parser: text waits in a buffer, from which one state's work at a time takes what it can."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from gateway.tools.emitter import Emitter, openai_id
from gateway.tools.protocol import Delta


class BufferedParser(ABC):
    """A ToolParser whose states are its own: `_step` works on the buffer, `_rest` gives up what is left at the end."""

    def __init__(
        self, names: frozenset[str], max_calls: int | None = None, new_id: Callable[[], str] = openai_id
    ) -> None:
        self._names = names
        self._builder = Emitter(max_calls, new_id)
        self._buffer = ""

    @property
    def num_completed(self) -> int:
        return self._builder.num_completed

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        while self._buffer and self._step():
            pass
        return self._builder.take_deltas()

    def finish(self) -> list[Delta]:
        self._flush_rest()
        self._builder.finish()
        return self._builder.take_deltas()

    @abstractmethod
    def _step(self) -> bool:
        """One state's work; False when it needs more text."""

    @abstractmethod
    def _flush_rest(self) -> None:
        """Gives out what no more text will complete."""
