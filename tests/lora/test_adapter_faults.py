"""Adapters that pods lose, directories that do not answer, hostile files, and names that change for months."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from common.errors import (
    AdapterNotLoaded,
    BatonError,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from common.pb import transfer_pb2
from common.settings.pod import AdapterSettings
from common.types import AdapterEntry, SamplingParams
from engine.adapters.peft import CONFIG, WEIGHTS, read_adapter
from gateway.pods import adapters as seen
from pod import adapters as pod_adapters
from pod.adapters import PodAdapters
from tests.lora.adapter_cluster import AdapterFiles, adapter_cluster, make_files
from tests.rigs.pods.harness import prompt_of
from tests.rigs.waiting import until


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> AdapterFiles:
    return make_files(tmp_path_factory.mktemp("adapters"))


class FakeEngine:
    """An engine whose adapters are their folders' names. Reads wait while `gate` is closed."""

    def __init__(self) -> None:
        self.adapters = self
        self.gate = threading.Event()
        self.gate.set()
        self.reads: list[str] = []
        self.known: dict[str, Any] = {}

    def read(self, folder: Path) -> Any:
        self.reads.append(folder.name)
        assert self.gate.wait(30.0)
        return self.known.setdefault(folder.name, SimpleNamespace(digest=folder.name, rank=4))

    def find_adapter(self, digest: str) -> Any:
        if digest not in self.known:
            raise AdapterNotLoaded("not loaded here")
        return self.known[digest]


def pod_with(root: Path, *folders: str) -> tuple[PodAdapters, FakeEngine]:
    for folder in folders:
        (root / folder).mkdir(parents=True)
        for file in (CONFIG, WEIGHTS):
            (root / folder / file).write_text("{}")
    engine: Any = FakeEngine()
    return PodAdapters(engine, AdapterSettings(adapter_dir=str(root)), "base"), engine


async def test_a_directory_that_does_not_answer_holds_one_thread_and_no_other_load(tmp_path: Path) -> None:
    pod, engine = pod_with(tmp_path, "a", "b", "c")
    await pod.load(AdapterEntry("a", "", path="a", version=1))
    engine.gate.clear()
    for _ in range(3):  # callers that leave
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await pod.load(AdapterEntry("b", "", path="b"))
    waiting = asyncio.ensure_future(pod.load(AdapterEntry("c", "", path="c", version=1)))
    held = await asyncio.wait_for(pod.load(AdapterEntry("copy", "a", path="a", version=1)), 5.0)
    assert (held.digest, engine.reads) == ("a", ["a", "b"])
    engine.gate.set()
    assert (await waiting).digest == "c"
    assert engine.reads == ["a", "b", "c"], "calls that were given up are not made"
    assert "b" in pod._kept, "a read whose caller has left is not lost"


