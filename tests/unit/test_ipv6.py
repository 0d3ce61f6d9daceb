"""IPv6 addresses in settings, in the addresses that are built of them, and on the wire."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis

from cli import probes
from cli.stack.stack import Stack
from common.errors import ConfigError
from common.redis.client import connect_redis
from common.rpc import RpcServer
from common.settings.gateway import GatewayConfig
from common.settings.kinds import host_port
from common.settings.pod import PodConfig
from common.settings.up import UpConfig
from common.types import Role
from engine.parallel.rank_group import split_address
from tests.rigs.waiting import until


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("10.0.0.1:7000", "10.0.0.1:7000"),
        ("pod-0.pods:7000", "pod-0.pods:7000"),
        ("[fd00::12]:7000", "[fd00::12]:7000"),
        ("fd00::12:7000", "[fd00::12]:7000"),  # as Kubernetes writes $(POD_IP):7000
        ("::1:7000", "[::1]:7000"),
    ],
)
def test_an_address_gets_its_brackets(given: str, address: str) -> None:
    assert PodConfig.load(file=None, env={}, flags={"role": "decode", "advertise": given}).advertise == address
    assert GatewayConfig.load(file=None, env={}, flags={"pods": given}).pods == (address,)
    host, port = split_address(address)
    assert (host_port(host, port), port) == (address, 7000)


@pytest.mark.parametrize("given", ["::1", "[::1]", "fd00::zz:7000", "[host]x:1", "host", "a b:1", "[fd00::12]:"])
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(ConfigError, match="IPv6"):
        PodConfig.load(file=None, env={}, flags={"role": "decode", "advertise": given})


def test_a_host_may_have_brackets() -> None:
    assert GatewayConfig.load(file=None, env={}, flags={"host": "[::1]", "pods": "h:1"}).host == "::1"
    assert GatewayConfig.load(file=None, env={}, flags={"host": "::1", "pods": "h:1"}).host == "::1"


async def test_a_grpc_server_and_the_probes() -> None:
    server = RpcServer("::1", 0)
    port = await server.start()
    server.set_serving(True)
    try:
        await until(lambda: probes.grpc_ready(f"[::1]:{port}"))
        assert await probes.trouble(f"grpc://[::1]:{port}", 30.0) is None
    finally:
        await server.stop(0)


async def test_an_http_probe_sends_a_valid_host() -> None:
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "::1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await probes.trouble(f"http://[::1]:{port}/ready", 30.0) is None
        assert await probes.http_ready("::1", port)
    assert all(f"Host: [::1]:{port}\r\n".encode() in head for head in heads)


async def test_a_redis_url() -> None:
    client = connect_redis("redis://:word@[::1]:6390/2", timeout_s=1.0)
    assert isinstance(client, redis.Redis)
    settings: dict[str, Any] = client.connection_pool.connection_kwargs
    assert (settings["host"], settings["port"], settings["db"]) == ("::1", 6390, 2)
    await client.aclose()


@pytest.mark.parametrize(("host", "reached"), [("::1", "[::1]"), ("::", "[::1]")])
def test_a_stack(tmp_path: Path, host: str, reached: str) -> None:
    with socket.socket(socket.AF_INET6) as free:
        free.bind(("::1", 0))
        port = free.getsockname()[1]
    config = UpConfig(host=host, port=port, device="cpu", redis="redis://[::1]:6390", secret="a secret word")
    stack = Stack.plan(config, tmp_path, tmp_path / "logs")
    try:
        assert stack.base_url == f"http://{reached}:{port}/v1"
        assert stack.grpc_address.startswith(f"{reached}:")
        [gateway] = [spec for spec in stack.specs if spec.role == "gateway"]
        assert gateway.address == f"[{host}]:{port}"
        argv = gateway.process.argv
        assert f"--host={host}" in argv or argv[argv.index("--host") + 1] == host
    finally:
        stack.close()


def test_pods_have_names_and_roles_as_before() -> None:
    assert PodConfig(role=Role.DECODE, host="::1", port=7000).resolve_name().endswith("-7000")
