"""A gateway names adapters: lists, permissions, loads on demand on both roles, and errors before any computing."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from benchmarks.support.relay_swaps import swap_over_hand_off
from common.errors import AdapterNotLoaded, ModelNotFound
from common.types import AdapterEntry, SamplingParams
from gateway.admission.api_keys import create_key
from gateway.admission.key_store import KeyFile
from gateway.pods import adapters as pod_adapters
from gateway.pods import view as pod_view
from gateway.telemetry.metrics import MAX_ADAPTER_LABELS, GatewayMetrics
from tests.lora.adapter_cluster import NAMES, AdapterCluster, AdapterFiles, adapter_cluster, make_files
from tests.lora.lora_rig import save_adapter
from tests.rigs.pods.harness import prompt_of
from tests.rigs.waiting import until

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> AdapterFiles:
    return make_files(tmp_path_factory.mktemp("adapters"))


def expected(files: AdapterFiles, prompt: list[int], max_tokens: int = 8) -> dict[str, list[int]]:
    """Returns the answers of the merged models."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return {
        name: files.oracle(name).generate([prompt], params, ignore_eos=True, show_progress=False)[0].ids
        for name in files.merged
    }


async def computed(cluster: AdapterCluster) -> int:
    counts = [(await pod.info()).computed for pod in cluster.pods.pods]
    return sum(value for count in counts for _, value in count.ListFields())


async def test_names_lists_and_permissions(files: AdapterFiles, tmp_path: Path) -> None:
    keys = {}
    for tenant, fields in (("admin", {"admin": True}), ("base", {"models": ["tiny"]}), ("one", {"models": ["first"]})):
        keys[tenant], record = create_key(tenant, **fields)
        KeyFile(tmp_path / "keys.toml").add(record)
    prompt = prompt_of(21)
    answers = expected(files, prompt)
    assert len({tuple(ids) for ids in answers.values()}) == 3, "the adapters answer alike"
    async with adapter_cluster(files, api_keys=(str(tmp_path / "keys.toml"),)) as cluster:
        http = cluster.gw.http

        async def call(tenant: str, path: str, **body: object) -> tuple[int, dict[str, object]]:
            headers = {"authorization": f"Bearer {keys[tenant]}"}
            found = await (http.post(path, json=body, headers=headers) if body else http.get(path, headers=headers))
            return found.status_code, found.json()

        _, listed = await call("admin", "/v1/models")
        assert [(card["id"], card.get("parent"), card["root"]) for card in listed["data"]] == [
            ("tiny", None, "tiny"),
            ("first", "tiny", "first"),
            ("second", "tiny", "second"),
        ]
        assert [card["id"] for card in (await call("one", "/v1/models"))[1]["data"]] == ["first"]
        assert (await call("one", "/v1/models/first"))[1]["rank"] == 4
        for name in ("first", "tiny:first"):
            assert await cluster.ask(name, prompt) == [answers["first"]]
        assert await cluster.ask("tiny", prompt) == [answers[""]]
        body = {"prompt": prompt, "max_tokens": 1}
        for tenant, model, status in (
            ("base", "tiny", 200),
            ("base", "first", 403),
            ("base", "tiny:first", 403),
            ("one", "first", 200),
            ("one", "tiny:first", 200),
            ("one", "tiny", 403),
            ("one", "second", 403),
            ("admin", "third", 404),
            ("admin", "first:second", 404),
        ):
            found, answer = await call(tenant, "/v1/completions", model=model, **body)
            assert found == status, (tenant, model, answer)
            assert status != 200 or answer["model"] == model
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert (await call("one", path, lora_name="x", lora_path="first"))[0] == 403
            assert (await call("admin", path, lora_name="x", lora_path="third"))[0] in (400, 404)
        text = (await http.get("/metrics")).text
        assert 'baton_adapter_requests_total{adapter="first"} 4.0' in text


