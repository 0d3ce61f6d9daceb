"""Pipelined connections: each call gets its own answer, and the client answers if no connection is open."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import hiredis
import pytest
import pytest_asyncio
from redis.exceptions import ConnectionError, NoScriptError

from cli.stack.valkey import EmbeddedValkey
from common.block_hash import hash_blocks
from common.errors import IndexUnavailable
from common.redis.client import REDIS_FAILURES, CircuitBreaker, LuaScript, connect_redis
from common.types import PodLoad, Role
from prefix_index.pipelined_connection import PipelinedConnection, PipelinedConnections
from prefix_index.publisher import IndexPublisher, mint_generation
from prefix_index.reader import IndexReader
from prefix_index.store import BookingCandidate, IndexKeys, PodRecord
from tests.rigs.index.tcp_proxy import tcp_proxy
from tests.rigs.waiting import until

SCOPE = "00112233"
BLOCKS = hash_blocks(list(range(1600)), fingerprint=SCOPE * 4, block_size=16)
UNASKED = hash_blocks(list(range(480)), fingerprint=SCOPE * 4, block_size=16, salt="other")
PODS = [("p", 7)]
ECHO = "return {KEYS[1], ARGV[1]}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    valkey = EmbeddedValkey(0, tmp_path_factory.mktemp("valkey"), password="")
    yield await valkey.start()
    await valkey.stop()


@asynccontextmanager
async def line(url: str) -> AsyncIterator[PipelinedConnection]:
    """An open connection; the server knows the echo script."""
    lines = PipelinedConnections(url)
    try:
        await until(lambda: lines.get(SCOPE) is not None)
        found = lines.get(SCOPE)
        assert found is not None
        yield found
    finally:
        await lines.close()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


async def echo_script(url: str, directory: Path) -> LuaScript:
    (directory / "echo.lua").write_text(ECHO)
    async with connect_redis(url, timeout_s=5.0) as client:
        await client.script_load(ECHO)
    return LuaScript("echo", directory=directory)


async def test_every_caller_gets_its_own_answer_while_others_are_cancelled(server: str, tmp_path: Path) -> None:
    echo, rng = await echo_script(server, tmp_path), random.Random(1)
    async with line(server) as found:
        for _ in range(20):
            calls = [
                asyncio.create_task(
                    found.call(echo.pack_command((f"k{i}",), (b"x" * rng.choice((1, 1_000)) + b"%d" % i,)))
                )
                for i in range(30)
            ]
            await asyncio.sleep(0)
            gone = rng.sample(range(30), 10)
            for i in gone:
                calls[i].cancel()
            answers = await asyncio.gather(*calls, return_exceptions=True)
            for i, answer in enumerate(answers):
                if i in gone:
                    assert isinstance(answer, asyncio.CancelledError)
                else:
                    assert isinstance(answer, list)
                    assert (answer[0], answer[1].lstrip(b"x")) == (b"k%d" % i, b"%d" % i)
        assert found.open


async def test_an_error_of_one_call_does_not_affect_others(server: str, tmp_path: Path) -> None:
    echo = await echo_script(server, tmp_path)
    (tmp_path / "new.lua").write_text("return 1 -- nobody has loaded it")
    unknown = LuaScript("new", directory=tmp_path)
    async with line(server) as found:
        calls = (found.call(s.pack_command(("k",), ("a",))) for s in (echo, unknown, echo))
        first, second, third = await asyncio.gather(*calls, return_exceptions=True)
        assert first == third == [b"k", b"a"]
        assert isinstance(second, NoScriptError)
        assert found.open


async def test_calls_in_flight_fail_when_the_connection_breaks(server: str, tmp_path: Path) -> None:
    echo = await echo_script(server, tmp_path)
    async with tcp_proxy(port_of(server)) as proxy, line(f"redis://127.0.0.1:{proxy.port}") as found:
        assert await found.call(echo.pack_command(("k",), ("a",))) == [b"k", b"a"]
        proxy.silence()
        calls = [asyncio.create_task(found.call(echo.pack_command(("k",), ("a",)))) for _ in range(5)]
        await asyncio.sleep(0.05)
        assert not any(call.done() for call in calls)
        proxy.hang_up()
        for answer in await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30):
            assert isinstance(answer, REDIS_FAILURES)
        assert not found.open
        with pytest.raises(ConnectionError):
            await found.call(echo.pack_command(("k",), ("a",)))
        proxy.heal()


@asynccontextmanager
async def strange_server(answers: list[bytes]) -> AsyncIterator[str]:
    """A server that answers scripts with these bytes, one packet each, and all else with OK."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        commands = hiredis.Reader(notEnoughData=None)
        while data := await reader.read(1 << 16):
            commands.feed(data)
            while (command := commands.gets()) is not None:
                for part in answers if command[0] == b"EVALSHA" else [b"+OK\r\n"]:
                    writer.write(part)
                    await asyncio.sleep(0.01)
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


