"""Deadlines and aborts over REST and gRPC, in every state of a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import orjson
import pytest
import pytest_asyncio

from common.errors import Cancelled
from common.pb import inference_pb2
from common.settings.gateway import GatewayConfig
from gateway.admission.api_keys import ANONYMOUS
from gateway.api.grpc.servicer import InferenceServicer
from gateway.api.http import endpoint
from gateway.api.openai.generate import GenerateHandler
from gateway.serving.gateway import Gateway
from tests.rigs.gateway.gateway_rig import MODEL, Rig
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.waiting import until

LATE_S = 3.0  #: In this time each request has to reach the state in which it waits.
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2}


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster() as c:
        c.script = lambda request: [66] * request.sampling.max_tokens
        yield c


async def rest_end(gw: Rig, **fields: Any) -> tuple[int, str]:
    """Returns the status and the message of the error that a request ends with, as a response or the last event."""
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 20, **fields}
    headers = {"x-request-timeout": str(LATE_S)}
    if not fields.get("stream"):
        answer = await gw.http.post("/v1/completions", json=body, headers=headers)
        return answer.status_code, answer.json()["error"]["message"]
    async with gw.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        text = (await response.aread()).decode()
    assert text.endswith("data: [DONE]\n\n") is (response.status_code == 200)
    return response.status_code, text.rsplit('"message":"', 1)[1].split('"', 1)[0]


async def grpc_end(stub: Any, **fields: Any) -> tuple[grpc.StatusCode, str]:
    request = inference_pb2.GenerateRequest(model=MODEL, text="Hello", max_tokens=20, **fields)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        _ = [message async for message in stub.Generate(request, timeout=LATE_S)]
    return error.value.code(), error.value.details() or ""


RESERVE, PREFILL, DECODE = {"reserve_delay_s": 60.0}, {"prefill_delay_s": 60.0}, {"stall_after": 2}


@pytest.mark.parametrize(
    ("fault", "fields"),
    [
        *((fault, fields) for fault in (RESERVE, PREFILL, DECODE) for fields in ({}, {"n": 2})),
        *((fault, BEAMS) for fault in (RESERVE, PREFILL)),  # each step asks for one token, which prefill gives
    ],
)
async def test_rest_and_grpc_end_with_the_same_error_at_the_deadline(
    gw: Rig, stub: Any, cluster: FakeCluster, fault: dict[str, float], fields: dict[str, Any]
) -> None:
    for pod in cluster.pods.values():
        for name, value in fault.items():
            setattr(pod.faults, name, value)
    streamed = [] if fields is BEAMS else [{**fields, "stream": True}]
    bodies = ({**fields}, *streamed)
    (code, _), *ends = await asyncio.gather(grpc_end(stub, **fields), *(rest_end(gw, **body) for body in bodies))
    assert {message for _, message in ends} == {"the request's time is over"}
    # The head of a stream is out when a decode pod has reserved.
    assert [status for status, _ in ends] == [504, 504 if fault is RESERVE else 200][: len(ends)]
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    # Pods get the rest of the client's time, rounded up on the wire.
    left = cluster.decodes[0].seen.timeouts
    assert len(left) == 1 + len(bodies)
    assert max(left) < LATE_S + 0.5
    await gw.settled()
    assert outcomes(gw)["completions"] == "DeadlineExceeded"


def outcomes(gw: Rig) -> dict[str, str]:
    """Returns the outcome of the requests by endpoint."""
    return {
        sample.labels["endpoint"]: sample.labels["outcome"]
        for metric in gw.gateway.metrics.requests.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.value
    }


async def test_a_client_that_has_gone_before_the_headers_is_no_failure(gw: Rig) -> None:
    class Left:
        """Fails as for a client that disconnected before the servicer was notified."""

        def time_remaining(self) -> float:
            return 30.0

        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return ()

        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        async def send_initial_metadata(self, _metadata: object) -> None:
            raise grpc.aio.InternalError("Failed execute_batch")

    request = inference_pb2.GenerateRequest(model=MODEL, text="Hello")
    with pytest.raises(Cancelled):
        await InferenceServicer(gw.gateway).Generate(request, Left())  # type: ignore[arg-type]
    assert outcomes(gw) == {"generate": "aborted"}


def test_a_deadline_that_has_passed_is_not_an_unlimited_one() -> None:
    gateway = Gateway(GatewayConfig(), [], None)
    for given, least, most in ((0.0, -1.0, 0.0), (3.0, 0.0, 3.0), (None, 3.0, 600.0), (1e9, 3.0, 600.0)):
        with gateway.admit("generate", None, given, caller=ANONYMOUS) as context:
            assert least < context.deadline - time.monotonic() <= most


@pytest.mark.parametrize(
    "own", ["", "mine", "long" * 50], ids=["our id", "the client's id", "a longer one than is kept"]
)
async def test_abort_ends_a_beam_search_without_output(gw: Rig, stub: Any, cluster: FakeCluster, own: str) -> None:
    cluster.prefills[0].faults.prefill_delay_s = 0.05
    request = inference_pb2.GenerateRequest(model=MODEL, text="Hello", max_tokens=1000, request_id=own, **BEAMS)
    call = stub.Generate(request)
    sent_id = dict(await call.initial_metadata())["x-request-id"]
    assert not own or sent_id == own[:128]
    await until(lambda: len(cluster.prefills[0].seen.prefilled) > 4)
    await stub.Abort(inference_pb2.AbortGenerateRequest(request_id=own or sent_id))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() is grpc.StatusCode.CANCELLED
    await gw.settled()
    asked = len(cluster.prefills[0].seen.prefilled)
    assert not gw.gateway._requests
    await asyncio.sleep(0.2)  # some steps' time
    assert len(cluster.prefills[0].seen.prefilled) == asked


async def test_abort_ends_a_rest_request_by_either_id(gw: Rig, stub: Any, cluster: FakeCluster) -> None:
    cluster.decodes[0].faults.stall_after = 1
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 20}
    for headers in ({"x-request-id": "mine"}, {}):
        asking = asyncio.create_task(gw.http.post("/v1/completions", json=body, headers=headers))
        await until(lambda: bool(gw.gateway._requests))
        request_id = headers.get("x-request-id") or next(iter(gw.gateway._requests))
        await stub.Abort(inference_pb2.AbortGenerateRequest(request_id=request_id))
        assert (await asking).status_code == 499
        await gw.settled()


@pytest.mark.parametrize("by", ["the request's deadline", "the gateway"])
async def test_a_body_that_does_not_come_is_408(gw: Rig, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    header = b"x-request-timeout: 0.2\r\n" if by == "the request's deadline" else b""
    if not header:
        monkeypatch.setattr(endpoint, "BODY_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", gw.server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n" + header + b"\r\n{")
    answer = await reader.read()  # to the end: the connection is closed
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    error = orjson.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "request_timeout")
    writer.close()
    assert (await gw.complete()).status_code == 200


async def test_a_client_that_does_not_read_is_given_up_after_the_deadline(
    gw: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "SEND_GRACE_S", 0.1)
    never = asyncio.Event()
    body = orjson.dumps({"model": MODEL, "prompt": "x", "stream": True})
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if not messages:
            await never.wait()
        return messages.pop()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await never.wait()

    served = endpoint.Endpoint(gw.gateway, "completions", GenerateHandler(gw.gateway, chat=False).serve)
    scope = {"type": "http", "headers": [(b"x-request-timeout", b"0.3")], "baton.caller": ANONYMOUS}
    async with asyncio.timeout(30):
        await served(scope, receive, send)
        await gw.gateway.drain()  # returns once no request runs
