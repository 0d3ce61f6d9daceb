"""Requests with an Idempotency-Key: a retry gets the same answer, from the same gateway or from another one."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
import pytest_asyncio

from common.errors import InternalError, InvalidRequest
from gateway.admission.api_keys import create_key
from gateway.admission.key_store import KeyFile
from gateway.serving.shared_answer import MAX_READERS
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.gateway.keyed_requests import CHAT, Stream, computed, counted, key, outcomes, seeded, two_gateways
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.waiting import until

ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "completions": ("/v1/completions", {"model": MODEL, "prompt": "Hello", "max_tokens": 12}),
    "responses": ("/v1/responses", {"model": MODEL, "input": "Hello", "max_output_tokens": 12}),
    "messages": ("/v1/messages", CHAT),
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def events(raw: bytes) -> list[Any]:
    """Returns the data of a stream's events, without [DONE]."""
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n") if line.startswith(b"data: ")]
    return [orjson.loads(line) for line in lines if line != b"[DONE]"]


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster() as c:
        c.script = seeded
        yield c


def same_answer(first: Any, second: Any) -> None:
    """Asserts that two JSON answers are equal, except the time at which a response was completed."""
    for answer in (first, second):
        if isinstance(answer, dict):
            answer.pop("completed_at", None)
    assert first == second


# -- one gateway


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ROUTES)
async def test_a_retry_gets_the_kept_answer_byte_for_byte(
    gw: Rig, cluster: FakeCluster, route: str, stream: bool
) -> None:
    path, body = ROUTES[route]
    body = {**body, "stream": stream}
    first = await gw.http.post(path, json=body, headers=key("k"))
    assert first.status_code == 200, first.text
    await gw.settled()
    second = await gw.http.post(path, json=body, headers=key("k"))
    assert (second.status_code, second.content) == (200, first.content)
    assert second.headers["content-type"] == first.headers["content-type"]
    assert (first.headers.get("idempotent-replayed"), second.headers["idempotent-replayed"]) == (None, "true")
    assert computed(cluster) == 1
    assert outcomes(gw) == {"computed": 1, "replayed": 1}
    assert counted(gw, route) == {"ok": 1}
    # Another key is another answer, and so is no key.
    for headers in (key("k2"), {}):
        other = await gw.http.post(path, json=body, headers=headers)
        assert other.status_code == 200
        assert other.content != first.content
    assert computed(cluster) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3},
        {"n": 2, "stream": True, "stream_options": {"include_usage": True}},
        {"logprobs": True, "top_logprobs": 2, "n": 2},
        {"logprobs": True, "stream": True},
        {"stop": ["H"], "stream": True},
        {"seed": 7},
    ],
    ids=str,
)
async def test_every_kind_of_answer_is_replayed(gw: Rig, cluster: FakeCluster, fields: dict[str, Any]) -> None:
    body = {**CHAT, **fields}
    first, second = [await gw.http.post("/v1/chat/completions", json=body, headers=key("k")) for _ in range(2)]
    assert (first.status_code, second.content) == (200, first.content)
    assert computed(cluster) == 1


async def test_a_retry_attaches_to_the_running_answer(gw: Rig, cluster: FakeCluster) -> None:
    cluster.decodes[0].faults.token_delay_s = 0.02
    path, body = ROUTES["chat"]
    body = {**body, "max_tokens": 40, "stream_options": {"include_usage": True}}
    first = await Stream(gw, path, body, key("k")).begun()
    second = Stream(gw, path, body, key("k"))
    await until(lambda: outcomes(gw).get("attached") == 1)
    whole = await first.whole()
    assert await second.whole() == whole
    assert second.headers is not None
    assert second.headers["idempotent-replayed"] == "true"
    assert events(whole)[-1]["usage"]["completion_tokens"] == 40
    await gw.settled()
    assert computed(cluster) == 1
    assert counted(gw, "chat") == {"ok": 1}
    assert outcomes(gw) == {"computed": 1, "attached": 1}


