"""Server-sent events out of bytes that come in any pieces."""

from __future__ import annotations


class SseParser:
    """feed() takes bytes and gives the data of the events that they complete. Other fields and comments are dropped."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each complete event, its lines joined."""
        data = self._rest + data if self._rest else data
        if b"\r" in data:
            # A CR at the very end may be half of a line end.
            held = data.endswith(b"\r")
            data = (data[:-1] if held else data).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + (
                b"\r" if held else b""
            )
        *events, self._rest = data.split(b"\n\n")
        found = []
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:  # nearly all
                found.append(event[6:])
            elif lines := [_value(line) for line in event.split(b"\n") if line.startswith(b"data:")]:
                found.append(b"\n".join(lines))
        return found


def _value(line: bytes) -> bytes:
    return line[6:] if line[5:6] == b" " else line[5:]
