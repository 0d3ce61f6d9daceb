"""Pieces that wait in the outbox: a few at a time, in order, before what goes another way, to nobody who has gone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from gateway.api.http.endpoint import HttpResponse
from gateway.api.http.protocol import MAX_BATCHED_WRITES, BodyWriter, WriteBatcher


class Wire:
    """What reached the client, as a connection and as ASGI's `send`."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closing = False

    def is_closing(self) -> bool:
        return self.closing

    def write(self, piece: bytes) -> None:
        self.sent.append(piece)

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])


def stream(outbox: WriteBatcher) -> tuple[Wire, HttpResponse]:
    wire = Wire()
    flow = SimpleNamespace(write_paused=False)
    cycle: Any = SimpleNamespace(chunked_encoding=True, disconnected=False, flow=flow, transport=wire)
    return wire, HttpResponse(wire.send, BodyWriter(cycle, outbox))


async def test_a_piece_comes_before_the_end_that_follows_it() -> None:
    wire, response = stream(WriteBatcher())
    await response.send_event(b"first")
    assert response.fast_write is not None
    assert response.fast_write(b"second")
    assert wire.sent == [b"first"]
    await response.end()
    assert wire.sent == [b"first", b"6\r\nsecond\r\n", b""]


async def test_pieces_wait_for_the_end_of_the_turn_or_for_a_burst() -> None:
    outbox = WriteBatcher()
    wires = [Wire() for _ in range(MAX_BATCHED_WRITES)]
    for wire in wires[:-1]:
        outbox.put(wire, b"x")  # type: ignore[arg-type]
    assert not any(wire.sent for wire in wires)
    outbox.put(wires[-1], b"x")  # type: ignore[arg-type]
    assert all(wire.sent == [b"x"] for wire in wires)
    outbox.put(wires[0], b"y")  # type: ignore[arg-type]
    wires[1].closing = True
    outbox.put(wires[1], b"y")  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert wires[0].sent == [b"x", b"y"]
    assert wires[1].sent == [b"x"]
