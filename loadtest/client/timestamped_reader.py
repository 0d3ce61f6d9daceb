"""Reads a TCP connection with the kernel's arrival time of the bytes (SO_TIMESTAMPNS, Linux).

A time taken by the process when it reads is late if the process or the machine is busy. The kernel takes the time in
the interrupt. Bytes of one read share the arrival time of the last byte.

The reader replaces the reading side of an asyncio transport: it pauses the transport for good and watches a duplicate
of the socket's descriptor. The transport still writes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

SO_TIMESTAMPNS = 35  # From asm-generic/socket.h; the ancillary message has the same number.
READ_BYTES = 1 << 14
ANCILLARY_BYTES = 64
CLOCK_READINGS, MAX_READING_S = 5, 20e-6
MAX_AGE_S = 5.0  # An older stamp means that the wall clock was changed.
_TIMESPEC = struct.Struct("@ll")


class TimestampedReader:
    """Calls `received(at, data)` for each read. `at` is in time.perf_counter() seconds, `data` is None at the end."""

    def __init__(self, transport: Any, received: Callable[[float, bytes | None], None]) -> None:
        transport.pause_reading()
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._received = received
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def close(self) -> None:
        """Stops reading. Idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _readable(self) -> None:
        try:
            data, ancillary, _, _ = self._socket.recvmsg(READ_BYTES, ANCILLARY_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # connection reset
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
                now -= age if 0.0 < age < MAX_AGE_S else 0.0
        self._received(now, data)


def _clocks() -> tuple[float, float]:
    """Returns time.perf_counter() and time.time() of one moment. Reads again after an interruption."""
    for _ in range(CLOCK_READINGS):
        before, wall, after = time.perf_counter(), time.time(), time.perf_counter()
        if after - before < MAX_READING_S:
            break
    return (before + after) / 2, wall
