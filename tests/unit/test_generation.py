"""A model's own defaults: end-of-sequence ids of all its files, and the values of generation_config.json."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from common.errors import ConfigError
from common.model.generation import GenerationDefaults, end_token_ids, generation_defaults
from common.types import SamplingParams
from engine.config import EngineConfig
from engine.engine import Engine
from gateway.text.tokenizer import TextTokenizer

SIZES = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
CONFIG = {"architectures": ["LlamaForCausalLM"], **SIZES, "num_attention_heads": 2, "max_position_embeddings": 64}
VOCAB = {f"<{i}>": i for i in range(250)}
EOS = {"eos_token": "<42>"}


def bpe() -> Any:
    return Tokenizer(models.BPE(VOCAB, []))


def directory(path: Path, files: dict[str, Any], raw: Any = None) -> Path:
    for name, value in {"config.json": CONFIG, **files}.items():
        (path / name).write_text(json.dumps(value))
    (bpe() if raw is None else raw).save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, ()),
        ({"tokenizer_config.json": EOS}, (42,)),
        ({"tokenizer_config.json": {"eos_token": {"content": "<42>"}}}, (42,)),
        ({"special_tokens_map.json": EOS}, (42,)),
        ({"tokenizer_config.json": {"eos_token": "missing"}}, ()),
        ({"tokenizer_config.json": {"eos_token": None}, "special_tokens_map.json": EOS}, (42,)),
        ({"config.json": {**CONFIG, "eos_token_id": 3}, "tokenizer_config.json": EOS}, (3, 42)),
        ({"config.json": {**CONFIG, "text_config": {"eos_token_id": [4]}}}, (4,)),
        ({"config.json": {**CONFIG, "eos_token_id": 3}, "generation_config.json": {"eos_token_id": [5, 3]}}, (5, 3)),
        (
            {
                "config.json": {**CONFIG, "eos_token_id": 0, "text_config": {"eos_token_id": 6}},
                "generation_config.json": {"eos_token_id": [7, -1]},
                "tokenizer_config.json": EOS,
            },
            (7, 0, 6, 42),
        ),
        ({"generation_config.json": {"eos_token_id": 42}, "tokenizer_config.json": EOS}, (42,)),
    ],
)
def test_gateway_and_engine_find_all_end_tokens(tmp_path: Path, files: dict[str, Any], ids: tuple[int, ...]) -> None:
    path = directory(tmp_path, files)
    assert end_token_ids(path) == ids
    assert TextTokenizer(path).eos_ids == ids
    engine = Engine(EngineConfig(model_dir=path, load_format="dummy", device="cpu", num_blocks=8, threads=1))
    assert engine.eos_token_ids == ids
    engine.close()


@pytest.mark.parametrize("kind", ["bpe", "word level", "unigram", "added"])
def test_the_tokenizers_end_token_is_found_as_the_library_finds_it(tmp_path: Path, kind: str) -> None:
    raw: Any = {
        "word level": lambda: Tokenizer(models.WordLevel(VOCAB, unk_token="<0>")),
        "unigram": lambda: Tokenizer(models.Unigram([(token, -1.0) for token in VOCAB], unk_id=0)),
    }.get(kind, bpe)()
    token = "<new>" if kind == "added" else "<42>"
    if kind == "added":
        raw.add_special_tokens([token])
    path = directory(tmp_path, {"tokenizer_config.json": {"eos_token": token}}, raw)
    assert end_token_ids(path) == (raw.token_to_id(token),)


def test_a_directory_without_a_tokenizer_has_the_ids_of_its_configuration(tmp_path: Path) -> None:
    directory(tmp_path, {"config.json": {**CONFIG, "eos_token_id": 3}, "tokenizer_config.json": EOS})
    (tmp_path / "tokenizer.json").unlink()
    assert end_token_ids(tmp_path) == (3,)


def test_the_end_tokens_do_not_change_the_fingerprint(tmp_path: Path) -> None:
    """Directories with and without a tokenizer compute the same KV."""
    with_tokenizer, without = tmp_path / "a" / "model", tmp_path / "b" / "model"
    for path in (with_tokenizer, without):
        path.mkdir(parents=True)
        directory(path, {"config.json": {**CONFIG, "eos_token_id": 3}, "tokenizer_config.json": EOS})
    (without / "tokenizer.json").unlink()
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "num_blocks": 8, "threads": 1}
    one, other = (Engine(EngineConfig(model_dir=path, **options)) for path in (with_tokenizer, without))
    assert (one.eos_token_ids, other.eos_token_ids) == ((3, 42), (3,))
    assert one.layout.fingerprint == other.layout.fingerprint


@pytest.mark.parametrize("value", ["</s>", [1, None], True, [1.5]])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_wrong_end_token_is_an_error_that_names_the_file(tmp_path: Path, name: str, value: Any) -> None:
    directory(tmp_path, {name: {**CONFIG, "eos_token_id": value}})
    with pytest.raises(ConfigError, match=f"{name}: eos_token_id is"):
        end_token_ids(tmp_path)


def test_a_damaged_tokenizer_is_an_error(tmp_path: Path) -> None:
    directory(tmp_path, {"tokenizer_config.json": EOS})
    for content in (b"[]", b"{}", b'{"model": {"vocab": 3}}', b'{"added_tokens": [3]}', b"no"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ConfigError, match="is not a tokenizer"):
            end_token_ids(tmp_path)


def test_an_end_token_beyond_the_models_vocabulary_is_not_used(tmp_path: Path) -> None:
    path = directory(tmp_path, {"config.json": {**CONFIG, "eos_token_id": [3, 300, 5000]}})
    engine = Engine(EngineConfig(model_dir=path, load_format="dummy", device="cpu", num_blocks=8, threads=1))
    assert engine.eos_token_ids == (3,)
    engine.close()


def test_defaults_are_those_of_the_file(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == GenerationDefaults()
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20.0, "min_p": 0, "repetition_penalty": 1.05}
    more = {"max_new_tokens": 2048, "do_sample": True, "max_length": 20, "eos_token_id": 2, "top_h": None}
    (tmp_path / "generation_config.json").write_text(json.dumps({**values, **more}))
    defaults = generation_defaults(tmp_path)
    assert (defaults.sampling, defaults.max_tokens) == (values, 2048)
    assert isinstance(defaults.sampling["top_k"], int)
    assert defaults.as_json() == {**values, "max_tokens": 2048}


def test_a_request_that_sets_a_field_wins() -> None:
    defaults = GenerationDefaults({"temperature": 0.6, "top_k": 20})
    asked = SamplingParams(temperature=1.0, top_p=0.5)
    assert defaults.fill(asked, {"temperature", "top_p"}) == SamplingParams(temperature=1.0, top_p=0.5, top_k=20)
    assert defaults.fill(asked, {"temperature", "top_k"}) is asked


def test_values_that_no_request_may_have_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrong = {"temperature": 3, "top_p": 0, "top_k": 1.5, "min_p": "x", "repetition_penalty": True, "max_new_tokens": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
    with caplog.at_level(logging.WARNING):
        assert generation_defaults(tmp_path) == GenerationDefaults()
    for name, value in wrong.items():
        assert f"{name} is {value!r} and has no effect" in caplog.text
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not a JSON object"):
        generation_defaults(tmp_path)


def test_the_demos_model_has_no_defaults_and_one_end_token(smollm2_dir: Path, tmp_path: Path) -> None:
    assert generation_defaults(smollm2_dir) == GenerationDefaults()
    assert end_token_ids(smollm2_dir) == (2,)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2_dir / name, tmp_path)
    assert end_token_ids(tmp_path) == (2,)
