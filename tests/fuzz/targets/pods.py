"""Pods: the messages of every RPC, from an authenticated caller, and notifications over NIXL.

An input of `pods` is a byte of flags, the path of a method, a line end, and a message. An input of `notifications` is
a byte of flags and a payload.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from common.auth import OPEN_METHODS, Signer, sign_calls
from common.pb import control_pb2, decode_pb2, embedding_pb2, prefill_pb2, transfer_pb2, types_pb2
from common.rpc import open_channel
from common.settings.process import DEFAULT_SECRET
from common.types import FinishReason, Grammar, KvTarget, Role, TransferId
from common.wire import kv_target_from_pb, kv_target_to_pb, request_to_pb
from kv_transfer.backend.interface import Notification
from kv_transfer.messages import (
    _MAC_BYTES,
    Commit,
    CommitNotification,
    CommittedNotification,
    RangeWritten,
    Writer,
    _sealed,
)
from tests.fuzz.mutators import bent_message, mutate
from tests.fuzz.target import AsyncFuzzTarget
from tests.rigs.pods.harness import Cluster, request, tiny_llama
from tests.rigs.transfer import transfer_pods

_PROMPT = tuple(range(2, 12))
_TARGET = KvTarget(TransferId(5, 1), "decode", "127.0.0.1:1", 0, (1, 2, 3), "f")
_REQUEST = request_to_pb(replace(request(_PROMPT, max_tokens=2, logprobs=1), grammar=Grammar('start: "a"', "f")))
_PLAIN = request_to_pb(request(_PROMPT, max_tokens=2))
_KV_TARGET = kv_target_to_pb(_TARGET)

_HINT = prefill_pb2.PullHint(pod="d", address="127.0.0.1:1", blocks=1)

#: A message of each method, in the order of services.
_CALLS: dict[str, list[Message]] = {
    "/baton.v1.Decode/Reserve": [decode_pb2.ReserveRequest(request=r, gateway_id="gw") for r in (_PLAIN, _REQUEST)],
    "/baton.v1.Decode/Abort": [decode_pb2.DecodeAbortRequest(request_id="r", child=0)],
    "/baton.v1.Decode/Tokens": [decode_pb2.TokensRequest(gateway_id="gw"), decode_pb2.TokensRequest(acked=5)],
    "/baton.v1.Control/ResetPrefixCache": [control_pb2.ResetPrefixCacheRequest()],
    "/baton.v1.Prefill/Prefill": [
        prefill_pb2.PrefillRequest(request=_PLAIN, target=_KV_TARGET),
        prefill_pb2.PrefillRequest(request=_REQUEST, pull=_HINT),
    ],
    "/baton.v1.Prefill/SetTarget": [prefill_pb2.SetTargetRequest(request_id="r", target=_KV_TARGET)],
    "/baton.v1.Prefill/Abort": [prefill_pb2.PrefillAbortRequest(request_id="r")],
    "/baton.v1.Embedding/Embed": [embedding_pb2.EmbedRequest(request=_PLAIN)],
    "/baton.v1.Transfer/Info": [transfer_pb2.InfoRequest()],
    "/baton.v1.Transfer/Handshake": [transfer_pb2.HandshakeRequest(agent_metadata=b"x")],
    "/baton.v1.Transfer/Probe": [transfer_pb2.ProbeRequest(pod="peer", generation=1, nonce=b"n" * 16)],
    "/baton.v1.Transfer/Open": [transfer_pb2.OpenRequest(pod="peer", generation=1, transfer_id=_KV_TARGET.transfer_id)],
    "/baton.v1.Transfer/Commit": [transfer_pb2.CommitRequest(generation=1, first_tokens=[5], checksums=[1])],
    "/baton.v1.Transfer/Drain": [transfer_pb2.DrainRequest(transfer_id=types_pb2.TransferId(generation=1, number=1))],
    "/baton.v1.Transfer/Pull": [transfer_pb2.PullRequest(request_id="r", target=_KV_TARGET, hashes=[b"h" * 16] * 3)],
}  # fmt: skip
_PATHS = list(_CALLS)
_SIGN_TARGET, _KNOWN_POD, _TO_PREFILL = 1, 2, 4  # flags
_OUR_FAULT = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_TIMEOUT_S = 0.05  #: Of a call; a message may ask a pod to wait for another one.


class Pods(AsyncFuzzTarget):
    """Calls of a gateway and of a pod that have the cluster's secret: their messages are not trusted."""

    async def start(self) -> None:
        folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        running = Cluster.start(tiny_llama(Path(folder)), decode_config={"local_prefill": "auto"})
        self._cluster = await self.stack.enter_async_context(running)
        self._numbers = itertools.count()
        secret = DEFAULT_SECRET.encode()
        self._signer = Signer(secret, Role.PREFILL.value, "peer", 1)
        self._infos = [await pod.info() for pod in self._cluster.pods]
        self._peers: list[grpc.aio.Channel] = []
        for pod in self._cluster.pods:
            channel = sign_calls(open_channel(pod.runtime.address), self._signer, lambda name=pod.runtime.name: name)
            self._peers.append(channel)
            self.stack.push_async_callback(channel.close)

    def seeds(self) -> Sequence[bytes]:
        hello = transfer_pb2.HandshakeRequest(agent_metadata=b"x")
        hello.info.CopyFrom(self._infos[0])
        hello.info.pod, hello.info.generation = "peer", 1
        inputs = [(path, message) for path, messages in _CALLS.items() for message in messages]
        inputs.append(("/baton.v1.Transfer/Handshake", hello))
        return [_input(flags, path, m) for path, m in inputs for flags in (0, _TO_PREFILL, _SIGN_TARGET | _KNOWN_POD)]

    def make(self, corpus: Sequence[bytes], rng: Random) -> bytes:
        data = rng.choice(corpus)
        flags, (path, _, body) = data[0] if data else 0, data[1:].partition(b"\n")
        if rng.random() < 0.1 or path.decode("latin-1") not in _CALLS:
            return mutate(data, rng, (), corpus)
        message = _CALLS[path.decode()][0].__class__()
        try:
            message.ParseFromString(body)
        except DecodeError:
            message = rng.choice(_CALLS[path.decode()])
        return _input(flags ^ rng.choice((0, 1, 2, 4)), path.decode(), bent_message(message, rng))

    async def handle(self, data: bytes) -> str:
        flags, (name, _, body) = data[0] if data else 0, data[1:].partition(b"\n")
        path = name.decode("latin-1") if name.decode("latin-1") in _CALLS else _PATHS[len(data) % len(_PATHS)]
        message: Any = _CALLS[path][0].__class__()
        parsed = True
        try:
            message.ParseFromString(body)
            self._fit(message, flags)
            body = message.SerializeToString()
        except DecodeError:
            parsed = path not in OPEN_METHODS  # without a guard gRPC itself answers UNKNOWN
        service = path.split("/")[1].removeprefix("baton.v1.")
        index = {"Decode": 1, "Prefill": 0, "Embedding": 0}.get(service, 0 if flags & _TO_PREFILL else 1)
        channel = self._peers[index] if "Transfer" in path else self._cluster.pods[index].channel
        code, details = grpc.StatusCode.OK, ""
        try:
            await _call(channel, path, body)
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
        assert not parsed or code not in _OUR_FAULT, details
        return f"{path} {code.name} {details[:30]}"

    def _fit(self, message: Any, flags: int) -> None:
        """Gives the message the names and signatures that get it past the first checks."""
        fields = message.DESCRIPTOR.fields_by_name
        inner = message.request if "request" in fields else message
        number = next(self._numbers)
        if "request" in fields and inner.request_id:
            inner.request_id = f"f{number}"
        if "gateway_id" in fields and flags & _KNOWN_POD:
            message.gateway_id = self._cluster.streams[0].gateway_id
        if "target" in fields and flags & _KNOWN_POD:
            message.target.pod, message.target.fingerprint = self._infos[1].pod, self._infos[1].fingerprint
            message.target.address = self._cluster.pods[1].runtime.address
        if "target" in fields and flags & _SIGN_TARGET and message.target.HasField("transfer_id"):
            request_id = inner.request_id if "request_id" in inner.DESCRIPTOR.fields_by_name else ""
            target = self._signer.sign_target(kv_target_from_pb(message.target), request_id, 1.0)
            message.target.CopyFrom(kv_target_to_pb(target))