async def test_the_first_clients_disconnect_does_not_end_an_answer_that_is_read(gw: Rig, cluster: FakeCluster) -> None:
    cluster.decodes[0].faults.token_delay_s = 0.02
    path, body = ROUTES["completions"]
    body = {**body, "max_tokens": 40}
    first = await Stream(gw, path, body, key("k")).begun()
    second = await Stream(gw, path, body, key("k")).begun()
    await first.disconnect()
    text = "".join(event["choices"][0]["text"] for event in events(await second.whole()))
    assert len(text) == 40
    assert second.raw.endswith(b"data: [DONE]\n\n")
    assert second.raw.startswith(first.raw[:100])
    await gw.settled()
    assert not cluster.decodes[0].seen.decode_aborts
    assert counted(gw, "completions") == {"ok": 1}


async def test_the_last_clients_disconnect_aborts_the_answer_on_the_pods(gw: Rig, cluster: FakeCluster) -> None:
    cluster.decodes[0].faults.stall_after = 3
    path, body = ROUTES["chat"]
    first = await Stream(gw, path, body, key("k")).begun()
    second = await Stream(gw, path, body, key("k")).begun()
    await first.disconnect()
    await second.disconnect()
    await gw.settled()
    assert len(cluster.decodes[0].seen.decode_aborts) == 1
    assert counted(gw, "chat") == {"aborted": 1}
    # A later retry computes the answer again, with the same tokens.
    cluster.decodes[0].faults.stall_after = None
    third = await Stream(gw, path, body, key("k")).whole()
    assert third.startswith(first.raw[:100])
    assert outcomes(gw)["recomputed"] == 1
    seeds = {valid.sampling.seed for valid in cluster.prefills[0].seen.prefilled}
    assert len(seeds) == 1


async def test_a_slow_reader_does_not_delay_another(gw: Rig, cluster: FakeCluster) -> None:
    path, body = ROUTES["completions"]
    body = {**body, "max_tokens": 1500, "stream": True, "logprobs": 5}
    raw = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gw.server.port, limit=1024)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nidempotency-key: k\r\ncontent-length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)  # and reads nothing
    try:
        await until(lambda: bool(cluster.prefills[0].seen.prefilled))
        quick = await gw.http.post(path, content=raw, headers=key("k"))
        assert quick.content.endswith(b"data: [DONE]\n\n")
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            got += await reader.read(1 << 16)
        assert got.count(b"data: ") == quick.content.count(b"data: ")
    finally:
        writer.close()
    assert computed(cluster) == 1


