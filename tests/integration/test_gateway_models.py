"""Several models behind one gateway: each request goes to the pods of its model, by name or alias."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from cli.app import app
from cli.stack.valkey import EmbeddedValkey
from common.errors import ConfigError
from common.pb import inference_pb2, inference_pb2_grpc
from common.rpc import open_channel
from common.settings.gateway import GatewayConfig
from common.types import Role
from gateway.serving.gateway import Gateway
from gateway.serving.models import TextProcessor
from tests.rigs.gateway.gateway_rig import Rig, rig, texts
from tests.rigs.index.index_entry import IndexEntry
from tests.rigs.pods.fake_pods import FakeCluster, FakePod, fake_cluster
from tests.rigs.waiting import until


@asynccontextmanager
async def two_models(model_dir: Path, port: int = 0) -> AsyncIterator[tuple[Rig, FakeCluster]]:
    """A gateway over pods of "one" (prefill-0, decode-0) and "two" (prefill-1, decode-1)."""
    async with fake_cluster(prefill=2, decode=2) as cluster:
        for name, pods in zip(("one", "two"), _pairs(cluster), strict=True):
            for pod in pods:
                pod.served_name = name
        models = (f"one={model_dir}", f"two={model_dir}")
        async with rig(cluster, model_dir, models=models, alias=("gpt=two",), grpc_port=port, wait=False) as gw:
            for model in gw.gateway.models:
                await until(lambda model=model: model.pod_table.ready)  # type: ignore[misc]
            yield gw, cluster


def _pairs(cluster: FakeCluster) -> list[tuple[FakePod, FakePod]]:
    return list(zip(cluster.prefills, cluster.decodes, strict=True))


def asked(cluster: FakeCluster) -> list[list[str]]:
    """Returns the model names of the reserved requests, by decode pod."""
    return [[request.model for request in pod.seen.reserved] for pod in cluster.decodes]


async def test_requests_go_to_the_pods_of_their_model(smollm2_dir: Path, unused_tcp_port: int) -> None:
    async with two_models(smollm2_dir, unused_tcp_port) as (gw, cluster):
        for name in ("one", "two", "gpt", "two"):
            answer = await gw.complete(model=name, max_tokens=2)
            assert (answer.status_code, answer.json()["model"]) == (200, name)
        assert (await gw.chat(model="gpt", max_tokens=2)).status_code == 200
        assert asked(cluster) == [["one"], ["two"] * 4]
        assert [len(pod.seen.prefilled) for pod in cluster.prefills] == [1, 4]
        error = (await gw.complete(model="three")).json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        listed = {card["id"]: card.get("root") for card in (await gw.http.get("/v1/models")).json()["data"]}
        assert listed == {"gpt": "two", "one": "one", "two": "two"}
        assert (await gw.http.get("/v1/models/gpt")).json()["id"] == "gpt"
        assert (await gw.http.post("/tokenize", json={"model": "gpt", "prompt": "x"})).json()["count"] == 1
        assert (await gw.http.post("/tokenize", json={"prompt": "x"})).json()["error"]["param"] == "model"
        assert (await gw.http.get("/v1/models/three")).status_code == 404
        async with open_channel(f"127.0.0.1:{unused_tcp_port}") as connection:
            stub = inference_pb2_grpc.InferenceStub(connection)
            assert [m.id for m in (await stub.ListModels(inference_pb2.ListModelsRequest())).models] == sorted(listed)
            request = inference_pb2.GenerateRequest(model="gpt", text="x", max_tokens=2)
            assert [m async for m in stub.Generate(request)][-1].usage.completion_tokens == 2
        assert asked(cluster)[0] == ["one"]


async def test_one_model_may_have_no_pods_while_another_serves(smollm2_dir: Path) -> None:
    async with two_models(smollm2_dir) as (gw, cluster):
        await cluster.decodes[0].stop()
        await until(lambda: not gw.gateway.models.by_name["one"].pod_table.ready)
        assert (await gw.http.get("/ready")).status_code == 200
        assert (await gw.complete(model="one", max_tokens=2)).status_code == 503
        assert (await gw.complete(model="two", max_tokens=2)).status_code == 200
        assert [card["id"] for card in (await gw.http.get("/v1/models")).json()["data"]] == ["gpt", "one", "two"]


async def test_a_pod_without_a_model_name_is_refused_by_a_gateway_of_several_models(smollm2_dir: Path) -> None:
    async with two_models(smollm2_dir) as (gw, cluster):
        silent = await cluster.add(Role.DECODE, "silent")
        for model in gw.gateway.models:
            pod = model.pod_table._pod(silent.address, static=True)
            await until(lambda pod=pod: bool(pod.refusal))  # type: ignore[misc]
            assert not pod.alive


async def test_several_gateways_find_the_pods_of_several_models_in_one_redis(smollm2_dir: Path, tmp_path: Path) -> None:
    valkey = EmbeddedValkey(0, tmp_path)
    url = await valkey.start()
    models = (f"one={smollm2_dir}", f"two={smollm2_dir}")
    try:
        async with fake_cluster(prefill=2, decode=2) as cluster, AsyncExitStack() as stack:
            for name, pods in zip(("one", "two"), _pairs(cluster), strict=True):
                for pod in pods:
                    pod.served_name = name
                    entry = IndexEntry(url, pod, name)
                    await entry.index.start()
                    stack.push_async_callback(entry.index.stop)
            settings = {"pods": (), "redis": url, "models": models, "alias": ("gpt=two",), "wait": False}
            gateways = [await stack.enter_async_context(rig(cluster, smollm2_dir, **settings)) for _ in range(2)]
            for gw in gateways:
                for model in gw.gateway.models:
                    await until(lambda model=model: model.pod_table.ready)  # type: ignore[misc]
                    assert len(model.pod_table.pods) == 2
            for name, gw in zip(("one", "gpt", "two", "one"), (*gateways, *gateways), strict=True):
                assert (await gw.complete(model=name, max_tokens=2)).status_code == 200
            assert asked(cluster) == [["one"] * 2, ["two"] * 2]
            # The other gateway reuses the prefix, under another name of the same model.
            first, second = gateways
            said = {"model": "two", "input": "Hi", "max_output_tokens": 3}
            kept = (await first.http.post("/v1/responses", json=said)).json()
            assert kept["store"] is True
            assert (await second.http.get(f"/v1/responses/{kept['id']}")).json()["output"] == kept["output"]
            more = {"model": "gpt", "input": "And?", "previous_response_id": kept["id"], "max_output_tokens": 3}
            assert (await second.http.post("/v1/responses", json=more)).status_code == 200
            prompts = [request.prompt_len for request in cluster.prefills[1].seen.prefilled]
            assert prompts[-1] > prompts[-2]
    finally:
        await valkey.stop()


@pytest.mark.parametrize(
    ("models", "alias", "field"),
    [
        (("a=DIR",), ("a=a",), "alias"),
        (("a=DIR",), ("b=c",), "alias"),
        (("a=DIR", "a=DIR"), (), "models"),
        (("a=DIR",), ("b=a", "b=a"), "alias"),
    ],
)
def test_ambiguous_and_unknown_names_are_rejected(
    models: tuple[str, ...], alias: tuple[str, ...], field: str, smollm2_dir: Path
) -> None:
    def make() -> Gateway:
        config = GatewayConfig(models=models, alias=alias)
        return Gateway(config, [TextProcessor(m, *texts(smollm2_dir)) for m in config.served_models()], None)

    with pytest.raises(ConfigError) as error:
        make()
    assert error.value.field == field


def test_flags_name_one_model_or_several(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[GatewayConfig] = []
    monkeypatch.setattr("cli.commands.services.run_service", lambda settings, _: seen.append(settings))

    def configured(*flags: str) -> dict[str, str]:
        app(["gateway", *flags], standalone_mode=False)
        return seen[-1].served_models()

    assert configured() == {"": "smollm2"}
    assert configured("--model", "./a=b") == {"": "./a=b"}
    assert configured("--model", "/x", "--served-name", "n") == {"n": "/x"}
    assert configured("--model", "a=/x", "--model", "b=/y", "--alias", "c=a") == {"a": "/x", "b": "/y"}
    assert seen[-1].aliases() == {"c": "a"}


async def test_clients_see_how_the_weights_are_quantised(smollm2_dir: Path) -> None:
    async with two_models(smollm2_dir) as (gw, _):
        assert all("quantization" not in card for card in (await gw.http.get("/v1/models")).json()["data"])
    async with fake_cluster() as cluster:
        for pod in (*cluster.prefills, *cluster.decodes):
            pod.layout = dataclasses.replace(pod.layout, weights="awq (int4, groups of 128, zeros)")
        async with rig(cluster, smollm2_dir) as gw:
            [card] = (await gw.http.get("/v1/models")).json()["data"]
            assert card["quantization"] == "awq (int4, groups of 128, zeros)"


async def test_a_gateway_names_the_weights_of_pods_that_cannot_work_together(smollm2_dir: Path) -> None:
    async with fake_cluster() as cluster:
        cluster.decodes[0].layout = dataclasses.replace(cluster.decodes[0].layout, weights="fp8 (fp8)")
        async with rig(cluster, smollm2_dir, wait=False) as gw:
            [model] = gw.gateway.models
            await until(lambda: "different KV layouts" in model.pod_table.why_unready())
            assert model.pod_table.why_unready().endswith("their weights are fp8 (fp8) and not quantised")