async def test_a_name_changes_on_all_pods_or_on_none(files: AdapterFiles, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(files.adapters, own)
    save_adapter(own / "only", AutoModelForCausalLM.from_pretrained(files.base), seed=9)
    prompt = prompt_of(30)
    answers = expected(files, prompt)
    async with adapter_cluster(files, decode_config={"adapter_dir": str(own)}) as cluster:
        answer = await cluster.admin("load", lora_name="mine", lora_path="first")
        assert (answer["id"], answer["parent"], answer["root"], answer["rank"]) == ("mine", "tiny", "first", 4)
        assert await cluster.ask("mine", prompt) == [answers["first"]]
        again = await cluster.admin("load", lora_name="mine", lora_path=str(files.adapters / "second"), status=400)
        assert "not below" in again["error"]["message"], "the path is not below the directory of the decode pod"
        await cluster.admin("load", lora_name="mine", lora_path="second")
        assert await cluster.ask("mine", prompt) == [answers["second"]]

        # only the decode pod has the folder: the prefill pod refuses, and neither has the name
        refused = await cluster.admin("load", 400, lora_name="half", lora_path="only")
        assert f"pod {cluster.pods.prefill.runtime.name} refuses" in refused["error"]["message"]
        shutil.rmtree(own / "second")
        shutil.copytree(own / "first", own / "second")
        differ = await cluster.admin("load", 503, lora_name="half", lora_path="second")
        assert "different files" in differ["error"]["message"]
        for pod in cluster.pods.pods:
            assert "half" not in [entry.name for entry in pod.runtime.adapters.entries()[0]]

        # a name that only the decode pod knows is an error at once, before anything is computed
        before = await computed(cluster)
        with pytest.raises(AdapterNotLoaded, match=r"prefill.* cannot load the adapter 'only'.*no such folder"):
            await cluster.ask("only", prompt_of(60, seed=3))
        assert await computed(cluster) == before

        gone = await cluster.admin("unload", lora_name="mine")
        assert gone["deleted"]
        with pytest.raises(ModelNotFound):
            await cluster.ask("mine", prompt)
        await cluster.admin("unload", 404, lora_name="mine")
        await cluster.admin("load", 400, lora_name="tiny", lora_path="first")


async def test_an_adapter_is_loaded_on_demand_where_it_is_missing(files: AdapterFiles, tmp_path: Path) -> None:
    (tmp_path / "names.toml").write_text("first = 'first'\n")
    prompt = prompt_of(40)
    async with adapter_cluster(files, prefill_config={"adapter_names": str(tmp_path / "names.toml")}) as cluster:
        prefill = cluster.pods.prefill.runtime.adapters
        assert [entry.name for entry in prefill.entries()[0]] == ["first"]
        asked = [cluster.ask("second", prompt) for _ in range(4)]
        assert await asyncio.gather(*asked) == [[expected(files, prompt)["second"]]] * 4
        assert prefill.loads == {"loaded": 2, "refused": 0}, "requests share one load"
        assert [entry.name for entry in prefill.entries()[0]] == ["first", "second"]
        view = next(pod.view for pod in cluster.gw.gateway.pod_table.pods.values() if pod.can_prefill)
        assert view is not None
        digest = prefill.entries()[0][1].digest
        await until(lambda: view.adapter_s(digest) == 0)
        assert view.adapter_s("0" * 32) > pod_view.ADAPTER_COPY_S


@pytest.mark.parametrize("kills", [False, True])
async def test_an_answer_goes_on_with_its_version_after_a_decode_death(files: AdapterFiles, kills: bool) -> None:
    prompt, swapped = prompt_of(33), asyncio.Event()
    answers = expected(files, prompt, 60)
    async with adapter_cluster(files, decode=2, check=False) as cluster:
        await cluster.admin("load", lora_name="mine", lora_path="first")

        async def swap() -> None:
            await cluster.admin("load", lora_name="mine", lora_path="second")
            if kills:
                busy = next(pod for pod in cluster.pods.decodes if len(pod.service.requests))
                await busy.runtime.stop()
            swapped.set()

        tasks = list[asyncio.Task[None]]()

        def on_token(_token: object) -> None:
            if not tasks:
                tasks.append(asyncio.ensure_future(swap()))

        assert await cluster.ask("mine", prompt, max_tokens=60, on_token=on_token) == [answers["first"]]
        await swapped.wait()
        assert await cluster.ask("mine", prompt, max_tokens=60) == [answers["second"]]


@pytest.mark.parametrize("requests", [60, pytest.param(1000, marks=pytest.mark.long)])
async def test_answers_under_hot_swap_are_of_the_version_that_was_asked_for(requests: int, files: AdapterFiles) -> None:
    counts = await swap_over_hand_off(files, requests)
    assert counts.requests == requests
    assert counts.wrong == 0
    assert counts.swaps > 8


def test_the_labels_of_metrics_are_bounded() -> None:
    metrics = GatewayMetrics()
    for number in range(3 * MAX_ADAPTER_LABELS):
        metrics.count_adapter(f"adapter-{number}")
    text = metrics.exposition("", lambda _tenant: True).decode()
    assert text.count("baton_adapter_requests_total{") == MAX_ADAPTER_LABELS + 1
    assert f'{{adapter="other"}} {2 * MAX_ADAPTER_LABELS}.0' in text


async def test_embeddings_load_the_adapter_too(files: AdapterFiles, tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text("{}")
    async with adapter_cluster(files, prefill_config={"adapter_names": str(tmp_path / "names.json")}) as cluster:
        vectors = []
        for model in ("tiny", *NAMES):
            answer = await cluster.gw.http.post("/v1/embeddings", json={"model": model, "input": prompt_of(12)})
            assert answer.status_code == 200, answer.text
            vectors.append(tuple(answer.json()["data"][0]["embedding"]))
        assert len(set(vectors)) == 3
        assert cluster.pods.prefill.runtime.adapters.loads["loaded"] == 2


MEANINGS = [AdapterEntry(name, digest * 32, version=v) for name in "ab" for digest in ("", "1", "2") for v in (1, 2, 3)]


@given(st.permutations(MEANINGS), st.integers(1, len(MEANINGS)))
def test_gateways_agree_whatever_they_hear_first(meanings: list[AdapterEntry], first: int) -> None:
    names, same = pod_adapters.KnownAdapters(), pod_adapters.KnownAdapters()
    names.update(meanings[:first])
    names.update([*meanings[first:], *meanings[:first]])
    same.update(MEANINGS)
    assert names.all() == same.all() == [AdapterEntry(name, "2" * 32, version=3) for name in "ab"]


def test_the_newest_meaning_of_a_name_counts() -> None:
    names = pod_adapters.KnownAdapters()
    old, new = AdapterEntry("a", "1" * 32, version=1), AdapterEntry("a", "2" * 32, version=2)
    for entries in ([new], [old], [AdapterEntry("b", "", version=5)]):
        names.update(entries)
    assert (names.find("a"), names.find("b"), names.all()) == (new, None, [new])
    assert names.with_digest(old.digest) == old
    names.update([AdapterEntry("a", "", version=3)])
    assert (names.find("a"), names.with_digest(new.digest)) == (None, new)
    assert names.next_version("a") > 3
