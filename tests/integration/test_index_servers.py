"""The prefix index on each kind of Redis server: cluster, sentinel, users with minimal rights, TLS."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from cli.stack.valkey import EmbeddedValkey, valkey_binary
from common.block_hash import hash_blocks
from common.errors import ConfigError, IndexUnavailable
from common.redis.client import connect_redis
from common.types import PodLoad, Role
from prefix_index import publisher
from prefix_index.publisher import IndexPublisher, mint_generation
from prefix_index.reader import IndexReader
from prefix_index.store import BookingCandidate, PodRecord
from tests.rigs.index.index_rig import one_node_cluster
from tests.rigs.index.tcp_proxy import tcp_proxy
from tests.rigs.waiting import until

SCOPE = "00112233"
BLOCKS = hash_blocks(list(range(160)), fingerprint=SCOPE * 4, block_size=16)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


@asynccontextmanager
async def pod(url: str, name: str = "p", scope: str = SCOPE) -> AsyncIterator[IndexPublisher]:
    """A pod with all blocks, registered in the index."""
    generation = await mint_generation(url, scope, name)
    record = PodRecord(name, generation, "127.0.0.1:5", Role.DECODE, "m", scope, scope * 4, 16, 2048, 99)
    index = IndexPublisher(url, record, lambda: BLOCKS, PodLoad)
    await index.start()
    try:
        yield index
    finally:
        await index.stop()


async def finds(reader: IndexReader, names: set[str], scope: str = SCOPE) -> bool:
    """Checks that the index has exactly these pods, with all blocks, and books one."""
    try:
        live = {s.record.pod: s.record.generation for s in await reader.pods() if s.record.scope == scope}
        if set(live) != names:
            return False
        held = await reader.lookup(scope, BLOCKS, list(live.items()))
        for name in names:
            await reader.book(scope, "r", [[BookingCandidate(name, 0.0, 1.0, 5, 60.0)]])
            await reader.unbook(scope, name, "r")
    except IndexUnavailable:
        return False
    return set(held.values()) <= {len(BLOCKS)}


def has_line(reader: IndexReader) -> bool:
    assert reader._connections is not None
    return reader._connections.get(SCOPE) is not None


async def serves(url: str) -> None:
    """Runs the whole life of a pod in the index at this URL."""
    reader = IndexReader(url, timeout_s=10.0)
    try:
        async with pod(url):
            await until(lambda: finds(reader, {"p"}))
            await until(lambda: has_line(reader))
            assert await finds(reader, {"p"})
            assert has_line(reader)  # it would have been closed at the first sign of trouble
        await until(lambda: finds(reader, set()))
    finally:
        await reader.close()


async def test_a_cluster(tmp_path: Path) -> None:
    async with one_node_cluster(tmp_path) as (_, plain):
        url = f"redis+cluster://127.0.0.1:{port_of(plain)}"
        await serves(url)
        async with connect_redis(plain, timeout_s=5.0) as client:
            await client.execute_command("SCRIPT", "FLUSH")
        reader = IndexReader(url, timeout_s=10.0)
        async with pod(url), pod(url, "q", "ffee0011"):  # scopes are on different slots
            await until(lambda: finds(reader, {"p"}))
            await until(lambda: finds(reader, {"q"}, "ffee0011"))
        await reader.close()


async def test_a_user_with_the_minimal_rights(tmp_path: Path) -> None:
    valkey = EmbeddedValkey(0, tmp_path, password="")
    plain = await valkey.start()
    try:
        async with connect_redis(plain, timeout_s=5.0) as client:
            rules = "on >p@ss ~kv:* -@all +@read +@write +@scripting +@connection +time"
            await client.execute_command("ACL", "SETUSER", "baton", *rules.split())
            await client.execute_command("ACL", "SETUSER", "default", "off")
        await serves(f"redis://baton:p%40ss@127.0.0.1:{port_of(plain)}")
        wrong = IndexReader(f"redis://baton:no@127.0.0.1:{port_of(plain)}", timeout_s=10.0)
        with pytest.raises(IndexUnavailable, match="password"):
            await wrong.pods()
        await wrong.close()
    finally:
        await valkey.stop()


def certificates(directory: Path) -> None:
    """Writes ca.pem, and server.pem (for 127.0.0.1) and client.pem with their keys, signed by the ca."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    for name, address in (("server", "IP:127.0.0.1"), ("client", "DNS:client")):
        openssl(
            *("req", "-x509", *new, "-CA", "ca.pem", "-CAkey", "ca.key", "-subj", f"/CN={name}"),
            *("-addext", f"subjectAltName={address}", "-keyout", f"{name}.key", "-out", f"{name}.pem"),
        )


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
async def test_tls_verifies_the_server_by_default(tmp_path: Path) -> None:
    certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    context.load_verify_locations(tmp_path / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    valkey = EmbeddedValkey(0, tmp_path / "valkey", password="")
    port = port_of(await valkey.start())
    client = f"ssl_certfile={tmp_path}/client.pem&ssl_keyfile={tmp_path}/client.key"
    ca = f"ssl_ca_certs={tmp_path}/ca.pem"
    try:
        async with tcp_proxy(port, context) as proxy:
            await serves(f"rediss://127.0.0.1:{proxy.port}?{ca}&{client}")
            await serves(f"rediss://localhost:{proxy.port}?{client}&ssl_cert_reqs=none")
            await serves(f"rediss://localhost:{proxy.port}?{ca}&{client}&ssl_check_hostname=false")
            for host, options in (("127.0.0.1", client), ("localhost", f"{ca}&{client}"), ("127.0.0.1", ca)):
                reader = IndexReader(f"rediss://{host}:{proxy.port}?{options}", timeout_s=10.0)
                with pytest.raises(IndexUnavailable):
                    await reader.pods()
                await reader.close()
        with pytest.raises(ConfigError, match="no such file"):
            connect_redis("rediss://127.0.0.1?ssl_ca_certs=/nowhere.pem", timeout_s=1.0)
    finally:
        await valkey.stop()


async def test_sentinels_lead_to_the_new_primary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(publisher, "_MAX_BACKOFF_S", 0.2)
    primary = EmbeddedValkey(0, tmp_path / "primary", password="")
    port = port_of(await primary.start())
    replica = EmbeddedValkey(0, tmp_path / "replica", ["--replicaof", "127.0.0.1", str(port)], password="")
    await replica.start()
    async with connect_redis(f"redis://127.0.0.1:{port}", timeout_s=5.0) as client:

        async def follows() -> bool:
            return (await client.info("replication"))["connected_slaves"] == 1

        await until(follows)  # a sentinel asks for replicas at once, and then only every 10 s
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        sentinel_port = free.getsockname()[1]
    configuration = tmp_path / "sentinel.conf"
    configuration.write_text(
        f"port {sentinel_port}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel monitor main 127.0.0.1 {port} 1\n"
        "sentinel down-after-milliseconds main 1000\nsentinel failover-timeout main 3000\n"
    )
    sentinel = await asyncio.create_subprocess_exec(
        valkey_binary(), configuration, "--sentinel", stdout=asyncio.subprocess.DEVNULL
    )
    url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel_port}/main"
    reader = IndexReader(url, timeout_s=10.0)
    try:
        async with connect_redis(f"redis://127.0.0.1:{sentinel_port}", timeout_s=5.0) as client:

            async def knows_both() -> bool:
                try:
                    return "'slaves': 1" in str(await client.execute_command("INFO", "sentinel"))
                except RedisError:
                    return False  # it has only just started

            await until(knows_both)
        async with pod(url):
            await until(lambda: finds(reader, {"p"}))
            await primary.stop()
            await until(lambda: finds(reader, {"p"}))
    finally:
        await reader.close()
        sentinel.terminate()
        await sentinel.wait()
        await replica.stop()
        await primary.stop()
