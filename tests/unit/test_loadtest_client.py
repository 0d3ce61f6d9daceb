"""The REST client of the load test: requests, timing, failures and kept connections."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, Unavailable
from loadtest.client.base import RequestDraft
from loadtest.client.http_connection import SO_TIMESTAMPNS, HttpConnection
from loadtest.client.rest_client import RestClient, SseParser
from loadtest.config import LoadConfig
from loadtest.run import RequestRecord
from loadtest.workload.sessions import ModelAnswer, PromptMessage, TextPiece, Turn

# -- server-sent events


@given(
    datas=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12), max_size=8),
    end=st.sampled_from(["\n", "\r\n"]),
    cuts=st.lists(st.integers(0, 300), max_size=10),
)
def test_events_are_parsed_for_any_chunking(datas: list[str], end: str, cuts: list[int]) -> None:
    raw = "".join(f": note{end}event: x{end}data: {d}{end}{end}data: {d}{end}{end}" for d in datas).encode()
    parser, found, at = SseParser(), [], 0
    for cut in [*sorted(min(c, len(raw)) for c in cuts), len(raw)]:
        found += parser.feed(raw[at:cut])
        at = cut
    assert found == [d.encode() for d in datas for _ in range(2)]


def test_lines_of_one_event_are_joined_and_others_dropped() -> None:
    assert SseParser().feed(b"data:a\ndata: b\nid: 3\n\n: nothing\n\ndata: c\n\ndata: d\n") == [b"a\nb", b"c"]


# -- a scripted server

Script = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(**fields: Any) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"


def delta_event(text: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish}])


END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
USAGE = {"prompt_tokens": 7, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}}


def plain(status: str, body: bytes, *lines: str) -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", f"content-length: {len(body)}", *lines, "", ""])
    return head.encode() + body


class Server:
    """Answers request n with script n, later requests with the last script. Stores the request bodies."""

    def __init__(self, *scripts: Script | bytes) -> None:
        self._scripts = scripts
        self.heads: list[bytes] = []
        self.bodies: list[dict[str, Any]] = []
        self.connections = 0
        self.port = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int((head.lower().partition(b"content-length: ")[2] or b"0").split(b"\r\n")[0])
                body = await reader.readexactly(length)
                self.heads.append(head)
                self.bodies.append(orjson.loads(body or b"{}"))
                script = self._scripts[min(len(self.heads), len(self._scripts)) - 1]
                if isinstance(script, bytes):
                    writer.write(script)
                else:
                    await script(body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Server]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()


def config(server: Server, **flags: Any) -> LoadConfig:
    return LoadConfig.of({"rate": "1", "url": f"http://127.0.0.1:{server.port}", **flags})


TURN = Turn(
    (PromptMessage("system", (TextPiece(b"s", 3),)), PromptMessage("user", (TextPiece(b"u", 4), TextPiece(b"v", 2)))), 5
)


def draft(turn: Turn = TURN, **answers: ModelAnswer) -> RequestDraft:
    return RequestDraft(turn, {int(k[1:]): v for k, v in answers.items()}, "id-1", "session-1", "key")


def blank(abort_after: int | None = None) -> RequestRecord:
    return RequestRecord("id-1", 0, 0, 9, 5, time.perf_counter(), abort_after=abort_after)


@asynccontextmanager
async def connected_client(*scripts: Script | bytes, **flags: Any) -> AsyncIterator[tuple[Server, RestClient]]:
    async with Server(*scripts).running() as server:
        client = RestClient(config(server, **flags))
        try:
            yield server, client
        finally:
            await client.close()


async def outcome(*scripts: Script | bytes, abort_after: int | None = None, **flags: Any) -> RequestRecord:
    async with connected_client(*scripts, **flags) as (_, client):
        record = blank(abort_after)
        await asyncio.wait_for(client.send(await client.build(draft()), record), 20)
        assert record.ended_s >= record.sent_s > 0
        return record


@pytest.mark.parametrize("stamped", [True, False])
async def test_a_stream_is_timed_event_by_event(stamped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not stamped:  # the path with TLS, and on other systems than Linux
        monkeypatch.setattr(HttpConnection, "use_kernel_timestamps", lambda _: None)

    async def script(_body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + chunk(event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])))
        for text in ("a", "b"):
            await asyncio.sleep(0.5)
            raw = chunk(delta_event(text))
            writer.write(raw[:9])
            await asyncio.sleep(0.01)
            writer.write(raw[9:])
        writer.write(chunk(delta_event("c", "length") + event(choices=[], usage=USAGE)) + END)

    record = await outcome(script)
    assert (record.error, record.finish, record.answer) == ("", "length", ModelAnswer("abc"))
    assert (record.tokens, record.prompt_tokens, record.cached_tokens) == (4, 7, 3)
    assert len(record.event_times) == 3
    first, second, third = record.event_times
    assert record.ttft_s is not None
    assert record.ttft_s >= 0.505
    assert second - first >= 0.505
    assert third - second < second - first


async def test_the_request_has_all_fields_of_the_draft() -> None:
    good = OK + chunk(delta_event("x", "stop")) + END
    async with connected_client(good, deadline_s="9") as (server, client):
        await client.send(await client.build(draft()), blank())
        head, body = server.heads[0].decode(), server.bodies[0]
    assert head.startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    for part in (
        "authorization: Bearer key",
        "x-request-id: id-1",
        "x-session-affinity: session-1",
        "x-request-timeout: 9",
    ):
        assert f"\r\n{part}\r\n" in head
    assert body["messages"] == [
        {"role": "system", "content": TextPiece(b"s", 3).text()},
        {"role": "user", "content": f"{TextPiece(b'u', 4).text()} {TextPiece(b'v', 2).text()}"},
    ]
    assert (body["max_tokens"], body["stream"], body["ignore_eos"], body["temperature"]) == (5, True, True, 0.0)
    async with connected_client(good, endpoint="completions", vocab="5:90", ignore_eos=False) as (server, client):
        await client.send(await client.build(draft()), blank())
        body = server.bodies[0]
    assert body["prompt"] == [
        *TextPiece(b"s", 3).ids(5, 90),
        *TextPiece(b"u", 4).ids(5, 90),
        *TextPiece(b"v", 2).ids(5, 90),
    ]
    assert "ignore_eos" not in body


async def test_the_real_answer_goes_into_the_next_turn() -> None:
    turn = Turn(
        (PromptMessage("user", (TextPiece(b"u", 2),)), PromptMessage("assistant", (TextPiece(b"a", 5),), answer=0)), 5
    )
    async with connected_client(b"") as (_, client):
        said_before = orjson.loads(
            (await client.build(draft(turn, _0=ModelAnswer('so "it"\nis')))).partition(b"\r\n\r\n")[2]
        )
        unknown = orjson.loads((await client.build(draft(turn))).partition(b"\r\n\r\n")[2])
    assert said_before["messages"][1] == {"role": "assistant", "content": 'so "it"\nis'}
    assert unknown["messages"][1]["content"] == TextPiece(b"a", 5).text()


async def _cut(_body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(OK + chunk(delta_event("a")))
    await writer.drain()
    writer.close()


async def _silent(_body: bytes, _writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


FULL = plain("429 Too Many", b'{"error": {"code": "rate_limit_exceeded", "message": "full"}}')
AWAY = plain("503 Away", b'{"error": {"type": "server_error", "code": null, "message": "no pod"}}')
LATE = OK + chunk(delta_event("a") + event(error={"code": "deadline", "message": "late"})) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        (FULL, "http 429 rate_limit_exceeded", "full"),
        (AWAY, "http 503 server_error", "no pod"),
        (plain("502 Bad Gateway", b"<html>"), "http 502", "<html>"),
        (LATE, "stream deadline", "late"),
        (OK + chunk(delta_event("a")) + END, "incomplete", "without a finish reason"),
        (OK + chunk(b"data: {nonsense\n\n") + END, "protocol", "not an event"),
        (OK + chunk(b"data: []\n\n") + END, "protocol", "not an event"),
        (b"220 smtp.example.com ESMTP\r\n", "disconnected", "not HTTP"),
        (_cut, "disconnected", "closed the connection"),
    ],
)
async def test_every_failure_has_a_kind(script: Script | bytes, kind: str, message: str) -> None:
    record = await outcome(script)
    assert record.error == kind
    assert message in record.message
    assert not record.ok


async def test_a_silent_server_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.client.rest_client.GRACE_S", 0.2)
    record = await outcome(_silent, deadline_s="0.1")
    assert (record.error, record.message) == ("timeout", "no complete answer before the timeout")
    assert 0.25 < record.e2e_s < 15


async def test_no_server_is_an_error_of_the_request_and_of_the_run() -> None:
    async with Server(b"").running() as server:
        pass
    client = RestClient(config(server))
    record = blank()
    await client.send(await client.build(draft()), record)
    assert record.error == "connect"
    with pytest.raises(Unavailable):
        await client.model()


@pytest.mark.parametrize("stamped", [True, False])
async def test_connections_are_kept_and_a_closed_one_is_replaced(
    stamped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not stamped:
        monkeypatch.setattr(HttpConnection, "use_kernel_timestamps", lambda _: None)
    good = OK + chunk(delta_event("x", "stop")) + END

    async def close_after(_body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(good)
        await writer.drain()

    async def refuse(_body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()  # the server's keep-alive time ends

    async with connected_client(close_after, close_after, refuse, close_after) as (server, client):
        for _ in range(3):
            record = blank()
            await client.send(await client.build(draft()), record)
            assert record.error == ""
        assert server.connections == 2
        assert len(server.heads) == 4


async def test_a_disconnect_on_a_new_connection_is_not_retried() -> None:
    async def refuse(_body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with connected_client(refuse) as (server, client):
        record = blank()
        await client.send(await client.build(draft()), record)
        assert record.error == "disconnected"
        assert len(server.heads) == 1


@pytest.mark.parametrize("after", [0, 1, 2])
async def test_an_aborting_client_closes_the_connection(after: int) -> None:
    gone = asyncio.Event()

    async def script(_body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        try:
            while True:
                if after:
                    writer.write(chunk(delta_event("a")))
                    await writer.drain()
                await asyncio.sleep(0.01)
                if writer.transport.is_closing():
                    return
        finally:
            gone.set()

    async with connected_client(script) as (_, client):
        record = blank(after)
        await client.send(await client.build(draft()), record)
        assert record.aborted
        assert not record.ok
        assert record.error == ""
        assert len(record.event_times) == after
        if after:
            await asyncio.wait_for(gone.wait(), 20)


async def test_an_answer_without_streaming() -> None:
    body = orjson.dumps({"choices": [{"message": {"content": "abc"}, "finish_reason": "stop"}], "usage": USAGE})
    record = await outcome(plain("200 OK", body), stream=False)
    assert (record.error, record.answer, record.tokens, len(record.event_times)) == ("", ModelAnswer("abc"), 4, 0)
    assert record.ttft_s is None
    assert (await outcome(plain("200 OK", b"{}"), stream=False)).error == "protocol"


async def test_the_model_is_the_one_that_is_served() -> None:
    models = plain("200 OK", b'{"data": [{"id": "m"}, {"id": "n"}]}')
    async with connected_client(models) as (server, client):
        assert await client.model() == "m"
        assert await RestClient(config(server, model="n")).model() == "n"
        with pytest.raises(ConfigError, match="serves m, n, not x"):
            await RestClient(config(server, model="x")).model()
    async with connected_client(plain("401 No", b'{"error": {"message": "no key"}}')) as (_, client):
        with pytest.raises(Unavailable, match="no key"):
            await client.model()
    async with connected_client(plain("200 OK", b"{}")) as (_, client):
        with pytest.raises(Unavailable, match="not a list of models"):
            await client.model()


@pytest.fixture
def kernel_stamps() -> Iterator[None]:
    """Waits until the kernel stamps arrivals: it starts some time after the first socket asks for stamps."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind(("127.0.0.1", 0))
        own.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            own.sendto(b"x", own.getsockname())
            time.sleep(0.1)
            read_at = time.time()
            _, [(_, _, stamp)], _, _ = own.recvmsg(1, 64)
            seconds, nanoseconds = struct.unpack("@ll", stamp)
            if seconds + nanoseconds * 1e-9 < read_at:
                break
        yield


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's stamps are Linux's")
async def test_bytes_have_their_arrival_time_not_the_read_time(kernel_stamps: None) -> None:
    sent = 0.0

    async def script(_body: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        sent = time.perf_counter()
        writer.write(OK + chunk(delta_event("a", "stop")) + END)
        time.sleep(2.0)  # noqa: ASYNC251 - blocks the client's loop, so it reads late

    record = await outcome(script)
    assert record.error == ""
    assert sent <= record.event_times[0] < sent + 1.9
