"""Malformed bodies: each gets an answer below 500, and none leaves requests, bookings, tasks or memory behind.

BATON_FUZZ sets the number of bodies for each of the two APIs (default 300; the long run has 10,000).
"""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import orjson
import psutil
import pytest_asyncio

from common import rpc
from common.pb import inference_pb2, inference_pb2_grpc
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.waiting import until

COUNT = int(os.environ.get("BATON_FUZZ", "300"))
WARM = min(COUNT // 2, 3000)  # bodies after which caches have their size; a short run says nothing of memory
AT_ONCE = 16
GROWTH = 48 << 20  # bytes: what allocators keep; a body that stayed behind each time would be more in the long run
OUR_FAULT = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
SEEDS: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "Hi",
        "stop": ["x"],
        "logprobs": 1,
        "logit_bias": {"5": 1},
        "n": 1,
        "best_of": 1,
        "echo": False,
    },
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "top_logprobs": 1,
        "logprobs": True,
        "tools": [TOOL],
        "response_format": SCHEMA,
        "tool_choice": "auto",
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {},
    },
    "/v1/responses": {"input": "Hi", "tools": [], "text": {"format": {"type": "text"}}, "store": False},
    "/tokenize": {"prompt": "Hi", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}
COMMON: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 4,
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 1,
    "stream": False,
    "priority": 0,
    "cache_salt": "s",
    "user": "u",
    "ignore_eos": False,
    "min_tokens": 0,
    "stop_token_ids": [7],
    "presence_penalty": 0.0,
    "allowed_token_ids": [66],
    "bad_words": ["no"],
    "prompt_logprobs": None,
    "structured_outputs": None,
    "metadata": {},
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
}
ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    -(2**63) - 1,
    1e308,
    -0.0,
    1.5,
    "",
    "x",
    "\0",
    "\ud800",
    "9" * 400,
    "ü" * 70,
    [],
    [None],
    [[]],
    [[1], "x"],
    [1, "x"],
    [-1],
    [2**40],
    {},
    {"": None},
    {"a": {"a": {"a": []}}},
    {"type": "object"},
    {"type": "json_schema"},
    {"json": {"type": 5}},
    {"regex": "("},
    {"grammar": "start: ("},
    [{"role": "user"}],
    [{"role": 5, "content": {}}],
    [{"role": "tool", "content": [{"type": "image_url"}]}],
    MESSAGES,
]


def bend(value: Any, rng: random.Random) -> Any:
    """Returns a changed copy of the value, or an unrelated one."""
    if isinstance(value, dict) and value and rng.random() < 0.7:
        out = dict(value)
        key = rng.choice(list(out))
        out[key] = bend(out[key], rng)
        return out
    if isinstance(value, list) and value and rng.random() < 0.7:
        out_list = list(value)
        at = rng.randrange(len(out_list))
        out_list[at] = bend(out_list[at], rng)
        return out_list
    return copy.deepcopy(rng.choice(ODD))


def raw_body(rng: random.Random, path: str) -> bytes:
    """Returns a body for a route: JSON with some changed values, or bytes that are not JSON."""
    body = {**COMMON, **SEEDS[path]}
    for key in rng.sample(list(body), rng.randrange(len(body))):
        if key not in ("model", *list(SEEDS[path])[:1]):
            del body[key]
    for _ in range(rng.randrange(1, 4)):
        body = bend(body, rng)
        if not isinstance(body, dict) or not body:
            break
    raw = _json(body)
    kind = rng.random()
    if kind < 0.08:
        raw = raw[: rng.randrange(len(raw) + 1)]
    elif kind < 0.14:
        at = rng.randrange(len(raw) + 1)
        raw = raw[:at] + rng.randbytes(rng.randrange(1, 9)) + raw[at:]
    elif kind < 0.16:
        raw = rng.choice((b"", b"[" * 5000, b'{"a":' * 2000, b"\xff\xfe", b"nul", b"{}{}", b'"x"'))
    return raw


def _json(value: Any) -> bytes:
    import json

    return json.dumps(value).encode("utf-8", "surrogatepass")  # orjson refuses lone surrogates and large numbers


