"""Clients that read slowly or not at all: they lose their own answer, and other clients are not affected."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import orjson
import pytest
import pytest_asyncio

from common.errors import Overloaded
from common.pb import decode_pb2, types_pb2
from common.types import SamplingParams, ValidRequest
from gateway import server as server_module
from gateway.dispatch import attempt as attempt_module
from gateway.dispatch.attempt import Attempt
from gateway.server import listening_socket
from gateway.telemetry.timeline import Timeline
from tests.rigs.gateway.gateway_rig import MODEL, Rig
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.waiting import until

TOKENS = 1500


@pytest_asyncio.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeCluster]:
    def listening(host: str, port: int) -> socket.socket:
        """Its connections hold little: the kernel would let them grow to whole answers."""
        sock = listening_socket(host, port)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        return sock

    monkeypatch.setattr(server_module, "listening_socket", listening)
    async with fake_cluster() as c:
        for pod in c.pods.values():
            pod.max_model_len = 8192
        c.script = lambda request: [66] * request.sampling.max_tokens
        yield c


def open_stream(port: int, **fields: object) -> socket.socket:
    """Starts a streamed completion with log-probabilities: some KB per token, few of which fit into the connection."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 3000, "stream": True, "logprobs": 20, **fields}
    raw = orjson.dumps(body)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
    sock.sendall(head.encode() + raw)
    return sock


def read_to_the_end(sock: socket.socket) -> bytes:
    """Returns the last bytes of a chunked answer."""
    tail = b""
    while not tail.endswith(b"0\r\n\r\n"):
        tail = (tail + sock.recv(1 << 16))[-4096:]
    return tail


def pending(gw: Rig) -> list[int]:
    """Returns the pending tokens of each client."""
    sinks = [sink for pod in gw.gateway.models.first.pod_table.pods.values() for sink in pod._sinks.values()]
    return [sink.token_queue._orders[0].num_pending for sink in sinks if isinstance(sink, Attempt)]


async def test_a_client_that_does_not_read_is_ended_and_others_are_not_affected(
    gw: Rig, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "MAX_PENDING_TOKENS", 21 * 128)
    decode = cluster.decodes[0]
    with open_stream(gw.server.port) as slow:
        await until(lambda: bool(decode.seen.reserved))
        status, events = await gw.stream("completions", max_tokens=TOKENS)
        assert status == 200
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "R" * TOKENS
        await until(lambda: decode.seen.decode_aborts == [decode.seen.reserved[0].request_id])
        assert not pending(gw)
        slow.settimeout(30)
        assert b"the client reads too slowly" in await asyncio.to_thread(read_to_the_end, slow)


async def test_pending_tokens_are_bounded_with_their_alternatives_counted(
    gw: Rig, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "MAX_PENDING_TOKENS", 210)
    for logprobs, limit in ((None, 210), (20, 10)):
        cluster.decodes[0].faults.stall_after = 0
        router = gw.gateway.models.first.router
        request = ValidRequest("r", MODEL, (1, 2, 3), SamplingParams(max_tokens=TOKENS, logprobs=logprobs))
        plan, timeline = await router.plan(request), Timeline("id", None, "completions")
        attempt = Attempt(plan, deadline=time.monotonic() + 30, timeline=timeline)
        await attempt.start()
        for index in range(1, limit + 2):
            attempt.on_delta(decode_pb2.SequenceDelta(request_id="r", tokens=[types_pb2.Token(index=index, id=66)]))
            assert (attempt.token_queue.error is None) == (index <= limit)
        assert isinstance(attempt.token_queue.error, Overloaded)
        attempt.close()