async def _call(channel: Any, path: str, body: bytes) -> None:
    def as_it_is(raw: bytes) -> bytes:
        return raw

    if path.endswith("/Tokens"):
        call = channel.stream_stream(path, request_serializer=as_it_is, response_deserializer=as_it_is)(
            timeout=_TIMEOUT_S
        )
        await call.write(body)
        await call.done_writing()
        async for _ in call:
            pass
    elif path.endswith("/Prefill"):
        async for _ in channel.unary_stream(path, as_it_is, as_it_is)(body, timeout=_TIMEOUT_S):
            pass
    else:
        await channel.unary_unary(path, as_it_is, as_it_is)(body, timeout=_TIMEOUT_S)


def _input(flags: int, path: str, message: Message) -> bytes:
    return bytes([flags & 7]) + path.encode() + b"\n" + message.SerializeToString()


_SEAL, _LIVE_ID, _WRITER = 1, 2, 4  # flags: right mac, the open transfer's id, from its writer
_BLOCKS = (9, 7, 8, 3)


class Notifications(AsyncFuzzTarget):
    """Payloads that arrive over NIXL, from the transfer's writer and from others, with and without a right mac."""

    words = tuple(b"BTN%d" % i for i in range(1, 10))

    async def start(self) -> None:
        cluster = transfer_pods.Cluster("loopback")
        self.stack.push_async_callback(cluster.stop)
        self._sender, self._pod = await cluster.pair(checksums=False)
        self._writer = Writer("prefill-0", self._sender.generation, self._sender.agent, self._sender.address)
        self._numbers = itertools.count()
        await self._expect()

    async def _expect(self) -> None:
        """Makes the pod expect a transfer, which its writer opens."""
        request_id = f"r{next(self._numbers)}"
        self._incoming = self._pod.reserve(request_id, 2, _BLOCKS)
        target, receiver = self._incoming.target, self._pod.node._incoming
        opened = (target.transfer_id, request_id, target.signature, self._writer)
        await self._on_thread(lambda: receiver.open_transfer(*opened))
        self._machine = receiver._table[target.transfer_id].machine

    async def _on_thread(self, function: Any) -> Any:
        return await asyncio.wrap_future(self._pod.node._thread.call(function))

    def seeds(self) -> Sequence[bytes]:
        transfer_id = TransferId(5, 1)
        commit = Commit((7, 8), (None, FinishReason.LENGTH))
        messages = (
            RangeWritten(transfer_id, 2, 4),
            RangeWritten(transfer_id, 3, 1),
            CommitNotification(transfer_id, commit),
            CommitNotification(transfer_id, Commit((), ())),
            CommittedNotification(transfer_id, 1234),
        )
        return [bytes([flags]) + message.pack(b"s") for message in messages for flags in range(8)]

    def make(self, corpus: Sequence[bytes], rng: Random) -> bytes:
        data = mutate(rng.choice(corpus), rng, self.words, corpus)
        return bytes([rng.randrange(8)]) + data[1:] if rng.random() < 0.3 else data

    async def handle(self, data: bytes) -> str:
        flags, payload = data[0] if data else 0, data[1:]
        target = self._incoming.target
        if flags & _LIVE_ID:
            live = RangeWritten(target.transfer_id, 0, 1).pack(target.signature)
            payload = payload[:4] + live[4:20] + payload[20:]
        if flags & _SEAL:
            payload = _sealed(payload[:-_MAC_BYTES], target.signature)
        peer = self._writer.agent if flags & _WRITER else "stranger"
        before = set(self._machine.missing), self._machine._commit
        await self._on_thread(lambda: self._pod.node.on_notification(Notification(peer, payload)))
        changed = (set(self._machine.missing), self._machine._commit) != before
        assert not changed or (flags & _SEAL and flags & _WRITER), "changed by a stranger"
        outcome = f"{changed} {self._machine.state.value} {sorted(self._pod.node.stats().dropped)}"
        if self._incoming.over:
            assert self._incoming.pin.free
            await self._expect()
        return outcome
