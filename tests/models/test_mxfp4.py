"""gpt-oss with experts in MXFP4: the same logits as transformers with the dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from common.errors import ConfigError
from engine.models.loader import open_model
from engine.models.moe import Experts, dequantize_mxfp4
from engine.models.spec import Shard, parse_spec, read_config
from tests.rigs.engine.tiny_models import CPU, MOE_CASES, Rig, save_reference, tiny_prompt

torch.set_num_threads(1)


def save_mxfp4(directory: Path) -> Any:
    """Saves gpt-oss with random MXFP4 experts. Returns the model of transformers with the same numbers."""
    model = save_reference(directory, MOE_CASES["gpt-oss"])
    path = directory / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(5)
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            key = f"model.layers.{index}.mlp.experts.{name}"
            experts, inputs, outputs = tensors.pop(key).shape
            size = experts, outputs, inputs // 32
            blocks = torch.randint(0, 256, (*size, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(122, 126, size, dtype=torch.uint8, generator=generator)
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            with torch.no_grad():
                numbers = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
                getattr(layer.mlp.experts, name).copy_(numbers)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return model


def test_logits_equal_transformers(tmp_path: Path) -> None:
    """Also of ranks with whole experts, and after the weights became float32 at load."""
    reference = save_mxfp4(tmp_path)
    tokens, blocks = tiny_prompt(40, seed=1), [list(range(3, 13))]
    with torch.inference_mode():
        want = reference(torch.tensor([tokens])).logits[0]
    rig = Rig(tmp_path)
    found = [module for module in rig.model.modules() if isinstance(module, Experts)]
    assert {experts.gate_up.dtype for experts in found} == {torch.uint8}
    torch.testing.assert_close(rig.logits([tokens], [0], blocks)[0], want, atol=1e-4, rtol=1e-4)

    loaded = open_model(tmp_path).load(256, CPU, torch.float32)
    for experts, other in zip(found, (m for m in loaded.modules() if isinstance(m, Experts)), strict=True):  # type: ignore[attr-defined]
        assert other.gate_up_scales is None
        assert experts.gate_up_scales is not None
        torch.testing.assert_close(
            other.gate_up, dequantize_mxfp4(experts.gate_up, experts.gate_up_scales, torch.float32), atol=0, rtol=0
        )
    rank = Rig(tmp_path, shard=Shard(1, 2, whole_experts=True), all_reduce=lambda _part: None)
    parts = (module for module in rank.model.modules() if isinstance(module, Experts))
    assert all(torch.equal(part.down, whole.down[3:]) for part, whole in zip(parts, found, strict=True))


def test_other_formats_and_other_models_are_refused(tmp_path: Path) -> None:
    save_reference(tmp_path, MOE_CASES["gpt-oss"])
    config, _ = read_config(tmp_path)
    mixtral = config | {"architectures": ["MixtralForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(ConfigError, match="'mxfp4' are not supported for MixtralForCausalLM"):
        parse_spec(mixtral)
    uneven = config | {"intermediate_size": 48, "quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(ConfigError, match=r"intermediate_size is 48, .* need a multiple of 32"):
        parse_spec(uneven)
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": awq}))
    with pytest.raises(ConfigError, match="'awq' are not supported for experts in one tensor"):
        open_model(tmp_path).load(64, CPU, torch.float32)


def test_random_weights_have_the_size_of_plain_ones(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    model = open_model(tmp_path, "dummy").load(64, CPU, torch.float32)
    experts = next(module for module in model.modules() if isinstance(module, Experts))  # type: ignore[attr-defined]
    assert 0.5 < float(experts.gate_up.std()) * 64**0.5 < 2
    assert 0.5 < float(experts.down.std()) * 96**0.5 < 2


def test_a_scale_that_the_kernels_cannot_hold_is_refused_on_a_cpu_too(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 3, 1] = 191
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"an MXFP4 scale is 2\^64, at most 2\^63 is supported"):
        open_model(tmp_path).load(64, CPU, torch.float32)
