"""Processes without the right to call a pod: strangers, relays, replays, forged KV targets, wrong roles."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from cli.stack.certificates import Authority
from common.auth import ALLOWED_ROLES, GATEWAY, CallGuard, MetadataItem, Signer, sign_calls
from common.errors import BatonError, NotServed, TransferFailed, Unauthenticated, Unavailable, UnknownTransfer
from common.pb import control_pb2, control_pb2_grpc, decode_pb2, prefill_pb2, transfer_pb2
from common.rpc import RpcServer, error_from_rpc, open_channel, translate_rpc_errors
from common.settings.process import DEFAULT_SECRET
from common.tls import TlsFiles
from common.types import KvTarget, Role, ValidRequest
from common.wire import kv_target_from_pb, kv_target_to_pb, request_to_pb
from engine.llm import LLM
from kv_transfer.backend.interface import Notification
from kv_transfer.backend.loopback import LoopbackFault
from kv_transfer.messages import Commit, CommitNotification, CommittedNotification, RangeWritten
from tests.rigs.gateway.gateway_rig import rig
from tests.rigs.pods.fake_pods import fake_cluster
from tests.rigs.pods.harness import (
    Cluster,
    GatewayStream,
    Pod,
    expected,
    gateway_client,
    prompt_of,
    request,
)
from tests.rigs.transfer import transfer_pods
from tests.rigs.transfer.transfer_pods import FakePin, hand_over
from tests.rigs.waiting import until

HANDSHAKE = "/baton.v1.Transfer/Handshake"
RESET = "/baton.v1.Control/ResetPrefixCache"
SECRET = DEFAULT_SECRET.encode()


async def raw_call(address: str, method: str, body: bytes = b"", metadata: Iterable[MetadataItem] = ()) -> bytes:
    """Makes a call with exactly these bytes over a plain channel. Raises BatonError."""
    async with open_channel(address) as channel:
        call = channel.unary_stream(method)(body, metadata=tuple(metadata), timeout=10.0)
        with translate_rpc_errors():
            return b"".join([part async for part in call])


class Recorder(grpc.GenericRpcHandler):
    """Records every call to a server, and answers with what `answer` returns."""

    def __init__(self, answer: Callable[[str, bytes, tuple[MetadataItem, ...]], Any]) -> None:
        self.calls: list[tuple[str, bytes, tuple[MetadataItem, ...]]] = []
        self._answer = answer

    def service(self, details: Any) -> Any:
        async def handle(body: bytes, context: Any) -> bytes:
            signed = tuple((k, v) for k, v in context.invocation_metadata() if k.startswith("baton-"))
            self.calls.append((details.method, body, signed))
            answer: bytes = await self._answer(details.method, body, signed)
            return answer

        return grpc.unary_unary_rpc_method_handler(handle)


@contextlib.asynccontextmanager
async def recording(
    answer: Callable[[str, bytes, tuple[MetadataItem, ...]], Any],
) -> AsyncIterator[tuple[str, Recorder]]:
    """Runs a foreign server. Yields its address and its recorder."""
    recorder, server = Recorder(answer), grpc.aio.server()
    server.add_generic_rpc_handlers((recorder,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", recorder
    finally:
        await server.stop(0)


async def no_answer(*_: object) -> bytes:
    return b""


async def targets(cluster: Cluster, *requests: ValidRequest) -> list[KvTarget]:
    """Reserves on the decode pod."""
    return [kv_target_from_pb((await cluster.reserve(r, remote_only=True)).target) for r in requests]


async def prefill(pod: Pod, r: ValidRequest, target: KvTarget) -> list[str | None]:
    """Prefills with this target, as a gateway. Returns the kinds of the events. Raises BatonError."""
    message = prefill_pb2.PrefillRequest(request=request_to_pb(r), target=kv_target_to_pb(target))
    with translate_rpc_errors():
        return [event.WhichOneof("event") async for event in pod.prefill.Prefill(message, timeout=20.0)]


def watch_writes(cluster: Cluster) -> list[str]:
    """Returns the receivers of all writes from now on."""
    writes: list[str] = []

    def on_write(_source: str, peer: str, _count: int) -> LoopbackFault:
        writes.append(peer)
        return LoopbackFault()

    cluster.fabric.on_write = on_write
    return writes


class TestStrangers:
    """Processes without the cluster's secret."""

    async def test_they_can_call_no_method_but_the_open_ones(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            guessed = Signer(b"guessed", GATEWAY, "gw", 1)
            for pod in cluster.pods:
                address, name = pod.runtime.address, pod.runtime.name
                for method in ALLOWED_ROLES:
                    for metadata in ((), (guessed.sign(method, b"", name),), (("baton-auth-bin", b"x" * 80),)):
                        with pytest.raises(BatonError) as refused:
                            await raw_call(address, method, metadata=metadata)
                        if isinstance(refused.value, Unauthenticated):
                            assert re.search("upgrade the caller|wrong signature", str(refused.value))
                        else:
                            assert isinstance(refused.value, NotServed)  # a service of the other role
                assert pod.runtime.transfer_node.stats().dropped["unauthenticated"] >= 3 * 10
                info = transfer_pb2.InfoResponse.FromString(await raw_call(address, "/baton.v1.Transfer/Info"))
                assert info.pod == name
                check = health_pb2.HealthCheckRequest().SerializeToString()
                assert await raw_call(address, "/grpc.health.v1.Health/Check", check)

    async def test_an_unsigned_prefill_contacts_no_foreign_address(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster, recording(no_answer) as (foreign, recorder):
            r = request(prompt_of(30))
            (target,) = await targets(cluster, r)
            message = prefill_pb2.PrefillRequest(request=request_to_pb(r))
            message.target.CopyFrom(kv_target_to_pb(replace(target, address=foreign)))
            with pytest.raises(Unauthenticated, match="not signed"):
                await raw_call(
                    cluster.prefill.runtime.address, "/baton.v1.Prefill/Prefill", message.SerializeToString()
                )
            # A gateway cannot change the address either.
            with pytest.raises(Unauthenticated, match="wrong signature"):
                await prefill(cluster.prefill, r, replace(target, address=foreign))
            await asyncio.sleep(0.2)
            assert recorder.calls == []
            await cluster.abort(r.request_id)

    async def test_they_cannot_reset_a_cache_or_take_a_token_stream(self, model_dir: Path, llm: LLM) -> None:
        async with Cluster.start(model_dir) as cluster:
            r, decode = request(prompt_of(30), 80), cluster.decode.runtime
            running = asyncio.create_task(cluster.generate(r))
            async with open_channel(decode.address) as channel:
                stolen: Any = channel.stream_stream("/baton.v1.Decode/Tokens")()
                hello = decode_pb2.TokensRequest(gateway_id=cluster.streams[0].gateway_id)
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await stolen.write(hello.SerializeToString())
                assert await stolen.code() is grpc.StatusCode.UNAUTHENTICATED
            for pod in cluster.pods:
                with pytest.raises(Unauthenticated, match="not signed"):
                    await raw_call(pod.runtime.address, RESET)
            assert (await running).ids == expected(llm, r)
            assert cluster.prefill.runtime.engine.pool.cached_hashes()

    async def test_nixl_metadata_is_given_only_to_pods(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            decode = cluster.decode.runtime
            body = transfer_pb2.HandshakeRequest(info=cluster.prefill.runtime.info()).SerializeToString()
            gateway = Signer(SECRET, GATEWAY, "gw", 1)
            foreign_name = Signer(SECRET, "prefill", "another-pod", 5)
            for metadata, problem in (
                ((), "not signed"),
                ((gateway.sign(HANDSHAKE, body, decode.name),), "called by gw in the role gateway"),
                ((foreign_name.sign(HANDSHAKE, body, decode.name),), "in the name of generation"),
            ):
                with pytest.raises(Unauthenticated, match=problem):
                    await raw_call(decode.address, HANDSHAKE, body, metadata)


class TestRelays:
    """Processes that get a signed call and send it on."""

    async def test_a_relayed_handshake_is_refused(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            decode, answers = cluster.decode.runtime, list[object]()

            async def relay(method: str, body: bytes, metadata: tuple[MetadataItem, ...]) -> bytes:
                try:
                    answers.append(await raw_call(decode.address, method, body, metadata))
                except BatonError as e:
                    answers.append(e)
                raise RuntimeError("the relay got its answer")

            async with recording(relay) as (foreign, recorder):
                with pytest.raises(BatonError):
                    await cluster.prefill.runtime.transfer_node.connect(foreign, "foreign")
                assert recorder.calls[0][0] == HANDSHAKE
                assert isinstance(answers[0], Unauthenticated)
                assert f"is signed for 'foreign', but this is '{decode.name}'" in str(answers[0])

    async def test_another_pod_cannot_answer_a_handshake(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir, decode=2) as cluster:
            first, second = (pod.runtime for pod in cluster.decodes)
            with pytest.raises(Unauthenticated):
                await cluster.prefill.runtime.transfer_node.connect(second.address, first.name)

    async def test_a_replayed_call_is_refused(self, model_dir: Path) -> None:
        """The bytes of a call that a gateway made for this pod, sent again."""
        async with Cluster.start(model_dir) as cluster, recording(no_answer) as (foreign, recorder):
            signer, name = Signer(SECRET, GATEWAY, "gw", 1), cluster.prefill.runtime.name
            async with open_channel(foreign) as channel:
                stub: Any = control_pb2_grpc.ControlStub(sign_calls(channel, signer, lambda: name))
                await stub.ResetPrefixCache(control_pb2.ResetPrefixCacheRequest())
            ((method, body, metadata),) = recorder.calls
            address = cluster.prefill.runtime.address
            await raw_call(address, method, body, metadata)
            with pytest.raises(Unauthenticated, match="replayed"):
                await raw_call(address, method, body, metadata)
            with pytest.raises(Unauthenticated, match="wrong signature"):
                await raw_call(address, "/baton.v1.Prefill/Abort", body, metadata)

    async def test_a_gateway_cannot_take_the_stream_or_the_id_of_another(self, model_dir: Path, llm: LLM) -> None:
        async with Cluster.start(model_dir) as cluster:
            decode, victim = cluster.decode.runtime, cluster.streams[0].gateway_id
            r = request(prompt_of(30), 80)
            running = asyncio.create_task(cluster.generate(r))
            async with gateway_client(decode, "gw-other") as other:
                stream = GatewayStream(other, victim)
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await stream.open()
                assert await stream._call.code() is grpc.StatusCode.UNAUTHENTICATED
                await stream.close()
                message = decode_pb2.ReserveRequest(request=request_to_pb(request([5])), gateway_id=victim)
                with pytest.raises(Unauthenticated, match="signed by 'gw-other'"), translate_rpc_errors():
                    await other.decode.Reserve(message, timeout=10.0)
            assert (await running).ids == expected(llm, r)


class TestKvTargets:
    """A prefill pod writes only to the blocks that the decode pod signed for this request."""

    async def test_swapped_blocks_are_refused_before_a_write(self, model_dir: Path, llm: LLM) -> None:
        """The KV of another request stays as it is: its answer and a later one from the prefix cache are right."""
        async with Cluster.start(model_dir) as cluster:
            victim, attacker = request(prompt_of(41, seed=1), 12), request(prompt_of(41, seed=2), 12)
            answer = await cluster.generate(victim, remote_only=True)
            again = replace(victim, request_id="again")
            theirs, mine = await targets(cluster, again, attacker)
            decode = cluster.decode.runtime
            cached = tuple(range(len(mine.blocks)))
            writes = watch_writes(cluster)
            for forged in (
                replace(mine, blocks=theirs.blocks + mine.blocks[len(theirs.blocks) :]),
                replace(mine, blocks=cached),
                replace(mine, transfer_id=theirs.transfer_id),
                replace(theirs, blocks=mine.blocks),
                theirs,  # right, but of another request
                replace(mine, signature=b""),
                replace(mine, pod="decode-x"),
                Signer(b"guessed", "decode", decode.name, 1).sign_target(mine, attacker.request_id, 60.0),
            ):
                with pytest.raises(BatonError) as refused:
                    await prefill(cluster.prefill, attacker, forged)
                assert isinstance(refused.value, Unauthenticated) or "target does not cover" in str(refused.value)
                await cluster.prefill.settled()
            assert writes == []
            await cluster.abort(attacker.request_id)
            await cluster.abort("again")
            await cluster.decode.settled()
            repeated = await cluster.generate(request(victim.prompt_ids, 12), remote_only=True)
            assert answer.ids == repeated.ids == expected(llm, victim)

    async def test_a_late_target_is_verified_too(self, model_dir: Path, llm: LLM) -> None:
        async with Cluster.start(model_dir) as cluster:
            r = request(prompt_of(41, seed=3), 8)
            inbox = cluster.streams[0].expect(r.request_id)
            (target,) = await targets(cluster, r)
            message = prefill_pb2.PrefillRequest(request=request_to_pb(r))
            call = cluster.prefill.prefill.Prefill(message, timeout=20.0)

            async def set_target(target: KvTarget) -> None:
                late = prefill_pb2.SetTargetRequest(request_id=r.request_id, target=kv_target_to_pb(target))
                with translate_rpc_errors():
                    await cluster.prefill.prefill.SetTarget(late, timeout=10.0)

            with pytest.raises(Unauthenticated, match="wrong signature"):
                await set_target(replace(target, blocks=tuple(reversed(target.blocks))))
            await set_target(target)
            assert [event.WhichOneof("event") async for event in call][-1] == "handed_off"
            tokens = list((await inbox.get()).tokens)
            assert tokens

    async def test_expired_and_replayed_targets_are_refused(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir, prefill=2) as cluster:
            r = request(prompt_of(41, seed=4), 1)
            (target,) = await targets(cluster, r)
            signer = cluster.decode.runtime.transfer_node.signer
            with pytest.raises(UnknownTransfer, match="expired"):
                await prefill(cluster.prefill, r, signer.sign_target(target, r.request_id, -100.0))
            assert (await prefill(cluster.prefill, r, target))[-1] == "handed_off"
            await cluster.decode.settled()
            await cluster.prefills[1].runtime.transfer_node.connect(target.address, target.pod)
            writes = watch_writes(cluster)
            for pod in cluster.prefills:  # the first one remembers the transfer; for the second one the target is right
                with contextlib.suppress(TransferFailed, UnknownTransfer):
                    assert (await prefill(pod, r, target))[-1] == "failed"
                await pod.settled()
            assert writes == []


class TestNotifications:
    """Messages over NIXL, which does not authenticate them."""

    async def test_only_the_holder_of_the_target_can_notify(self) -> None:
        cluster = transfer_pods.Cluster("loopback")
        try:
            sender, receiver = await cluster.pair(checksums=False)
            incoming = receiver.reserve("r", 0, [1, 2])
            transfer = sender.node.start_transfer(incoming.target, "r", 2, 30.0)
            transfer.push(0, [1], FakePin([1]))
            await until(lambda: transfer.delivered_blocks == 1)
            transfer_id, commit = incoming.target.transfer_id, Commit((9,), (None,))
            for key in (b"guess", b"", bytes(32)):
                for message in (RangeWritten(transfer_id, 0, 2), CommitNotification(transfer_id, commit)):
                    notification = Notification(sender.agent, message.pack(key))
                    await told(receiver, lambda n=notification: receiver.node.on_notification(n))
                acknowledgement = Notification(receiver.agent, CommittedNotification(transfer_id, 0).pack(key))
                await told(sender, lambda n=acknowledgement: sender.node.on_notification(n))
            assert receiver.node.stats().dropped["notification_forged"] == 6
            assert sender.node.stats().dropped["notification_forged"] == 3
            assert not incoming.over
            transfer.push(1, [2], FakePin([2]))
            transfer.finish([7], [None])
            await transfer.done()
            await until(lambda: incoming.over)
            assert incoming.committed == [Commit((7,), (None,))]
        finally:
            await cluster.stop()

    async def test_a_writer_without_the_target_cannot_open_or_commit(self) -> None:
        """Another pod of the cluster that only knows the id of a transfer and its request."""
        cluster = transfer_pods.Cluster("loopback")
        try:
            sender, receiver = await cluster.pair()
            other = await cluster.start("prefill-1", Role.PREFILL)
            await other.node.connect(receiver.address, receiver.name)
            incoming = receiver.reserve("r", 0, [1, 2])
            guessed = other.node.signer.sign_target(incoming.target, "r2", 60.0)
            with pytest.raises(UnknownTransfer, match="signature"):
                await other.node._rpc.open(guessed, "r", False, 5.0)
            transfer = sender.node.start_transfer(incoming.target, "r", 2, 30.0)
            await until(lambda: transfer.machine.state.value == "open")
            for target in (guessed, incoming.target):  # the right one too: another pod has opened the transfer
                with pytest.raises(UnknownTransfer):
                    await other.node._rpc.commit(target, Commit((9,), (None,)), 5.0)
            transfer.push(0, [1, 2], FakePin([1, 2]))
            transfer.finish([7], [None])
            await transfer.done()
            await hand_over(other, receiver, 3)
        finally:
            await cluster.stop()


@pytest.mark.parametrize(
    ("certificate", "role", "problem"),
    [
        ("gateway", GATEWAY, None),
        ("worker", GATEWAY, "the certificate of x has worker"),
        ("prefill", GATEWAY, "the certificate of x has prefill"),
        ("gateway", "prefill", "in the role prefill, but only gateway may call it"),
        (None, GATEWAY, "failed to connect"),
    ],
)
async def test_the_role_of_the_certificate_must_be_the_signed_one(
    tmp_path: Path, certificate: str | None, role: str, problem: str | None
) -> None:
    authority = Authority.create()
    for name in {"decode", certificate or "decode"}:
        authority.issue(tmp_path / name, name, "x", 1)

    class Control(control_pb2_grpc.ControlServicer):
        async def ResetPrefixCache(self, _request: Any, _context: Any) -> control_pb2.ResetPrefixCacheResponse:
            return control_pb2.ResetPrefixCacheResponse(cleared=3)

    tls = TlsFiles.of_directory(tmp_path / "decode", "decode")
    guard = CallGuard(Signer(b"secret", "decode", "decode-0", 1))
    server = RpcServer("127.0.0.1", 0, tls=tls, interceptors=(guard,))
    server.add_servicer(control_pb2_grpc.add_ControlServicer_to_server, Control(), "baton.v1.Control")
    address = f"127.0.0.1:{await server.start()}"
    own = None if certificate is None else TlsFiles.of_directory(tmp_path / certificate, certificate)
    channel = open_channel(address, own)
    try:
        signed = sign_calls(channel, Signer(b"secret", role, "caller", 1), lambda: "decode-0")
        stub: Any = control_pb2_grpc.ControlStub(signed)
        call = stub.ResetPrefixCache(control_pb2.ResetPrefixCacheRequest(), timeout=10.0)
        if problem is None:
            assert (await call).cleared == 3
        else:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            error = error_from_rpc(refused.value)
            assert isinstance(error, Unavailable if certificate is None else Unauthenticated)
            assert problem in str(error)
    finally:
        await channel.close()
        await server.stop(0)


async def test_a_message_that_cannot_be_parsed_is_an_invalid_argument() -> None:
    """The first message of a token stream is garbage, after a right signature."""
    async with fake_cluster() as cluster:
        pod = cluster.decodes[0]
        channel = open_channel(pod.address)
        try:
            signed: Any = sign_calls(channel, Signer(DEFAULT_SECRET.encode(), GATEWAY, "gw", 1), lambda: pod.name)
            for call in (
                signed.stream_stream("/baton.v1.Decode/Tokens")(iter([b"\x09garbage"]), timeout=10.0),
                signed.unary_unary("/baton.v1.Decode/Abort", bytes, bytes)(b"\x09garbage", timeout=10.0),
            ):
                with pytest.raises(grpc.aio.AioRpcError, match="cannot be parsed") as refused:
                    await (call.read() if hasattr(call, "read") else call)
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        finally:
            await channel.close()


async def told(pod: transfer_pods.Pod, act: Callable[[], None]) -> None:
    """Runs `act` on the pod's transfer thread."""
    await asyncio.wrap_future(pod.node._thread.call(act))


async def test_a_gateway_with_another_secret_logs_why_it_has_no_pods(
    smollm2_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_cluster() as cluster, rig(cluster, smollm2_dir, wait=False, secret="another secret") as gw:
        problem = "token stream of decode-0 cannot be opened: /baton.v1.Decode/Tokens carries a wrong signature"
        await until(lambda: problem in caplog.text)
        await asyncio.sleep(0.5)  # it is tried again and again
        assert caplog.text.count("token stream of") == 1
        assert (await gw.complete()).status_code == 503
        assert not cluster.decodes[0].seen.reserved
