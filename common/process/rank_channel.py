"""A stream of messages between the processes of one tensor-parallel group, over TCP.

Both ends prove that they know the group's secret before anything else is said; then either side sends messages: a kind,
a few JSON fields and raw bytes. A peer that is gone ends the channel: every later call raises Unavailable. One thread
uses an end; `gone` alone may be asked by another.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import select
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from common.errors import Unauthenticated, Unavailable

SEND_S = 30.0  # a peer that takes nothing for so long, or stops inside a message, is gone
HELLO_S = 10.0  # between two messages of somebody who is not known yet
KEEP_ALIVE_S = 15  # after which a silent peer's machine is asked whether it lives
_HEAD = struct.Struct("<IQ")  # bytes of the fields, bytes of the payload
_MOST = 1 << 20  # bytes of the fields
_NONCE_BYTES = 32
_HELLO_BYTES = 256  # of a payload before both know each other


@dataclass(frozen=True, slots=True)
class RankMessage:
    """fields: JSON; payload: raw bytes."""

    kind: str
    fields: Mapping[str, Any]
    payload: bytes


class RankChannel:
    """One end. name: of the peer, for messages to people."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        sock.settimeout(SEND_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2000 * KEEP_ALIVE_S)
        for option, value in ((socket.TCP_KEEPIDLE, KEEP_ALIVE_S), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._sock, self.name = sock, name

    @classmethod
    def accept(cls, listener: socket.socket, secret: bytes, timeout_s: float) -> tuple[Self, RankMessage] | None:
        """A peer that knows the secret, and its first message; None when nobody came in time.

        Raises Unauthenticated for a stranger, Unavailable for one that went away.
        """
        if not _poll(listener, select.POLLIN, timeout_s):
            return None
        sock, address = listener.accept()
        channel = cls(sock, str(address[0]))
        try:
            nonce = os.urandom(_NONCE_BYTES)
            channel.send("challenge", nonce)
            answer = channel.receive(HELLO_S, most=_HELLO_BYTES)
            theirs, proof = answer.payload[:_NONCE_BYTES], answer.payload[_NONCE_BYTES:]
            if not hmac.compare_digest(proof, _proof(secret, b"member", nonce)):
                raise Unauthenticated(f"{channel.name} does not know the group's secret")
            channel.send("welcome", _proof(secret, b"leader", theirs))
            return channel, channel.receive(HELLO_S, most=_HELLO_BYTES)
        except BaseException:
            channel.close()
            raise

    @classmethod
    def connect(cls, host: str, port: int, secret: bytes, name: str, kind: str, **fields: Any) -> Self:
        """The other end of `accept`; kind and fields are the first message. Raises Unavailable, Unauthenticated."""
        try:
            channel = cls(socket.create_connection((host, port), timeout=SEND_S), name)
        except OSError as error:
            raise Unavailable(f"{name} at {host}:{port} cannot be reached: {error}") from error
        try:
            nonce = os.urandom(_NONCE_BYTES)
            challenge = channel.receive(HELLO_S, most=_HELLO_BYTES).payload
            channel.send("answer", nonce + _proof(secret, b"member", challenge))
            welcome = channel.receive(HELLO_S, most=_HELLO_BYTES)
            if not hmac.compare_digest(welcome.payload, _proof(secret, b"leader", nonce)):
                raise Unauthenticated(f"{name} at {host}:{port} does not know the group's secret")
            channel.send(kind, **fields)
        except BaseException:
            channel.close()
            raise
        return channel

    @property
    def host(self) -> str:
        """This end's own address."""
        return str(self._sock.getsockname()[0])

    def send(self, kind: str, payload: bytes | memoryview = b"", **fields: Any) -> None:
        """Raises Unavailable when the peer is gone."""
        said = json.dumps({"kind": kind, **fields}).encode()
        try:
            self._sock.sendall(b"".join((_HEAD.pack(len(said), len(payload)), said, payload)))
        except OSError as error:
            raise Unavailable(f"{self.name} is gone: {error}") from error

    def wait_readable(self, timeout_s: float | None = 0.0) -> bool:
        """A message, or the end, can be received; waits for at most timeout_s (None: for ever)."""
        try:
            return bool(_poll(self._sock, select.POLLIN, timeout_s))
        except (OSError, ValueError) as error:  # closed
            raise Unavailable(f"{self.name} is gone: {error}") from error

    def receive(self, timeout_s: float | None = None, *, most: int | None = None) -> RankMessage:
        """The next message. Raises Unavailable when the peer is gone, says nothing in time (None: no limit), or more
        than `most` bytes.
        """
        if not self.wait_readable(timeout_s):
            raise Unavailable(f"{self.name} says nothing")
        said, more = _HEAD.unpack(self._exactly(_HEAD.size))
        if said > _MOST or (most is not None and more > most):
            raise Unavailable(f"{self.name} does not speak our language")
        try:
            fields = json.loads(self._exactly(said))
            kind = fields.pop("kind")
        except (ValueError, AttributeError, KeyError) as error:
            raise Unavailable(f"{self.name} does not speak our language") from error
        return RankMessage(kind, fields, self._exactly(more))

    def peer_closed(self) -> bool:
        """The peer has closed its end, whatever it said before; any thread."""
        try:
            return bool(_poll(self._sock, select.POLLRDHUP, 0.0))
        except (OSError, ValueError):  # closed here
            return True

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()

    def _exactly(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            try:
                part = self._sock.recv(min(count, 1 << 20))
            except OSError as error:
                raise Unavailable(f"{self.name} is gone: {error}") from error
            if not part:
                raise Unavailable(f"{self.name} is gone")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def _poll(sock: socket.socket, events: int, timeout_s: float | None) -> bool:
    """Whether one of these, or the end, happened in time."""
    poll = select.poll()
    poll.register(sock, events)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def _proof(secret: bytes, side: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, side + nonce, hashlib.sha256).digest()
