"""Health checks: `baton probe`, liveness of a process and readiness of its services."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cli import probes
from common.errors import ConfigError
from common.pb import control_pb2_grpc
from common.rpc import LIVENESS_SERVICE, RpcServer
from common.settings.gateway import GatewayConfig
from tests.rigs.gateway.gateway_rig import rig
from tests.rigs.pods.fake_pods import fake_cluster
from tests.rigs.waiting import until


@pytest.fixture
async def server() -> AsyncIterator[tuple[RpcServer, str]]:
    running = RpcServer("127.0.0.1", 0)
    running.add_servicer(
        control_pb2_grpc.add_ControlServicer_to_server, control_pb2_grpc.ControlServicer(), "baton.v1.Control"
    )
    address = f"127.0.0.1:{await running.start()}"
    yield running, address
    await running.stop(0.1)


async def test_a_process_is_live_before_its_services_are_ready(server: tuple[RpcServer, str]) -> None:
    rpc, address = server

    async def state() -> tuple[bool, ...]:
        urls = (f"grpc://{address}/{LIVENESS_SERVICE}", f"grpc://{address}", f"grpc://{address}/baton.v1.Control")
        told = [await probes.trouble(url, 30.0) for url in urls]
        assert set(told) <= {None, "its health is NOT_SERVING"}
        return tuple(trouble is None for trouble in told)

    assert await state() == (True, False, False)
    rpc.set_serving(True)
    await asyncio.sleep(0)
    assert await state() == (True, True, True)
    rpc.set_serving(False)
    await asyncio.sleep(0)
    assert await state() == (True, False, False)
    assert (await probes.trouble(f"grpc://{address}/nobody", 30.0) or "").startswith("NOT_FOUND")


async def test_a_gateway_without_pods_is_live_but_not_ready(smollm2_dir: Path) -> None:
    async with fake_cluster(0, 0) as cluster, rig(cluster, smollm2_dir, pods=(), wait=False) as gw:
        assert await probes.trouble(f"{gw.url}/live", 30.0) is None
        assert await probes.trouble(f"{gw.url}/ready", 30.0) == "the answer is 503 Service Unavailable"
        assert await probes.trouble(gw.url, 30.0) == "the answer is 503 Service Unavailable", "/ready is asked"
        assert await probes.trouble(f"{gw.url}/", 30.0) == "the answer is 503 Service Unavailable"
        assert await probes.trouble(f"{gw.url}/nothing", 30.0) == "the answer is 404 Not Found"


async def test_a_silent_server_is_unhealthy_after_the_time_limit() -> None:
    async def silent(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        asked.set()
        await leave.wait()

    asked, leave = asyncio.Event(), asyncio.Event()
    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        assert await probes.trouble(f"http://127.0.0.1:{port}/live", 0.3) == "no answer within 0.3 s"
        await until(asked.is_set)
        assert await probes.trouble(f"grpc://127.0.0.1:{port}", 0.3) == "no answer within 0.3 s"
        leave.set()
    assert await probes.trouble(f"http://127.0.0.1:{port}/live", 30.0) == "connection refused"
    assert (await probes.trouble(f"grpc://127.0.0.1:{port}", 30.0) or "").startswith("UNAVAILABLE")


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1", "127.0.0.1:1", "http://127.0.0.1/live", "grpc://:7000", ""])
async def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(url)}$"):
        await probes.trouble(url, 1.0)


async def test_the_command(server: tuple[RpcServer, str]) -> None:
    def run(url: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "cli", "probe", url], capture_output=True, text=True, check=False
        )

    assert (await asyncio.to_thread(run, f"grpc://{server[1]}/live")).returncode == 0
    unwell = await asyncio.to_thread(run, f"grpc://{server[1]}")
    assert (unwell.returncode, len(unwell.stderr.splitlines())) == (1, 1)
    assert server[1] in unwell.stderr
    assert "NOT_SERVING" in unwell.stderr
    wrong = await asyncio.to_thread(run, "ftp://127.0.0.1:1")
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1)


def test_a_gateway_cannot_delay_for_longer_than_it_drains() -> None:
    assert GatewayConfig(drain_s=30.0, drain_delay_s=30.0).drain_delay_s == 30.0
    with pytest.raises(ConfigError, match="drain_delay_s"):
        GatewayConfig(drain_s=30.0, drain_delay_s=31.0)


@pytest.mark.parametrize("names", ["Baton", "a,-b", "a_b", "a" * 64])
def test_services_have_names_that_kubernetes_accepts(names: str) -> None:
    assert GatewayConfig.load(file=None, env={}, flags={"k8s_services": "a, b-1"}).k8s_services == ("a", "b-1")
    with pytest.raises(ConfigError, match="Kubernetes Service"):
        GatewayConfig.load(file=None, env={}, flags={"k8s_services": names})