async def test_a_reader_with_a_shorter_deadline_leaves_the_answer_to_the_others(
    gw: Rig, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.api.http.keyed.READ_GRACE_S", 0.0)
    go = asyncio.Event()
    cluster.prefills[0].faults.before_prefill = lambda _request: go.wait()
    path, body = ROUTES["chat"]
    first = asyncio.create_task(gw.http.post(path, json=body, headers=key("k")))
    await until(lambda: bool(cluster.prefills[0].seen.prefilled))
    second = await gw.http.post(path, json=body, headers=key("k", **{"x-request-timeout": "0.2"}))
    assert second.status_code == 504
    go.set()
    assert (await first).status_code == 200


async def test_an_answer_that_does_not_fit_the_memory_is_computed_again(
    cluster: FakeCluster, smollm2_dir: Path
) -> None:
    path, body = ROUTES["completions"]
    body = {**body, "max_tokens": 600, "stream": True}
    async with rig(cluster, smollm2_dir, idempotency_memory=100_000) as gw:
        first, second = [await Stream(gw, path, body, key("k")).whole() for _ in range(2)]
        texts = ["".join(e["choices"][0]["text"] for e in events(raw)) for raw in (first, second)]
        assert texts[0] == texts[1]
        assert len(texts[0]) == 600
        assert computed(cluster) == 2
        assert outcomes(gw) == {"computed": 1, "recomputed": 1}
        conflict = await gw.http.post(path, json={**body, "max_tokens": 5}, headers=key("k"))
        assert conflict.status_code == 409
        await gw.settled()


async def test_keys_can_be_turned_off(cluster: FakeCluster, smollm2_dir: Path) -> None:
    path, body = ROUTES["chat"]
    async with rig(cluster, smollm2_dir, idempotency_ttl_s=0.0) as gw:
        first, second = [await gw.http.post(path, json=body, headers=key("k")) for _ in range(2)]
        assert first.json()["id"] != second.json()["id"]
        await gw.settled()


async def test_other_routes_ignore_the_header(gw: Rig) -> None:
    body = {"model": MODEL, "prompt": "Hello"}
    for _ in range(2):
        assert (await gw.http.post("/tokenize", json=body, headers=key("k"))).status_code == 200
        body["prompt"] = "Another"
    assert outcomes(gw) == {}


# -- errors


@pytest.mark.parametrize("route", ROUTES)
async def test_the_same_key_with_another_body_is_a_conflict(gw: Rig, cluster: FakeCluster, route: str) -> None:
    path, body = ROUTES[route]
    assert (await gw.http.post(path, json=body, headers=key("k"))).status_code == 200
    answer = await gw.http.post(path, json={**body, "temperature": 0.5}, headers=key("k"))
    assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")
    error = answer.json()["error"]
    assert "belongs to another request" in error["message"]
    assert error["type"] == "invalid_request_error"
    if route == "messages":
        assert answer.json()["request_id"] == answer.headers["request-id"]
    else:
        assert (error["code"], error["param"]) == ("idempotency_key_in_use", "idempotency-key")
    # The same body at another route is another request, too.
    path, body = ROUTES["completions" if route != "completions" else "chat"]
    assert (await gw.http.post(path, json=body, headers=key("k"))).status_code == 409
    assert computed(cluster) == 1
    assert outcomes(gw)["conflict"] == 2


async def test_a_bad_key_is_refused(gw: Rig, cluster: FakeCluster) -> None:
    path, body = ROUTES["chat"]
    for bad in (b"", b"x" * 256, b"k\xe9y", b"a\tb"):
        answer = await gw.http.post(path, json=body, headers=[(b"idempotency-key", bad)])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "idempotency-key")
    assert computed(cluster) == 0
    assert (await gw.http.post(path, json=body, headers=key("x" * 255))).status_code == 200