async def test_a_load_has_a_deadline_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers without a deadline wait so long for a directory that does not answer, and later ones do not wait."""
    monkeypatch.setattr(pod_adapters, "LOAD_S", 0.05)
    pod, engine = pod_with(tmp_path, "a", "b", "c")
    engine.gate.clear()
    first, second = (asyncio.ensure_future(pod.load(AdapterEntry(name, "", path=name, version=1))) for name in "ab")
    for load, path in ((first, "a"), (second, "b")):
        with pytest.raises(DeadlineExceeded, match=f"'{path}' was not read within 0.05 s"):
            await asyncio.wait_for(load, 10.0)
    with pytest.raises(DeadlineExceeded, match=r"'a' has been read for .* is the adapter directory slow"):
        await pod.load(AdapterEntry("c", "", path="c", version=1))
    assert engine.reads == ["a"]
    engine.gate.set()
    await until(lambda: pod._reading is None)
    monkeypatch.setattr(pod_adapters, "LOAD_S", 30.0)
    assert (await pod.load(AdapterEntry("c", "", path="c", version=1))).digest == "c"
    assert pod._open_loads == 0


async def test_too_many_loads_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_adapters, "MAX_LOADS", 2)
    pod, engine = pod_with(tmp_path, "a", "b", "c")
    engine.gate.clear()
    waiting = [asyncio.ensure_future(pod.load(AdapterEntry(name, "", path=name, version=1))) for name in "ab"]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="2 adapters wait"):
        await pod.load(AdapterEntry("c", "", path="c", version=1))
    engine.gate.set()
    assert [entry.digest for entry in await asyncio.gather(*waiting)] == ["a", "b"]
    assert (await pod.load(AdapterEntry("c", "", path="c", version=1))).digest == "c"


async def test_bad_paths_are_refused_with_their_field(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    pod, engine = pod_with(root, "ok", "linked")
    (root / "loop").symlink_to("loop")
    (tmp_path / "secret").write_text("{}")
    for file in (CONFIG, WEIGHTS):
        (root / "linked" / file).unlink()
        (root / "linked" / file).symlink_to(tmp_path / "secret")
    for path, problem in (
        ("x" * 300, "can read"),
        ("a\0", "can read"),
        ("loop", "can read|no such folder"),
        ("linked", "not below"),
        ("ok/../../secret", "not below"),
        (f"ok/{CONFIG}", "can read|no such folder"),
    ):
        with pytest.raises(InvalidRequest, match=problem) as caught:
            await pod.load(AdapterEntry("name", "", path=path, version=1))
        assert caught.value.field == "lora_path"
    assert engine.reads == []


def test_files_without_a_date_and_absolute_paths_of_a_file_of_names(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    _, engine = pod_with(root, "ok")
    for file in (CONFIG, WEIGHTS):
        os.utime(root / "ok" / file, (-5.0, -5.0))
    (tmp_path / "names.toml").write_text(f"mine = '{root / 'ok'}'\n")
    made: Any = engine
    settings = AdapterSettings(adapter_dir=str(root), adapter_names=str(tmp_path / "names.toml"))
    pod = PodAdapters(made, settings, "base")
    pod.find_all()
    assert pod.entries()[0] == [AdapterEntry("mine", "ok", 4, "ok", 1)]


def test_a_pipe_is_no_settings_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / CONFIG)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_adapter(tmp_path, {}, 8)


def test_a_name_in_use_is_never_forgotten() -> None:
    names = seen.KnownAdapters()
    stable = AdapterEntry("stable", "a" * 32, path="x", version=1)
    names.update([stable])
    for number in range(1, 3 * seen.MAX_FORMER):
        names.update([AdapterEntry("busy", f"{number:032x}", version=number)])
    assert names.with_digest(stable.digest) == stable
    assert names.with_digest(f"{3 * seen.MAX_FORMER - 2:032x}") is not None, "the last former one"
    assert names.with_digest(f"{1:032x}") is None
    moved = AdapterEntry("stable", stable.digest, path="y", version=2)
    names.update([moved, stable])
    assert names.with_digest(stable.digest) == moved, "the folder that counts now"


def test_removed_names_are_bounded() -> None:
    names = seen.KnownAdapters()
    for number in range(seen.MAX_REMOVED + 10):
        names.update(
            [AdapterEntry(f"n{number}", "1" * 32, version=1), AdapterEntry(f"n{number}", "", version=number + 2)]
        )
    assert len(names._entries) == seen.MAX_REMOVED
    assert names.next_version(f"n{seen.MAX_REMOVED}") > 0
    names.update([AdapterEntry(f"n{seen.MAX_REMOVED + 9}", "1" * 32, version=1)])
    assert names.all() == [], "an old list brings no name back"


def loader() -> seen.AdapterLoader:
    made = seen.AdapterLoader(SimpleNamespace(), lambda: "p", lambda _entries: None)  # type: ignore[arg-type]
    made.serves = True
    return made


@pytest.mark.parametrize(
    ("error", "text"), [(DeadlineExceeded("late"), " within 30 s: late"), (Overloaded("64 wait"), ": 64 wait")]
)
async def test_a_pod_that_does_not_load_in_time_is_not_asked_again_at_once(
    error: BatonError, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod, calls, entry = loader(), [], AdapterEntry("n", "1" * 32)

    async def call(asked: AdapterEntry) -> AdapterEntry:
        calls.append(asked)
        raise error

    monkeypatch.setattr(pod, "call_load", call)
    for _ in range(2):
        with pytest.raises(Unavailable, match=f"pod p did not load the adapter 'n'{text}"):
            await pod.load(entry, 1.0)
    assert (len(calls), pod.refuses(entry.digest)) == (1, True)
    await pod.refresh(transfer_pb2.InfoResponse(generation=2), SimpleNamespace())  # type: ignore[arg-type]
    assert not pod.refuses(entry.digest), "another process"


async def test_a_pod_that_restarts_without_adapters_has_none() -> None:
    pod = loader()
    pod.held = {"1" * 32}
    await pod.refresh(transfer_pb2.InfoResponse(generation=2), SimpleNamespace())  # type: ignore[arg-type]
    assert (pod.serves, pod.held) == (False, set())


async def test_pods_that_lost_an_adapter_load_it_again(files: AdapterFiles) -> None:
    prompt, params = prompt_of(31), SamplingParams(temperature=0.0, max_tokens=8)
    expected = files.oracle("second").generate([prompt], params, ignore_eos=True, show_progress=False)
    async with adapter_cluster(files) as cluster:

        def lose() -> None:
            """Makes the pods forget all adapters, before the gateway knows: they have restarted."""
            for pod in cluster.pods.pods:
                adapters = pod.runtime.adapters
                adapters._adapters.clear()
                adapters._listed.clear()
                adapters._kept.clear()
            assert all(pod.adapters.held for pod in cluster.gw.gateway.pod_table.pods.values())

        lose()
        assert await cluster.ask("second", prompt) == [expected[0].ids]
        lose()
        body = {"model": "first", "input": prompt}
        answer = await cluster.gw.http.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text


def test_a_file_that_is_overwritten_later_changes_no_weights(tmp_path: Path) -> None:
    """The digest is in the hashes of KV blocks, so other weights under it would mix the KV of two adapters."""
    (tmp_path / CONFIG).write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["m"]}')
    halves = {
        "base_model.model.m.lora_A.weight": torch.ones(2, 8),
        "base_model.model.m.lora_B.weight": torch.ones(8, 2),
    }
    save_file(halves, tmp_path / WEIGHTS)
    pair = read_adapter(tmp_path, {"m": (8, 8)}, 8).pairs["m"]
    content = (tmp_path / WEIGHTS).read_bytes()
    with (tmp_path / WEIGHTS).open("r+b") as file:
        file.seek(len(content) - 128)
        file.write(bytes(128))
    assert torch.equal(pair.a, torch.ones(2, 8))
    assert torch.equal(pair.b, torch.ones(8, 2))


async def test_adapters_without_room_on_the_host_are_read_again(
    files: AdapterFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod has memory for one adapter and slots for one; every answer is still that of its adapter."""
    monkeypatch.setattr(pod_adapters, "PIN_S", 0.0)
    prompt, params = prompt_of(31), SamplingParams(temperature=0.0, max_tokens=8)
    expected = {
        name: files.oracle(name).generate([prompt], params, ignore_eos=True, show_progress=False)[0].ids
        for name in ("", "first", "second")
    }
    fields = {"adapter_memory": 1, "max_adapters": 1}
    async with adapter_cluster(files, prefill_config=fields, decode_config=fields) as cluster:
        pods = [pod.runtime.adapters for pod in cluster.pods.pods]
        assert [len(adapters.evicted()) for adapters in pods] == [1, 1]
        for name in ("first", "second", "", "first", "second"):
            assert await cluster.ask(name or "tiny", prompt) == [expected[name]]
        # Two at the start, and one for each change. The decode pod may have cached the prompts of the second round.
        fewest, most = sorted(adapters.loads["loaded"] for adapters in pods)
        assert fewest >= 4
        assert most >= 5
        for adapters in pods:
            assert adapters.counts()["named"] == 1
            assert [entry.name for entry in adapters.entries()[0]] == ["first", "second"]
        cards = (await cluster.gw.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["tiny", "first", "second"], "evicted adapters keep their names"


async def test_an_adapter_in_use_is_pinned_and_the_one_used_longest_ago_is_evicted(tmp_path: Path) -> None:
    pod, engine = pod_with(tmp_path, "aa", "bb", "cc", "dd")

    def read(folder: Path) -> Any:
        size = SimpleNamespace(nbytes=10)
        return engine.known.setdefault(folder.name, SimpleNamespace(digest=folder.name, rank=4, numbers=size))

    engine.read = read  # type: ignore[method-assign]
    pod._memory = 20
    for name in ("aa", "bb", "cc"):
        await pod.load(AdapterEntry(name, "", path=name, version=1))
    assert pod.evicted() == [b"\xaa"]
    pod.find("bb")
    await pod.load(AdapterEntry("dd", "", path="dd", version=1))
    assert pod.evicted() == [b"\xaa", b"\xcc"]
    version = pod.entries()[1]
    await pod.load(AdapterEntry("aa", "aa", path="aa"))
    assert pod.evicted() == [b"\xcc", b"\xdd"], "bb was used a moment ago"
    assert pod.entries()[1] > version
    pod.unload("bb", 2)
    assert pod.evicted() == [b"\xcc", b"\xdd"]
    assert pod.find("bb").digest == "bb"


def sized_pod(root: Path, memory: int, *folders: str) -> PodAdapters:
    """Returns a pod with room for `memory` bytes of adapters of 10 bytes each."""
    pod, engine = pod_with(root, *folders)

    def read(folder: Path) -> Any:
        size = SimpleNamespace(nbytes=10)
        return engine.known.setdefault(folder.name, SimpleNamespace(digest=folder.name, rank=4, numbers=size))

    engine.read = read  # type: ignore[method-assign]
    engine.warm_adapters = lambda: ((), 0)  # type: ignore[attr-defined]
    pod._memory = memory
    return pod


async def test_requests_that_load_two_adapters_at_once_find_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateways load with the version of the name. The call after the load finds the adapter, whatever came between."""
    pod = sized_pod(tmp_path, 10, "aa", "bb")
    for name in ("aa", "bb"):
        await pod.load(AdapterEntry(name, "", path=name, version=1))
    assert pod.evicted() == [b"\xaa"]
    await asyncio.gather(*(pod.load(AdapterEntry(name, name, path=name, version=1)) for name in ("aa", "bb", "aa")))
    assert pod.evicted() == []
    monkeypatch.setattr(pod_adapters, "PIN_S", 0.0)
    before = pod.entries()[1]
    state = pod.state()
    assert state is not None
    assert (len(pod.evicted()), state.version > before) == (1, True), "their room is given up without another load"


async def test_a_retired_adapter_leaves_the_memory_without_another_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = sized_pod(tmp_path, 0, "aa", "bb")
    await pod.load(AdapterEntry("aa", "", path="aa", version=1))
    pod.unload("aa", 2)
    assert pod.counts()["retired"] == 1
    monkeypatch.setattr(pod_adapters, "KEEP_S", 0.0)
    await pod.load(AdapterEntry("bb", "bb", path="bb"))  # has no name here
    assert "bb" not in pod._used, "only adapters with a name have a time of use"
    pod._kept["aa"] = pod._kept["aa"][0], 0.0
    pod._kept.move_to_end("aa", last=False)
    pod.state()
    assert pod.counts()["retired"] == 0


def test_a_full_list_of_names_does_not_refuse_a_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_adapters, "MAX_NAMES", 1)
    pod, _ = pod_with(tmp_path, "a")
    pod.find_all()
    pod.unload("other", 1)
    assert [entry.name for entry in pod.entries()[0]] == ["a"]


def test_an_empty_file_of_names_names_no_adapter(tmp_path: Path) -> None:
    root, names = tmp_path / "adapters", tmp_path / "names.json"
    _, engine = pod_with(root, "a")
    names.write_text("{}")
    made: Any = engine
    pod = PodAdapters(made, AdapterSettings(adapter_dir=str(root), adapter_names=str(names)), "base")
    pod.find_all()
    assert pod.entries()[0] == []


def test_a_directory_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pod, _ = pod_with(tmp_path, "a")

    def refused(_self: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        pod.find_all()
    assert caught.value.field == "adapter_dir"


async def test_two_meanings_of_one_version_are_ordered_as_gateways_order_them(tmp_path: Path) -> None:
    for order in ("ab", "ba"):
        pod, _ = pod_with(tmp_path / order, "a", "b")
        for path in order:
            await pod.load(AdapterEntry("name", "", path=path, version=1))
        names = seen.KnownAdapters()
        names.update(AdapterEntry("name", path, path=path, version=1) for path in order)
        found = names.find("name")
        assert found is not None
        assert [(entry.name, entry.digest) for entry in pod.entries()[0]] == [("name", "b")] == [("name", found.digest)]
