"""Pods publish in Redis which adapters are on the device, and gateways prefer these pods."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.pb import transfer_pb2
from common.settings.pod import AdapterSettings
from common.types import MAX_WARM_ADAPTERS, PodLoad
from gateway.pods.adapters import AdapterLoader
from gateway.pods.pod import Pod
from gateway.pods.view import PodView
from pod.adapters import PodAdapters
from prefix_index import publisher
from tests.lora.adapter_cluster import adapter_cluster, make_files
from tests.rigs.gateway.gateway_rig import rig
from tests.rigs.index.index_rig import RECORD as PLAIN_RECORD
from tests.rigs.index.index_rig import FakePool, Rig, one_node_cluster
from tests.rigs.pods.harness import prompt_of
from tests.rigs.waiting import until

DIGESTS = tuple(f"{number:032x}" for number in range(3))


def test_a_load_report_has_a_bounded_list_of_adapters() -> None:
    load = PodLoad(free_blocks=5, warm_adapters=DIGESTS, adapter_copies=4)
    assert PodLoad.from_json(load.to_json()) == load
    assert PodLoad.from_json(PodLoad().to_json()) == PodLoad()
    long = json.dumps({"warm_adapters": [DIGESTS[0]] * 1000, "adapter_copies": 1000})
    assert len(PodLoad.from_json(long).warm_adapters) == MAX_WARM_ADAPTERS
    for bad in ("3", '"abc"', "[3]", "{}", "null"):
        with pytest.raises(ValueError, match="warm_adapters"):
            PodLoad.from_json(f'{{"warm_adapters": {bad}}}')


def test_a_pod_reports_the_adapters_that_were_used_last() -> None:
    adapters = [SimpleNamespace(digest=f"{number:032x}") for number in range(MAX_WARM_ADAPTERS + 5)]
    engine: Any = SimpleNamespace(warm_adapters=lambda: (adapters, 99))
    load = PodLoad(**PodAdapters(engine, AdapterSettings(), "base").warm())
    assert load.warm_adapters == tuple(adapter.digest for adapter in adapters[:MAX_WARM_ADAPTERS])
    assert load.adapter_copies == 99


async def test_of_two_lists_the_one_with_more_copies_is_newer() -> None:
    view = PodView("p", block_size=4, max_request_tokens=64, num_blocks=8)
    pod: Any = SimpleNamespace(view=view, _reports_load=True)
    loader = AdapterLoader(SimpleNamespace(), lambda: "p", lambda _entries: None)  # type: ignore[arg-type]
    loader._process, loader._listed = 1, 1

    async def info(copies: int, *digests: str) -> set[str]:
        warm = [bytes.fromhex(digest) for digest in digests]
        adapters = transfer_pb2.Adapters(version=1, warm=warm, copies=copies)
        await loader.refresh(transfer_pb2.InfoResponse(generation=1, adapters=adapters), view)
        return view.warm_adapters

    def index(copies: int, *digests: str) -> set[str]:
        Pod.on_index_load(pod, PodLoad(warm_adapters=digests, adapter_copies=copies))
        return view.warm_adapters

    a, b, c = DIGESTS
    assert await info(1, a) == {a}
    assert index(2, a, b) == {a, b}
    assert await info(1, a) == {a, b}, "the answer was under way for longer"
    assert await info(3, b, c) == {b, c}
    assert index(2, a, b) == {b, c}
    assert index(3) == {b, c}, "the list of the index may be cut"
    Pod.on_index_load(SimpleNamespace(view=None), PodLoad(adapter_copies=1))  # type: ignore[arg-type]


async def test_a_change_is_published_before_the_next_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "HEARTBEAT_S", 3600.0)
    monkeypatch.setattr(publisher, "ADAPTERS_S", 0.01)
    pool, loads = FakePool(), [PodLoad()]
    async with one_node_cluster(tmp_path) as (valkey, url), Rig(valkey, url) as index:
        published = publisher.IndexPublisher(url, PLAIN_RECORD, pool.snapshot, lambda: loads[-1])
        await published.start()
        try:
            await until(lambda: published.registered)
            for copies in (1, 2):
                loads.append(replace(loads[-1], warm_adapters=DIGESTS[:copies], adapter_copies=copies))

                async def shows() -> bool:
                    return (await index.live())[PLAIN_RECORD.pod].load == loads[-1]

                await until(shows)
        finally:
            await published.stop()


async def test_another_gateway_finds_the_warm_pod_in_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, state = make_files(tmp_path / "files"), PodAdapters.state

    def without_warm(self: PodAdapters) -> transfer_pb2.Adapters | None:
        """Info without the list, so that the gateways have only that of Redis."""
        found = state(self)
        if found is not None:
            found.ClearField("warm")
            found.copies = 0
        return found

    monkeypatch.setattr(PodAdapters, "state", without_warm)
    monkeypatch.setattr("gateway.pods.view.ADAPTER_COPY_S", 60.0)  # more than any queue of a slow machine
    async with one_node_cluster(tmp_path) as (_, url):
        fields = {"redis": url}
        async with adapter_cluster(files, prefill=2, prefill_config=fields, decode_config=fields, redis=url) as cluster:
            await cluster.ask("first", prompt_of(20))
            engines = {pod.runtime.name: pod.runtime.engine for pod in cluster.pods.prefills}
            (warm,) = (name for name, engine in engines.items() if engine.warm_adapters()[1])
            (cold,) = engines.keys() - {warm}
            fakes: Any = cluster.gw.cluster
            async with rig(fakes, files.base, models=(f"tiny={files.base}",), redis=url, pods=()) as other:
                table = other.gateway.pod_table
                await until(lambda: sum(pod.can_prefill for pod in table.pods.values()) == len(engines))
                (view,) = (pod.view for pod in table.pods.values() if pod.name == warm)
                await until(lambda: view is not None and view.adapter_copies == 1)
                for seed in range(6):
                    body = {"model": "first", "prompt": prompt_of(20, seed=seed), "max_tokens": 2}
                    answer = await other.http.post("/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text
                assert engines[cold].warm_adapters()[1] == 0, "the pod that would have to copy got no request"
