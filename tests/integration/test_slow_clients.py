"""Clients that send slowly or keep connections: they lose their own requests, and other clients are not affected."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import orjson
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.stack.supervisor import PortLease
from common.pb import inference_pb2, inference_pb2_grpc
from common.rpc import open_channel
from gateway import server
from gateway.admission.api_keys import create_key
from gateway.admission.key_store import KeyFile
from gateway.api.http import protocol
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.waiting import until

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
OTHER = "127.0.0.2"  #: Another client on this machine.


@pytest.fixture
def _many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """An input counts as slow at once."""
    monkeypatch.setattr(protocol, "SLOW_S", 0.05)


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, raw: bytes) -> None:
        self._writer.write(raw)

    @property
    def ended(self) -> bool:
        return self._reader._eof or self._reader.exception() is not None  # type: ignore[attr-defined]

    async def answer(self) -> tuple[int, dict[str, Any]]:
        """Returns the status and the body of the answer, after which the gateway must close the connection."""
        head, _, body = (await asyncio.wait_for(self._reader.read(), 20)).partition(b"\r\n\r\n")
        assert b"connection: close" in head
        return int(head.split()[1]), orjson.loads(body)

    async def head(self) -> bytes:
        """Returns the head of an answer, and reads its body."""
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 20)
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        await self._reader.readexactly(length)
        return head

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def connected(
    gw: Rig, number: int = 1, host: str = "127.0.0.1", *, raw: bytes = b""
) -> AsyncIterator[list[Client]]:
    """Opens connections of one client address, one after another, and sends `raw` on each."""
    opened: list[Client] = []
    try:
        for _ in range(number):
            opened.append(Client(*await asyncio.open_connection("127.0.0.1", gw.server.port, local_addr=(host, 0))))
            opened[-1].send(raw)
        yield opened
    finally:
        for client in opened:
            client.close()


def connections(gw: Rig) -> int:
    assert gw.server._http is not None
    return len(gw.server._http.server_state.connections)


def posted(length: int | None = None, **fields: Any) -> bytes:
    """Returns a request; `length` cuts its body."""
    body = orjson.dumps({"model": MODEL, "prompt": "Hello", "max_tokens": 5, **fields})
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body[:length]


def keyed(raw: bytes, key: str) -> bytes:
    return raw.replace(b"host: x\r\n", b"host: x\r\nauthorization: Bearer %s\r\n" % key.encode())


@pytest.mark.usefixtures("_many_files")
async def test_1100_one_byte_bodies_take_nothing_from_other_requests(gw: Rig) -> None:
    """Each unfinished body had one of 1,024 permits, so all other requests got 429 for 30 s."""
    number, most = 1100, gw.gateway.settings.max_client_slow
    async with connected(gw, number, raw=posted(1)) as slow:
        for _ in range(3):
            assert (await gw.complete(max_tokens=2)).status_code == 200
        await until(lambda: sum(client.ended for client in slow) == number - most)
        assert (await gw.complete(max_tokens=2)).status_code == 200
        status, body = await next(client for client in slow if client.ended).answer()
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert "too many requests slowly" in body["error"]["message"]
        text = (await gw.http.get("/metrics")).text
        assert f'baton_rejections_total{{by="client"}} {number - most}.0' in text
        assert f'baton_requests_total{{endpoint="completions",outcome="RequestTooSlow"}} {number - most}.0' in text


@pytest.mark.usefixtures("quick")
async def test_slow_heads_are_bounded_per_address(cluster: FakeCluster, smollm2_dir: Path) -> None:
    async with (
        rig(cluster, smollm2_dir, max_client_slow=2) as gw,
        connected(gw, 1, OTHER) as others,
        connected(gw, 5) as slow,
    ):
        for client in (*others, *slow):
            client.send(HEAD[:20])
        await until(lambda: sum(client.ended for client in slow) == 3)
        assert [client.ended for client in (*slow, *others)] == [True] * 3 + [False] * 3
        assert (await slow[0].answer())[0] == 408
        slow[4].send(posted()[20:])  # a slow request that arrives is answered
        assert (await slow[4].head()).startswith(b"HTTP/1.1 200")


@pytest.mark.usefixtures("quick")
async def test_slow_bodies_are_bounded_per_key(cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path) -> None:
    path, keys = tmp_path / "keys.toml", []
    for tenant in ("acme", "other"):
        key, record = create_key(tenant)
        KeyFile(path).add(record)
        keys.append(key)
    async with (
        rig(cluster, smollm2_dir, api_keys=(str(path),), max_client_slow=2) as gw,
        connected(gw, 2) as first,
        connected(gw, 1, OTHER) as second,
        connected(gw, 1, OTHER) as third,
    ):
        for client, key in ((first[0], keys[0]), (first[1], keys[0]), (third[0], keys[1]), (second[0], keys[0])):
            client.send(keyed(posted(1), key))
            await asyncio.sleep(0.1)
        await until(lambda: first[0].ended)
        assert not any(client.ended for client in (first[1], second[0], third[0]))
        assert (await first[0].answer())[0] == 408
        second[0].send(posted().partition(b"\r\n\r\n")[2][1:])
        assert (await second[0].head()).startswith(b"HTTP/1.1 200")


async def test_connections_are_bounded_per_address(cluster: FakeCluster, smollm2_dir: Path) -> None:
    async with rig(cluster, smollm2_dir, max_client_connections=3) as gw, connected(gw, 3, OTHER) as open_ones:
        async with connected(gw, 1, OTHER) as refused:
            status, body = await refused[0].answer()
            assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert (await gw.complete(max_tokens=2)).status_code == 200  # of another address
        open_ones[0].send(posted())
        assert (await open_ones[0].head()).startswith(b"HTTP/1.1 200")
        open_ones[0].close()
        before = connections(gw)
        await until(lambda: connections(gw) < before)
        async with connected(gw, 1, OTHER) as again:
            again[0].send(posted())
            assert (await again[0].head()).startswith(b"HTTP/1.1 200")


async def test_grpc_calls_are_bounded_per_address(
    cluster: FakeCluster, smollm2_dir: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.decodes[0].faults, "stall_after", 1)
    seen = cluster.decodes[0].seen.reserved
    before = len(seen)
    request = inference_pb2.GenerateRequest(model=MODEL, text="Hello", max_tokens=8)
    address = f"127.0.0.1:{unused_tcp_port}"
    async with (
        rig(cluster, smollm2_dir, grpc_port=unused_tcp_port, max_client_connections=2) as gw,
        open_channel(address) as one,
        open_channel(address) as two,  # a connection of its own
    ):
        first, second = (inference_pb2_grpc.InferenceStub(channel) for channel in (one, two))
        running = [first.Generate(request) for _ in range(2)]
        await until(lambda: len(seen) == before + 2)
        waiting = first.Generate(request)  # the connection has as many streams as it may have
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await second.ListModels(inference_pb2.ListModelsRequest())
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not waiting.done()
        probe = health_pb2_grpc.HealthStub(two)
        assert (await probe.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        assert (await gw.complete(max_tokens=1)).status_code == 200  # HTTP's connections are counted apart
        for call in (*running, waiting):
            call.cancel()

        async def served() -> bool:
            try:
                await second.ListModels(inference_pb2.ListModelsRequest())
            except grpc.aio.AioRpcError:
                return False
            return True

        async with asyncio.timeout(60):
            while not await served():
                await asyncio.sleep(0.02)
        await gw.settled()


async def test_grpc_connections_are_bounded_in_all(
    cluster: FakeCluster, smollm2_dir: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_max_files", lambda: 2 * server.GRPC_SHARE)
    request = inference_pb2.ListModelsRequest()
    async with (
        rig(cluster, smollm2_dir, grpc_port=unused_tcp_port),
        AsyncExitStack() as channels,
    ):
        opened = [await channels.enter_async_context(open_channel(f"127.0.0.1:{unused_tcp_port}")) for _ in range(3)]
        stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in opened]
        for stub in stubs[:2]:
            assert (await stub.ListModels(request)).models
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stubs[2].ListModels(request)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await opened[0].close(None)
        assert (await stubs[2].ListModels(request, wait_for_ready=True, timeout=60)).models


@pytest.mark.parametrize(
    ("request_", "drip"),
    [(posted(), b"\r\n"), (b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n", b"x")],
    ids=["empty lines", "the body of an answered request"],
)
async def test_bytes_that_begin_no_request_do_not_keep_a_connection_open(
    gw: Rig, monkeypatch: pytest.MonkeyPatch, request_: bytes, drip: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.3)
    async with connected(gw) as (client,):
        client.send(request_)
        await client.head()

        async def dripped() -> bool:
            client.send(drip)
            return client.ended

        await until(dripped, 10)


async def test_grpc_calls_without_a_message_take_no_permit(cluster: FakeCluster, smollm2_dir: Path) -> None:
    with PortLease() as port:
        async with (
            rig(cluster, smollm2_dir, grpc_port=port.port, max_inflight=8) as gw,
            open_channel(f"127.0.0.1:{gw.server.grpc_port}") as channel,
        ):
            silent = [channel.stream_stream("/baton.v1.Inference/Generate")() for _ in range(40)]
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            for _ in range(3):
                request = inference_pb2.GenerateRequest(model=MODEL, text="Hello", max_tokens=2)
                assert [message async for message in stub.Generate(request)][-1].usage.completion_tokens == 2
            assert not gw.gateway._requests
            for call in silent:
                call.cancel()


async def test_a_requests_time_counts_from_its_head(gw: Rig, cluster: FakeCluster) -> None:
    cluster.prefills[0].faults.prefill_delay_s = 30.0
    raw = posted().replace(b"host: x\r\n", b"host: x\r\nconnection: close\r\nx-request-timeout: 4.0\r\n")
    async with connected(gw) as (client,):
        client.send(raw[:-1])
        await asyncio.sleep(0.5)
        assert not gw.gateway._requests
        client.send(raw[-1:])
        assert (await client.answer())[0] == 504
    assert cluster.decodes[0].seen.timeouts[0] < 3.55


async def test_a_disconnect_within_a_body_is_counted(cluster: FakeCluster, smollm2_dir: Path) -> None:
    async with rig(cluster, smollm2_dir) as gw:
        async with connected(gw) as (client,):
            client.send(posted(1))
            http = gw.server._http
            assert http is not None
            await until(lambda: len(http.server_state.tasks) == 1)
        await until(lambda: gw.gateway.metrics.requests.labels("completions", "aborted")._value.get() == 1)
        assert not gw.gateway._requests


async def test_metrics_name_a_tenant_only_to_its_key_and_to_administrators(smollm2_dir: Path, tmp_path: Path) -> None:
    path, keys = tmp_path / "keys.toml", {}
    for tenant, admin in (("acme", False), ("other", False), ("root", True)):
        keys[tenant], record = create_key(tenant, admin=admin)
        KeyFile(path).add(record)
    async with fake_cluster() as cluster, rig(cluster, smollm2_dir, api_keys=(str(path),)) as gw:
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2}
        for tenant in ("acme", "other"):
            headers = {"authorization": f"Bearer {keys[tenant]}"}
            assert (await gw.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        await gw.settled()
        open_metrics = "application/openmetrics-text; version=1.0.0"
        for key, named in (
            (None, set()),
            ("sk-wrong", set()),
            (keys["acme"], {"acme"}),
            (keys["other"], {"other"}),
            (keys["root"], {"acme", "other"}),
        ):
            for accept in ("text/plain", open_metrics):
                headers = {"accept": accept, **({} if key is None else {"authorization": f"Bearer {key}"})}
                answer = await gw.http.get("/metrics", headers=headers)
                assert answer.status_code == 200
                assert {tenant for tenant in keys if f'"{tenant}"' in answer.text} == named
                assert 'baton_requests_total{endpoint="completions",outcome="ok"} 2.0' in answer.text
