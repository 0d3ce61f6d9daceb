"""/v1/responses over fake pods with the openai SDK: answers, typed events, and stored responses per tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
import pytest_asyncio

from cli.stack.valkey import EmbeddedValkey
from common.errors import Overloaded
from common.types import ValidRequest
from gateway.admission.api_keys import create_key
from gateway.admission.key_store import KeyFile
from gateway.api.openai.responses import store
from gateway.api.openai.responses.store import ResponseStore, StoredResponse
from gateway.text.tokenizer import TextTokenizer
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig, texts
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAID = "Hello, world"
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> TextTokenizer:
    return texts(smollm2_dir)[0]


@pytest.fixture(scope="module", autouse=True)
def _patient_store() -> Iterator[None]:
    """A store answers late on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "TIMEOUT_S", 30.0)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tokenizer: TextTokenizer) -> AsyncIterator[FakeCluster]:
    ids = [*tokenizer.encode(SAID, add_special_tokens=False), tokenizer.eos_ids[0]]

    def script(_request: ValidRequest) -> list[int]:
        return ids

    async with fake_cluster() as c:
        c.script = script
        yield c


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gw(cluster: FakeCluster, smollm2_dir: Path) -> AsyncIterator[Rig]:
    async with rig(cluster, smollm2_dir) as r:
        yield r


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(gw: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gw.url}/v1", api_key="x", max_retries=0) as c:
        yield c


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def redis(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    valkey = EmbeddedValkey(port=0, directory=tmp_path_factory.mktemp("valkey"))
    yield await valkey.start()
    await valkey.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keeping(cluster: FakeCluster, smollm2_dir: Path, redis: str) -> AsyncIterator[Rig]:
    async with rig(cluster, smollm2_dir, redis=redis) as r:
        yield r


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keeper(keeping: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{keeping.url}/v1", api_key="x", max_retries=0) as c:
        yield c


async def post(gw: Rig, **fields: Any) -> Any:
    return await gw.http.post("/v1/responses", json={"model": MODEL, "input": "Hi", **fields})


async def events_of(gw: Rig, **fields: Any) -> list[dict[str, Any]]:
    events = []
    body = {"model": MODEL, "input": "Hi", "stream": True, **fields}
    async with gw.http.stream("POST", "/v1/responses", json=body) as response:
        assert response.status_code == 200
        kind = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            if line.startswith("data: "):
                if line == "data: [DONE]":  # only after an error
                    assert events[-1]["type"] == "response.failed"
                    continue
                events.append(orjson.loads(line.removeprefix("data: ")))
                assert events[-1]["type"] == kind
    return events


def prompt(cluster: FakeCluster, tokenizer: TextTokenizer) -> str:
    """Returns the text of the last prompt."""
    ids = list(cluster.prefills[0].seen.prefilled[-1].prompt_ids)
    text: str = tokenizer.raw.decode(ids, skip_special_tokens=False)
    return text


async def test_create_answers_and_repeats_the_request_fields(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    r = await client.responses.create(
        model=MODEL,
        input="Hi",
        instructions="Be brief.",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=40,
        metadata={"a": "b"},
        user="u",
        extra_body={"seed": 7, "top_k": 3},
    )
    assert (r.output_text, r.status, r.error, r.incomplete_details) == (SAID, "completed", None, None)
    assert (r.temperature, r.top_p, r.max_output_tokens, r.metadata) == (0.5, 0.9, 40, {"a": "b"})
    assert (r.instructions, r.tools, r.tool_choice, r.parallel_tool_calls) == ("Be brief.", [], "auto", True)
    assert r.usage is not None
    assert r.usage.total_tokens == r.usage.input_tokens + r.usage.output_tokens
    sampling = cluster.prefills[0].seen.prefilled[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, pytest.approx(0.9), 40)
    assert (sampling.seed, sampling.top_k) == (7, 3)


async def test_items_become_chat_messages(
    client: openai.AsyncOpenAI, cluster: FakeCluster, tokenizer: TextTokenizer
) -> None:
    items: Any = [
        {"role": "developer", "content": "Second."},
        {"role": "user", "content": [{"type": "input_text", "text": "One"}, {"type": "input_text", "text": "Two"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Yes?", "annotations": []}],
        },
        {"role": "user", "content": "Three"},
    ]
    await client.responses.create(model=MODEL, input=items, instructions="First.")
    assert prompt(cluster, tokenizer) == (
        "<|im_start|>system\nFirst.\n\nSecond.<|im_end|>\n<|im_start|>user\nOne\nTwo<|im_end|>\n"
        "<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\nThree<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_stream_has_every_event_in_its_order(gw: Rig) -> None:
    events = await events_of(gw, include=["message.output_text.logprobs"], top_logprobs=1)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    kinds = [e["type"] for e in events]
    assert list(dict.fromkeys(kinds)) == TEXT_EVENTS
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(e["delta"] for e in deltas) == SAID
    (item,) = {e["item_id"] for e in deltas}
    done = events[-1]["response"]
    assert done["output"][0]["id"] == item
    assert done["output"][0]["content"][0]["text"] == SAID
    logprobs = [entry for e in deltas for entry in e["logprobs"]]
    assert done["output"][0]["content"][0]["logprobs"] == logprobs
    assert "".join(entry["token"] for entry in logprobs).startswith(SAID)
    assert all(len(entry["top_logprobs"]) == 1 for entry in logprobs)
    whole = (await post(gw)).json()
    for body in (whole, done):
        for name in ("id", "created_at", "completed_at", "top_logprobs"):
            body.pop(name)
        body["output"][0].pop("id")
        body["output"][0]["content"][0].pop("logprobs")
    assert whole == done


async def test_the_sdk_reads_streams(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model=MODEL, input="Hi") as stream:
        kinds = [event.type async for event in stream]
        assert kinds[-1] == "response.completed"
        assert (await stream.get_final_response()).output_text == SAID
    seen = [event async for event in await client.responses.create(model=MODEL, input="Hi", stream=True)]
    assert [e.type for e in seen if e.type != "response.output_text.delta"] == [
        kind for kind in TEXT_EVENTS if kind != "response.output_text.delta"
    ]


async def test_an_answer_that_was_cut_is_incomplete(gw: Rig) -> None:
    body = (await post(gw, max_output_tokens=2)).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (body["output"][0]["status"], body["completed_at"]) == ("incomplete", None)
    assert (await events_of(gw, max_output_tokens=2))[-1]["type"] == "response.incomplete"


async def test_an_answer_without_text_is_an_empty_message(
    gw: Rig, cluster: FakeCluster, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "script", lambda _: [tokenizer.eos_ids[0]])
    (item,) = (await post(gw)).json()["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")
    events = await events_of(gw)
    assert [e["type"] for e in events] == [kind for kind in TEXT_EVENTS if kind != "response.output_text.delta"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"store": "no"}, "store"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"include": "x"}, "include"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"stop": 5}, "stop"),
        ({"model": None}, "model"),
        ({"input": "a " * 5000}, "input"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": 1}, "text"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
async def test_errors_use_the_field_names_of_this_endpoint(gw: Rig, fields: dict[str, Any], param: str) -> None:
    response = await post(gw, **fields)
    error = response.json()["error"]
    assert response.status_code == (404 if param == "previous_response_id" else 400), error
    assert error["param"] == param
    assert "messages" not in error["message"]
    assert "max_completion_tokens" not in error["message"]


async def test_a_failure_before_the_first_event_has_a_status_and_one_after_it_is_an_event(
    gw: Rig, cluster: FakeCluster, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.decodes[0].faults, "reserve_error", Overloaded("full", retry_after_s=3.0))
    response = await post(gw, stream=True)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    monkeypatch.setattr(cluster.decodes[0].faults, "reserve_error", None)
    monkeypatch.setattr(cluster.decodes[0].faults, "decode_error", Overloaded("out of blocks"))
    monkeypatch.setattr(cluster.decodes[0].faults, "token_delay_s", 0.3)  # the first token comes by another connection
    events = await events_of(gw)
    assert [e["type"] for e in events][-2:] == ["error", "response.failed"]
    assert events[-2]["message"] == "out of blocks"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"] == {"code": "rate_limit_exceeded", "message": "out of blocks"}
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    async with client.responses.stream(model=MODEL, input="Hi") as stream:
        assert [event.type async for event in stream][-1] == "response.failed"


async def test_a_disconnect_aborts_the_stream(
    client: openai.AsyncOpenAI, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.decodes[0].faults, "stall_after", 1)
    before = len(cluster.decodes[0].seen.decode_aborts)
    stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    await until(lambda: len(cluster.decodes[0].seen.decode_aborts) > before)


async def test_without_redis_nothing_is_stored_and_the_answer_shows_it(client: openai.AsyncOpenAI) -> None:
    r = await client.responses.create(model=MODEL, input="Hi")  # asks to store by default
    assert r.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(r.id)
    with pytest.raises(openai.NotFoundError, match="no Redis"):
        await client.responses.create(model=MODEL, input="And?", previous_response_id=r.id)


async def test_a_stored_response_can_be_read_listed_continued_and_deleted(
    keeper: openai.AsyncOpenAI, cluster: FakeCluster, tokenizer: TextTokenizer
) -> None:
    first = await keeper.responses.create(model=MODEL, input="One", instructions="Not kept for later.")
    async with keeper.responses.stream(model=MODEL, input="Two", previous_response_id=first.id) as stream:
        second = await stream.get_final_response()
    assert second.previous_response_id == first.id
    assert prompt(cluster, tokenizer).endswith(
        f"<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\n{SAID}<|im_end|>\n"
        "<|im_start|>user\nTwo<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "Not kept" not in prompt(cluster, tokenizer)
    await keeper.responses.delete(first.id)
    third = await keeper.responses.create(model=MODEL, input="Three", previous_response_id=second.id, store=False)
    assert prompt(cluster, tokenizer).count(SAID) == 2  # of the first, which is deleted, too
    again = await keeper.responses.retrieve(second.id)
    assert (again.output_text, again.usage, again.status) == (SAID, second.usage, "completed")
    for gone in (first.id, third.id):
        with pytest.raises(openai.NotFoundError):
            await keeper.responses.retrieve(gone)
        with pytest.raises(openai.NotFoundError):
            await keeper.responses.delete(gone)
    with pytest.raises(openai.NotFoundError):
        await keeper.responses.create(model=MODEL, input="x", previous_response_id=first.id)


async def test_input_items_come_in_pages(keeping: Rig, keeper: openai.AsyncOpenAI) -> None:
    items: Any = [{"role": "user", "content": str(i)} for i in range(5)]
    r = await keeper.responses.create(model=MODEL, input=items)
    listed = [item async for item in keeper.responses.input_items.list(r.id, limit=2, order="asc")]
    assert [item.content[0].text for item in listed] == list("01234")  # type: ignore[union-attr]
    url = f"/v1/responses/{r.id}/input_items"
    page = (await keeping.http.get(url, params={"limit": 2})).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["4", "3"]
    assert page["has_more"]
    long = ("0000000019999", "000000001" + "0" * 5000)
    for params in (*({"limit": limit} for limit in (0, 101, "x", *long)), {"order": "up"}, {"after": "nothing"}):
        assert (await keeping.http.get(url, params=params)).status_code == 400
    assert (await keeping.http.get(f"/v1/responses/{r.id}", params={"stream": "true"})).status_code == 400


async def test_an_unexpected_error_has_the_form_of_the_api(
    keeping: Rig, keeper: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = await keeper.responses.create(model=MODEL, input="Hi")

    async def find(*_: object) -> StoredResponse:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(ResponseStore, "find", find)
    answer = await keeping.http.get(f"/v1/responses/{r.id}/input_items")
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/json")
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text


async def test_the_store_is_bounded_and_expires_and_separates_tenants(redis: str) -> None:
    def kept(name: str, size: int = 0) -> StoredResponse:
        return StoredResponse({"id": name, "filler": "x" * size}, [], [])

    kept_long, brief = (ResponseStore(redis, ttl_s=ttl_s, max_bytes_per_tenant=1000) for ttl_s in (60, 0.05))
    try:
        assert await kept_long.save("a", kept("r1", 300))
        assert await kept_long.find("b", "r1") is None
        assert not await kept_long.delete("b", "r1")
        assert await kept_long.save("b", kept("r1"))
        assert await kept_long.save("a", kept("r2", 300))
        assert not await kept_long.save("a", kept("huge", 1001))
        assert await kept_long.save("a", kept("r3", 300))  # the oldest makes room
        assert [await kept_long.find("a", name) is not None for name in ("r1", "r2", "r3")] == [False, True, True]
        assert await kept_long.find("b", "r1") == kept("r1")
        assert await kept_long.delete("a", "r2")
        assert await kept_long.save("a", kept("r4", 300))
        assert await kept_long.find("a", "r3") is not None
        assert await brief.save("c", kept("old", 800))
        while await brief.find("c", "old") is not None:
            await asyncio.sleep(0.05)
        for i in range(5):  # what has expired takes no room
            assert await kept_long.save("c", kept(f"n{i}", 100))
        assert await kept_long.find("c", "n0") is not None
    finally:
        await kept_long.close()
        await brief.close()


async def test_a_response_is_found_only_with_keys_of_its_tenant(
    cluster: FakeCluster, smollm2_dir: Path, redis: str, tmp_path: Path
) -> None:
    keys = []
    for tenant in ("acme", "other"):
        key, record = create_key(tenant)
        KeyFile(tmp_path / "keys.toml").add(record)
        keys.append({"authorization": f"Bearer {key}"})
    async with rig(cluster, smollm2_dir, redis=redis, api_keys=(str(tmp_path / "keys.toml"),)) as gw:
        body = {"model": MODEL, "input": "Hi"}
        kept = (await gw.http.post("/v1/responses", json=body, headers=keys[0])).json()
        url = f"/v1/responses/{kept['id']}"
        assert (await gw.http.get(url, headers=keys[1])).status_code == 404
        assert (await gw.http.get(f"{url}/input_items", headers=keys[1])).status_code == 404
        assert (await gw.http.delete(url, headers=keys[1])).status_code == 404
        follow = {**body, "previous_response_id": kept["id"]}
        assert (await gw.http.post("/v1/responses", json=follow, headers=keys[1])).status_code == 404
        assert (await gw.http.post("/v1/responses", json=follow, headers=keys[0])).status_code == 200
        assert (await gw.http.get(url)).status_code == 401
        assert (await gw.http.get(url, headers=keys[0])).json()["id"] == kept["id"]


async def test_with_redis_down_requests_are_answered_and_stored_responses_are_unavailable(
    cluster: FakeCluster, smollm2_dir: Path, unused_tcp_port: int
) -> None:
    async with rig(cluster, smollm2_dir, redis=f"redis://127.0.0.1:{unused_tcp_port}") as gw:
        body = (await post(gw)).json()
        assert (body["status"], body["store"]) == ("completed", False)
        assert (await gw.http.get(f"/v1/responses/{body['id']}")).status_code == 503
        assert (await post(gw, previous_response_id=body["id"])).status_code == 503
