"""The wire of a stream: when its head goes out, comments while it is silent, how it fails, HTTP/1.0, other origins."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from common.errors import Overloaded, Unavailable
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.waiting import until

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
}
PATHS = list(BODIES)
ORIGIN = "http://app.example"


def body(path: str, **fields: Any) -> bytes:
    return orjson.dumps({"model": MODEL, "stream": True, **BODIES[path], **fields})


class Connection:
    """A raw connection to a gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    @classmethod
    async def open(cls, gw: Rig) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", gw.server.port))

    def post(self, path: str, raw: bytes, *headers: str, version: str = "1.1") -> None:
        lines = (f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(raw)}", *headers)
        self._writer.write("".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + raw)

    async def head(self) -> str:
        return (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()

    async def rest(self) -> bytes:
        """Returns everything until the gateway closes the connection."""
        return await self.reader.read()

    def close(self) -> None:
        self._writer.close()


@pytest.mark.parametrize("path", PATHS)
async def test_the_head_comes_before_the_prompt_is_computed(gw: Rig, cluster: FakeCluster, path: str) -> None:
    computed = asyncio.Event()
    cluster.prefills[0].faults.before_prefill = lambda _request: computed.wait()
    connection = await Connection.open(gw)
    connection.post(path, body(path), "Connection: close")
    head = await asyncio.wait_for(connection.head(), 10)
    assert head.startswith("http/1.1 200")
    assert "text/event-stream" in head
    assert "x-request-id" in head
    computed.set()
    assert b"[DONE]" in await connection.rest() or path == "/v1/responses"


@pytest.mark.parametrize("path", PATHS)
async def test_the_head_waits_until_a_decode_pod_has_reserved(gw: Rig, cluster: FakeCluster, path: str) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def before_reserve(_request: object) -> None:
        asked.set()
        await answer.wait()

    decode = cluster.decodes[0].faults
    decode.before_reserve, decode.reject = before_reserve, 1
    connection = await Connection.open(gw)
    connection.post(path, body(path), "Connection: close")
    await asyncio.wait_for(asked.wait(), 10)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(connection.reader.readexactly(1), 0.2)
    answer.set()
    assert (await connection.rest()).startswith(b"HTTP/1.1 429")


async def test_with_several_prompts_a_refusal_of_one_keeps_its_status(gw: Rig, cluster: FakeCluster) -> None:
    cluster.decodes[0].capacity = 1
    refused = asyncio.Event()
    cluster.prefills[0].faults.before_prefill = lambda _request: refused.wait()
    response = await gw.http.post("/v1/completions", content=body("/v1/completions", prompt=["one", "two", "three"]))
    assert response.status_code == 429
    refused.set()


@pytest.mark.parametrize("path", PATHS)
async def test_a_later_failure_is_an_event_and_done_follows(gw: Rig, cluster: FakeCluster, path: str) -> None:
    cluster.decodes[0].faults.decode_error = Overloaded("out of blocks")
    async with gw.http.stream("POST", path, content=body(path)) as response:
        assert response.status_code == 200
        events = [line for line in (await response.aread()).decode().split("\n") if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert "out of blocks" in events[-2]


async def test_a_prefill_that_fails_ends_an_open_stream_with_an_error(gw: Rig, cluster: FakeCluster) -> None:
    cluster.prefills[0].faults.prefill_error = Unavailable("broken")
    status, events = await gw.stream("chat")
    assert status == 200
    assert events[-2]["error"]["message"] == "broken"
    assert events[-1] == "[DONE]"


@pytest.mark.parametrize("path", PATHS)
async def test_comments_while_the_stream_is_silent(path: str, smollm2_dir: Path) -> None:
    async with fake_cluster() as cluster, rig(cluster, smollm2_dir, ping_s=0.05) as gw:
        computed = asyncio.Event()
        cluster.prefills[0].faults.before_prefill = lambda _request: computed.wait()
        connection = await Connection.open(gw)
        connection.post(path, body(path), "Connection: close")
        await connection.head()
        for _ in range(3):
            await asyncio.wait_for(connection.reader.readuntil(b": ping\n\n"), 10)
        computed.set()
        events = await connection.rest()
        assert events.rstrip().endswith(b"0")  # the last chunk: the answer is complete
        assert b"error" not in events.replace(b'"error":null', b"")
        await gw.settled()


async def test_no_comments_between_tokens_that_flow(smollm2_dir: Path) -> None:
    async with fake_cluster() as cluster, rig(cluster, smollm2_dir, ping_s=0.4) as gw:
        cluster.decodes[0].faults.token_delay_s = 0.02
        async with gw.http.stream(
            "POST", "/v1/completions", content=body("/v1/completions", max_tokens=60)
        ) as response:
            text = (await response.aread()).decode()
        assert text.count("data: ") > 50
        assert ": ping" not in text


async def test_ping_zero_sends_none(smollm2_dir: Path) -> None:
    async with fake_cluster() as cluster, rig(cluster, smollm2_dir, ping_s=0.0) as gw:
        cluster.prefills[0].faults.prefill_delay_s = 0.3
        async with gw.http.stream("POST", "/v1/completions", content=body("/v1/completions")) as response:
            assert ": ping" not in (await response.aread()).decode()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("headers", [(), ("Connection: keep-alive",), ("Connection: close",)])
async def test_a_stream_for_http_1_0_has_no_chunks_and_ends_with_the_connection(
    gw: Rig, path: str, headers: tuple[str, ...]
) -> None:
    connection = await Connection.open(gw)
    connection.post(path, body(path), *headers, version="1.0")
    head = await connection.head()
    assert "transfer-encoding" not in head
    assert "content-length" not in head
    assert "connection: close" in head
    events = await asyncio.wait_for(connection.rest(), 20)
    assert events.startswith((b"data: {", b"event: "))
    assert b"data: [DONE]\n\n" in events or b"response.completed" in events or b"response.incomplete" in events
    blocks = events.decode().strip().split("\n\n")
    assert all(line.startswith(("data: ", "event: ")) for block in blocks for line in block.split("\n"))


async def test_keep_alive_of_http_1_0(gw: Rig) -> None:
    raw = body("/v1/completions", stream=False)
    connection = await Connection.open(gw)
    for _ in range(2):  # the connection stays open for an answer of known length, if the client asks for it
        connection.post("/v1/completions", raw, "Connection: keep-alive", version="1.0")
        head = await connection.head()
        assert "connection: keep-alive" in head
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        assert orjson.loads(await connection.reader.readexactly(length))["object"] == "text_completion"
    connection.post("/v1/completions", raw, version="1.0")
    assert "connection: close" in await connection.head()
    await asyncio.wait_for(connection.rest(), 20)


async def test_a_second_request_of_http_1_1_on_one_connection(gw: Rig) -> None:
    connection = await Connection.open(gw)
    for last in (False, True):
        connection.post("/v1/completions", body("/v1/completions"), *(["Connection: close"] if last else []))
        head = await connection.head()
        assert "transfer-encoding: chunked" in head
        assert ("connection: close" in head) is last
        await connection.reader.readuntil(b"0\r\n\r\n")
    assert await asyncio.wait_for(connection.rest(), 20) == b""


PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


def keys(tmp_path: Path) -> tuple[str, ...]:
    """Returns the setting of a gateway that knows one key, of which nobody has the secret."""
    file = tmp_path / "keys.json"
    file.write_text('{"keys": []}')
    return (str(file),)


@pytest.mark.parametrize("path", [*PATHS, "/v1/models", "/v1/embeddings", "/tokenize"])
@pytest.mark.parametrize("origins", [(ORIGIN,), ("*",), ("https://other.example", ORIGIN)])
async def test_preflight(smollm2_dir: Path, tmp_path: Path, path: str, origins: tuple[str, ...]) -> None:
    async with fake_cluster(0, 0) as cluster, rig(cluster, smollm2_dir, wait=False, **no_pods(origins)) as gw:
        answer = await gw.http.options(path, headers=PREFLIGHT)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == ("*" if origins == ("*",) else ORIGIN)
        allowed = answer.headers["access-control-allow-headers"]
        assert {"authorization", "content-type", "x-stainless-lang"} <= set(allowed.split(","))
        assert "POST" in answer.headers["access-control-allow-methods"]


def no_pods(origins: tuple[str, ...]) -> dict[str, Any]:
    return {"pods": ("127.0.0.1:1",), "cors_origin": origins}


async def test_a_preflight_of_another_origin_is_refused(smollm2_dir: Path) -> None:
    async with fake_cluster(0, 0) as cluster, rig(cluster, smollm2_dir, wait=False, **no_pods((ORIGIN,))) as gw:
        answer = await gw.http.options("/v1/models", headers={**PREFLIGHT, "Origin": "http://evil.example"})
        assert answer.status_code == 400
        assert "access-control-allow-origin" not in answer.headers


async def test_without_the_setting_no_origin_is_allowed(gw: Rig) -> None:
    answer = await gw.http.options("/v1/models", headers=PREFLIGHT)
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in (await gw.complete()).headers


async def test_answers_streams_and_errors_show_their_headers_to_the_origin(smollm2_dir: Path) -> None:
    async with fake_cluster() as cluster, rig(cluster, smollm2_dir, cors_origin=(ORIGIN,)) as gw:

        def check(response: httpx.Response, status: int) -> None:
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == ORIGIN
            exposed = response.headers["access-control-expose-headers"].split(", ")
            assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= set(exposed)
            assert "Origin" in response.headers["vary"]

        headers = {"Origin": ORIGIN}
        for path in PATHS:
            check(await gw.http.post(path, content=body(path), headers=headers), 200)
            check(await gw.http.post(path, content=body(path, stream=False), headers=headers), 200)
            check(await gw.http.post(path, content=body(path, temperature=9), headers=headers), 400)
        check(await gw.http.get("/v1/models", headers=headers), 200)
        check(await gw.http.get("/nothing", headers=headers), 404)
        cluster.decodes[0].faults.reject = 1
        check(await gw.http.post(PATHS[0], content=body(PATHS[0]), headers=headers), 429)
        other = await gw.http.post(PATHS[0], content=body(PATHS[0]), headers={"Origin": "http://evil.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_a_refused_key_is_shown_to_the_origin(smollm2_dir: Path, tmp_path: Path) -> None:
    settings = {**no_pods((ORIGIN,)), "api_keys": keys(tmp_path)}
    async with fake_cluster(0, 0) as cluster, rig(cluster, smollm2_dir, wait=False, **settings) as gw:
        answer = await gw.http.get("/v1/models", headers={"Origin": ORIGIN})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, ORIGIN)
        assert (await gw.http.options("/v1/models", headers=PREFLIGHT)).status_code == 200


@pytest.mark.parametrize("root", ["/llm", "/team/llm/"])
async def test_a_path_of_a_proxy_may_be_there_or_not(smollm2_dir: Path, tmp_path: Path, root: str) -> None:
    async with fake_cluster() as cluster, rig(cluster, smollm2_dir, root_path=root) as gw:
        for prefix in ("", root.rstrip("/")):
            answer = await gw.http.post(f"{prefix}/v1/completions", content=body("/v1/completions", stream=False))
            assert answer.status_code == 200
            assert (await gw.http.get(f"{prefix}/v1/models")).status_code == 200
            assert (await gw.http.get(f"{prefix}/")).status_code == 200
            assert (await gw.http.get(f"{prefix}/dashboard/page/main.js")).status_code == 200
        document = (await gw.http.get(f"{root.rstrip('/')}/openapi.json")).json()
        assert document["servers"] == [{"url": root.rstrip("/")}]
        assert (await gw.http.get("/llmx/v1/models")).status_code == 404


async def test_the_path_of_a_proxy_opens_no_path_that_needs_a_key(smollm2_dir: Path, tmp_path: Path) -> None:
    settings = {"pods": ("127.0.0.1:1",), "root_path": "/dashboard/page", "api_keys": keys(tmp_path)}
    async with fake_cluster(0, 0) as cluster, rig(cluster, smollm2_dir, wait=False, **settings) as gw:
        assert (await gw.http.get("/dashboard/page/v1/models")).status_code == 401
        assert (await gw.http.get("/dashboard/page/live")).status_code == 200


async def test_ipv6(smollm2_dir: Path) -> None:
    async with fake_cluster() as cluster, rig(cluster, smollm2_dir, host="::1") as gw:
        url = f"http://[::1]:{gw.server.port}"
        async with httpx.AsyncClient(base_url=url) as http:
            assert (await http.get("/ready")).status_code == 200
            assert (await http.post("/v1/completions", content=body("/v1/completions"))).status_code == 200


async def test_a_stream_waits_for_the_restart_of_the_only_decode_pod(
    gw: Rig, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gw.gateway, "settings", replace(gw.gateway.settings, pod_wait_s=30.0))
    expected = (await gw.complete(max_tokens=12)).json()["choices"][0]["text"]
    decode = cluster.decodes[0]
    decode.faults.stall_after = 4
    task = asyncio.create_task(gw.stream("completions", max_tokens=12))
    await until(lambda: any(c.usage.completion == 5 for t in gw.gateway._requests.values() for c in t.choices))
    await decode.stop()
    await asyncio.sleep(1.0)
    assert not task.done()
    cluster.decodes = [await decode.restart()]
    status, events = await task
    assert (status, events[-1]) == (200, "[DONE]")
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == expected


async def test_the_wait_for_lost_pods_ends(smollm2_dir: Path) -> None:
    async with fake_cluster() as cluster, rig(cluster, smollm2_dir, pod_wait_s=0.5) as gw:
        cluster.decodes[0].faults.stall_after = 2
        task = asyncio.create_task(gw.stream("completions", max_tokens=12))
        await until(lambda: any(c.usage.completion == 3 for t in gw.gateway._requests.values() for c in t.choices))
        lost = time.monotonic()
        await cluster.decodes[0].stop()
        _, events = await task
        assert time.monotonic() - lost > 0.4
        assert "decode-0" in events[-2]["error"]["message"]
        assert events[-1] == "[DONE]"


async def test_a_new_request_does_not_wait_for_lost_pods(smollm2_dir: Path) -> None:
    async with fake_cluster() as cluster, rig(cluster, smollm2_dir, pod_wait_s=3600.0) as gw:
        await cluster.decodes[0].stop()
        await until(lambda: not gw.gateway.ready)  # a request that was sent to the pod before is a running one
        assert (await gw.complete()).status_code == 503