async def test_an_answer_in_several_packets_is_assembled(tmp_path: Path) -> None:
    (tmp_path / "any.lua").write_text("return 1")
    packed = LuaScript("any", directory=tmp_path).pack_command(("k",), ())
    async with strange_server([b"*2\r\n:1", b"7\r\n$4\r\na", b"b\r\n\r\n"]) as url, line(url) as found:
        answers = await asyncio.wait_for(asyncio.gather(*(found.call(packed) for _ in range(3))), 20)
        assert answers == [[17, b"ab\r\n"]] * 3
        assert found.open


@pytest.mark.parametrize(
    ("nonsense", "good"),
    [(b"HTTP/1.1 400 Bad Request\r\n", []), (b":1\r\n:2\r\n:3\r\n", [1, 2]), (b"-LOADING soon\r\n", [])],
    ids=["other", "more", "loading"],
)
async def test_an_invalid_answer_closes_the_connection(nonsense: bytes, good: list[int], tmp_path: Path) -> None:
    (tmp_path / "any.lua").write_text("return 1")
    packed = LuaScript("any", directory=tmp_path).pack_command(("k",), ())
    async with strange_server([nonsense]) as url, line(url) as found:
        calls = (found.call(packed) for _ in range(2))
        answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
        assert [a for a in answers if not isinstance(a, REDIS_FAILURES)] == good
        await until(lambda: not found.open)
        with pytest.raises(ConnectionError):
            await found.call(packed)


@asynccontextmanager
async def pod(url: str) -> AsyncIterator[None]:
    record = PodRecord("p", 7, "127.0.0.1:5", Role.DECODE, "m", SCOPE, SCOPE * 4, 16, 2048, 99)
    index = IndexPublisher(url, record, lambda: BLOCKS, PodLoad)
    await index.start()
    try:
        await until(lambda: index.registered)
        yield
    finally:
        await index.stop()


def reader_of(url: str, timeout_s: float = 5.0, breaker: CircuitBreaker | None = None) -> IndexReader:
    """A reader without look-up cache."""
    return IndexReader(url, timeout_s=timeout_s, breaker=breaker, clock=lambda: time.monotonic() * 1e6)


async def has_line(reader: IndexReader) -> bool:
    """The scope's connection is open; the first call starts to connect it."""
    assert await reader.lookup(SCOPE, BLOCKS[: random.randrange(2, 100)], PODS)
    assert reader._connections is not None
    return reader._connections.get(SCOPE) is not None


async def finds_all(reader: IndexReader) -> None:
    for length in random.sample(range(1, 101), 20):
        assert await reader.lookup(SCOPE, BLOCKS[:length], PODS) == {"p": length}


async def until_line(reader: IndexReader) -> None:
    async with asyncio.timeout(30):
        while not await has_line(reader):
            await asyncio.sleep(0.02)


async def test_a_reader_answers_with_and_without_a_connection_and_when_it_breaks(server: str) -> None:
    async with tcp_proxy(port_of(server)) as proxy, connect_redis(server, timeout_s=5.0) as raw, pod(server):
        reader = reader_of(f"redis://127.0.0.1:{proxy.port}")
        await finds_all(reader)  # while it connects
        await until_line(reader)
        await finds_all(reader)
        await raw.script_flush()
        await finds_all(reader)
        for _ in range(3):
            await raw.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await finds_all(reader)
            await reader.book(SCOPE, "r", [[BookingCandidate("p", 0.0, 1.0, 5, 60.0)]])
            proxy.hang_up()
            await finds_all(reader)
            await reader.unbook(SCOPE, "p", "r")
        await until_line(reader)
        assert reader.available
        await reader.close()
        assert await raw.zcard(IndexKeys(SCOPE).bookings("p")) == 0