async def test_a_refused_request_leaves_its_key_free(gw: Rig, cluster: FakeCluster) -> None:
    path, body = ROUTES["chat"]
    refused = await gw.http.post(path, json={**body, "temperature": 9}, headers=key("k"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
    assert refused.headers["x-request-id"]
    cluster.decodes[0].faults.reserve_error = InvalidRequest("not today", field="prompt")
    other = await gw.http.post(path, json={**body, "stream": True}, headers=key("k"))
    assert (other.status_code, other.json()["error"]["message"]) == (400, "not today")
    cluster.decodes[0].faults.reserve_error = None
    assert (await gw.http.post(path, json=body, headers=key("k"))).status_code == 200
    assert len(gw.gateway.answer_keys._book) == 1


async def test_both_readers_get_the_error_and_the_retry_computes_again(gw: Rig, cluster: FakeCluster) -> None:
    go = asyncio.Event()
    faults = cluster.decodes[0].faults
    faults.decode_error, faults.decode_errors = InternalError("broken"), 1
    faults.before_decode_error = lambda _request: go.wait()
    path, body = ROUTES["chat"]
    first = await Stream(gw, path, body, key("k")).begun()
    second = await Stream(gw, path, body, key("k")).begun()
    go.set()
    whole = await first.whole()
    assert await second.whole() == whole
    assert "error" in events(whole)[-1]
    third = events(await Stream(gw, path, body, key("k")).whole())
    assert "error" not in third[-1]
    assert third[0]["id"] == events(whole)[0]["id"]
    assert outcomes(gw) == {"computed": 1, "attached": 1, "recomputed": 1}


async def test_an_answer_has_a_bounded_number_of_readers(gw: Rig, cluster: FakeCluster) -> None:
    go = asyncio.Event()
    cluster.prefills[0].faults.before_prefill = lambda _request: go.wait()
    path, body = ROUTES["chat"]
    streams = [Stream(gw, path, body, key("k")) for _ in range(MAX_READERS)]
    await until(lambda: outcomes(gw).get("attached") == MAX_READERS - 1)
    assert (await gw.http.post(path, json={**body, "stream": True}, headers=key("k"))).status_code == 429
    go.set()
    assert len({await stream.whole() for stream in streams}) == 1


# -- tenants and limits


async def test_a_key_belongs_to_a_tenant_and_an_attached_retry_is_charged_once(
    cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path
) -> None:
    path, body = ROUTES["chat"]
    keys, file = {}, KeyFile(tmp_path / "keys.toml")
    for name, fields in (("a", {"requests_per_minute": 2}), ("a2", {}), ("b", {}), ("a3", {"models": ("other",)})):
        keys[name], record = create_key(name[0], **fields)
        file.add(record)

    async def post(name: str, body: dict[str, Any]) -> httpx.Response:
        headers = key("k", authorization=f"Bearer {keys[name]}")
        return await gw.http.post(path, json=body, headers=headers)

    async with rig(cluster, smollm2_dir, api_keys=(str(file.path),)) as gw:
        firsts = [await post("a", body) for _ in range(3)]
        assert [answer.status_code for answer in firsts] == [200] * 3
        assert {answer.headers["x-ratelimit-remaining-requests"] for answer in firsts} == {"1"}
        assert (await post("a2", body)).content == firsts[0].content
        assert computed(cluster) == 1
        # Another tenant has its own keys, with other seeds and ids.
        other = await post("b", {**body, "max_tokens": 3})
        assert other.status_code == 200
        assert (await post("b", body)).status_code == 409
        # A key that may not use the model does not read its answer.
        assert (await post("a3", body)).status_code in (403, 409)
        await gw.settled()


# -- several gateways


@pytest.mark.parametrize("route", ROUTES)
async def test_another_gateway_gives_the_same_answer(
    cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path, route: str
) -> None:
    path, body = ROUTES[route]
    async with two_gateways(cluster, smollm2_dir, tmp_path) as (one, two, _):
        first, second = [await gw.http.post(path, json=body, headers=key("k")) for gw in (one, two)]
        assert (first.status_code, second.status_code) == (200, 200)
        same_answer(first.json(), second.json())
        assert computed(cluster) == 2
        streams = [await Stream(gw, path, body, key("s")).whole() for gw in (one, two)]
        texts = [[_text(route, event) for event in events(raw)] for raw in streams]
        assert "".join(texts[0]) == "".join(texts[1]) != ""
        ids = [[event.get("id") or event.get("response", {}).get("id") for event in events(raw)] for raw in streams]
        assert set(ids[0]) == set(ids[1])
        # Another body is a conflict at both.
        for gw in (one, two):
            answer = await gw.http.post(path, json={**body, "temperature": 0.3}, headers=key("k"))
            assert answer.status_code == 409


def _text(route: str, event: dict[str, Any]) -> str:
    match route:
        case "chat":
            return event["choices"][0]["delta"].get("content") or ""
        case "completions":
            return event["choices"][0]["text"]
        case "responses":
            return event["delta"] if event["type"] == "response.output_text.delta" else ""
    return event["delta"].get("text", "") if event["type"] == "content_block_delta" else ""


async def test_several_choices_prompts_and_calls_are_the_same_at_another_gateway(
    cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path
) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"model": MODEL, "prompt": ["Hello", "Hello"], "n": 2, "max_tokens": 5}),
        ("/v1/completions", {"model": MODEL, "prompt": "Hi", "best_of": 3, "n": 2, "max_tokens": 5}),
        ("/v1/chat/completions", {**CHAT, "tools": TOOLS, "max_tokens": 90}),
        ("/v1/responses", {"model": MODEL, "input": "Hi", "tools": [{"type": "function", "name": "look"}]}),
    ]
    settings = {"tool_parser": "hermes"}
    async with two_gateways(cluster, smollm2_dir, tmp_path, **settings) as (one, two, _):
        tokenizer = one.gateway.tokenizer
        call = [*tokenizer.encode(CALL + CALL, add_special_tokens=False), tokenizer.eos_ids[0]]
        for i, (path, body) in enumerate(requests):
            cluster.script = (lambda _request: call) if "tools" in body else seeded
            first, second = [(await gw.http.post(path, json=body, headers=key(str(i)))).json() for gw in (one, two)]
            same_answer(first, second)
            if "tools" in body:
                ids = re.findall(r'"call_[0-9a-f]{24}"', json.dumps(first))
                assert len(set(ids)) == 2
            if isinstance(body.get("prompt"), list):  # equal prompts of one request have different seeds
                texts = [choice["text"] for choice in first["choices"]]
                assert texts[:2] != texts[2:]


