"""Loading of weights: random ones by seed, checks of the model directory and their errors; progress."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigError
from common.model.directory import check_model_dir
from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.decoder import Decoder
from engine.models.loader import open_model
from engine.models.spec import Shard
from engine.models.weights.load import EMBEDDING, HEAD
from engine.progress import progress
from tests.rigs.engine.bare_model import GPT2, LLAMA, bare_model

torch.set_num_threads(1)
CPU = torch.device("cpu")


def engine(directory: Path, **config: Any) -> Engine:
    settings: dict[str, Any] = {"device": "cpu", "num_blocks": 16, "threads": 1, "load_format": "dummy"}
    return Engine(EngineConfig(model_dir=directory, **(settings | config)))


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["native", "foreign"])
def test_random_weights_follow_the_seed_and_name_it(config: dict[str, Any], tmp_path: Path) -> None:
    one, other = bare_model(tmp_path / "m", config), bare_model(tmp_path / "elsewhere", config)
    layouts = {
        "a": engine(one, name="x").layout,
        "same": engine(other, name="x").layout,
        "seed": engine(one, name="x", weights_seed=1).layout,
        "config": engine(bare_model(tmp_path / "c", config | {"vocab_size": 97}), name="x").layout,
    }
    assert layouts["a"].fingerprint == layouts["same"].fingerprint
    assert len({layout.revision for layout in layouts.values()}) == 3

    def states(seed: int) -> torch.Tensor:
        model: Any = open_model(one, "dummy", seed).load(64, CPU, torch.float32)
        return model.logits(torch.ones(1, 32))

    assert torch.equal(states(0), states(0))
    assert not torch.allclose(states(0), states(1))
    assert states(0).isfinite().all()


def test_random_weights_are_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA)).save_pretrained(tmp_path)
    assert open_model(tmp_path).revision(CPU) != open_model(tmp_path, "dummy").revision(CPU)


def test_random_weights_keep_the_scale_of_the_states(tmp_path: Path) -> None:
    """Otherwise a benchmark would compute with infinities, or all logits would be equal."""
    config = LLAMA | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 12, "head_dim": 64}
    model = open_model(bare_model(tmp_path, config), "dummy").load(64, CPU, torch.float32)
    assert isinstance(model, Decoder)
    logits = model.logits(torch.randn(8, 256))
    assert 0.3 < float(logits.std()) < 3.0


@pytest.mark.parametrize("parts", ["neither", "no tokenizer", "no weights"])
def test_missing_files_of_a_directory_are_reported(parts: str, tmp_path: Path) -> None:
    bare_model(tmp_path)
    if parts == "no tokenizer":
        (tmp_path / "model.safetensors").touch()
    if parts == "no weights":
        (tmp_path / "tokenizer.json").write_text("{}")
    for tokenizer in (True, False):
        for weights in (True, False):
            lacks = (tokenizer and parts != "no weights") or (weights and parts != "no tokenizer")
            if lacks:
                with pytest.raises(ConfigError, match=r"has no (tokenizer\.json|\*\.safetensors)"):
                    check_model_dir(tmp_path, tokenizer=tokenizer, weights=weights)
            else:
                assert check_model_dir(tmp_path, tokenizer=tokenizer, weights=weights) == tmp_path


def test_defective_files_are_reported(tmp_path: Path) -> None:
    bare_model(tmp_path)
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor an index"):
        engine(tmp_path, load_format="auto")
    broken = (b"", b"\xff" * 64, b"\x08\0\0\0\0\0\0\0not json", b"\x02\0\0\0\0\0\0\0[]", b'\x08\0\0\0\0\0\0\0{"a": 1}')
    for content in broken:
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match="safetensors"):
            engine(tmp_path, load_format="auto")
    (tmp_path / "model.safetensors").unlink()
    for index in ("[]", "{}", '{"weight_map": 1}'):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ConfigError, match="is not an index of shards"):
            engine(tmp_path, load_format="auto")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "missing.safetensors"}}')
    with pytest.raises(ConfigError, match="named by the index, does not exist"):
        engine(tmp_path, load_format="auto")
    with pytest.raises(ConfigError, match="load_format: invalid value 'fast'"):
        EngineConfig(model_dir=tmp_path, load_format="fast")


def test_out_of_memory_of_weights_and_pool_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no room for 30000000000000 KV blocks") as refused:
        engine(bare_model(tmp_path), num_blocks=30_000_000_000_000)
    assert refused.value.field == "kv_memory"

    def full(*_args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore")

    monkeypatch.setattr("engine.models.loader.randomize", full)
    monkeypatch.setattr("engine.models.hf.model.build_model", full)
    for config in (LLAMA, GPT2):
        with pytest.raises(ConfigError) as refused:
            engine(bare_model(tmp_path, config))
        assert refused.value.message == "no room for the weights: CUDA out of memory. Tried to allocate 2.00 GiB."


WITHOUT = """
import sys, pathlib
sys.modules["transformers"] = None
from engine.models.loader import open_model
for name in sys.argv[1:]:
    try:
        print(type(open_model(pathlib.Path(name), "dummy").spec).__name__)
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_only_models_without_native_code_need_transformers(tmp_path: Path) -> None:
    dirs = [str(bare_model(tmp_path / name, config)) for name, config in (("llama", LLAMA), ("gpt2", GPT2))]
    child = subprocess.run([sys.executable, "-c", WITHOUT, *dirs], capture_output=True, text=True, check=True)
    native, foreign = child.stdout.splitlines()
    assert native == "ModelSpec"
    assert foreign.startswith("ConfigError GPT2LMHeadModel has no native code")
    assert "pip install 'baton-serving[hf]'" in foreign


