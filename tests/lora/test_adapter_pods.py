"""Prefill and decode pods with adapters: exact over the hand-off, hot swap, files, and errors before any work."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from common.errors import AdapterNotLoaded, ConfigError, InvalidRequest, Unauthenticated
from common.pb import control_pb2, control_pb2_grpc
from common.rpc import translate_rpc_errors
from common.settings.pod import PodConfig
from common.types import AdapterEntry, Role, ValidRequest
from common.wire import adapter_from_pb, adapter_to_pb, kv_target_from_pb
from pod import adapters as pod_adapters
from tests.lora.lora_rig import merge, save_adapter
from tests.rigs.engine.tiny_models import assert_greedy
from tests.rigs.pods.harness import Answer, Cluster, Pod, prompt_of, request, tiny_llama

NAMES = ("first", "second")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def adapters(tmp_path: Path, model_dir: Path) -> Path:
    """A directory with two adapters."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    for seed, name in enumerate(NAMES):
        save_adapter(tmp_path / "adapters" / name, model, seed=seed, size=0.3)
    return tmp_path / "adapters"


def digest_of(pod: Pod, name: str) -> str:
    return next(entry.digest for entry in pod.runtime.adapters.entries()[0] if entry.name == name)


def adapted(prompt: list[int], digest: str, max_tokens: int = 8) -> ValidRequest:
    return dataclasses.replace(request(prompt, max_tokens), adapter=digest)


async def load(pod: Pod, entry: AdapterEntry) -> AdapterEntry:
    control = control_pb2_grpc.ControlStub(pod.channel)
    with translate_rpc_errors():
        answer = await control.LoadAdapter(control_pb2.LoadAdapterRequest(adapter=adapter_to_pb(entry)))
    return adapter_from_pb(answer.adapter)


async def unload(pod: Pod, name: str, version: int) -> None:
    control = control_pb2_grpc.ControlStub(pod.channel)
    await control.UnloadAdapter(control_pb2.UnloadAdapterRequest(name=name, version=version))


