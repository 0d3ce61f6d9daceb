"""Pooling: the files of sentence-transformers, the setting, and the tokens whose states are pooled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from engine.models.pooling import Pooling, PoolingKind, pooling_of

PREFIX = "sentence_transformers.models"


def write(directory: Path, config: Any = None, *more: str) -> Path:
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{PREFIX}.Transformer"}]
    if config is not None:
        modules.append({"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{PREFIX}.Pooling"})
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
    modules += [{"idx": 2, "name": "2", "path": f"2_{name}", "type": f"{PREFIX}.{name}"} for name in more]
    (directory / "modules.json").write_text(json.dumps(modules))
    return directory


def test_without_files_the_setting_counts(tmp_path: Path) -> None:
    assert pooling_of(tmp_path, "auto") == Pooling(PoolingKind.LAST)
    for kind in ("last", "mean", "cls"):
        assert pooling_of(tmp_path, kind) == Pooling(PoolingKind(kind), normalize=True)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "last"),
        ({"embedding_dimension": 8, "pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["cls"]}, "cls"),
    ],
)
def test_the_files_decide(tmp_path: Path, config: Any, kind: str) -> None:
    assert pooling_of(write(tmp_path, config, "Normalize"), "auto") == Pooling(PoolingKind(kind), normalize=True)


def test_vectors_keep_their_length_without_the_module_normalize(tmp_path: Path) -> None:
    directory = write(tmp_path, {"pooling_mode_mean_tokens": True})
    assert pooling_of(directory, "auto") == Pooling(PoolingKind.MEAN, normalize=False)
    assert pooling_of(directory, "last") == Pooling(PoolingKind.LAST, normalize=False)


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        ({"pooling_mode_max_tokens": True}, (), "pooling_mode_max_tokens"),
        ({"pooling_mode": "weightedmean"}, (), "weightedmean"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, (), "and"),
        ({}, (), "none"),
        ({"pooling_mode_mean_tokens": True}, ("Dense",), "Dense"),
    ],
)
def test_what_is_not_served_is_refused_and_not_ignored(
    tmp_path: Path, config: Any, more: tuple[str, ...], said: str
) -> None:
    assert said in pooling_of(write(tmp_path, config, *more), "auto").refusal
    if not more:  # a setting replaces the files' kind
        assert pooling_of(tmp_path, "mean") == Pooling(PoolingKind.MEAN, normalize=False)


def test_a_broken_file_is_an_error_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ConfigError) as e:
        pooling_of(tmp_path, "auto")
    assert e.value.field == "model"


def test_the_tokens_that_are_pooled() -> None:
    for kind, tokens in (("last", [4]), ("mean", [0, 1, 2, 3, 4]), ("cls", [0])):
        assert list(Pooling(PoolingKind(kind)).tokens(5)) == tokens
