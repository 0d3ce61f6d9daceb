"""gRPC over a loopback connection: errors keep their class; health and reflection answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common import rpc
from common.errors import (
    BatonError,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from common.pb import decode_pb2, decode_pb2_grpc
from common.rpc import RpcServer, error_from_rpc, open_channel, remaining_s, timeout_until, translate_rpc_errors

SERVICE = "baton.v1.Decode"


class Servicer(decode_pb2_grpc.DecodeServicer):
    """Raises `error` from every method, from Tokens after one message."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.seen: list[float] = []
        self.aborting = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:
        self.seen.append(remaining_s(context, default=77.0))
        if self.error is not None:
            raise self.error
        return decode_pb2.ReserveResponse(cached_tokens=3)

    async def Abort(self, request: decode_pb2.DecodeAbortRequest, context: Any) -> decode_pb2.DecodeAbortResponse:
        self.aborting.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return decode_pb2.DecodeAbortResponse()

    async def Tokens(
        self, request_iterator: AsyncIterator[decode_pb2.TokensRequest], context: Any
    ) -> AsyncIterator[decode_pb2.TokenBatch]:
        async for message in request_iterator:
            yield decode_pb2.TokenBatch(number=message.acked)
            if self.error is not None:
                raise self.error


class Pair:
    """A server with one servicer and a channel to it."""

    def __init__(self, servicer: Servicer) -> None:
        self.servicer = servicer
        self.server = RpcServer("127.0.0.1", 0)

    async def __aenter__(self) -> Pair:
        self.server.add_servicer(decode_pb2_grpc.add_DecodeServicer_to_server, self.servicer, SERVICE)
        self.port = await self.server.start()
        self.channel = open_channel(f"127.0.0.1:{self.port}")
        self.stub: Any = decode_pb2_grpc.DecodeStub(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.stop(0)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("n is -1", field="n"),
        Overloaded("full", retry_after_s=2.5),
        Unavailable("leaving – später"),
        DeadlineExceeded("over"),
    ],
)
async def test_an_error_keeps_class_field_and_time_to_wait(error: BatonError) -> None:
    async with Pair(Servicer(error)) as pair:
        with pytest.raises(BatonError) as unary, translate_rpc_errors():
            await pair.stub.Reserve(decode_pb2.ReserveRequest(), timeout=30)
        call = pair.stub.Tokens(iter([decode_pb2.TokensRequest(acked=5)]), timeout=30)
        got = [(await call.read()).number]
        with pytest.raises(BatonError) as stream, translate_rpc_errors():
            await call.read()
    assert got == [5]
    for e in (unary.value, stream.value):
        assert (type(e), e.message, e.field, e.retry_after_s) == (
            type(error),
            error.message,
            error.field,
            error.retry_after_s,
        )


async def test_an_unexpected_exception_is_internal_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with Pair(Servicer(KeyError("secret"))) as pair:
        with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as e:
            await pair.stub.Reserve(decode_pb2.ReserveRequest(), timeout=30)
    assert e.value.code() is grpc.StatusCode.INTERNAL
    assert isinstance(error_from_rpc(e.value), InternalError)
    assert "secret" not in (e.value.details() or "")
    assert any(r.exc_info for r in caplog.records)


class Left:
    """A call whose caller has disconnected before the servicer is cancelled."""

    async def abort(self, *_: object, **__: object) -> None:
        raise grpc.aio.InternalError("Failed execute_batch")


@pytest.mark.parametrize("error", [InvalidRequest("n is -1"), grpc.aio.InternalError("Failed execute_batch")])
@pytest.mark.parametrize("streams", [False, True])
async def test_a_disconnected_caller_is_not_logged_as_an_error(
    error: Exception, streams: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(_request: object, _context: object) -> None:
        raise error

    async def answers(_request: object, _context: object) -> AsyncIterator[None]:
        raise error
        yield

    caplog.set_level(logging.ERROR)
    wrapped = rpc._wrap(answers if streams else answer, "m")(None, Left())
    with pytest.raises(asyncio.CancelledError):
        await (anext(wrapped) if streams else wrapped)
    assert not caplog.records


async def test_a_long_message_still_arrives_as_its_class() -> None:
    async with Pair(Servicer(InvalidRequest("x" * 100_000, field="prompt"))) as pair:
        with pytest.raises(InvalidRequest) as e, translate_rpc_errors():
            await pair.stub.Reserve(decode_pb2.ReserveRequest(), timeout=30)
    assert e.value.field == "prompt"


async def test_cancel_reaches_the_servicer_and_the_caller() -> None:
    async with Pair(Servicer()) as pair:
        call = pair.stub.Abort(decode_pb2.DecodeAbortRequest(), timeout=60)
        await asyncio.wait_for(pair.servicer.aborting.wait(), 30)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(pair.servicer.cancelled.wait(), 30)


async def test_deadlines_reach_the_servicer_and_expire() -> None:
    async with Pair(Servicer()) as pair:
        await pair.stub.Reserve(decode_pb2.ReserveRequest(), timeout=40)
        await pair.stub.Reserve(decode_pb2.ReserveRequest())
        with pytest.raises(DeadlineExceeded), translate_rpc_errors():
            await pair.stub.Abort(decode_pb2.DecodeAbortRequest(), timeout=0.2)
    assert 0 < pair.servicer.seen[0] < 41  # on the wire it is rounded up, to a tenth of a second from ten on
    assert pair.servicer.seen[1] == 77.0
    with pytest.raises(DeadlineExceeded):
        timeout_until(time.monotonic() - 1)


async def test_a_missing_server_is_unavailable(unused_tcp_port: int) -> None:
    async with open_channel(f"127.0.0.1:{unused_tcp_port}") as ch:
        with pytest.raises(Unavailable), translate_rpc_errors():
            await decode_pb2_grpc.DecodeStub(ch).Reserve(decode_pb2.ReserveRequest(), timeout=30)  # type: ignore[misc]


async def test_stop_cancels_calls_after_the_grace_time() -> None:
    async with Pair(Servicer()) as pair:
        call = pair.stub.Abort(decode_pb2.DecodeAbortRequest(), timeout=60)
        await asyncio.wait_for(pair.servicer.aborting.wait(), 30)
        await pair.server.stop(0.1)
        with pytest.raises(Unavailable), translate_rpc_errors():
            await call


async def test_health_follows_set_serving() -> None:
    async with Pair(Servicer()) as pair:
        stub: Any = health_pb2_grpc.HealthStub(pair.channel)

        async def statuses() -> set[int]:
            await asyncio.sleep(0)
            names = ("", SERVICE)
            return {(await stub.Check(health_pb2.HealthCheckRequest(service=n), timeout=30)).status for n in names}

        kinds = health_pb2.HealthCheckResponse
        assert await statuses() == {kinds.NOT_SERVING}
        pair.server.set_serving(True)
        assert await statuses() == {kinds.SERVING}
        pair.server.set_serving(False)
        assert await statuses() == {kinds.NOT_SERVING}


async def test_reflection_lists_the_services() -> None:
    async with Pair(Servicer()) as pair:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(pair.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=30)
        names = {s.name for s in (await call.read()).list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_a_taken_port_is_a_configuration_error() -> None:
    async with Pair(Servicer()) as pair:
        with pytest.raises(ConfigError) as e:
            await RpcServer("127.0.0.1", pair.port).start()
    assert e.value.field == "port"
