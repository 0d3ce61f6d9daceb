"""A stream that is ended in the same loop turn in which tokens arrive: the end is the client's last event."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from common.errors import Cancelled, Overloaded
from common.pb import decode_pb2, types_pb2
from gateway.dispatch.attempt import Attempt
from tests.rigs.gateway.gateway_rig import MODEL, Rig, until


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("how", ["context", "attempt"])
async def test_the_end_event_is_the_last(gw: Rig, tokens_first: bool, how: str) -> None:
    gw.cluster.decodes[0].faults.stall_after = 2
    reader, writer = await asyncio.open_connection("127.0.0.1", gw.server.port)
    raw = orjson.dumps({"model": MODEL, "prompt": "x", "max_tokens": 50, "stream": True})
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw)
    pods = gw.gateway.models.first.pod_table.pods.values()
    attempts = lambda: [sink for pod in pods for sink in pod._sinks.values() if isinstance(sink, Attempt)]  # noqa: E731
    await until(
        lambda: any(
            len(attempt.token_queue._orders[0].ids) == 3 and attempt.token_queue._on_tokens is not None
            for attempt in attempts()
        )
    )
    [attempt] = attempts()
    [context] = gw.gateway._requests.values()

    def come() -> None:
        attempt.on_delta(decode_pb2.SequenceDelta(request_id="r", tokens=[types_pb2.Token(index=3, id=66)]))

    def end() -> None:
        if how == "context":
            context.abort(Cancelled("ended by a test"))
        else:
            attempt.token_queue.fail(Overloaded("ended by a test"))

    for step in (come, end) if tokens_first else (end, come):
        step()
    body = await reader.readuntil(b"\r\n0\r\n\r\n")
    assert body.count(b"ended by a test") == 1
    assert body.rindex(b"data: {") < body.index(b"ended by a test") < body.index(b"[DONE]")
    writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"  # no bytes of the stream follow its end
    writer.close()