def test_progress_is_a_log_line_without_a_terminal(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO), progress("loading", 10, "GB") as work:
        work.advance(4)
        work.advance(2, skipped=4)
    assert "loading: 6 of 6 GB" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO), progress("loading", 10, "GB", show=False) as work:
        work.advance(10)
    assert not caplog.text
    assert not capsys.readouterr().err


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("loading", 10, "GB") as work:
        work.advance(10)
    seen = capsys.readouterr()
    assert "10/10 GB" in seen.err
    assert not seen.out


def test_shards_and_a_single_file_are_the_same_model(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA))
    made.save_pretrained(tmp_path / "one")
    made.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    one, shards = (open_model(tmp_path / name).load(64, CPU, torch.bfloat16) for name in ("one", "shards"))
    assert isinstance(one, Decoder)
    assert isinstance(shards, Decoder)
    for (name, a), b in zip(one.named_parameters(), shards.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.dtype == torch.bfloat16
    shutil.rmtree(tmp_path / "shards")


def tiny(directory: Path, **config: Any) -> dict[str, torch.Tensor]:
    """Saves a checkpoint of LLAMA in `directory` and returns its tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **(LLAMA | config))).save_pretrained(directory)
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["native", "foreign"])
def test_a_truncated_file_is_named(config: dict[str, Any], tmp_path: Path) -> None:
    tiny(tmp_path)
    bare_model(tmp_path, config)
    path = tmp_path / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match=f"{path} has {size - 1000} of its {size} bytes"):
        engine(tmp_path, load_format="auto")


@pytest.mark.parametrize("there", ["embedding", "head", "both"])
def test_tied_embeddings_load_from_either_tensor(there: str, tmp_path: Path) -> None:
    tensors = tiny(tmp_path, tie_word_embeddings=True)
    expected = tensors[EMBEDDING]
    if there != "embedding":
        tensors[HEAD] = expected.clone()
    if there == "head":
        del tensors[EMBEDDING]
    save_file(tensors, tmp_path / "model.safetensors")
    for model in parts(tmp_path):
        assert torch.equal(model.embedding.weight, expected)
        assert model.head is model.embedding


def parts(directory: Path) -> Iterator[Decoder]:
    """The whole model, and the shard of each of two ranks."""
    source = open_model(directory)
    for shard in (Shard(0, 1), Shard(0, 2), Shard(1, 2)):
        model = source.load(64, CPU, torch.float32, shard)
        assert isinstance(model, Decoder)
        yield model


@pytest.mark.parametrize("shard", [Shard(0, 1), Shard(0, 2), Shard(1, 2)])
def test_an_lm_head_that_differs_from_the_tied_embedding_is_refused(shard: Shard, tmp_path: Path) -> None:
    """transformers would use the separate head although the configuration ties it."""
    tensors = tiny(tmp_path, tie_word_embeddings=True)
    tensors[HEAD] = tensors[EMBEDDING] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        open_model(tmp_path).load(64, CPU, torch.float32, shard)


def test_a_tensor_in_two_files_must_be_equal_in_both(tmp_path: Path) -> None:
    tensors = tiny(tmp_path)
    name = "model.norm.weight"
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({name: tensors[name]}, tmp_path / "b.safetensors")
    open_model(tmp_path).load(64, CPU, torch.float32)
    save_file({name: tensors[name] + 1}, tmp_path / "b.safetensors")
    with pytest.raises(ConfigError, match=f"{name} twice"):
        open_model(tmp_path).load(64, CPU, torch.float32)
