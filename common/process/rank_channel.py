"""A message stream between two processes of a tensor-parallel group, over TCP.

    connecting rank                          accepting rank
                       <-- challenge (nonce)
    answer (nonce, HMAC of the challenge) -->
                       <-- welcome (HMAC of the rank's nonce)
    first message      -->

Both ends prove that they know the group's secret. With certificates the connection is TLS 1.3, and both ends prove
their role before the challenge. A message is a kind, a few JSON fields and raw bytes. After a peer
has disconnected, every call raises Unavailable. One thread uses an end, except for peer_closed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import select
import socket
import ssl
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from common.errors import Unauthenticated, Unavailable, describe
from common.tls import SERVER_NAME, TlsFiles, socket_identity

SEND_S = 30.0  #: A peer that receives nothing for this time, or stops inside a message, counts as gone.
HELLO_S = 10.0  #: Longest pause between messages of a peer that has not proved itself.
KEEP_ALIVE_S = 15  #: Silence after which TCP keep-alive probes the peer's machine.
PIECE_BYTES = 1 << 20  #: Bytes for which a slow link has SEND_S. A larger message is sent in pieces.
_HEAD = struct.Struct("<IQ")  #: Bytes of the fields, bytes of the payload.
_MAX_FIELD_BYTES = 1 << 20
_NONCE_BYTES = 32
LEADER_ROLES = ("prefill", "decode", "both")  #: Certificates of the accepting rank, which is in the pod's process.
MEMBER_ROLES = ("worker", *LEADER_ROLES)
_HELLO_BYTES = 256  #: Longest payload before both ends have proved themselves.


@dataclass(frozen=True, slots=True)
class RankMessage:
    kind: str
    fields: Mapping[str, Any]  # JSON values.
    payload: bytes


class RankChannel:
    """One end of a channel. `name` is the peer's name in error messages."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        sock.settimeout(SEND_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2000 * KEEP_ALIVE_S)
        for option, value in ((socket.TCP_KEEPIDLE, KEEP_ALIVE_S), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._sock, self.name = sock, name

    @classmethod
    def accept(
        cls, listener: socket.socket, secret: bytes, timeout_s: float, tls: TlsFiles | None = None
    ) -> tuple[Self, RankMessage] | None:
        """Returns the channel to a peer, its first message; None without one. Raises Unauthenticated, Unavailable."""
        if not _poll(listener, select.POLLIN, timeout_s):
            return None
        sock, address = listener.accept()
        channel = cls(sock, str(address[0]))
        try:
            if tls is not None:
                channel._secure(lambda sock: tls.server_context().wrap_socket(sock, server_side=True), MEMBER_ROLES)
            nonce = os.urandom(_NONCE_BYTES)
            channel.send("challenge", nonce)
            answer = channel.receive(HELLO_S, max_bytes=_HELLO_BYTES)
            theirs, proof = answer.payload[:_NONCE_BYTES], answer.payload[_NONCE_BYTES:]
            if not hmac.compare_digest(proof, _proof(secret, b"member", nonce)):
                raise Unauthenticated(f"{channel.name} does not know the group's secret")
            channel.send("welcome", _proof(secret, b"leader", theirs))
            return channel, channel.receive(HELLO_S, max_bytes=_HELLO_BYTES)
        except BaseException:
            channel.close()
            raise

    @classmethod
    def connect(
        cls, host: str, port: int, secret: bytes, name: str, kind: str, tls: TlsFiles | None = None, **fields: Any
    ) -> Self:
        """Connects to a peer in `accept` and sends the first message. Raises Unavailable, Unauthenticated."""
        try:
            channel = cls(socket.create_connection((host, port), timeout=SEND_S), name)
        except OSError as error:
            raise Unavailable(
                f"{name} at {host}:{port} cannot be reached: {describe(error, limit_s=SEND_S)}"
            ) from error
        try:
            if tls is not None:
                wrap = tls.client_context().wrap_socket
                channel._secure(lambda sock: wrap(sock, server_hostname=SERVER_NAME), LEADER_ROLES)
            nonce = os.urandom(_NONCE_BYTES)
            challenge = channel.receive(HELLO_S, max_bytes=_HELLO_BYTES).payload
            channel.send("answer", nonce + _proof(secret, b"member", challenge))
            welcome = channel.receive(HELLO_S, max_bytes=_HELLO_BYTES)
            if not hmac.compare_digest(welcome.payload, _proof(secret, b"leader", nonce)):
                raise Unauthenticated(f"{name} at {host}:{port} does not know the group's secret")
            channel.send(kind, **fields)
        except BaseException:
            channel.close()
            raise
        return channel

    def _secure(self, wrap: Callable[[socket.socket], ssl.SSLSocket], roles: Collection[str]) -> None:
        """Makes the TLS handshake. Raises Unauthenticated if the peer has no certificate of one of these roles."""
        self._sock.settimeout(HELLO_S)
        try:
            self._sock = secured = wrap(self._sock)
        except OSError as error:
            reason = getattr(error, "reason", None) or describe(error, limit_s=HELLO_S)
            hint = "does it have certificates of the same authority (tls_dir)?"
            raise Unauthenticated(f"{self.name} did not complete the TLS handshake: {reason}; {hint}") from error
        self._sock.settimeout(SEND_S)
        if (identity := socket_identity(secured)) is None or identity[0] not in roles:
            has = "no role" if identity is None else f"the role {identity[0]}"
            raise Unauthenticated(f"the certificate of {self.name} has {has}; expected {' or '.join(roles)}")

    @property
    def host(self) -> str:
        """The local address."""
        return str(self._sock.getsockname()[0])

    def send(self, kind: str, payload: bytes | memoryview = b"", **fields: Any) -> None:
        """Sends a message. Raises Unavailable if the peer is gone."""
        header = json.dumps({"kind": kind, **fields}).encode()
        try:
            message = memoryview(b"".join((_HEAD.pack(len(header), len(payload)), header, payload)))
            for start in range(0, len(message), PIECE_BYTES):
                self._sock.sendall(message[start : start + PIECE_BYTES])  # its time limit is for the whole call
        except OSError as error:
            raise Unavailable(f"{self.name} is gone: {describe(error, limit_s=SEND_S)}") from error

    def wait_readable(self, timeout_s: float | None = 0.0) -> bool:
        """Waits until a message, or the end of the stream, can be received; False after timeout_s (None: no limit)."""
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        try:
            return bool(_poll(self._sock, select.POLLIN, timeout_s))
        except (OSError, ValueError) as error:  # closed
            raise Unavailable(f"{self.name} is gone: {describe(error, limit_s=SEND_S)}") from error

    def receive(self, timeout_s: float | None = None, *, max_bytes: int | None = None) -> RankMessage:
        """Returns the next message. Raises Unavailable if the peer is gone, silent for timeout_s, or over max_bytes."""
        if not self.wait_readable(timeout_s):
            raise Unavailable(f"{self.name} sent no message within {timeout_s} s")
        fields_len, payload_len = _HEAD.unpack(self._exactly(_HEAD.size))
        if fields_len > _MAX_FIELD_BYTES or (max_bytes is not None and payload_len > max_bytes):
            raise Unavailable(f"{self.name} sent an invalid message")
        try:
            fields = json.loads(self._exactly(fields_len))
            kind = fields.pop("kind")
        except (ValueError, AttributeError, KeyError) as error:
            raise Unavailable(f"{self.name} sent an invalid message") from error
        return RankMessage(kind, fields, self._exactly(payload_len))

    def peer_closed(self) -> bool:
        """Returns whether the peer has closed its end; earlier messages may still be unread. Any thread."""
        try:
            return bool(_poll(self._sock, select.POLLRDHUP, 0.0))
        except (OSError, ValueError):  # closed here
            return True

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        self._sock.close()

    def _exactly(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            try:
                part = self._sock.recv(min(count, PIECE_BYTES))
            except OSError as error:
                raise Unavailable(f"{self.name} is gone: {describe(error, limit_s=SEND_S)}") from error
            if not part:
                raise Unavailable(f"{self.name} is gone")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def _poll(sock: socket.socket, events: int, timeout_s: float | None) -> bool:
    """Returns whether one of the events, or the end of the stream, occurs within timeout_s."""
    poll = select.poll()
    poll.register(sock, events)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def _proof(secret: bytes, side: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, side + nonce, hashlib.sha256).digest()
