"""HTTP of the gateway below its API: large and broken bodies, bad heads, pipelined requests, health."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from gateway.api.http import protocol
from tests.rigs.gateway.gateway_rig import MODEL, Rig
from tests.rigs.pods.fake_pods import FakeCluster
from tests.rigs.waiting import until


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_50_mb_body_is_rejected_without_being_stored(gw: Rig, chunked: bool) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b" " * (1 << 20)

    content = parts() if chunked else b" " * (50 << 20)
    response = await gw.http.post("/v1/completions", content=content)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert (await gw.complete()).status_code == 200


async def test_a_compressed_body_is_refused_by_name(gw: Rig) -> None:
    raw = gzip.compress(orjson.dumps({"model": MODEL, "prompt": "Hello"}))
    response = await gw.http.post("/v1/completions", content=raw, headers={"content-encoding": "gzip"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "content-encoding")


async def said_to(gw: Rig, raw: bytes) -> tuple[int, dict[str, Any]]:
    """Sends raw bytes and returns the status and the error of the answer. The gateway must close the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gw.server.port)
    writer.write(raw)
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), orjson.loads(body)["error"]


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (HEAD + b"X: " + b"a" * (80 << 10), 431),
        (HEAD + b"X: a\r\n" * (20 << 10), 431),
        (b"GET /" + b"a" * (80 << 10), 431),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00", 400),
    ],
)
async def test_endless_and_invalid_heads(gw: Rig, raw: bytes, status: int) -> None:
    got, error = await said_to(gw, raw)
    assert (got, error["type"]) == (status, "invalid_request_error")
    assert (await gw.complete()).status_code == 200


async def test_a_head_that_does_not_arrive(gw: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)
    for raw in (b"", HEAD):
        status, error = await said_to(gw, raw)
        assert (status, error["type"]) == (408, "invalid_request_error")


def posted(**fields: Any) -> bytes:
    """Returns a complete request as bytes."""
    body = orjson.dumps({"model": MODEL, "prompt": "Hello", "max_tokens": 5, **fields})
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    "behind",
    [b"no HTTP\r\n\r\n", HEAD, HEAD + b"X: " + b"a" * (80 << 10), HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"],
)
async def test_a_bad_request_does_not_cut_the_answers_of_earlier_ones(
    gw: Rig, cluster: FakeCluster, behind: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)
    cluster.decodes[0].faults.token_delay_s = 0.1
    reader, writer = await asyncio.open_connection("127.0.0.1", gw.server.port)
    writer.write(posted(stream=True) + posted() + behind)
    answers = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    streamed, _, whole = answers.partition(b"data: [DONE]")
    assert (streamed.count(b"HTTP/1.1"), whole.count(b"HTTP/1.1")) == (1, 1), answers
    assert whole.startswith(b"\n\n\r\n0\r\n\r\nHTTP/1.1 200")
    assert orjson.loads(whole.rpartition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 5
    await gw.settled()


async def test_input_after_a_rejected_request_is_ignored(
    gw: Rig, cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.decodes[0].faults.token_delay_s = 0.1
    reader, writer = await asyncio.open_connection("127.0.0.1", gw.server.port)
    writer.write(posted())
    await until(lambda: bool(cluster.decodes[0].seen.reserved))
    for _ in range(10):
        writer.write(b"no HTTP\r\n\r\n")
        await asyncio.sleep(0.01)
    assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 200")
    writer.close()
    assert [record.message for record in caplog.records if record.name == "uvicorn.error"] == [
        "Invalid HTTP request received."
    ]


async def test_an_unread_pipelined_head_is_not_late(
    gw: Rig, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Input after pipelined requests stays in the kernel until they are answered; that time does not count as slow."""
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)
    cluster.decodes[0].faults.token_delay_s = 0.15
    reader, writer = await asyncio.open_connection("127.0.0.1", gw.server.port)
    writer.write(posted())
    await until(lambda: bool(cluster.decodes[0].seen.reserved))
    writer.write(posted() + posted()[:20])
    await asyncio.sleep(0.02)
    writer.write(posted()[20:])
    answers = b""
    async with asyncio.timeout(20):
        while answers.count(b"HTTP/1.1 200") < 3:
            more = await reader.read(1 << 16)
            assert more, answers
            answers += more
    writer.close()


async def test_a_disconnect_with_pipelined_requests_is_noticed(gw: Rig, cluster: FakeCluster) -> None:
    decode = cluster.decodes[0]
    decode.faults.token_delay_s = 0.05
    _, writer = await asyncio.open_connection("127.0.0.1", gw.server.port)
    writer.write(posted(stream=True, max_tokens=2000) + posted())
    await until(lambda: bool(decode.seen.reserved))
    writer.close()
    await until(lambda: decode.seen.decode_aborts == [decode.seen.reserved[0].request_id])
    await gw.settled()
    assert len(decode.seen.reserved) == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[1]",
        b'"x"',
        b"null",
        b'{"model": "smol", "prompt": "\xff\xfe"}',
        b'{"temperature": NaN}',
        b'{"top_p": 1e999}',
    ],
)
async def test_bodies_that_are_not_a_json_object(gw: Rig, raw: bytes) -> None:
    response = await gw.http.post("/v1/completions", content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_health_metrics_version(gw: Rig) -> None:
    for path in ("/health", "/ready", "/live", "/version", "/metrics"):
        assert (await gw.http.get(path)).status_code == 200
    assert (await gw.http.head("/metrics")).status_code == 200
    await gw.complete()
    text = (await gw.http.get("/metrics")).text
    assert 'baton_requests_total{endpoint="completions",outcome="ok"} 1.0' in text
    assert "baton_ttft_seconds_count 1.0" in text
