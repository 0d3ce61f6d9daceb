"""A gateway that leaves behind a load balancer: who still comes is served and told to go, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from common.pb import inference_pb2, inference_pb2_grpc
from common.process import PortLease
from tests.fake_pods import FakeCluster, fake_cluster
from tests.gateway_rig import MODEL, rig
from tests.until import until


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster() as running:
        yield running


async def test_a_leaving_gateway_serves_what_still_comes_and_sends_clients_away(
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
