"""Pieces of many answers on their way to sockets: in order, by the end of the turn, and not to closed ones."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from gateway.http_protocol import BURST, Outbox


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes) -> None:
        self.written.append(data)

    @property
    def transport(self) -> asyncio.Transport:
        return cast("Any", self)


@pytest.mark.parametrize("pieces", [1, BURST - 1, BURST, 2 * BURST + 3])
async def test_all_is_written_in_order_when_the_turn_is_over(pieces: int) -> None:
    outbox, wires = Outbox(), [Wire(), Wire(), Wire()]
    for turn in range(2):
        for number in range(pieces):
            for wire in wires:
                outbox.put(wire.transport, b"%d.%d" % (turn, number))
        await asyncio.sleep(0)
        expected = [b"%d.%d" % (t, n) for t in range(turn + 1) for n in range(pieces)]
        assert [wire.written for wire in wires] == [expected] * 3


async def test_what_waits_goes_before_what_is_written_after_a_flush() -> None:
    outbox, wire = Outbox(), Wire()
    outbox.put(wire.transport, b"first")
    outbox.flush()
    wire.write(b"second")
    await asyncio.sleep(0)
    assert wire.written == [b"first", b"second"]


async def test_a_connection_that_closed_meanwhile_gets_nothing_and_the_others_theirs() -> None:
    outbox, gone, here = Outbox(), Wire(), Wire()
    outbox.put(gone.transport, b"a")
    outbox.put(here.transport, b"b")
    gone.closed = True
    await asyncio.sleep(0)
    assert (gone.written, here.written) == ([], [b"b"])
