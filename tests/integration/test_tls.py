"""TLS of servers and channels: between services with certificates of both ends, and the gateway's public side."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.empty_pb2 import Empty

from cli import probes
from cli.stack.certificates import Authority
from common import tls
from common.errors import BatonError, Unavailable
from common.pb import inference_pb2, inference_pb2_grpc
from common.rpc import RpcServer, open_channel, translate_rpc_errors
from common.tls import TlsFiles, peer_identity
from tests.rigs.gateway.gateway_rig import MODEL, rig
from tests.rigs.pods.fake_pods import fake_cluster
from tests.rigs.waiting import until

METHOD, STREAM = "/baton.v1.Test/Call", "/baton.v1.Test/Stream"
PLAIN_AGAINST_TLS = "the peer ended the connection at its start: does it use TLS"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create()


def files(authority: Authority, directory: Path, role: str, name: str = "") -> TlsFiles:
    authority.issue(directory, role, name or role, days=1)
    found = TlsFiles.of_directory(directory, role)
    assert found is not None
    return found


class Service:
    """Notes who calls. The stream sends a message when `more` is set."""

    def __init__(self) -> None:
        self.callers: list[tuple[str, str] | None] = []
        self.more = asyncio.Event()

    async def call(self, _request: Empty, context: Any) -> Empty:
        self.callers.append(peer_identity(context))
        return Empty()

    async def stream(self, _request: Empty, _context: Any) -> AsyncIterator[Empty]:
        while True:
            yield Empty()
            await self.more.wait()
            self.more.clear()

    def register(self, _servicer: object, server: grpc.aio.Server) -> None:
        codec = {"request_deserializer": Empty.FromString, "response_serializer": Empty.SerializeToString}
        handlers = {
            "Call": grpc.unary_unary_rpc_method_handler(self.call, **codec),
            "Stream": grpc.unary_stream_rpc_method_handler(self.stream, **codec),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.v1.Test", handlers),))


@asynccontextmanager
async def serving(certificates: TlsFiles | None) -> AsyncIterator[tuple[str, Service]]:
    server, service = RpcServer("127.0.0.1", 0, tls=certificates), Service()
    server.add_servicer(service.register, service, "baton.v1.Control")
    port = await server.start()
    server.set_serving(True)
    try:
        yield f"127.0.0.1:{port}", service
    finally:
        await server.stop(0.0)


async def called(channel: grpc.aio.Channel) -> None:
    with translate_rpc_errors():
        await channel.unary_unary(METHOD, Empty.SerializeToString, Empty.FromString)(Empty(), timeout=20)


async def test_both_ends_prove_themselves_and_the_server_knows_the_caller(authority: Authority, tmp_path: Path) -> None:
    pod, gateway = files(authority, tmp_path / "pod", "decode"), files(authority, tmp_path / "gw", "gateway", "gw-1")
    async with serving(pod) as (address, service), open_channel(address, gateway) as channel:
        await called(channel)
        assert service.callers == [("gateway", "gw-1")]
        assert await probes.trouble(f"grpc://{address}", 20.0, pod) is None
    async with serving(None) as (address, service), open_channel(address) as channel:
        await called(channel)
        assert service.callers == [None]


async def test_processes_without_a_certificate_of_the_authority_are_refused(
    authority: Authority, tmp_path: Path
) -> None:
    pod, stranger = files(authority, tmp_path / "pod", "decode"), files(Authority.create(), tmp_path / "s", "gateway")
    anonymous = grpc.ssl_channel_credentials(pod.pems().ca)
    override = (("grpc.ssl_target_name_override", tls.SERVER_NAME),)
    foreign = grpc.ssl_channel_credentials(pod.pems().ca, stranger.pems().key, stranger.pems().cert)
    async with serving(pod) as (address, service):
        for credentials in (anonymous, foreign):
            async with grpc.aio.secure_channel(address, credentials, options=override) as channel:
                with pytest.raises(Unavailable):
                    await called(channel)
        async with open_channel(address) as channel:
            with pytest.raises(Unavailable, match=f"{PLAIN_AGAINST_TLS}.*tls_dir, made by `baton certs DIR`"):
                await called(channel)
        assert PLAIN_AGAINST_TLS in str(await probes.trouble(f"grpc://{address}", 20.0))
        async with open_channel(address, stranger) as channel:  # which does not trust this server either
            with pytest.raises(Unavailable, match=r"ca\.pem does not verify the peer's certificate"):
                await called(channel)
        assert service.callers == []


async def test_a_server_without_tls_is_named_as_the_reason(authority: Authority, tmp_path: Path) -> None:
    """As the pods of the version before TLS are."""
    gateway = files(authority, tmp_path, "gateway")
    async with serving(None) as (address, service), open_channel(address, gateway) as channel:
        with pytest.raises(Unavailable, match=r"the peer does not use TLS.*previous version \(upgrade it\)"):
            await called(channel)
        assert service.callers == []


async def test_changed_certificates_are_used_and_streams_go_on(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "CHECK_S", 0.0)
    pod, gateway = files(authority, tmp_path / "pod", "decode"), files(authority, tmp_path / "gw", "gateway", "old")
    async with serving(pod) as (address, service), open_channel(address, gateway) as channel:
        stream = channel.unary_stream(STREAM, Empty.SerializeToString, Empty.FromString)(Empty(), timeout=60)
        assert await stream.read() == Empty()
        await called(channel)
        other = Authority.create()
        other.issue(tmp_path / "pod", "decode", "decode", 1)
        other.issue(tmp_path / "gw", "gateway", "new", 1)
        await called(channel)
        assert service.callers == [("gateway", "old"), ("gateway", "new")]
        service.more.set()
        assert await stream.read() == Empty(), "the stream stays on its connection"
        stream.cancel()
        old = files(authority, tmp_path / "outdated", "gateway")
        async with open_channel(address, old) as outdated:
            with pytest.raises(BatonError):
                await called(outdated)


async def test_a_gateway_logs_why_it_cannot_use_a_pod(
    smollm2_dir: Path, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files(authority, tmp_path / "gw", "gateway")
    pod = files(authority, tmp_path / "pod", "decode")
    with caplog.at_level(logging.WARNING):
        async with (
            serving(pod) as (address, _),
            fake_cluster(0, 0) as none,
            rig(none, smollm2_dir, pods=(address,), wait=False) as gw,
        ):
            await until(lambda: PLAIN_AGAINST_TLS in caplog.text)
            assert gw.gateway.pod_table.pods[address].state == "refused"
        caplog.clear()
        async with fake_cluster(1, 1) as plain, rig(plain, smollm2_dir, wait=False, tls_dir=str(tmp_path / "gw")) as gw:
            await until(lambda: "the peer does not use TLS" in caplog.text)
            assert not gw.gateway.ready


async def test_the_gateway_serves_https_and_grpc_with_one_certificate(
    smollm2_dir: Path, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    monkeypatch.setattr(tls, "CHECK_S", 0.0)
    files(authority, tmp_path, "gateway")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    public: dict[str, Any] = {"tls_cert": str(cert), "tls_key": str(key), "grpc_port": unused_tcp_port}
    async with fake_cluster(1, 1) as cluster, rig(cluster, smollm2_dir, wait=False, **public) as gw:
        await until(lambda: gw.gateway.ready)
        url = f"https://127.0.0.1:{gw.server.port}"
        assert await probes.trouble(f"{url}/ready", 20.0) is None
        assert await probes.trouble(f"http://127.0.0.1:{gw.server.port}/ready", 20.0) is not None

        async def answer(ca: Path) -> str:
            context = ssl.create_default_context(cafile=str(ca))
            context.check_hostname = False  # its name is `baton`
            async with httpx.AsyncClient(base_url=url, verify=context, timeout=30) as http:
                body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4, "stream": True}
                async with http.stream("POST", "/v1/completions", json=body) as response:
                    assert response.status_code == 200
                    return (await response.aread()).decode()

        assert (await answer(tmp_path / "ca.pem")).endswith("data: [DONE]\n\n")
        credentials = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
        options = (("grpc.ssl_target_name_override", tls.SERVER_NAME),)
        async with grpc.aio.secure_channel(f"127.0.0.1:{gw.server.grpc_port}", credentials, options=options) as channel:
            models = await inference_pb2_grpc.InferenceStub(channel).ListModels(
                inference_pb2.ListModelsRequest(), timeout=20
            )
            assert [model.id for model in models.models] == [MODEL]
        old = tmp_path / "old-ca.pem"
        old.write_bytes((tmp_path / "ca.pem").read_bytes())
        Authority.create().issue(tmp_path, "gateway", "gateway", 1)
        assert (await answer(tmp_path / "ca.pem")).endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError):
            await answer(old)
