"""/v1/embeddings over fake pods with the openai SDK: encodings, failing pods, and pods without embeddings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from common.errors import InternalError, Unauthenticated, Unavailable
from common.types import Role
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster, FakePod, fake_cluster
from tests.rigs.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster(prefill=2) as c:
        yield c


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gw(cluster: FakeCluster, smollm2_dir: Path) -> AsyncIterator[Rig]:
    async with rig(cluster, smollm2_dir) as r:
        await until(lambda: sum(pod.serving for pod in r.gateway.pod_table.pods.values()) == 3)
        yield r


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(gw: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gw.url}/v1", api_key="x", max_retries=0) as c:
        yield c


async def post(gw: Rig, **fields: Any) -> Any:
    return await gw.http.post("/v1/embeddings", json={"model": MODEL, "input": "Hi", **fields})


async def test_the_sdk_gets_the_same_as_base64_and_as_floats(client: openai.AsyncOpenAI) -> None:
    packed = await client.embeddings.create(model=MODEL, input=["Hello", "Hello again, world"])
    plain = await client.embeddings.create(model=MODEL, input=["Hello", "Hello again, world"], encoding_format="float")
    assert [item.index for item in packed.data] == [0, 1]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding)
        assert sum(x * x for x in one.embedding) == pytest.approx(1.0)
    assert packed.data[0].embedding != packed.data[1].embedding
    assert packed.usage == plain.usage
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == 1 + 4


async def test_token_ids_salt_and_dimensions(gw: Rig, cluster: FakeCluster) -> None:
    body = (await post(gw, input=[[1, 2, 3], [4]], cache_salt="s")).json()
    assert body["usage"]["prompt_tokens"] == 4
    salted = [r.prompt_ids for pod in cluster.prefills for r in pod.seen.embedded if r.cache_salt == "s"]
    assert sorted(salted) == [(1, 2, 3), (4,)]
    one = (await post(gw, input=[1, 2, 3])).json()["data"][0]["embedding"]
    assert one == body["data"][0]["embedding"]
    assert (await post(gw, dimensions=2)).json()["data"][0]["embedding"] == pytest.approx([0.6, 0.8])
    assert not cluster.decodes[0].seen.reserved


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [99999]}, "input"),
        ({"input": "a " * 5000}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": 5}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 4}, "dimensions"),
        ({"model": None}, "model"),
    ],
)
async def test_errors_name_the_field(gw: Rig, fields: dict[str, Any], param: str) -> None:
    response = await post(gw, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_failing_pod_is_avoided_and_the_rest_is_reported(
    gw: Rig, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = cluster.prefills
    monkeypatch.setattr(first.faults, "embed_error", Unavailable("not now"))
    assert (await post(gw, input=["a", "b", "c"])).status_code == 200
    monkeypatch.setattr(second.faults, "embed_error", Unavailable("not now either"))
    assert (await post(gw)).status_code == 503
    for error in (InternalError("a secret"), Unauthenticated("a secret")):
        monkeypatch.setattr(first.faults, "embed_error", error)
        monkeypatch.setattr(second.faults, "embed_error", error)
        failed = await post(gw)
        assert failed.status_code == 500
        assert "secret" not in failed.text


async def test_inputs_are_spread_over_the_pods(gw: Rig, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for pod in cluster.prefills:
        monkeypatch.setattr(pod.faults, "embed_delay_s", 0.6)
        pod.seen.embedded.clear()
    await post(gw, input=["same length"] * 8)
    assert [len(pod.seen.embedded) for pod in cluster.prefills] == [4, 4]


async def test_pods_without_embeddings_give_a_501(smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = FakePod.start

    async def older(pod: FakePod) -> None:
        pod.embeds = False
        await start(pod)

    monkeypatch.setattr(FakePod, "start", older)
    async with fake_cluster(0, 0) as cluster:
        await cluster.add(Role.BOTH, "both")
        async with rig(cluster, smollm2_dir) as gw:
            response = await post(gw)
            assert (response.status_code, response.json()["error"]["type"]) == (501, "invalid_request_error")
