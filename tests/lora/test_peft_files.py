"""Adapters that are not plain LoRA over this base are refused, by file and name; the digest is of the content."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common.errors import ConfigError
from engine.adapters.peft import read_adapter
from tests.lora.lora_rig import save_adapter

SHAPES = {f"model.layers.{i}.self_attn.{n}_proj": (24, 40 if n == "q" else 16) for i in (0, 1) for n in "qkvo"}
ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qk")


def base() -> nn.Module:
    """A tree of modules with the names of `SHAPES`."""
    root = nn.Module()
    for name, (inputs, outputs) in SHAPES.items():
        module = root
        *path, last = name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.add_module(last, nn.Linear(inputs, outputs, bias=False))
    return root


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "adapter", base(), seed=1, modules=ATTENTION)


def change_config(directory: Path, **fields: Any) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def read(directory: Path, max_rank: int = 64) -> Any:
    return read_adapter(directory, SHAPES, max_rank)


def test_ranks_and_scales_of_patterns(tmp_path: Path) -> None:
    directory = save_adapter(
        tmp_path,
        base(),
        seed=1,
        modules=ATTENTION,
        rank=4,
        alpha=6,
        ranks={"0.self_attn.q_proj": 8, "k_proj": 2},
        alphas={"1.self_attn.k_proj": 5.0},
    )
    expected = {"0.self_attn.q": (8, 6), "1.self_attn.q": (4, 6), "0.self_attn.k": (2, 6), "1.self_attn.k": (2, 5)}
    for rslora in (False, True):
        change_config(directory, use_rslora=rslora)
        pairs = read(directory).pairs
        assert pairs.keys() == {f"model.layers.{name}_proj" for name in expected}
        for name, (rank, alpha) in expected.items():
            pair = pairs[f"model.layers.{name}_proj"]
            assert (pair.rank, pair.scale) == (rank, alpha / (math.sqrt(rank) if rslora else rank))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is not supported: DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights is 'lora_ga'"),
        ({"r": 0}, "is 0: expected 1 to 256"),
        ({"r": 300}, "is 300: expected 1 to 256"),
        ({"r": 70}, "raise max_adapter_rank, which is 64"),
        ({"r": "many"}, "r of .* is 'many': expected a number"),
        ({"lora_alpha": None}, "lora_alpha of .* is None"),
        ({"lora_alpha": 10**400}, "lora_alpha of .* expected a number of float32"),
        ({"lora_alpha": 1e39}, "lora_alpha of .* is 1e[+]39: expected a number of float32"),
        ({"lora_alpha": math.nan}, "lora_alpha of .* is nan"),
        ({"rank_pattern": {"(": 3}}, "not a regular expression"),
        ({"alpha_pattern": {r"([a-z0-9._]+)+X": 3}}, "repeated group, which could take for ever"),
        ({"rank_pattern": {".*" * 20 + "X": 3}}, "expected up to 4 repeats"),
        ({"rank_pattern": [3]}, "rank_pattern: expected an object"),
        ({"target_modules": ["q_proj", "k_proj", "gate_proj"]}, "no tensors of 'gate_proj'"),
    ],
)
def test_settings_that_are_refused(fields: dict[str, Any], words: str, adapter: Path) -> None:
    change_config(adapter, **fields)
    with pytest.raises(ConfigError, match=words) as caught:
        read(adapter)
    assert str(adapter) in str(caught.value)


Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update({f"{Q0}.lora_magnitude_vector": torch.ones(3)}), "DoRA is not supported"),
        (lambda t: t.update({f"{Q0}.bias": torch.ones(3)}), "q_proj.bias: it is not a tensor of LoRA"),
        (
            lambda t: t.update({Q0.replace("0.self", "7.self") + ".lora_A.weight": torch.ones(4, 24)}),
            "layers.7.self_attn",
        ),
        (
            lambda t: t.update(
                {Q0.replace("self_attn.q_proj", "mlp.experts.0.down_proj.lora_A.weight"): torch.ones(4, 4)}
            ),
            "experts have no adapters",
        ),
        (lambda t: t.pop(f"{Q0}.lora_B.weight"), "layers.0.self_attn.q_proj has no lora_B"),
        (lambda t: t.update({f"{Q0}.lora_A.weight": torch.ones(4, 23)}), r"\(4, 23\): expected \(4, 24\)"),
        (lambda t: t.update({f"{Q0}.lora_A.weight": torch.ones(5, 24)}), r"\(5, 24\): expected \(4, 24\)"),
        (lambda t: t.update({f"{Q0}.lora_B.weight": torch.ones(41, 4)}), r"\(41, 4\): expected \(40, 4\)"),
        (lambda t: t.update({f"{Q0}.lora_B.weight": torch.full((40, 4), math.nan)}), "expected finite numbers"),
        (lambda t: t.update({f"{Q0}.lora_B.weight": torch.ones(40, 4, dtype=torch.int8)}), "expected finite numbers"),
        (lambda t: t.clear(), "no tensors of"),
    ],
)
def test_tensors_that_are_refused(change: Callable[[dict[str, Tensor]], object], words: str, adapter: Path) -> None:
    change_tensors(adapter, change)
    with pytest.raises(ConfigError, match=words) as caught:
        read(adapter)
    assert str(adapter / "adapter_model.safetensors") in str(caught.value)


def test_damaged_and_missing_files(adapter: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        read(adapter)
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model.bin is not read"):
        read(adapter)
    (adapter / "adapter_config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"adapter_config.json: the file cannot be read"):
        read(adapter)


def test_the_digest_is_of_the_content(adapter: Path) -> None:
    digest = read(adapter).digest
    change_config(adapter, base_model_name_or_path="elsewhere", lora_dropout=0.3)
    change_tensors(adapter, lambda t: t.update(dict(reversed(t.items()))))
    assert read(adapter).digest == digest, "paths and training settings do not matter"
    changes: list[Callable[[], object]] = [
        lambda: change_config(adapter, lora_alpha=9),
        lambda: change_tensors(adapter, lambda t: t[f"{Q0}.lora_A.weight"][0, 0].add_(0.001)),
        lambda: change_config(adapter, use_rslora=True),
    ]
    for change in changes:
        change()
        assert read(adapter).digest != digest
        digest = read(adapter).digest
