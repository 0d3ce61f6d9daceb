"""gRPC calls with an Idempotency-Key: a retry gets the same messages, from the same gateway or from another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cli.stack.supervisor import PortLease
from common.errors import IdempotencyConflict, InvalidRequest, Unavailable
from common.pb import inference_pb2 as pb
from common.pb import inference_pb2_grpc
from common.rpc import open_channel, translate_rpc_errors
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.gateway.keyed_requests import computed, counted, outcomes, seeded
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.waiting import until


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster() as c:
        c.script = seeded
        yield c


def generate(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"model": MODEL, "text": "Hello", "max_tokens": 12, **fields})


async def read(
    stub: inference_pb2_grpc.InferenceAsyncStub, request: pb.GenerateRequest, name: str | None = "k"
) -> list[pb.GenerateResponse]:
    metadata = () if name is None else (("idempotency-key", name),)
    with translate_rpc_errors():
        return [message async for message in stub.Generate(request, metadata=metadata, timeout=30)]


async def test_a_grpc_retry_gets_the_same_messages(
    gw: Rig, cluster: FakeCluster, stub: inference_pb2_grpc.InferenceAsyncStub
) -> None:
    first = await read(stub, generate(n=2))
    assert await read(stub, generate(n=2, request_id="the retry's own id")) == first
    assert computed(cluster) == 1
    assert counted(gw, "generate") == {"ok": 1}
    with pytest.raises(IdempotencyConflict, match="belongs to another request"):
        await read(stub, generate(n=3))
    with pytest.raises(InvalidRequest, match="idempotency-key must have"):
        await read(stub, generate(), "x" * 256)
    assert (await read(stub, generate(n=2), None))[0].request_id != first[0].request_id


async def test_a_refused_grpc_call_leaves_its_key_free(
    gw: Rig, cluster: FakeCluster, stub: inference_pb2_grpc.InferenceAsyncStub
) -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        await read(stub, generate(temperature=9.0))
    first = await read(stub, generate(temperature=1.0))
    assert await read(stub, generate(temperature=1.0)) == first
    assert computed(cluster) == 1
    assert outcomes(gw) == {"computed": 2, "replayed": 1}


async def test_a_grpc_retry_attaches_and_an_abort_by_its_id_ends_the_answer(
    gw: Rig, cluster: FakeCluster, stub: inference_pb2_grpc.InferenceAsyncStub
) -> None:
    cluster.decodes[0].faults.stall_after = 3
    first = asyncio.create_task(read(stub, generate(request_id="one")))
    await until(lambda: bool(cluster.prefills[0].seen.prefilled))
    second = asyncio.create_task(read(stub, generate(request_id="two")))
    await until(lambda: outcomes(gw).get("attached") == 1)
    await stub.Abort(pb.AbortGenerateRequest(request_id="two"))
    results = await asyncio.gather(first, second, return_exceptions=True)
    assert [str(result) for result in results] == ["the request was aborted"] * 2
    await gw.settled()
    assert counted(gw, "generate") == {"Cancelled": 1} or counted(gw, "generate") == {"aborted": 1}


async def test_a_grpc_client_that_cancels_leaves_the_answer_to_the_other(
    gw: Rig, cluster: FakeCluster, stub: inference_pb2_grpc.InferenceAsyncStub
) -> None:
    cluster.decodes[0].faults.token_delay_s = 0.02
    first = asyncio.create_task(read(stub, generate(max_tokens=40)))
    await until(lambda: bool(cluster.prefills[0].seen.prefilled))
    second = asyncio.create_task(read(stub, generate(max_tokens=40)))
    await until(lambda: outcomes(gw).get("attached") == 1)
    first.cancel()
    assert sum(len(message.tokens) for message in await second) == 40
    await gw.settled()
    assert counted(gw, "generate") == {"ok": 1}


async def test_grpc_gives_the_same_answer_at_another_gateway(cluster: FakeCluster, smollm2_dir: Path) -> None:
    answers = []
    for _ in range(2):
        with PortLease() as port:
            async with (
                rig(cluster, smollm2_dir, grpc_port=port.port) as gw,
                open_channel(f"127.0.0.1:{gw.server.grpc_port}") as channel,
            ):
                answers.append(await read(inference_pb2_grpc.InferenceStub(channel), generate()))
                await gw.settled()
    texts = ["".join(message.text for message in answer) for answer in answers]
    assert texts[0] == texts[1]
    assert answers[0][0].request_id == answers[1][0].request_id


async def test_a_grpc_call_at_a_draining_gateway_is_refused(
    gw: Rig, stub: inference_pb2_grpc.InferenceAsyncStub
) -> None:
    gw.gateway.draining = True
    with pytest.raises(Unavailable, match="stopping"):
        await read(stub, generate())