async def test_a_failed_request_frees_its_key_for_every_gateway(
    cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path
) -> None:
    path, body = ROUTES["chat"]
    async with two_gateways(cluster, smollm2_dir, tmp_path) as (one, two, _):
        wrong = await one.http.post(path, json={**body, "temperature": 9}, headers=key("k"))
        assert wrong.status_code == 400
        assert (await two.http.post(path, json=body, headers=key("k"))).status_code == 200
        # The second gateway has answered for this key, so a failure at the first one does not remove the claim.
        cluster.decodes[0].faults.reserve_error = InvalidRequest("not today")
        assert (await one.http.post(path, json=body, headers=key("k"))).status_code == 400
        assert (await one.http.post(path, json={**body, "n": 2}, headers=key("k"))).status_code == 409


async def test_without_redis_each_gateway_knows_its_own_keys(
    cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path
) -> None:
    path, body = ROUTES["chat"]
    async with two_gateways(cluster, smollm2_dir, tmp_path) as (one, two, valkey):
        await valkey.stop()
        first, second = [(await gw.http.post(path, json=body, headers=key("k"))).json() for gw in (one, two)]
        assert first["choices"] == second["choices"]
        assert first["id"] == second["id"]
        assert (await one.http.post(path, json={**body, "n": 2}, headers=key("k"))).status_code == 409
        assert next(iter(one.gateway.metrics.local_keys.collect())).samples[0].value >= 1


# -- a gateway that leaves


async def test_a_draining_gateway_ends_what_runs_and_refuses_retries(gw: Rig, cluster: FakeCluster) -> None:
    cluster.decodes[0].faults.token_delay_s = 0.02
    path, body = ROUTES["completions"]
    running = await Stream(gw, path, {**body, "max_tokens": 30}, key("k")).begun()
    draining = asyncio.create_task(gw.gateway.drain())
    await asyncio.sleep(0)
    refused = await gw.http.post(path, json={**body, "max_tokens": 30, "stream": True}, headers=key("k"))
    assert refused.status_code == 503
    assert (await running.whole()).endswith(b"data: [DONE]\n\n")
    async with asyncio.timeout(20):
        await draining


async def test_a_stopping_gateway_ends_its_streams_with_an_error(gw: Rig, cluster: FakeCluster) -> None:
    cluster.decodes[0].faults.stall_after = 3
    path, body = ROUTES["chat"]
    running = [await Stream(gw, path, body, key("k")).begun() for _ in range(2)]
    gw.gateway.abort_requests()
    for stream in running:
        assert events(await stream.whole())[-1]["error"]["message"] == "the gateway is stopping"


# -- gRPC


# -- clients


async def test_openais_client_sends_no_key_unless_asked(gw: Rig) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gw.url}/v1", api_key="none") as client:
        for _ in range(2):
            await client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
        assert outcomes(gw) == {}
        named = [await client.chat.completions.create(**CHAT, extra_headers=key("k")) for _ in range(2)]  # type: ignore[call-overload]
        assert named[0] == named[1]
        with pytest.raises(openai.ConflictError):
            await client.chat.completions.create(**{**CHAT, "n": 2}, extra_headers=key("k"))  # type: ignore[call-overload]
    assert outcomes(gw) == {"computed": 1, "replayed": 1, "conflict": 1}  # the client did not repeat the conflict
