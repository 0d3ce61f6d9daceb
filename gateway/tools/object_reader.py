"""One JSON object in the text that should be a call, from its first character to the emitter."""

from __future__ import annotations

from collections.abc import Collection

from gateway.tools.emitter import Emitter
from gateway.tools.json_stream import CallObject


class ObjectReader:
    """Opens a call; done: it was closed; broken: it is content, `lead` (what stood before the object) included."""

    def __init__(self, emit: Emitter, names: Collection[str], lead: str = "") -> None:
        self.done = False
        self.broken = False
        self._emit = emit
        self._object = CallObject(names)
        self._raw = [lead]
        self._named = False
        emit.open()

    def take(self, buffer: str) -> str:
        """Reads what belongs to the object and returns the rest."""
        at = self._object.take(buffer, 0)
        self._raw.append(buffer[:at])
        if not self._named and self._object.name is not None:
            self._named = True
            self._emit.named(self._object.name)
        self._emit.arguments(self._object.arguments())
        if self._object.broken:
            self.give_up()
        elif self._object.done:
            self.done = True
            self._emit.close()
        return buffer[at:]

    def give_up(self) -> None:
        """It stays unfinished: content."""
        self.broken = True
        self._emit.broken("".join(self._raw))
