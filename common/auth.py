"""Signatures of the cluster: on every call between its services, and on KV targets. HMAC-SHA256 with its secret.

The metadata entry `baton-call-bin` of a call holds

    mac | version, generation, timestamp, nonce | role, name, receiver

The mac covers the rest of the entry, the method and the message as it is sent. So the receiver verifies a message
before it parses it, and an unknown field does not change the outcome. A stream of requests is signed at its opening,
without a message. A call is accepted once, by the receiver that it names, within MAX_SKEW_S of its timestamp and not
from before the receiver's start. The receiver remembers the nonces of calls with a right mac only, so unsigned calls
cannot fill its memory.

Invariant for rolling upgrades: a new field of a message has the highest number in the message. The signature of a KV
target covers its named fields, because a gateway parses and serializes the target on its way.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError

from common.call_wrapper import CallWrapper
from common.errors import ConfigError, InvalidRequest, Unauthenticated, UnknownTransfer
from common.tls import peer_identity
from common.types import KvTarget, Role

SIGNATURE_KEY = "baton-call-bin"
MAX_SKEW_S = 30.0
GATEWAY = "gateway"  #: Role of a gateway in signatures and certificates. A pod has the name of its Role at the start.
OPERATOR = "operator"  #: Role of `baton role` and `baton planner`, which change pods.

_PODS, _GATEWAYS = frozenset(role.value for role in Role), frozenset((GATEWAY,))
#: Roles that may call a method. A method that is neither in this table nor open is refused.
ALLOWED_ROLES: Mapping[str, frozenset[str]] = {
    "/baton.v1.Prefill/Prefill": _GATEWAYS,
    "/baton.v1.Prefill/SetTarget": _GATEWAYS,
    "/baton.v1.Prefill/Abort": _GATEWAYS,
    "/baton.v1.Decode/Reserve": _GATEWAYS,
    "/baton.v1.Decode/Abort": _GATEWAYS,
    "/baton.v1.Decode/Tokens": _GATEWAYS,
    "/baton.v1.Embedding/Embed": _GATEWAYS,
    "/baton.v1.Control/ResetPrefixCache": _GATEWAYS,
    "/baton.v1.Control/LoadAdapter": _GATEWAYS,
    "/baton.v1.Control/UnloadAdapter": _GATEWAYS,
    "/baton.v1.Control/ListAdapters": _GATEWAYS,
    "/baton.v1.Control/SwitchRole": frozenset((OPERATOR,)),
    "/baton.v1.Transfer/Handshake": _PODS,
    "/baton.v1.Transfer/Probe": _PODS,
    "/baton.v1.Transfer/Open": _PODS,
    "/baton.v1.Transfer/Commit": _PODS,
    "/baton.v1.Transfer/Drain": _PODS,
    "/baton.v1.Transfer/Pull": _PODS,
}
#: Methods and services that every process may call: they reveal the layout and the addresses of pods.
OPEN_METHODS = ("/baton.v1.Transfer/Info", "/grpc.health.v1.Health/", "/grpc.reflection.")

_OLD_KEY = "baton-auth-bin"  # Entry of earlier versions, which signed only the calls between pods
_VERSION = 2
_HEAD = struct.Struct("<BQQ16s")  # Version, generation, timestamp in ms, nonce
_MAC_BYTES, _NONCE_BYTES = 32, 16

MetadataItem = tuple[str, str | bytes]
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class CallerIdentity:
    """The verified process behind a call."""

    role: str  # GATEWAY, or the value of a pod's Role
    name: str
    generation: int


_caller: ContextVar[CallerIdentity] = ContextVar("caller")


def current_caller() -> CallerIdentity:
    """Returns the caller of the call that this task serves. Raises Unauthenticated on a server without a CallGuard."""
    caller = _caller.get(None)
    if caller is None:
        raise Unauthenticated("this server does not verify its callers: give its RpcServer a CallGuard")
    return caller


class Signer:
    """Signs the calls and KV targets of one process, and verifies those of others. Calls are verified on one thread."""

    def __init__(self, secret: bytes, role: str, name: str, generation: int) -> None:
        if not secret:
            raise ConfigError("the cluster's secret is empty", field="secret")
        self.name, self._generation = name, generation
        self.refused = 0  # Number of calls without a right signature
        # Each kind of signature has its own key, so that neither passes for the other.
        self._call_key, self._target_key = (hmac.digest(secret, use, "sha256") for use in (b"call", b"KV target"))
        self._sender = f"{role}\0{name}\0"
        self._seen: dict[int, set[bytes]] = {}  # Nonces of accepted calls, in buckets of MAX_SKEW_S by timestamp
        self._started_ms = int(time.time() * 1000)  # Older calls may be replays: an earlier process knew their nonces

    def sign(self, method: str, body: bytes, receiver: str) -> MetadataItem:
        """Returns the metadata entry that signs a call of `method` with the message `body` to the pod `receiver`."""
        now_ms = int(time.time() * 1000)
        head = _HEAD.pack(_VERSION, self._generation, now_ms, os.urandom(_NONCE_BYTES))
        head += (self._sender + receiver).encode()
        return SIGNATURE_KEY, self._call_mac(method, head, body) + head

    def verify(
        self, method: str, body: bytes, metadata: Iterable[MetadataItem] | None, now: float | None = None
    ) -> CallerIdentity:
        """Verifies the signature of a call to this process. Raises Unauthenticated.

        `now` is in seconds since the epoch; None: the current time.
        """
        try:
            return self._verify(method, body, dict(metadata or ()), time.time() if now is None else now)
        except Unauthenticated:
            self.refused += 1
            raise

    def _verify(self, method: str, body: bytes, metadata: Mapping[str, str | bytes], now: float) -> CallerIdentity:
        value = metadata.get(SIGNATURE_KEY)
        if not isinstance(value, bytes) or len(value) <= _MAC_BYTES + _HEAD.size:
            older = " by this version's rules" if _OLD_KEY in metadata else ""
            remedy = "upgrade the caller to this version of Baton, and give it this cluster's secret (BATON_SECRET)"
            raise Unauthenticated(f"{method} is not signed{older}: {remedy}")
        mac, head = value[:_MAC_BYTES], value[_MAC_BYTES:]
        if head[0] != _VERSION:
            wrong = f"{method} has a signature of version {head[0]}, this process verifies version {_VERSION}"
            raise Unauthenticated(f"{wrong}: upgrade the older of the two")
        if not hmac.compare_digest(mac, self._call_mac(method, head, body)):
            raise Unauthenticated(f"{method} carries a wrong signature; do both processes have the same secret?")
        _, generation, sent_ms, nonce = _HEAD.unpack_from(head)
        role, name, receiver = head[_HEAD.size :].decode().split("\0")
        if receiver != self.name:
            raise Unauthenticated(f"{method} of {name} is signed for {receiver!r}, but this is {self.name!r}")
        if abs(now - sent_ms / 1000) > MAX_SKEW_S:
            raise Unauthenticated(f"{method} was signed {now - sent_ms / 1000:.0f} s ago; are the clocks right?")
        if sent_ms < self._started_ms:
            raise Unauthenticated(f"{method} of {name} was signed before {self.name} started: send the call again")
        if role not in ALLOWED_ROLES.get(method, ()):
            allowed = " or ".join(sorted(ALLOWED_ROLES.get(method, ()))) or "no role"
            raise Unauthenticated(f"{method} was called by {name} in the role {role}, but only {allowed} may call it")
        self._remember(nonce, sent_ms / 1000, now, method)
        return CallerIdentity(role, name, generation)

    def _remember(self, nonce: bytes, sent: float, now: float, method: str) -> None:
        for bucket in [b for b in self._seen if (b + 1) * MAX_SKEW_S < now - MAX_SKEW_S]:
            del self._seen[bucket]
        seen = self._seen.setdefault(int(sent // MAX_SKEW_S), set())
        if nonce in seen:
            raise Unauthenticated(f"{method} was replayed")
        seen.add(nonce)

    def _call_mac(self, method: str, head: bytes, body: bytes) -> bytes:
        return hmac.digest(self._call_key, _joined(method.encode(), head, hashlib.sha256(body).digest()), "sha256")

    def sign_target(self, target: KvTarget, request_id: str, valid_s: float, adapter: str = "") -> KvTarget:
        """Returns the KV target of a request with a signature that expires after valid_s seconds.

        `adapter` is the digest of the request's LoRA adapter, empty for the base model.

        MAX_SKEW_S is added for the clocks of other machines. The receiver of the KV keeps to the exact time itself.
        """
        target = replace(target, expires_at=int((time.time() + valid_s + MAX_SKEW_S) * 1000))
        return replace(target, signature=self._target_mac(target, request_id, adapter))

    def verify_target(self, target: KvTarget, request_id: str, adapter: str = "") -> None:
        """Verifies that a pod of this cluster signed the KV target for this request and this adapter.

        Raises Unauthenticated, or UnknownTransfer if the signature has expired.
        """
        if not target.signature:
            raise Unauthenticated(f"the KV target of {target.pod} is not signed: upgrade that pod to this version")
        if not hmac.compare_digest(target.signature, self._target_mac(target, request_id, adapter)):
            raise Unauthenticated(f"the KV target of {target.pod} for request {request_id} has a wrong signature")
        if (late_s := time.time() - target.expires_at / 1000) > 0:
            raise UnknownTransfer(f"the KV target of {target.pod} for request {request_id} expired {late_s:.1f} s ago")

    def _target_mac(self, target: KvTarget, request_id: str, adapter: str) -> bytes:
        transfer_id = target.transfer_id
        numbers = (transfer_id.generation, transfer_id.number, target.expires_at, target.first_block)
        packed = struct.pack(f"<QQQI{len(target.blocks)}I", *numbers, *target.blocks)
        names = (request_id, target.pod, target.address, target.fingerprint, *([adapter] if adapter else []))
        return hmac.digest(self._target_key, _joined(packed, *(name.encode() for name in names)), "sha256")


def _joined(*parts: bytes) -> bytes:
    """Joins byte strings so that different parts never give the same bytes."""
    return b"".join(piece for part in parts for piece in (len(part).to_bytes(8, "little"), part))


class SignedChannel:
    """A channel to one pod that signs the calls of ALLOWED_ROLES.

    It is a channel rather than a client interceptor of grpc.aio: those run before a message is serialized, so they
    cannot sign the sent bytes, and cost a task for each call.
    """

    def __init__(self, channel: grpc.aio.Channel, signer: Signer, receiver: Callable[[], str]) -> None:
        self._channel, self._signer = channel, signer
        self._receiver = receiver  # Returns the name of the pod at the other end

    def unary_unary(self, *method: Any, **more: Any) -> Any:
        return self._signed(self._channel.unary_unary, *method, **more)

    def unary_stream(self, *method: Any, **more: Any) -> Any:
        return self._signed(self._channel.unary_stream, *method, **more)

    def stream_stream(self, *method: Any, **more: Any) -> Any:
        return self._signed_stream(self._channel.stream_stream(*method, **more), method[0])

    def _signed(
        self,
        make: Callable[..., Any],
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: Any,
    ) -> Any:
        if method not in ALLOWED_ROLES:
            return make(method, request_serializer, response_deserializer)
        send = make(method, None, response_deserializer)

        def call(request: Any, *, metadata: Iterable[MetadataItem] | None = None, **options: Any) -> Any:
            body = request_serializer(request)
            signature = self._signer.sign(method, body, self._receiver())
            return send(body, metadata=(*(metadata or ()), signature), **options)

        return call

    def _signed_stream(self, open_stream: Callable[..., Any], method: str) -> Any:
        def call(*requests: Any, metadata: Iterable[MetadataItem] | None = None, **options: Any) -> Any:
            signature = self._signer.sign(method, b"", self._receiver())
            return open_stream(*requests, metadata=(*(metadata or ()), signature), **options)

        return call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


def sign_calls(channel: grpc.aio.Channel, signer: Signer, receiver: Callable[[], str]) -> grpc.aio.Channel:
    """Returns a SignedChannel, as the type that the generated stubs ask for."""
    return cast("grpc.aio.Channel", SignedChannel(channel, signer, receiver))


class CallGuard(CallWrapper):
    """Verifies each call of a server, except OPEN_METHODS, before its message is parsed. See current_caller.

    Over TLS the role in the caller's certificate must be the signed one.
    """

    def __init__(self, signer: Signer) -> None:
        super().__init__()
        self._signer = signer

    def wraps(self, method: str) -> bool:
        return not method.startswith(OPEN_METHODS)

    def deserializer(self, method: str, handler: Any) -> Callable[[bytes], Any] | None:
        return partial(_parse, method, handler.request_deserializer) if handler.request_streaming else None

    @contextmanager
    def around(self, method: str, handler: Any, request: Any, context: Any) -> Iterator[Any]:
        streamed = handler.request_streaming
        self._admit(method, b"" if streamed else request, context)
        yield request if streamed else _parse(method, handler.request_deserializer, request)

    def _admit(self, method: str, body: bytes, context: Context) -> None:
        metadata = cast("Iterable[MetadataItem] | None", context.invocation_metadata())
        caller = self._signer.verify(method, body, metadata)
        if b"ssl" in context.auth_context().get("transport_security_type", ()):
            role, name = peer_identity(context) or ("no role", "the caller")
            if role != caller.role:
                self._signer.refused += 1
                wrong = f"{method} is signed in the role {caller.role}"
                raise Unauthenticated(f"{wrong}, but the certificate of {name} has {role}: use the right certificate")
        _caller.set(caller)


def _parse(method: str, deserialize: Callable[[bytes], Any], message: bytes) -> Any:
    """Parses a message of a call. Raises InvalidRequest."""
    try:
        return deserialize(message)
    except DecodeError as e:
        raise InvalidRequest(f"the message of {method} cannot be parsed: {e}") from e
