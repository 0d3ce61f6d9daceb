"""One JSON object in the text that should be a call, from its first character to the emitter."""

from __future__ import annotations

from collections.abc import Collection

from gateway.tools.emitter import Emitter
from gateway.tools.json_stream import CallObject


class ObjectReader:
    """Opens a call; done: it was closed; broken: it is content, `lead` (what stood before the object) included."""

    def __init__(self, emit: Emitter, names: Collection[str], lead: str = "") -> None:
        self.done = False
        self.invalid = False
        self._emit = emit
        self._object = CallObject(names)
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