async def test_answers_over_the_hand_off_are_those_of_merged_models(model_dir: Path, adapters: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    fields = {"adapter_dir": str(adapters)}
    async with Cluster.start(model_dir, prefill_config=fields, decode_config=fields) as cluster:
        for name in NAMES:
            digest = digest_of(cluster.decode, name)
            assert digest == digest_of(cluster.prefill, name)
            prompt = prompt_of(37)
            for hits in (0, 36):  # the second answer takes the prefix from the decode pod's cache
                answer = await cluster.generate(adapted(prompt, digest), remote_only=True)
                assert answer.cached_tokens == hits
                assert_greedy(merge(base, adapters / name), prompt, answer.tokens)
        answer = await cluster.generate(request(prompt), remote_only=True)
        assert answer.cached_tokens == 0, "the base shares no KV with adapters"
        assert_greedy(base, prompt, answer.tokens)
        info = await cluster.decode.info()
        assert {digest.hex() for digest in info.adapters.warm} == {digest_of(cluster.decode, name) for name in NAMES}


async def test_a_hand_off_finishes_on_the_version_with_which_it_began(
    model_dir: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_adapters, "KEEP", 0)  # no version stays for requests that come later
    old = merge(AutoModelForCausalLM.from_pretrained(model_dir), adapters / "first")
    fields = {"adapter_dir": str(adapters)}
    async with Cluster.start(model_dir, prefill_config=fields, decode_config=fields) as cluster:
        prompt = prompt_of(50)
        asked = adapted(prompt, digest_of(cluster.decode, "first"), 12)
        inbox, answer = cluster.stream_of(cluster.decode).expect(asked.request_id), Answer()
        answer.target = kv_target_from_pb((await cluster.reserve(asked, remote_only=True)).target)
        new = await load(cluster.decode, AdapterEntry("first", "", path="second", version=1 << 62))
        swaps = list[asyncio.Task[AdapterEntry]]()

        def on_event(kind: str) -> None:
            if kind == "progress" and not swaps:
                swaps.append(asyncio.ensure_future(load(cluster.prefill, new)))

        await cluster.run_prefill(asked, answer, cluster.prefill, 30.0, on_event)
        while answer.finish is None:
            cluster._take(answer, await asyncio.wait_for(inbox.get(), 30.0))
        assert (await swaps[0]).digest == digest_of(cluster.prefill, "first") == new.digest != asked.adapter
        assert_greedy(old, prompt, answer.tokens)
        with pytest.raises(AdapterNotLoaded, match="not loaded here"):
            await cluster.generate(adapted(prompt, "0" * 32))


async def test_a_kv_target_is_for_one_adapter(model_dir: Path, adapters: Path) -> None:
    """Its signature covers the digest, and Commit proves knowledge of it: KV of another adapter is never taken."""
    fields = {"adapter_dir": str(adapters)}
    async with Cluster.start(model_dir, prefill_config=fields, decode_config=fields) as cluster:
        asked, answer = adapted(prompt_of(30), digest_of(cluster.decode, "first")), Answer()
        answer.target = kv_target_from_pb((await cluster.reserve(asked, remote_only=True)).target)
        for digest in (digest_of(cluster.decode, "second"), ""):
            other = dataclasses.replace(asked, adapter=digest)
            with pytest.raises(Unauthenticated, match="wrong signature"):
                await cluster.run_prefill(other, answer, cluster.prefill, 30.0, lambda _: None)
        assert (await cluster.prefill.info()).computed.prefill == 0
        inbox = cluster.stream_of(cluster.decode).expect(asked.request_id)
        await cluster.run_prefill(asked, answer, cluster.prefill, 30.0, lambda _: None)
        while answer.finish is None:
            cluster._take(answer, await asyncio.wait_for(inbox.get(), 30.0))
        merged = merge(AutoModelForCausalLM.from_pretrained(model_dir), adapters / "first")
        assert_greedy(merged, list(asked.prompt_ids), answer.tokens)


async def test_a_pod_without_the_adapter_refuses_before_anything_is_computed(model_dir: Path, adapters: Path) -> None:
    async with Cluster.start(model_dir, prefill_config={"adapter_dir": str(adapters)}) as cluster:
        asked = adapted(prompt_of(20), digest_of(cluster.prefill, "first"))
        with pytest.raises(AdapterNotLoaded, match="serves no adapters"):
            await cluster.generate(asked)
        with pytest.raises(AdapterNotLoaded, match="serves no adapters"):
            await load(cluster.decode, AdapterEntry("first", "", path="first"))
        assert not (await cluster.decode.info()).HasField("adapters")


async def test_names_change_by_version_and_paths_stay_below_the_directory(model_dir: Path, adapters: Path) -> None:
    (adapters / "out").symlink_to(model_dir)
    (adapters / "plain").mkdir()
    (adapters.parent / "names.toml").write_text("mine = 'first'\n")
    fields = {"adapter_dir": str(adapters), "adapter_names": str(adapters.parent / "names.toml")}
    async with Cluster.start(model_dir, prefill=0, role=Role.BOTH, decode_config=fields) as cluster:
        pod, version = cluster.decode, 1 << 60
        (mine,), number = pod.runtime.adapters.entries()
        assert (mine.name, mine.path, mine.rank) == ("mine", "first", 4)
        assert (await pod.info()).adapters.version == number
        for path, problem in (
            ("../model", "not below"),
            ("/etc", "not below"),
            (".", "not below"),
            ("out", "not below"),
            ("absent", "no such folder"),
            ("a\0b", "not a path"),
        ):
            with pytest.raises(InvalidRequest, match=problem):
                await load(pod, AdapterEntry("other", "", path=path, version=version))
        for name in ("", "a b", "-a", "a:b", "tiny", "x" * 129):
            with pytest.raises(InvalidRequest, match="lora_name"):
                await load(pod, AdapterEntry(name, "", path="second", version=version))
        with pytest.raises(ConfigError, match="cannot be read"):
            await load(pod, AdapterEntry("other", "", path="plain", version=version))
        with pytest.raises(AdapterNotLoaded, match="have changed"):
            await load(pod, AdapterEntry("other", "0" * 32, path="second", version=version))
        assert pod.runtime.adapters.entries() == ([mine], number), "a refusal changes nothing"

        prepared = await load(pod, AdapterEntry("other", "", path=str(adapters / "second")))
        assert (prepared.path, pod.runtime.adapters.entries()[1]) == ("second", number)
        shutil.rmtree(adapters / "second")
        named = await load(pod, dataclasses.replace(prepared, version=version))  # the pod holds its digest
        assert named == dataclasses.replace(prepared, version=version)
        await load(pod, AdapterEntry("other", mine.digest, path="first", version=version - 1))
        assert digest_of(pod, "other") == prepared.digest, "an older version does not count"
        await unload(pod, "other", version + 1)
        assert digest_of(pod, "other") == ""
        answer = await cluster.generate(adapted(prompt_of(9), prepared.digest))  # a request that knows the old version
        assert len(answer.tokens) == 8
        assert pod.runtime.adapters.counts() == {"named": 1, "retired": 1, "device": 1}


def test_settings_that_contradict_each_other() -> None:
    for fields, name in (
        ({"max_adapters": 2}, "max_adapters"),
        ({"adapter_names": "x.toml"}, "adapter_names"),
        ({"adapter_memory": 1 << 30}, "adapter_memory"),
    ):
        with pytest.raises(ConfigError, match="not used without adapter_dir") as caught:
            PodConfig(role=Role.PREFILL, model="m", **fields)
        assert caught.value.field == name


async def test_a_bad_folder_is_left_out_and_a_bad_name_ends_the_start(
    model_dir: Path, adapters: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((adapters / "first" / "adapter_config.json").read_text())
    (adapters / "first" / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    os.mkfifo(adapters / "pipe")
    async with Cluster.start(model_dir, prefill=0, decode_config={"adapter_dir": str(adapters)}) as cluster:
        assert [entry.name for entry in cluster.decode.runtime.adapters.entries()[0]] == ["second"]
    assert "adapter first is left out" in caplog.text
    names = adapters.parent / "names.json"
    for text, problem in (('{"a": "first"}', "a: .*DoRA"), ('{"a": 3}', "expected NAME"), ("{", "cannot be read")):
        names.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            async with Cluster.start(
                model_dir, prefill=0, decode_config={"adapter_dir": str(adapters), "adapter_names": str(names)}
            ):
                pass
