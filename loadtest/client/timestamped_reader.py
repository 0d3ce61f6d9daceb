"""Reads a TCP connection with the kernel's own time of each arrival (SO_TIMESTAMPNS, Linux).

What a program notes when it comes to read is late by whatever it was busy with, and on a shared machine by what others
were; the kernel notes in the interrupt. Bytes that are read together have the time of the last of them.

It takes reading over from an asyncio transport, which still writes: the transport is paused for good, and another
descriptor of its socket is watched instead.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

SO_TIMESTAMPNS = 35  # asm-generic/socket.h; the ancillary message has the same number
READ_BYTES = 1 << 14
ANCILLARY_BYTES = 64
CLOCK_READINGS, AT_ONCE_S = 5, 20e-6
MOST_AGE_S = 5.0  # an older stamp tells that the clock was set
_TIMESPEC = struct.Struct("@ll")


class TimestampedReader:
    """received(at, data): at by time.perf_counter(); data None: nothing more will come. close() ends it."""

    def __init__(self, transport: Any, received: Callable[[float, bytes | None], None]) -> None:
        transport.pause_reading()
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._received = received
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def close(self) -> None:
        """Idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _readable(self) -> None:
        try:
            data, ancillary, _, _ = self._socket.recvmsg(READ_BYTES, ANCILLARY_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # reset
            data, ancillary = b"", []
        now, wall = _clocks()
        if not data:
            self.close()
            self._received(now, None)
            return
        for level, kind, stamp in ancillary:
            if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
                seconds, nanoseconds = _TIMESPEC.unpack(stamp)
                age = wall - seconds - nanoseconds * 1e-9
                now -= age if 0.0 < age < MOST_AGE_S else 0.0
        self._received(now, data)


def _clocks() -> tuple[float, float]:
    """time.perf_counter() and time.time() of one moment: read again where this thread had to wait between the two."""
    for _ in range(CLOCK_READINGS):
        before, wall, after = time.perf_counter(), time.time(), time.perf_counter()
        if after - before < AT_ONCE_S:
            break
    return (before + after) / 2, wall
