"""Log lines about an index that is away: gateways and pods name the cause, also while the circuit breaker is open."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cli.probes import redis_trouble
from cli.stack.valkey import EmbeddedValkey
from common.auth import GATEWAY, Signer
from common.errors import IndexUnavailable
from common.redis.client import CircuitBreaker
from common.settings.process import DEFAULT_SECRET
from common.types import PodLoad
from gateway.pods.table import PodTable
from prefix_index.publisher import IndexPublisher, mint_generation, read_name_owner
from prefix_index.reader import IndexReader
from tests.rigs.index.index_rig import RECORD, SCOPE
from tests.rigs.waiting import until

CAUSES = {
    "LOADING Redis is loading the dataset in memory": "loading its data",
    "READONLY You can't write against a read only replica.": "read-only replica",
    "NOAUTH Authentication required.": "password missing",
    "NOPERM User x has no permissions to run the 'hkeys' command": "no permission for this command",
    "MISCONF Valkey is configured to save RDB snapshots, but it is unable to persist to disk.": "saving to disk fails",
    "OOM command not allowed when used memory > 'maxmemory'.": "memory full",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.": "replica without its primary",
    "BUSY Redis is busy running a script.": "busy with a script",
}


@asynccontextmanager
async def server_that_answers(answer: str | None) -> AsyncIterator[str]:
    """Yields the URL of a server that answers each command with this error. None: it never answers; "": it hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                if answer == "":
                    break
                if answer is not None:
                    # One answer per command. A command is an array, which begins with "*" at the start of a line.
                    commands = data.startswith(b"*") + data.count(b"\r\n*")
                    writer.write(f"-{answer}\r\n".encode() * commands)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def causes(url: str, calls: int = 5, *, timeout_s: float = 30.0) -> list[str]:
    """Returns the texts of a gateway's reader about an index that is away, also with an open circuit breaker."""
    reader, found = IndexReader(url, timeout_s=timeout_s, breaker=CircuitBreaker(clock=lambda: 100.0)), []
    try:
        for _ in range(calls):
            with pytest.raises(IndexUnavailable) as raised:
                await reader.lookup(SCOPE, [bytes(16)], [("p", 1)])
            found.append(raised.value.message)
    finally:
        await reader.close()
    return found


@pytest.mark.parametrize("answer", CAUSES)
async def test_an_error_of_the_server_is_named(answer: str) -> None:
    async with server_that_answers(answer) as url:
        for text in await causes(url):
            assert CAUSES[answer] in text
        assert CAUSES[answer] in str(await redis_trouble(url))


async def test_a_server_that_is_absent_silent_or_hangs_up() -> None:
    for text in await causes("redis://127.0.0.1:1"):
        assert text.endswith(": connection refused (127.0.0.1:1)")
    async with server_that_answers(None) as url:
        for text in await causes(url, timeout_s=0.05):
            assert text.endswith(": timed out after 0.05 s")
    async with server_that_answers("") as url:
        for text in await causes(url):
            assert text.endswith((": connection closed by the server", ": connection reset by peer"))


async def test_a_wrong_password_and_a_wrong_user_of_a_real_server(tmp_path: Path) -> None:
    valkey = EmbeddedValkey(0, tmp_path, password="right")
    url = await valkey.start()
    try:
        for wrong in (url.replace("right", "wrong"), url.replace(":right@", "somebody:right@")):
            for text in await causes(wrong):
                assert "wrong password or user" in text
        for text in await causes(url.replace(":right@", "")):
            assert "password missing" in text
    finally:
        await valkey.stop()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def warnings(lines: pytest.LogCaptureFixture, start: str) -> list[str]:
    return [record.getMessage() for record in lines.records if record.getMessage().startswith(start)]


async def test_the_gateway_logs_the_cause_and_its_change(
    tmp_path: Path, lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.pods.table.REPORT_PAUSE_S", 0.1)
    monkeypatch.setattr("gateway.pods.table.POLL_PERIOD_S", 0.02)
    monkeypatch.setattr("prefix_index.reader.POLL_TIMEOUT_S", 0.2)
    valkey = EmbeddedValkey(0, tmp_path, password="")
    url = await valkey.start()
    reader = IndexReader(url, breaker=CircuitBreaker(probe_s=0.05))
    table = PodTable((), reader, signer=Signer(DEFAULT_SECRET.encode(), GATEWAY, "g", 1), model="m")
    await table.start()
    away = "prefix index: away ("
    try:
        await until(lambda: table.index_up)
        assert valkey.pid is not None
        os.kill(valkey.pid, signal.SIGSTOP)
        await until(lambda: len(warnings(lines, away)) > 0)
        os.kill(valkey.pid, signal.SIGCONT)
        await until(lambda: table.index_up)
        await valkey.stop()
        await until(lambda: any("connection refused" in line for line in warnings(lines, away)))
    finally:
        await table.stop()
        await reader.close()
        await valkey.stop()
    assert "timed out after 0.2 s" in warnings(lines, away)[0]
    named = ("timed out after 0.2 s", "connection refused", "connection closed by the server", "connection reset")
    assert all(any(cause in line for cause in named) for line in warnings(lines, away)), warnings(lines, away)


async def test_a_pod_logs_the_cause(lines: pytest.LogCaptureFixture) -> None:
    index = IndexPublisher("redis://127.0.0.1:1", RECORD, list, PodLoad)
    await index.start()
    lost = "not registered in the prefix index, retrying: "
    await until(lambda: len(warnings(lines, lost)) > 0)
    await index.stop()
    assert warnings(lines, lost)[0] == f"{lost}connection refused (127.0.0.1:1)"
    assert warnings(lines, "could not leave") == [
        "could not leave the prefix index, the lease will expire: connection refused (127.0.0.1:1)"
    ]
    assert await read_name_owner("redis://127.0.0.1:1", SCOPE, "p") is None
    assert warnings(lines, "cannot read")[0].endswith("the pod name p: connection refused (127.0.0.1:1)")
    async with server_that_answers(None) as url:
        await mint_generation(url, SCOPE, "p")
    assert warnings(lines, "the prefix index does not answer")[0].endswith("alone: timed out after 1 s")


async def test_a_refused_registration_names_no_private_class(lines: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Two pods have one name. The index keeps the later generation, and the other pod logs that in words."""
    valkey = EmbeddedValkey(0, tmp_path, password="")
    url = await valkey.start()
    records = [replace(RECORD, generation=generation) for generation in (2_000, 1_000)]
    pods = [IndexPublisher(url, record, list, PodLoad) for record in records]
    try:
        await pods[0].start()
        await until(lambda: pods[0].registered)
        await pods[1].start()
        lost = "not registered in the prefix index, retrying: "
        await until(lambda: len(warnings(lines, lost)) > 0)
    finally:
        for pod in pods:
            await pod.stop()
        await valkey.stop()
    (line, *_) = warnings(lines, lost)
    assert line.endswith("pod decode-0 at 127.0.0.1:5 was replaced by 127.0.0.1:5 under the same name")
