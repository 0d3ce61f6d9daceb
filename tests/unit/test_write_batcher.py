"""WriteBatcher: pieces are written in order, before direct writes, and not to closed connections."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from gateway.api.http.endpoint import HttpResponse
from gateway.api.http.protocol import MAX_BATCHED_WRITES, BodyWriter, WriteBatcher


class Wire:
    """The client's connection, as a transport and as ASGI's `send`."""

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


def stream(batcher: WriteBatcher) -> tuple[Wire, HttpResponse]:
    wire = Wire()
    flow = SimpleNamespace(write_paused=False)
    cycle: Any = SimpleNamespace(chunked_encoding=True, disconnected=False, flow=flow, transport=wire)
    return wire, HttpResponse(wire.send, BodyWriter(cycle, batcher))


async def test_a_batched_piece_is_written_before_the_end_of_the_stream() -> None:
    wire, response = stream(WriteBatcher())
    await response.send_event(b"first")
    assert response.fast_write is not None
    assert response.fast_write(b"second")
    assert wire.sent == [b"first"]
    await response.end()
    assert wire.sent == [b"first", b"6\r\nsecond\r\n", b""]


async def test_pieces_wait_for_the_end_of_the_loop_turn_or_for_a_full_batch() -> None:
    batcher = WriteBatcher()
    wires = [Wire() for _ in range(MAX_BATCHED_WRITES)]
    for wire in wires[:-1]:
        batcher.put(wire, b"x")  # type: ignore[arg-type]
    assert not any(wire.sent for wire in wires)
    batcher.put(wires[-1], b"x")  # type: ignore[arg-type]
    assert all(wire.sent == [b"x"] for wire in wires)
    batcher.put(wires[0], b"y")  # type: ignore[arg-type]
    wires[1].closing = True
    batcher.put(wires[1], b"y")  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert wires[0].sent == [b"x", b"y"]
    assert wires[1].sent == [b"x"]
