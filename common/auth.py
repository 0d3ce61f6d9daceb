"""Signatures by which pods of one cluster know each other's messages: HMAC-SHA256 with the cluster's secret.

One metadata entry `baton-auth-bin` carries mac, generation, timestamp, nonce and pod; the mac covers all of them, the
method's name and the message in protobuf's deterministic form. A message is accepted once, within MAX_SKEW_S of its
timestamp. Nonces are kept in buckets by timestamp and only for messages whose mac was right, so a stranger cannot fill
memory and a bucket goes as soon as its timestamps would be refused anyway.

Invariant for rolling upgrades: a field added to a signed message has a higher number than all fields before it, so
that an older peer, which keeps unknown fields last, sees the same bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
import time
from collections.abc import Iterable

from google.protobuf.message import Message

from common.errors import ConfigError, Unauthenticated

AUTH_KEY = "baton-auth-bin"
MAX_SKEW_S = 30.0

_MAC_BYTES = 32
_NONCE_BYTES = 16
_HEAD = struct.Struct(f"<QQ{_NONCE_BYTES}s")  # generation, timestamp in ms, nonce; the pod's name follows

MetadataItem = tuple[str, str | bytes]


class Signer:
    """Signs what `pod` of `generation` sends and verifies what others send; used from one thread."""

    def __init__(self, secret: bytes, pod: str, generation: int) -> None:
        if not secret:
            raise ConfigError("the cluster's secret is empty", field="secret")
        self._secret = secret
        self._pod = pod
        self._generation = generation
        self._seen: dict[int, set[bytes]] = {}

    def sign(self, method: str, message: Message) -> tuple[MetadataItem, ...]:
        """Metadata that signs `message` for a call of `method` (any name that both sides agree on)."""
        now_ms = int(time.time() * 1000)
        head = _HEAD.pack(self._generation, now_ms, os.urandom(_NONCE_BYTES)) + self._pod.encode()
        return ((AUTH_KEY, self._mac(method, head, message) + head),)

    def verify(
        self, method: str, message: Message, metadata: Iterable[MetadataItem] | None, now: float | None = None
    ) -> tuple[str, int]:
        """The sender's (pod, generation). Raises Unauthenticated.

        now: seconds since the epoch, the current time when None.
        """
        value = next((v for k, v in metadata or () if k == AUTH_KEY), None)
        if not isinstance(value, bytes) or len(value) < _MAC_BYTES + _HEAD.size:
            raise Unauthenticated(f"{method} is not signed")
        mac, head = value[:_MAC_BYTES], value[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(method, head, message)):
            raise Unauthenticated(f"{method} carries a wrong signature; do both pods have the same secret?")
        generation, sent_ms, nonce = _HEAD.unpack_from(head)
        now = time.time() if now is None else now
        if abs(now - sent_ms / 1000) > MAX_SKEW_S:
            raise Unauthenticated(f"{method} was signed {now - sent_ms / 1000:.0f} s ago; are the clocks right?")
        self._remember(nonce, sent_ms / 1000, now, method)
        return head[_HEAD.size :].decode(), generation

    def _remember(self, nonce: bytes, sent: float, now: float, method: str) -> None:
        for bucket in [b for b in self._seen if (b + 1) * MAX_SKEW_S < now - MAX_SKEW_S]:
            del self._seen[bucket]
        seen = self._seen.setdefault(int(sent // MAX_SKEW_S), set())
        if nonce in seen:
            raise Unauthenticated(f"{method} was replayed")
        seen.add(nonce)

    def _mac(self, method: str, head: bytes, message: Message) -> bytes:
        mac = hmac.new(self._secret, digestmod=hashlib.sha256)
        for part in (method.encode(), head, message.SerializeToString(deterministic=True)):
            mac.update(len(part).to_bytes(8, "little"))
            mac.update(part)
        return mac.digest()