def message(rng: random.Random) -> inference_pb2.GenerateRequest:
    """Returns a request that gRPC itself accepts."""
    request = inference_pb2.GenerateRequest(model=MODEL, max_tokens=4, text="Hi")
    for _ in range(rng.randrange(1, 4)):
        field = rng.choice(inference_pb2.GenerateRequest.DESCRIPTOR.fields)
        for _ in range(20):
            value: Any = rng.choice(
                (rng.choice(ODD), [rng.choice(ODD)], rng.uniform(-9, 9), rng.randrange(-9, 1 << 32), {"ids": [5]})
            )
            try:
                changed = inference_pb2.GenerateRequest(**{field.name: value})
            except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
                continue
            request.ClearField(field.name)  # type: ignore[arg-type]
            request.MergeFrom(changed)
            break
    request.max_tokens = min(request.max_tokens, 16)
    return request


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster() as c:
        c.script = lambda request: [66] * min(request.sampling.max_tokens, 8)
        yield c


@pytest_asyncio.fixture
async def gw(cluster: FakeCluster, smollm2_dir: Path, unused_tcp_port: int) -> AsyncIterator[Rig]:
    async with rig(cluster, smollm2_dir, grpc_port=unused_tcp_port) as r:
        yield r


async def nothing_stays(gw: Rig, count: int, one: Callable[[int], Any]) -> None:
    """Runs one(0), one(1), ... and checks that requests, bookings, tasks and memory are as before."""
    memory = psutil.Process().memory_info

    async def some(numbers: range) -> None:
        for at in range(numbers.start, numbers.stop, AT_ONCE):
            await asyncio.gather(*[one(i) for i in range(at, min(at + AT_ONCE, numbers.stop))])
        await gw.settled()
        await until(lambda: not gw.gateway._requests)

    await some(range(WARM))
    gc.collect()
    tasks, before = len(asyncio.all_tasks()), memory().rss
    await some(range(WARM, count))
    gc.collect()
    await until(lambda: len(asyncio.all_tasks()) <= tasks + AT_ONCE)  # connections that stay open keep one each
    if WARM >= 1000:
        assert memory().rss - before < GROWTH
    assert gw.gateway.metrics.running._value.get() == 0
    response = await gw.complete(max_tokens=2)
    assert response.status_code == 200
    await gw.settled()


async def test_malformed_bodies_over_rest(gw: Rig) -> None:
    paths = list(SEEDS)
    statuses: dict[int, int] = {}

    async def one(number: int) -> None:
        rng = random.Random(number)
        path = paths[number % len(paths)]
        raw = raw_body(rng, path)
        response = await gw.http.post(path, content=raw, headers={"content-type": "application/json"})
        assert response.status_code < 500, (path, raw, response.text)
        if response.status_code != 200:
            assert orjson.loads(response.content)["error"]["message"]
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1

    await nothing_stays(gw, COUNT, one)
    assert statuses[400] > COUNT // 3
    assert statuses[200] > 0


async def test_malformed_messages_over_grpc(gw: Rig) -> None:
    channel = rpc.open_channel(f"127.0.0.1:{gw.server.grpc_port}")
    stub: Any = inference_pb2_grpc.InferenceStub(channel)
    raw_call: Any = channel.unary_stream("/baton.v1.Inference/Generate")
    codes: dict[grpc.StatusCode, int] = {}

    async def one(number: int) -> None:
        rng = random.Random(number)
        request = message(rng)
        garbage = rng.random() < 0.1
        call = raw_call(rng.randbytes(rng.randrange(1, 40))) if garbage else stub.Generate(request, timeout=30)
        code = grpc.StatusCode.OK
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as e:
            code = e.code()
        # Bytes that are not a message never reach the gateway: gRPC itself answers INTERNAL.
        assert garbage or code not in OUR_FAULT, request
        codes[code] = codes.get(code, 0) + 1

    await nothing_stays(gw, COUNT, one)
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > COUNT // 5
    assert codes[grpc.StatusCode.OK] > 0
    await channel.close()
