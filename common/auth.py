"""Signatures of messages between the pods of one cluster: HMAC-SHA256 with the cluster's secret.

The metadata entry `baton-auth-bin` holds mac, generation, timestamp, nonce and pod. The mac covers the other four, the
method's name and the message in protobuf's deterministic form. A message is accepted once, within MAX_SKEW_S of its
timestamp. Nonces are remembered only of messages with a right mac, so unsigned traffic cannot fill the memory.

Invariant for rolling upgrades: a new field of a signed message has the highest number in the message. An older peer
serializes unknown fields last, so it computes the mac over the same bytes.
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

_MAC_BYTES, _NONCE_BYTES = 32, 16
_HEAD = struct.Struct(f"<QQ{_NONCE_BYTES}s")  #: Generation, timestamp in ms, nonce; the pod's name follows.

MetadataItem = tuple[str, str | bytes]


class Signer:
    """Signs the messages of one pod (`pod`, `generation`) and verifies other pods' messages. Used by one thread."""

    def __init__(self, secret: bytes, pod: str, generation: int) -> None:
        if not secret:
            raise ConfigError("the cluster's secret is empty", field="secret")
        self._secret, self._pod, self._generation = secret, pod, generation
        self._seen: dict[int, set[bytes]] = {}  #: Nonces of accepted messages, in buckets of MAX_SKEW_S by timestamp.

    def sign(self, method: str, message: Message) -> tuple[MetadataItem, ...]:
        """Returns metadata with the signature of `message` for a call of `method`, a name that both sides use."""
        now_ms = int(time.time() * 1000)
        head = _HEAD.pack(self._generation, now_ms, os.urandom(_NONCE_BYTES)) + self._pod.encode()
        return ((AUTH_KEY, self._mac(method, head, message) + head),)

    def verify(
        self, method: str, message: Message, metadata: Iterable[MetadataItem] | None, now: float | None = None
    ) -> tuple[str, int]:
        """Verifies a signature and returns the sender's (pod, generation). Raises Unauthenticated.

        `now` is in seconds since the epoch; None: the current time.
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
