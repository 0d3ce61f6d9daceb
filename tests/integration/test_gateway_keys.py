"""A gateway with API keys: the routes that need one, the rights of a key, and changes while the gateway runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from cli.stack.valkey import EmbeddedValkey
from common.errors import InvalidApiKey
from common.pb import inference_pb2, inference_pb2_grpc
from common.rpc import open_channel
from gateway.admission import key_store
from gateway.admission.api_keys import create_key
from gateway.admission.key_store import KeyFile, RedisKeyStore
from tests.rigs.gateway.gateway_rig import MODEL, rig
from tests.rigs.pods.fake_pods import fake_cluster
from tests.rigs.waiting import until


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_store, "FILE_PERIOD_S", 0.02)
    monkeypatch.setattr(key_store, "REDIS_PERIOD_S", 0.05)


def new_key(path: Path, tenant: str, **fields: Any) -> tuple[str, str]:
    """Adds a key to the file. Returns the header value and the id."""
    key, record = create_key(tenant, **fields)
    KeyFile(path).add(record)
    return f"Bearer {key}", record.id


async def test_rest_needs_a_key_except_for_probes(smollm2_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    good, _ = new_key(path, "acme")
    async with fake_cluster() as cluster, rig(cluster, smollm2_dir, api_keys=(str(path),)) as gw:
        for open_path in ("/health", "/live", "/ready", "/version", "/metrics"):
            assert (await gw.http.get(open_path)).status_code == 200
        for headers in ({}, {"authorization": "Bearer sk-wrong"}, {"authorization": good[:-1]}):
            for method, closed in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/nowhere")):
                answer = await gw.http.request(method, closed, headers=headers)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        async with openai.AsyncOpenAI(base_url=f"{gw.url}/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(model=MODEL, prompt="x")
        async with openai.AsyncOpenAI(base_url=f"{gw.url}/v1", api_key=good.split()[1], max_retries=0) as client:
            assert (await client.completions.create(model=MODEL, prompt="x", max_tokens=2)).usage is not None
        common = await gw.http.post("/reset_prefix_cache", headers={"authorization": good})
        assert (common.status_code, common.json()["error"]["code"]) == (403, None)
        assert (await gw.http.post("/reset_prefix_cache", headers={"authorization": "Bearer x"})).status_code == 401
        await gw.settled()


async def test_metrics_can_need_a_key(smollm2_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    good, _ = new_key(path, "acme")
    settings: dict[str, Any] = {"api_keys": (str(path),), "open_metrics": False}
    async with fake_cluster() as cluster, rig(cluster, smollm2_dir, **settings) as gw:
        assert (await gw.http.get("/metrics")).status_code == 401
        assert (await gw.http.get("/metrics", headers={"authorization": good})).status_code == 200


async def test_grpc_needs_a_key_too(smollm2_dir: Path, tmp_path: Path, unused_tcp_port: int) -> None:
    path = tmp_path / "keys.toml"
    good, _ = new_key(path, "acme")
    settings: dict[str, Any] = {"api_keys": (str(path),), "grpc_port": unused_tcp_port}
    async with (
        fake_cluster() as cluster,
        rig(cluster, smollm2_dir, **settings) as gw,
        open_channel(f"127.0.0.1:{gw.server.grpc_port}") as connection,
    ):
        stub: Any = inference_pb2_grpc.InferenceStub(connection)
        request = inference_pb2.GenerateRequest(model=MODEL, text="x", max_tokens=2)
        for metadata in ((), (("authorization", "Bearer x"),)):
            for call in (
                stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata),
                stub.Abort(inference_pb2.AbortGenerateRequest(request_id="x"), metadata=metadata),
                stub.Generate(request, metadata=metadata).read(),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await call
                assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        got = [m async for m in stub.Generate(request, metadata=(("authorization", good),))]
        assert got[-1].usage.completion_tokens == 2


async def test_a_key_limits_models_cache_and_priority(smollm2_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    bound, _ = new_key(path, "a", models=("gpt",), isolated=True, priority=-1)
    free, _ = new_key(path, "b", admin=True)
    settings: dict[str, Any] = {"api_keys": (str(path),), "alias": (f"gpt={MODEL}",)}
    async with fake_cluster() as cluster, rig(cluster, smollm2_dir, **settings) as gw:

        async def ask(key: str, model: str, **fields: Any) -> Any:
            body = {"model": model, "prompt": "Hello", "max_tokens": 2, **fields}
            return await gw.http.post("/v1/completions", json=body, headers={"authorization": key})

        denied = await ask(bound, MODEL)
        assert (denied.status_code, denied.json()["error"]["code"]) == (403, "model_not_found")
        assert (await ask(bound, "gpt", priority=9, cache_salt="s")).status_code == 200
        mine = await ask(free, MODEL, cache_salt="s")
        one, two = cluster.decodes[0].seen.reserved
        assert (one.priority, two.priority) == (-1, 0)
        assert one.cache_salt != two.cache_salt
        listed = (await gw.http.get("/v1/models", headers={"authorization": bound})).json()["data"]
        assert [card["id"] for card in listed] == ["gpt"]
        hidden = f"/debug/requests/{mine.json()['id']}"
        assert (await gw.http.get(hidden, headers={"authorization": bound})).status_code == 404
        assert (await gw.http.get(hidden, headers={"authorization": free})).status_code == 200


async def test_keys_come_and_go_in_a_file_and_a_broken_file_changes_nothing(smollm2_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first, first_id = new_key(path, "a")
    async with fake_cluster() as cluster, rig(cluster, smollm2_dir, api_keys=(str(path),)) as gw:

        def allowed(key: str) -> bool:
            try:
                return bool(gw.gateway.keys.current.identify(key))
            except InvalidApiKey:
                return False

        second, _ = new_key(path, "b")
        await until(lambda: allowed(second))
        path.write_text("{ broken")
        await until(lambda: bool(gw.gateway.keys._errors))
        assert allowed(first)
        path.unlink()
        path.with_suffix(".json").write_text('{"keys": []}')
        third, _ = new_key(path, "c")
        await until(lambda: allowed(third))
        assert not allowed(first)
        assert not KeyFile(path).remove(first_id)


async def test_keys_in_redis_stay_valid_while_it_is_away(smollm2_dir: Path, tmp_path: Path) -> None:
    valkey = EmbeddedValkey(0, tmp_path)
    url = await valkey.start()
    store = RedisKeyStore(url)
    key, record = create_key("a", tokens_per_minute=7)
    try:
        async with fake_cluster() as cluster, rig(cluster, smollm2_dir, api_keys=("redis",), redis=url) as gw:
            keys = gw.gateway.keys
            with pytest.raises(Exception, match="not valid"):
                keys.current.identify(f"Bearer {key}")
            await store.add(record)
            await until(lambda: bool(keys._redis_keys))
            assert keys.current.identify(f"Bearer {key}").limits.tokens_per_minute == 7
            await store._client.hset("kv:api-keys", "x", "no record")
            await until(lambda: bool(keys._errors))
            await store._client.hdel("kv:api-keys", "x")
            await until(lambda: not keys._errors)
            await valkey.stop()
            await until(lambda: bool(keys._errors))
            headers = {"authorization": f"Bearer {key}"}
            body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
            assert (await gw.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    finally:
        await store.close()
        await valkey.stop()


async def test_a_gateway_that_never_reached_redis_answers_503(tmp_path: Path, unused_tcp_port: int) -> None:
    ring = key_store.KeyRing(["redis"], f"redis://127.0.0.1:{unused_tcp_port}/0")
    await ring.start()
    try:
        with pytest.raises(Exception, match="cannot be checked"):
            ring.current.identify(f"Bearer {create_key('t')[0]}")
    finally:
        await ring.stop()
