"""The endpoints beside generation: tokenizing, models, health, metrics, and resetting the prefix caches."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from starlette.routing import Route
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from common.errors import Unavailable
from gateway.app import build_app
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster(prefill=1, decode=2) as c:
        yield c


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gw(cluster: FakeCluster, smollm2_dir: Path) -> AsyncIterator[Rig]:
    async with rig(cluster, smollm2_dir) as r:
        yield r


async def test_a_text_goes_to_tokens_and_back(gw: Rig) -> None:
    said = (await gw.http.post("/tokenize", json={"model": MODEL, "prompt": "Grüße, 世界"})).json()
    assert said["count"] == len(said["tokens"]) > 2
    assert (said["max_model_len"], said["token_strs"]) == (2048, None)
    back = await gw.http.post("/detokenize", json={"tokens": said["tokens"]})
    assert back.json() == {"prompt": "Grüße, 世界"}
    named = (await gw.http.post("/tokenize", json={"prompt": "Hi there", "return_token_strs": True})).json()
    assert named["token_strs"] == ["Hi", "Ġthere"]


async def test_messages_are_tokenized_as_a_chat_request_would_be(gw: Rig, cluster: FakeCluster) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    said = (await gw.http.post("/tokenize", json={"messages": messages})).json()
    await gw.chat(messages=messages, max_tokens=1)
    assert tuple(said["tokens"]) == cluster.prefills[0].seen.prefilled[-1].prompt_ids
    back = (await gw.http.post("/detokenize", json={"tokens": said["tokens"]})).json()["prompt"]
    assert back.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


async def test_tokenize_options(cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        shutil.copy(smollm2_dir / name, tmp_path)
    raw: Any = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    raw.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    raw.save(str(tmp_path / "tokenizer.json"))
    config = json.loads((smollm2_dir / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ x }}{{ tools[0].function.name if tools }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    async with rig(cluster, tmp_path) as gw:

        async def text(**fields: Any) -> str:
            tokens = (await gw.http.post("/tokenize", json=fields)).json()["tokens"]
            said: str = raw.decode(tokens, skip_special_tokens=False)
            return said

        hello: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
        assert await text(prompt="Hi") == await text(prompt="Hi", add_special_tokens=True) == "<|im_start|>Hi"
        assert await text(prompt="Hi", add_special_tokens=False) == "Hi"
        assert await text(**hello, chat_template_kwargs={"x": "y"}) == "y"
        assert await text(**hello, chat_template_kwargs={"x": "y"}, add_special_tokens=True) == "<|im_start|>y"
        assert await text(**hello, tools=[{"type": "function", "function": {"name": "f"}}]) == "f"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("tokenize", {"prompt": 5}, "prompt"),
        ("tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ("tokenize", {"messages": [{"role": "robot"}]}, "messages[0].role"),
        ("tokenize", {"messages": [], "continue_final_message": True}, "continue_final_message"),
        ("tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("tokenize", [], None),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": ["a"]}, "tokens"),
        ("detokenize", {"tokens": [49152]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": [1], "model": "other"}, "model"),
    ],
)
async def test_bad_bodies_are_named(gw: Rig, path: str, body: Any, param: str | None) -> None:
    response = await gw.http.post(f"/{path}", json=body)
    assert response.status_code == (404 if param == "model" else 400)
    assert response.json()["error"]["param"] == param


async def test_the_request_id_comes_back(gw: Rig) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/v1/completions", {"model": MODEL, "prompt": "x"})):
        response = await gw.http.post(path, json=body, headers={"x-request-id": "mine-7"})
        assert response.headers["x-request-id"] == "mine-7"


async def test_models_have_the_fields_that_clients_need(gw: Rig) -> None:
    (card,) = (await gw.http.get("/v1/models")).json()["data"]
    assert card == {
        "id": MODEL,
        "object": "model",
        "created": gw.gateway.models.first.created,
        "owned_by": "baton",
        "root": MODEL,
        "max_model_len": 2048,
    }
    assert (await gw.http.get(f"/v1/models/{MODEL}")).json() == card
    missing = await gw.http.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_load_tools_may_poll_metrics_and_health_with_head(gw: Rig) -> None:
    for path in ("/metrics", "/health", "/ready", "/live", "/version"):
        assert (await gw.http.head(path)).status_code == 200
        assert (await gw.http.get(path)).status_code == 200
    assert set((await gw.http.get("/version")).json()) == {"version"}


async def test_without_pods_the_gateway_is_live_not_ready_and_tokenizes(smollm2_dir: Path) -> None:
    async with fake_cluster(0, 0) as none, rig(none, smollm2_dir, wait=False) as gw:
        for path, status in (("/live", 200), ("/ready", 503), ("/health", 503)):
            assert (await gw.http.get(path)).status_code == status
        said = (await gw.http.post("/tokenize", json={"prompt": "Hello"})).json()
        assert (said["count"], said["max_model_len"]) == (1, None)
        assert (await gw.http.post("/reset_prefix_cache")).status_code == 503


async def test_a_reset_is_confirmed_by_every_pod_or_fails(gw: Rig, cluster: FakeCluster) -> None:
    approx = gw.gateway.models.first.router.approx_index
    prompt = list(range(200))
    await gw.complete(prompt=prompt)
    body = (await gw.http.post("/reset_prefix_cache")).json()
    assert (body["cleared"], body["kept"]) == (21, 6)
    assert [pod["pod"] for pod in body["pods"]] == ["decode-0", "decode-1", "prefill-0"]
    assert all(pod.seen.resets == 1 for pod in cluster.pods.values())
    hashes = [bytes([i]) * 16 for i in range(3)]
    approx.record("prefill-0", 1, hashes)
    cluster.decodes[1].faults.reset_error = Unavailable("not now")
    failed = await gw.http.post("/reset_prefix_cache")
    assert failed.status_code == 503
    assert failed.json()["error"]["message"] == "these pods did not confirm the reset: decode-1"
    assert "retry-after" in failed.headers
    assert approx.lookup(hashes, [("prefill-0", 1)]) == {"prefill-0": 0}
    cluster.decodes[1].faults.reset_error = None
    assert (await gw.http.get("/reset_prefix_cache")).status_code == 405


async def test_openapi_json_has_every_route_and_method(gw: Rig) -> None:
    document = (await gw.http.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    said = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    app = build_app(gw.gateway, gw.server.metrics_history)
    there = {
        (method, route.path.replace(":path}", "}"))
        for route in app.routes
        if isinstance(route, Route) and route.path not in {"/", "/openapi.json"}  # a page for people, and itself
        for method in (route.methods or ()) - {"HEAD"}
    }
    assert said == there
