"""Real clients: the OpenAI SDK, gRPC, and the published OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import pytest_asyncio

from common.pb import inference_pb2, inference_pb2_grpc, types_pb2
from gateway.api.grpc import servicer
from tests.rigs.gateway.gateway_rig import MODEL, Rig, texts
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.waiting import until

SAID = "Héllo 世界, how are you?"


@pytest_asyncio.fixture
async def cluster(smollm2_dir: Path) -> AsyncIterator[FakeCluster]:
    async with fake_cluster() as c:
        tokenizer = texts(smollm2_dir)[0]
        ids = [*tokenizer.encode(SAID, add_special_tokens=False), tokenizer.eos_ids[0]]
        c.script = lambda _request: ids
        yield c


MESSAGES: Any = [{"role": "user", "content": "Hi"}]


async def test_async_sdk(gw: Rig) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gw.url}/v1", api_key="x", max_retries=0) as client:
        assert [m.id async for m in client.models.list()] == [MODEL]
        chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=1)
        assert chat.choices[0].message.content == SAID
        assert chat.choices[0].finish_reason == "stop"
        assert chat.usage is not None
        assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == SAID
        assert chunks[-1].usage is not None
        text = await client.completions.create(model=MODEL, prompt="x", max_tokens=30, logprobs=1)
        assert text.choices[0].text == SAID
        pieces = await client.completions.create(model=MODEL, prompt="x", max_tokens=30, stream=True)
        assert "".join([p.choices[0].text async for p in pieces]) == SAID
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model=MODEL, prompt="x", temperature=9)
        assert bad.value.param == "temperature"


async def test_sync_sdk(gw: Rig) -> None:
    def work() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{gw.url}/v1", api_key="x", max_retries=0) as client:
            chat = client.chat.completions.create(model=MODEL, messages=MESSAGES)
            stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            return chat.choices[0].message.content, "".join(c.choices[0].delta.content or "" for c in stream)

    assert await asyncio.to_thread(work) == (SAID, SAID)


async def test_sdk_sees_an_error_inside_a_stream(gw: Rig, cluster: FakeCluster) -> None:
    cluster.decodes[0].faults.stall_after = 1
    async with openai.AsyncOpenAI(base_url=f"{gw.url}/v1", api_key="x", max_retries=0) as client:
        headers = {"x-request-timeout": "4"}
        stream = await client.completions.create(
            model=MODEL, prompt="x", max_tokens=30, stream=True, extra_headers=headers
        )
        with pytest.raises(openai.APIError, match="time is over"):
            _ = [chunk async for chunk in stream]


async def test_sdk_abandoning_a_stream_aborts_it(gw: Rig, cluster: FakeCluster) -> None:
    cluster.decodes[0].faults.stall_after = 2
    async with openai.AsyncOpenAI(base_url=f"{gw.url}/v1", api_key="x", max_retries=0) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        async for _ in stream:
            break
        await stream.close()
    await until(lambda: len(cluster.decodes[0].seen.decode_aborts) == 1)


async def test_grpc_generate(gw: Rig, stub: Any, cluster: FakeCluster) -> None:
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="Hi")])
    for prompt in ({"text": "x"}, {"tokens": inference_pb2.TokenPrompt(ids=[1, 2])}, {"chat": chat}):
        request = inference_pb2.GenerateRequest(model=MODEL, max_tokens=30, temperature=0, logprobs=1, **prompt)
        got = [message async for message in stub.Generate(request)]
        assert "".join(m.text for m in got) == SAID
        assert [t.index for m in got for t in m.tokens] == list(range(got[-1].usage.completion_tokens))
        assert all(t.HasField("logprob") and len(t.top) == 1 for m in got for t in m.tokens)
        assert got[-1].finish_reason == types_pb2.FINISH_REASON_STOP
        assert len({m.request_id for m in got}) == 1
    assert cluster.decodes[0].seen.reserved[0].sampling.greedy
    assert [m.id for m in (await stub.ListModels(inference_pb2.ListModelsRequest())).models] == [MODEL]


async def test_grpc_priority_reaches_both_pods(stub: Any, cluster: FakeCluster) -> None:
    for priority in (3, -7):
        request = inference_pb2.GenerateRequest(model=MODEL, text="x", max_tokens=2, priority=priority)
        _ = [message async for message in stub.Generate(request)]
        asked = (cluster.prefills[0].seen.prefilled[-1], cluster.decodes[0].seen.reserved[-1])
        assert [r.priority for r in asked] == [priority] * 2


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model": "other", "text": "x"}, grpc.StatusCode.NOT_FOUND),
        ({"model": MODEL}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": MODEL, "text": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": MODEL, "text": "x", "temperature": float("nan")}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": MODEL, "text": "x", "temperature": 2.5}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_grpc_errors(stub: Any, fields: dict[str, Any], code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        _ = [m async for m in stub.Generate(inference_pb2.GenerateRequest(**fields))]
    assert error.value.code() is code


async def test_grpc_abort_deadline_and_cancel_free_everything(gw: Rig, stub: Any, cluster: FakeCluster) -> None:
    cluster.decodes[0].faults.stall_after = 2
    request = inference_pb2.GenerateRequest(model=MODEL, text="x", max_tokens=30)
    call = stub.Generate(request)
    first = await call.read()
    await stub.Abort(inference_pb2.AbortGenerateRequest(request_id=first.request_id))
    assert await _status(call) is grpc.StatusCode.CANCELLED
    with pytest.raises(grpc.aio.AioRpcError) as error:
        _ = [m async for m in stub.Generate(request, timeout=4.0)]
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    call = stub.Generate(request)
    await call.read()
    call.cancel()
    await until(lambda: len(cluster.decodes[0].seen.decode_aborts) == 3)
    assert (await stub.Abort(inference_pb2.AbortGenerateRequest(request_id="unknown"))) is not None


async def test_grpc_client_that_does_not_read_is_given_up_after_the_deadline(
    gw: Rig, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "SEND_GRACE_S", 0.1)
    monkeypatch.setattr(gw.gateway, "settings", replace(gw.gateway.settings, request_timeout_s=2.0))
    cluster.script = lambda request: [66] * request.sampling.max_tokens
    sent = gw.gateway.metrics.output_tokens
    request = inference_pb2.GenerateRequest(model=MODEL, text="x", max_tokens=2000, logprobs=20)
    # A fixed window: what the connection takes without a reader is less than the answer.
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 << 10)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gw.server.grpc_port}", options=window) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)  # never read
        await until(lambda: gw.gateway.metrics.running._value.get() != 0)
        async with asyncio.timeout(30):
            await gw.gateway.drain()  # returns once no request runs
        assert sent._value.get() == 0
        call.cancel()


async def _status(call: Any) -> grpc.StatusCode:
    """Reads a call to its end and returns the status code."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError:
        pass
    code: grpc.StatusCode = await call.code()
    return code
