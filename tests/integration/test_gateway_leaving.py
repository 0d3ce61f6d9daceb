"""Drain of a gateway over HTTP and gRPC: running requests end, new ones are served and sent to other gateways."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from cli.stack.supervisor import PortLease
from common import rpc
from common.pb import inference_pb2, inference_pb2_grpc
from common.process.lifecycle import Lifecycle
from gateway import server as gateway_server
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.waiting import until


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster() as running:
        yield running


async def test_a_draining_gateway_serves_new_requests_and_closes_their_connections(
    cluster: FakeCluster, smollm2_dir: Path
) -> None:
    async with rig(cluster, smollm2_dir, drain_delay_s=2.5) as gw:
        assert "connection" not in (await gw.complete(max_tokens=3)).headers
        reader, writer = await asyncio.open_connection("127.0.0.1", gw.server.port)
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b'{"status":"live"}')
        drain = asyncio.create_task(gw.server.drain())
        await until(lambda: not gw.gateway.ready)
        assert (await gw.http.get("/ready")).status_code == 503
        assert (await gw.http.get("/live")).status_code == 200
        served = await gw.complete(max_tokens=3)
        assert (served.status_code, served.headers["connection"]) == (200, "close")
        assert not drain.done()
        assert await reader.read() == b""  # a connection that says nothing is closed at the end of the delay
        writer.close()
        await asyncio.wait_for(drain, 60)
        assert (await gw.complete(max_tokens=3)).status_code == 503


async def test_grpc_clients_go_to_the_next_gateway_without_a_failed_call(
    cluster: FakeCluster, smollm2_dir: Path
) -> None:
    with PortLease() as one, PortLease() as two:
        async with (
            rig(cluster, smollm2_dir, grpc_port=one.port, drain_delay_s=0.5) as leaves,
            rig(cluster, smollm2_dir, grpc_port=two.port) as stays,
            grpc.aio.insecure_channel(f"ipv4:{one.address},{two.address}") as channel,
        ):
            stub = inference_pb2_grpc.InferenceStub(channel)

            async def call(max_tokens: int) -> None:
                request = inference_pb2.GenerateRequest(model=MODEL, text="x", max_tokens=max_tokens)
                async for _ in stub.Generate(request, timeout=30):
                    pass

            cluster.decodes[0].faults.token_delay_s = 0.1
            await call(2)
            assert list(leaves.gateway.timelines.newest())
            running = asyncio.create_task(call(40))  # four seconds, more than the delay
            drain = asyncio.create_task(leaves.server.drain())
            while not list(stays.gateway.timelines.newest()):
                await call(2)
            assert not drain.done()
            await running
            await asyncio.wait_for(drain, 60)
            await call(2)


async def test_grpc_calls_sent_before_goaway_arrived_are_served(
    cluster: FakeCluster, smollm2_dir: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_server, "GRPC_DRAIN_DELAY_S", 30.0)
    async with rig(cluster, smollm2_dir, grpc_port=unused_tcp_port, drain_delay_s=0.01) as gw:
        drain = asyncio.create_task(gw.server.drain())
        await until(lambda: gw.server._grpc_leaving is not None)
        assert (await gw.complete(max_tokens=3)).status_code == 200
        drain.cancel()


async def test_drain_finishes_running_requests_and_refuses_new_ones(gw: Rig, cluster: FakeCluster) -> None:
    goes_on = asyncio.Event()
    for pod in cluster.prefills:
        pod.faults.before_prefill = lambda _request: goes_on.wait()
    running = asyncio.create_task(gw.complete())
    await until(lambda: any(pod.seen.prefilled for pod in cluster.prefills))
    drain = asyncio.create_task(gw.server.drain())
    await until(lambda: not gw.gateway.ready)
    assert (await gw.complete()).status_code == 503
    assert (await gw.http.get("/ready")).status_code == 503
    assert not drain.done()
    goes_on.set()
    assert (await running).status_code == 200
    await asyncio.wait_for(drain, 30)


async def test_a_request_that_outlives_the_drain_ends_with_an_error_event(
    cluster: FakeCluster, smollm2_dir: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_server, "STOP_S", 300.0)
    for pod in cluster.decodes:
        pod.faults.stall_after = 2
    async with (
        rig(cluster, smollm2_dir, grpc_port=unused_tcp_port) as gw,
        rpc.open_channel(f"127.0.0.1:{unused_tcp_port}") as channel,
    ):
        streams = [asyncio.create_task(gw.stream(path)) for path in ("completions", "chat")]
        whole = asyncio.create_task(gw.complete())
        request = inference_pb2.GenerateRequest(model=MODEL, text="x", max_tokens=30)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        await call.read()
        await until(lambda: sum(len(pod.seen.hand_offs) for pod in cluster.prefills) == 4)
        lifecycle = Lifecycle(gw.server.drain, drain_s=0.2)
        lifecycle.begin_drain("the test")
        await lifecycle.wait_stopped()
        assert gw.server._http is not None
        gw.server._http.config.timeout_graceful_shutdown = 300  # what connections get to end by themselves
        async with asyncio.timeout(60):
            await gw.server.stop()
        for status, events in [await stream for stream in streams]:
            assert status == 200
            assert "choices" in events[0]
            assert events[-2]["error"]["message"] == "the gateway is stopping"
        assert (await whole).status_code == 503
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