async def test_a_connection_to_a_silent_server_is_closed_after_time_limits(server: str) -> None:
    async with tcp_proxy(port_of(server)) as proxy, pod(server):
        now = 100.0
        reader = reader_of(f"redis://127.0.0.1:{proxy.port}", 1.0, CircuitBreaker(failures=3, clock=lambda: now))
        await until_line(reader)
        proxy.silence()
        answers = await asyncio.gather(
            *(reader.lookup(SCOPE, UNASKED[:length], PODS) for length in range(1, 30)), return_exceptions=True
        )
        assert all(isinstance(answer, IndexUnavailable) for answer in answers)
        assert not reader.available
        proxy.heal()

        async def found() -> bool:
            nonlocal now
            now += 1.0
            try:
                await finds_all(reader)
            except IndexUnavailable:  # a busy machine may take longer than the time limit
                return False
            return True

        await until(found)
        await until_line(reader)
        await until(found)
        await reader.close()


async def test_connections_of_removed_scopes_are_closed(server: str) -> None:
    lines = PipelinedConnections(server)
    await until(lambda: lines.get("a") is not None and lines.get("b") is not None)
    a, b = lines.get("a"), lines.get("b")
    assert a is not None
    assert b is not None
    lines.close_other_scopes({"a"})
    assert (a.open, b.open) == (True, False)
    await lines.close()
    assert not a.open


# ---- a cluster


async def node(directory: Path) -> tuple[EmbeddedValkey, str]:
    with socket.socket() as bus:
        bus.bind(("127.0.0.1", 0))
        bus_port = bus.getsockname()[1]
    valkey = EmbeddedValkey(0, directory, ["--cluster-enabled", "yes", "--cluster-port", str(bus_port)], password="")
    return valkey, await valkey.start()


async def test_a_connection_follows_its_scope_to_another_node_of_a_cluster(tmp_path: Path) -> None:
    nodes = [await node(tmp_path / name) for name in "ab"]
    clients: list[Any] = [connect_redis(url, timeout_s=5.0) for _, url in nodes]
    try:
        slot = int(await clients[0].execute_command("CLUSTER", "KEYSLOT", IndexKeys(SCOPE).pods))
        await clients[0].execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        bus = (await clients[1].execute_command("CLUSTER", "NODES")).decode().split("@")[1].split()[0].split(",")[0]
        await clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port_of(nodes[1][1]), bus)

        async def all_know() -> bool:
            texts = [str(await client.execute_command("CLUSTER", "INFO")) for client in clients]
            return all("cluster_state:ok" in t and "cluster_known_nodes:2" in t for t in texts)

        await until(all_know)
        url = f"redis+cluster://127.0.0.1:{port_of(nodes[0][1])}"
        reader = reader_of(url)
        assert await reader.lookup(SCOPE, BLOCKS, PODS) == {"p": 0}
        await until_line(reader)
        there = (await clients[1].execute_command("CLUSTER", "MYID")).decode()
        for client in reversed(clients):
            await client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", there)
        async with pod(url):
            await finds_all(reader)
            await until_line(reader)
            before = (await clients[1].info("commandstats"))["cmdstat_evalsha"]["calls"]
            await finds_all(reader)
            assert (await clients[1].info("commandstats"))["cmdstat_evalsha"]["calls"] >= before + 20
        await reader.close()
    finally:
        for client in clients:
            await client.aclose()
        for valkey, _ in nodes:
            await valkey.stop()


async def test_a_cluster_that_is_down_makes_the_index_unavailable(unused_tcp_port: int) -> None:
    url = f"redis+cluster://127.0.0.1:{unused_tcp_port}"
    reader = IndexReader(url)
    for _ in range(3):
        with pytest.raises(IndexUnavailable):
            await reader.pods()
    assert not reader.available
    await reader.close()
    assert await mint_generation(url, SCOPE, "p") > 0
