"""Models of the hub by name, with a stand-in of its HTTP API: files, commits, cache, offline mode, refusals."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.model.directory import default_served_name, expected_model_path, pinned_model, resolve_model
from common.model.hub import HubName, hub_name
from common.types import SamplingParams
from engine.llm import LLM
from tests.rigs.hub import TOKEN, HubServer, Repository, hub_environment, hub_in_this_process

ROOT = Path(__file__).parents[2]
NAME = "some-one/Tiny-1.0_x"
SETTINGS: dict[str, Any] = {"device": "cpu", "num_blocks": 32, "block_size": 4, "threads": 1}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def tiny(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with SmolLM2's tokenizer, in several safetensors files."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=49152, max_position_embeddings=256, eos_token_id=2, **sizes)
    directory = tmp_path_factory.mktemp("tiny") / "Tiny-1.0_x"
    LlamaForCausalLM(config).save_pretrained(directory, max_shard_size="2MB")
    for name in TOKENIZER:
        shutil.copy(smollm2_dir / name, directory)
    assert (directory / "model.safetensors.index.json").is_file()
    return directory


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_in_this_process(tmp_path / "cache", monkeypatch) as server:
        yield server


@pytest.fixture
def repository(hub: HubServer, tiny: Path) -> Repository:
    """The tiny model and files that nobody needs."""
    repository = hub.repository(NAME)
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    unneeded = ("README.md", "model.gguf", "onnx/model.onnx", "onnx/config.json", "tf_model.h5", "pytorch_model.bin")
    repository.push({**files, **dict.fromkeys(unneeded, b"x" * 100)})
    return repository


def names_in(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def refusal(model: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model(model, **options)
    assert caught.value.field == "model"
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@v1.0", HubName("Qwen/Qwen3-0.6B", "v1.0")),
        ("a/b@refs/pr/4", HubName("a/b", "refs/pr/4")),
        *((path, None) for path in ("/a/b", "./a/b", "../a", "a/b/c", "a", "~/a", "smollm2", "a/b@", "a /b", "-a/b")),
    ],
)
def test_a_name_of_the_hub_has_an_owner(text: str, name: HubName | None) -> None:
    assert hub_name(text) == name


def test_a_directory_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_name("a/b") is None
    assert default_served_name("a/b") == "b"
    assert "has no config.json" in refusal("a/b")


def test_only_the_needed_files_are_downloaded(hub: HubServer, repository: Repository, tiny: Path) -> None:
    directory = resolve_model(NAME)
    assert names_in(directory) == names_in(tiny)
    assert directory.name == repository.refs["main"]
    assert (
        default_served_name(NAME) == default_served_name(f"{NAME}@main") == default_served_name(str(directory)) == NAME
    )
    hub.requests.clear()
    assert resolve_model(NAME) == directory
    assert hub.downloads() == []
    assert len(hub.requests) == 1  # is it still the same commit?


def test_a_gateway_downloads_no_weights(hub: HubServer, repository: Repository, tiny: Path) -> None:
    directory = resolve_model(NAME, weights=False)
    needed = {"config.json", "generation_config.json", *TOKENIZER}
    assert names_in(directory) == needed
    assert resolve_model(NAME) == directory  # a pod adds the weights
    assert names_in(directory) == names_in(tiny)


def test_a_commit_in_the_cache_needs_no_network(hub: HubServer, repository: Repository) -> None:
    pinned = pinned_model(NAME)
    assert pinned == f"{NAME}@{repository.refs['main']}"
    assert pinned_model(pinned) == pinned
    directory = resolve_model(pinned)
    assert directory == expected_model_path(NAME) == expected_model_path(pinned)
    hub.requests.clear()
    hub.status = 500
    assert resolve_model(pinned) == directory
    assert hub.requests == []


def test_processes_with_a_pinned_name_stay_at_one_commit(hub: HubServer, repository: Repository, tiny: Path) -> None:
    pinned, before = pinned_model(NAME), repository.refs["main"]
    config = json.loads((tiny / "config.json").read_bytes())
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    after = repository.push({**files, "config.json": json.dumps({**config, "rms_norm_eps": 0.1}).encode()})
    assert resolve_model(pinned, weights=False).name == before
    assert resolve_model(NAME, weights=False).name == after


def test_branches_tags_and_pull_requests(repository: Repository, tiny: Path) -> None:
    for revision in ("v1", "refs/pr/4"):
        files = {path.name: path.read_bytes() for path in tiny.iterdir()}
        commit = repository.push({**files, "generation_config.json": json.dumps({"of": revision}).encode()}, revision)
        assert (
            json.loads((resolve_model(f"{NAME}@{revision}") / "generation_config.json").read_text())["of"] == revision
        )
        assert resolve_model(f"{NAME}@{commit}").name == commit


@pytest.mark.parametrize("fault", ["offline", "down", "unreachable"])
def test_the_cache_is_enough(
    hub: HubServer, repository: Repository, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    from huggingface_hub import constants

    directory = resolve_model(NAME)
    hub.requests.clear()
    if fault == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif fault == "down":
        hub.status = 503
    else:
        _unreachable(monkeypatch)
    assert resolve_model(NAME) == directory
    assert len(hub.requests) <= (fault == "down")


def _unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def test_an_incomplete_cache_is_named_offline(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    resolve_model(NAME, weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said = refusal(NAME)
    assert f"not completely, in the cache {constants.HF_HUB_CACHE}" in said
    assert f"HF_HUB_OFFLINE is set: run `baton pull {NAME}`" in said
    assert "there is no directory 'other/model' here" in refusal("other/model")


def test_a_hub_that_cannot_be_reached_is_named(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(file_download, "_DEFAULT_RETRY_ON_EXCEPTIONS", ())  # it would wait some seconds
    _unreachable(monkeypatch)
    said = refusal(NAME)
    assert f"{constants.ENDPOINT} cannot be reached: connection refused" in said
    assert f"there is no directory {NAME!r} here" in said


def test_a_download_continues_after_a_lost_connection(
    hub: HubServer, repository: Repository, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    file = max((path for path in tiny.glob("*.safetensors")), key=lambda path: path.stat().st_size)
    cut = file.stat().st_size // 2
    hub.cuts[file.name] = cut
    directory = resolve_model(NAME)
    assert (directory / file.name).read_bytes() == file.read_bytes()
    [spec] = [spec for _, path, spec in hub.requests if path.endswith(file.name) and spec]
    assert cut - (1 << 16) < int(spec.removeprefix("bytes=").removesuffix("-")) <= cut


def test_weights_in_bin_files_are_taken_without_safetensors(
    hub: HubServer, repository: Repository, tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import torch
    from safetensors.torch import load_file

    pickled, shards = tmp_path / "pickled", sorted(tiny.glob("*.safetensors"))
    pickled.mkdir()
    index: dict[str, str] = {}
    for number, shard in enumerate(shards):
        tensors, name = load_file(shard), f"pytorch_model-{number}.bin"
        torch.save(tensors, pickled / name)
        index |= dict.fromkeys(tensors, name)
    (pickled / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    for name in ("config.json", "generation_config.json", *TOKENIZER):
        shutil.copy(tiny / name, pickled)
    hub.repository("some-one/pickled").push_directory(pickled)
    directory = resolve_model("some-one/pickled")
    assert names_in(directory) == names_in(pickled)
    expected = LLM(tiny, **SETTINGS).generate(["one two three"], SamplingParams(temperature=0.0, max_tokens=8))
    got = LLM(directory, **SETTINGS)
    answer = got.generate(["one two three"], SamplingParams(temperature=0.0, max_tokens=8))
    assert [c.ids for c in answer] == [c.ids for c in expected]
    assert "has no safetensors" in caplog.text
    # The fingerprint is that of equal files in a directory with the model's name.
    assert got.engine.layout.fingerprint == LLM(pickled, **SETTINGS).engine.layout.fingerprint


def test_a_model_in_this_process_by_its_name(repository: Repository, tiny: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    by_name, by_path = LLM(NAME, **SETTINGS), LLM(tiny, **SETTINGS)
    assert by_name.generate(["Hello"], greedy)[0].ids == by_path.generate(["Hello"], greedy)[0].ids
    assert by_name.engine.layout == by_path.engine.layout


def test_gated_models(hub: HubServer, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    repository.gated = True
    accept = f"model {NAME} is gated: accept its terms at {hub.url}/{NAME}, then "
    assert refusal(NAME) == accept + "log in with `hf auth login`, or set HF_TOKEN"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert refusal(NAME) == accept + "wait until your account has access"


def test_private_and_missing_models(hub: HubServer, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = f"there is no directory 'no/model' here, and {hub.url} has no model no/model"
    assert refusal("no/model") == f"{missing}; if it is private, log in with `hf auth login`, or set HF_TOKEN"
    repository.private = True
    assert f"has no model {NAME}; if it is private" in refusal(NAME)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert refusal("no/model") == f"{missing}, or your token has no access to it"
    assert resolve_model(NAME, weights=False).name == repository.refs["main"]
    hub.bad_token = True
    assert f"{hub.url} rejects the token (401)" in refusal("no/model")


def test_a_missing_revision(hub: HubServer, repository: Repository) -> None:
    said = f"model {NAME} has no branch, tag or commit 'v9': see {hub.url}/{NAME}/commits/main"
    assert refusal(f"{NAME}@v9") == said


def test_missing_files(hub: HubServer, tiny: Path) -> None:
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    shard = next(name for name in sorted(files) if name.endswith(".safetensors"))
    for lost, said in (
        ("config.json", "has no config.json at main, so Baton cannot load it"),
        ("tokenizer.json", "has no tokenizer.json"),
        (shard, f"model.safetensors.index.json names {shard}, which the repository lacks"),
    ):
        hub.repository("some-one/lacks").push({name: data for name, data in files.items() if name != lost})
        assert said in refusal("some-one/lacks")
    small = {name: data for name, data in files.items() if "safetensors" not in name}
    hub.repository("some-one/lacks").push({**small, "model.gguf": b"x"})
    assert "has no weights that Baton reads" in refusal("some-one/lacks")
    hub.repository("some-one/lacks").push({**small, "model.safetensors.index.json": b'{"weight_map": {"a": "../x"}}'})
    assert "is not an index of weights" in refusal("some-one/lacks")


def test_an_unsupported_model_is_refused_before_its_weights(hub: HubServer, tiny: Path) -> None:
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    config = json.loads(files["config.json"])

    def push(**changes: Any) -> None:
        hub.repository("some-one/other").push({**files, "config.json": json.dumps({**config, **changes}).encode()})

    push(architectures=["T5ForConditionalGeneration"])
    assert "T5ForConditionalGeneration is not supported" in refusal("some-one/other")
    push(quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(ConfigError, match=r"config\.json: weights of the format 'bitsandbytes' are not supported"):
        LLM("some-one/other", **SETTINGS)
    push(architectures=["NewForCausalLM"], model_type="new")
    with pytest.raises(ConfigError, match="transformers"):
        LLM("some-one/other", **SETTINGS)
    assert not [name for name in hub.downloads() if name.endswith(".safetensors")]


def test_a_full_disk(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants, file_download

    free = shutil.disk_usage("/")._replace(free=1000)
    with monkeypatch.context() as small:
        small.setattr(shutil, "disk_usage", lambda _: free)
        said = refusal(NAME)
    assert "MB more in" in said
    assert "0.0 MB are free: make room, or set HF_HOME to a larger disk" in said

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file_download, "http_get", full)
    assert refusal(NAME) == (
        f"no space is left in {constants.HF_HUB_CACHE} for model {NAME}: make room, or set HF_HOME elsewhere"
    )


def test_what_else_the_hub_may_answer(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import file_download

    monkeypatch.setattr(file_download, "_DEFAULT_RETRY_ON_STATUS_CODES", ())  # it would wait some seconds
    for status in (403, 429, 500):
        hub.status = status
        assert f"{status}" in refusal(NAME)
    assert "is not the name of a model of the hub" in refusal("a/b--c")


@pytest.mark.long  # a stack takes half a minute; test_baton_pull_and_a_start_without_the_network starts an engine
def test_a_stack_of_a_model_in_the_cache(hub: HubServer, repository: Repository, tmp_path: Path) -> None:
    """All processes of `baton up` use one commit, and need no network."""
    env = {**os.environ, **hub_environment(hub, tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "cli"]
    subprocess.run([*command, "pull", NAME], env=env, check=True, capture_output=True)
    argv = [*command, "up", "--model", NAME, "--once", "Hello", "--max-tokens", "4", "--port", "0", "--device", "cpu"]
    argv += ["--kv-memory", "16MiB", "--threads", "1", "--log-dir", str(tmp_path / "logs")]
    ran = subprocess.run(argv, env={**env, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for name in ("prefill-0", "decode-0"):
        log = (tmp_path / "logs" / f"{name}.log").read_text()
        assert f"serves {NAME} on" in log


def test_partial_files_of_threads_that_go_on(tmp_path: Path) -> None:
    """Threads of a download open their next files while the process ends."""
    code = """if True:
        import itertools, os, sys, threading, time
        from common.model.hub import remove_partial_files
        files = []
        def download(name):
            for n in itertools.count():
                files.append(open(f"{sys.argv[1]}/{name}-{n}.incomplete", "wb"))
                time.sleep(0.0002)
        for name in "abcd":
            threading.Thread(target=download, args=(name,), daemon=True).start()
        time.sleep(0.02)
        remove_partial_files()
        os._exit(7)
    """
    ended = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, check=False)
    assert ended.returncode == 7, ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_baton_pull_and_a_start_without_the_network(hub: HubServer, repository: Repository, tmp_path: Path) -> None:
    """In processes of their own, which read the library's environment variables."""
    env = {**os.environ, **hub_environment(hub, tmp_path / "home"), "PYTHONPATH": str(ROOT)}

    def baton(*argv: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cli", *argv]
        return subprocess.run(command, env={**env, **more}, capture_output=True, text=True, check=False, cwd=tmp_path)

    pulled = baton("pull", NAME)
    assert pulled.returncode == 0, pulled.stderr
    directory = Path(pulled.stdout.strip())
    assert directory.is_relative_to(tmp_path / "home")
    assert "downloading some-one/Tiny-1.0_x at" in pulled.stderr
    assert "downloaded" in pulled.stderr
    offline = baton("pull", NAME, HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout) == (0, pulled.stdout)
    for wrong, said in (
        ("no/model", "baton: there is no directory 'no/model' here, and http"),
        (f"{NAME}@v9", "has no branch, tag or commit 'v9'"),
        ("/no/where", "baton: '/no/where' is not the name of a model of the hub: expected OWNER/NAME[@REVISION]"),
    ):
        ended = baton("pull", wrong)
        assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
        assert said in ended.stderr
    file, stalled = next(iter(sorted(directory.glob("*.safetensors")))).name, threading.Event()
    hub.stalls[file] = stalled
    elsewhere = tmp_path / "elsewhere"
    pulling = subprocess.Popen([sys.executable, "-m", "cli", "pull", NAME], env={**env, "HF_HOME": str(elsewhere)})
    assert stalled.wait(60)
    while not list(elsewhere.rglob("*.incomplete")):  # the client opens it after the first bytes
        assert pulling.poll() is None
        time.sleep(0.01)
    pulling.send_signal(signal.SIGINT)
    assert pulling.wait(60) == 128 + signal.SIGINT
    assert list(elsewhere.rglob("*.incomplete")) == []
    code = "import sys; from engine.llm import LLM; print(LLM(sys.argv[1], device='cpu', kv_memory=1 << 22).model_dir)"
    argv = [sys.executable, "-c", code, NAME]
    ran = subprocess.run(argv, env={**env, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines()[-1:] == [str(directory)], ran.stderr
