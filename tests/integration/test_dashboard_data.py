"""The dashboard's JSON: pods, rates and requests that really ran, and who may read them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from common.pb import transfer_pb2
from gateway.admission.api_keys import create_key
from gateway.admission.key_store import KeyFile
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.waiting import until


async def get(gw: Rig, path: str, **headers: str) -> Any:
    answer = await gw.http.get(path, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def heard(gw: Rig) -> None:
    """Waits until every pod has reported its activity again."""
    for _ in range(2):  # the first may be the answer to an earlier question
        before = {pod: pod.last_answer_at for pod in gw.gateway.pod_table.pods.values()}
        await until(lambda before=before: all(pod.last_answer_at > at for pod, at in before.items()))  # type: ignore[misc]


async def test_the_state_shows_pods_rates_and_latencies(gw: Rig, cluster: FakeCluster) -> None:
    first = await get(gw, "/dashboard/state")
    assert first["latency"]["ttft"] is None
    assert first["errors"] == {"requests": 0, "failed": 0, "ratio": None}
    cluster.prefills[0].cached_tokens = 1
    cluster.decodes[0].faults.token_delay_s = 0.05  # tokens that come together have no time between them
    for _ in range(3):
        assert (await gw.complete(max_tokens=4)).status_code == 200
    assert (await gw.http.post("/v1/completions", json={"model": MODEL})).status_code == 400
    decode = cluster.decodes[0]
    decode.blocks = transfer_pb2.PoolCounts(free=6, cached=2, leased=7, quarantined=1)
    decode.activity.generated_tokens = 9
    decode.activity.drafts.CopyFrom(transfer_pb2.Drafts(proposer="ngram", chains=4, proposed=8, accepted=6))
    decode.activity.gpu.CopyFrom(transfer_pb2.Gpu(memory_used=3, memory_total=4))
    cluster.prefills[0].pairs = [
        transfer_pb2.Pair(pod="decode-0", transport="cuda_ipc", bytes=6_000_000_000, busy_s=2.0, gb_s=9.0)
    ]
    await heard(gw)
    state = await get(gw, "/dashboard/state")
    assert state["links"] == [
        {
            "from": "prefill-0",
            "to": "decode-0",
            "transport": "cuda_ipc",
            "bytes": 6_000_000_000,
            "busy_s": 2.0,
            "gb_per_s": 3.0,
        }
    ]
    by_name = {pod["name"]: pod for pod in state["pods"]}
    assert {name: (pod["role"], pod["state"], pod["model"]) for name, pod in by_name.items()} == {
        "prefill-0": ("prefill", "ready", MODEL),
        "decode-0": ("decode", "ready", MODEL),
    }
    shown = by_name["decode-0"]
    assert shown["blocks"] == {"free": 6, "cached": 2, "leased": 7, "quarantined": 1, "total": 16}
    assert shown["kv_used"] == 0.5
    assert shown["generated_tokens_per_s"] == pytest.approx(9 / state["window_s"], rel=0.01)
    assert shown["speculation"]["acceptance_length"] == 2.5
    assert shown["gpu"] == {"utilization": None, "memory_used": 3, "memory_total": 4}
    assert state["speculation"]["acceptance_length"] == 2.5
    assert state["errors"] == {"requests": 4, "failed": 0, "ratio": 0.0}
    assert state["rates"]["output_tokens_per_s"] == pytest.approx(12 / state["window_s"], rel=0.01)
    assert state["latency"]["ttft"]["count"] == state["latency"]["e2e"]["count"] == 3
    assert 1 <= state["latency"]["itl"]["count"] <= 9
    assert 0 < state["latency"]["ttft"]["p50"] <= state["latency"]["ttft"]["p99"]
    assert (state["cache"]["hit_tokens"], state["cache"]["prompt_tokens"]) == (3, 3)
    assert state["models"] == [
        {"name": MODEL, "aliases": [], "ready": True, "waiting": 0, "max_model_len": 2048},
    ]
    assert (state["gateway"]["ready"], state["gateway"]["running"], state["gateway"]["index_mode"]) == (
        True,
        0,
        "hash",
    )
    points = {name: len(values) for name, values in state["series"].items()}
    assert len(set(points.values())) == 1, points
    assert min(points.values()) >= 1


async def test_found_and_predicted_cache_hits(gw: Rig, cluster: FakeCluster) -> None:
    async def counted(prompt: list[int]) -> tuple[float, float, float]:
        names = ("lookup_tokens", "repeated_tokens", "hit_tokens_actual")
        registry = gw.gateway.metrics.base.registry

        def now() -> list[float]:
            return [registry.get_sample_value(f"baton_prefix_{name}_total") or 0.0 for name in names]

        before = now()
        assert (await gw.complete(prompt=prompt, max_tokens=2)).status_code == 200
        looked_up, repeated, hit = (b - a for a, b in zip(before, now(), strict=True))
        return looked_up, repeated, hit

    block = cluster.prefills[0].layout.block_size
    prompt = list(range(300, 300 + 2 * block + 5))
    assert await counted(prompt) == (len(prompt), 0, 0)
    cluster.prefills[0].cached_tokens = block
    assert await counted(prompt) == (len(prompt), 2 * block, block)
    assert await counted([*prompt[: block + 3], 7, 8]) == (block + 5, block, block)
    assert (await gw.http.post("/reset_prefix_cache")).status_code == 200
    assert (await counted(prompt))[1] == 0  # no pod can be predicted to hold it


async def test_the_state_of_a_dead_or_draining_pod(gw: Rig, cluster: FakeCluster) -> None:
    def states() -> dict[str, str]:
        return {pod.name: pod.state for pod in gw.gateway.pod_table.pods.values()}

    cluster.decodes[0].draining = True
    await until(lambda: states()["decode-0"] == "draining")
    await cluster.prefills[0].stop()
    await until(lambda: states()["prefill-0"] == "gone")
    shown = {pod["name"]: pod for pod in (await get(gw, "/dashboard/state"))["pods"]}
    assert shown["prefill-0"]["state"] == "gone"
    assert shown["prefill-0"]["prefill_tokens_per_s"] is None


async def test_requests_have_phases(gw: Rig) -> None:
    answer = await gw.http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 5}, headers={"x-request-id": "mine"}
    )
    await until(lambda: not gw.gateway._requests)

    async def handed_off() -> bool:  # the prefill pod's report may come after the answer
        (request,) = (await get(gw, "/dashboard/requests"))["requests"]
        return request["bytes"] is not None

    await until(handed_off)
    listed = await get(gw, "/dashboard/requests")
    (shown,) = listed["requests"]
    assert shown == await get(gw, "/dashboard/requests/mine") | {"age_s": shown["age_s"]}
    assert answer.json()["id"] == f"cmpl-{shown['id']}"
    assert (shown["state"], shown["output_tokens"], shown["prompt_tokens"], shown["attempts"]) == ("ok", 5, 1, 1)
    assert (shown["prefill_pod"], shown["decode_pod"], shown["model"]) == ("prefill-0", "decode-0", MODEL)
    assert (shown["client_request_id"], shown["transport"], shown["bytes"]) == ("mine", "loopback", 1)
    assert 0 < shown["ttft_s"] <= shown["end_s"]
    kinds = [span["kind"] for span in shown["spans"]]
    assert kinds == ["gateway", "queue", "chunk", "pushes", "hand_off", "decode"]
    assert [part["name"] for part in shown["spans"][0]["parts"]] == ["tokenize", "wait", "route, reserve"]
    assert all(span["start_s"] <= span["end_s"] for span in shown["spans"])
    pushes = shown["spans"][3]["parts"]
    assert [push["name"] for push in pushes] == ["blocks 0-0"]
    assert shown["spans"][2]["start_s"] <= pushes[0]["start_s"] <= pushes[0]["end_s"]
    again = await get(gw, f"/dashboard/requests?since={listed['cursor']}")
    assert again["requests"] == []


async def test_a_running_request_is_listed_until_it_ends(gw: Rig, cluster: FakeCluster) -> None:
    cluster.decodes[0].faults.stall_after = 2
    task = asyncio.create_task(gw.complete(max_tokens=8))
    await until(
        lambda: bool(gw.gateway._requests) and gw.gateway.num_output_tokens(next(iter(gw.gateway._requests))) == 3
    )
    cursor = (await get(gw, "/dashboard/requests"))["cursor"]
    (shown,) = (await get(gw, f"/dashboard/requests?since={cursor}"))["requests"]
    assert (shown["state"], shown["end_s"], shown["output_tokens"]) == ("running", None, 3)
    assert shown["spans"][-1]["kind"] == "decode"
    task.cancel()
    await until(lambda: not gw.gateway._requests)
    (shown,) = (await get(gw, f"/dashboard/requests?since={cursor}"))["requests"]
    assert shown["state"] == "aborted"


async def test_the_phases_are_those_of_the_last_attempt(gw: Rig, cluster: FakeCluster) -> None:
    cluster.prefills[0].faults.drop_prefill_after_first = 1
    assert (await gw.complete(max_tokens=3)).status_code == 200
    await gw.settled()
    (shown,) = (await get(gw, "/dashboard/requests"))["requests"]
    assert shown["attempts"] == 2
    assert [span["kind"] for span in shown["spans"]].count("chunk") == 1


@pytest.mark.parametrize("query", ["limit=0", "limit=257", "limit=x", "since=-1", "since=nan", "limit=1.5"])
async def test_invalid_queries(gw: Rig, query: str) -> None:
    answer = await gw.http.get(f"/dashboard/requests?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_unknown_requests(gw: Rig) -> None:
    assert (await gw.http.get("/dashboard/requests/none")).status_code == 404


async def test_keys_are_required_and_tenants_see_their_own_requests(smollm2_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    keys = {}
    for tenant, admin in (("acme", False), ("other", False), ("ops", True)):
        key, record = create_key(tenant, admin=admin)
        KeyFile(path).add(record)
        keys[tenant] = f"Bearer {key}"
    async with fake_cluster() as cluster, rig(cluster, smollm2_dir, api_keys=(str(path),)) as gw:
        for closed in ("/dashboard/state", "/dashboard/requests", "/dashboard/requests/x"):
            assert (await gw.http.get(closed)).status_code == 401
        body, mine = {"model": MODEL, "prompt": "x", "max_tokens": 2}, {"authorization": keys["acme"]}
        made = (await gw.http.post("/v1/completions", json=body, headers=mine)).json()["id"]
        for tenant, seen in (("acme", 1), ("other", 0), ("ops", 1)):
            listed = await get(gw, "/dashboard/requests", authorization=keys[tenant])
            assert len(listed["requests"]) == seen
            one = await gw.http.get(f"/dashboard/requests/{made}", headers={"authorization": keys[tenant]})
            assert one.status_code == (200 if seen else 404)
        await get(gw, "/dashboard/state", authorization=keys["other"])
        await gw.settled()
