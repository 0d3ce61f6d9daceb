"""Experts of quantised checkpoints, and experts that are quantised while they load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.support.quantized_files import QuantizedFiles, write
from common.errors import ConfigError
from engine.models.decoder import Decoder
from engine.models.loader import open_model
from engine.models.moe import Experts, grouped_experts
from engine.models.spec import Shard
from engine.quantization.at_load import quantize
from engine.quantization.inputs import InputRounding
from engine.quantization.scheme import Scheme
from tests.rigs.engine.tiny_models import CPU, MOE_CASES, Rig, save_reference, tiny_prompt

torch.set_num_threads(1)
#: An intermediate size of whole blocks, so that gate and up share no block.
CASE: dict[str, Any] = MOE_CASES["qwen3-moe"] | {"moe_intermediate_size": 256, "num_experts": 4, "num_hidden_layers": 2}
BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "self_attn", "model.layers.1.mlp.gate_proj"],
}
SCHEME = Scheme(layout="plain", kind="fp8", extent="block", activations="group", scale_name="weight_scale_inv")


def save_blocks(directory: Path) -> dict[str, torch.Tensor]:
    """Saves a checkpoint with experts in FP8 blocks. Returns the dequantised weights of the experts."""
    save_reference(directory, CASE | {"mlp_only_layers": []})
    path, dequantized = directory / "model.safetensors", {}
    tensors = load_file(path)
    for name in [name for name in tensors if ".experts." in name]:
        weight = quantize(tensors.pop(name), SCHEME)
        tensors |= {name: weight.numbers, f"{name}_scale_inv": weight.scales}
        dequantized[name] = weight.dequantize(torch.float32)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": BLOCKS}))
    return dequantized


def experts_of(directory: Path, shard: Shard, *, fused: bool) -> Experts:
    """Loads a model's experts of layer 0; `fused` as on a GPU."""
    source = open_model(directory)
    if not fused:
        model = source.load(64, CPU, torch.float32, shard, lambda _part: None)
        assert isinstance(model, Decoder)
    else:
        from engine.models.weights.load import load_weights

        model = Decoder(
            shard.shard_spec(source.spec),  # type: ignore[arg-type]
            64,
            CPU,
            torch.float32,
            fused=False,
            quantization=source.quantization,
        )
        prefix, experts = next(model.experts())
        assert source.quantization is not None
        names = experts.projection_names()
        experts.set_scheme({name: source.quantization.scheme_of(prefix + name) for name in names}, keep=True)
        for kind in experts.float32_parameters:
            setattr(experts, kind, torch.nn.Parameter(torch.empty(getattr(experts, kind).shape), requires_grad=False))
        load_weights(model, directory, source.spec, shard, source.quantization)  # type: ignore[arg-type]
    return next(model.experts())[1]


@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2), Shard(1, 2, whole_experts=True)], ids=["whole", "part", "ep"])
def test_fp8_blocks_are_dequantised_or_kept(shard: Shard, tmp_path: Path) -> None:
    expected = save_blocks(tmp_path)
    plain, kept = (experts_of(tmp_path, shard, fused=fused) for fused in (False, True))
    assert (plain.gate_up.dtype, kept.gate_up.dtype) == (torch.float32, torch.float8_e4m3fn)
    size = plain.size
    for local in range(len(plain.gate_up)):
        name = f"model.layers.0.mlp.experts.{plain.first + local}"
        span = slice(size, 2 * size) if size == 128 else slice(0, 256)
        gate, up, down = (expected[f"{name}.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
        assert torch.equal(plain.gate_up[local], torch.cat((gate[span], up[span])))
        assert torch.equal(plain.down[local], down[:, span])
    assert_equal_results(plain, kept)


def assert_equal_results(*layers: Experts) -> None:
    x, weights = torch.randn(5, 64), torch.rand(5, 2)
    chosen = torch.tensor([[0, 1], [3, 2], [2, 0], [1, 3], [3, 0]], dtype=torch.int32)
    torch.testing.assert_close(*(grouped_experts(x, weights, chosen, experts) for experts in layers))


def save_format(directory: Path, name: str) -> QuantizedFiles:
    """Saves a model in directory/name, and in directory/meant with the weights that its files mean."""
    save_reference(directory / "plain", CASE | {"mlp_only_layers": []})
    meaning = write(directory / "plain", directory / name, name, group_size=32)
    save_reference(directory / "meant", CASE | {"mlp_only_layers": []})
    path = directory / "meant" / "model.safetensors"
    weights = {f"{layer}.weight": weight.contiguous() for layer, weight in meaning.weights.items()}
    save_file(load_file(path) | weights, path, {"format": "pt"})
    return meaning


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq-order", "ct-w4", "ct-w4-zeros"])
def test_experts_in_4_bits_are_those_of_the_files(name: str, tmp_path: Path) -> None:
    """On a CPU their logits are those of transformers; as on a GPU they keep 4 bits, except in activation order."""
    save_format(tmp_path, name)
    tokens, blocks = tiny_prompt(20, seed=1), [list(range(3, 13))]
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "meant", dtype=torch.float32).eval()
    with torch.inference_mode():
        want = reference(torch.tensor([tokens])).logits[0]
    rig = Rig(tmp_path / "plain")
    rig.model = open_model(tmp_path / name).load(256, CPU, torch.float32)  # type: ignore[assignment]
    torch.testing.assert_close(rig.logits([tokens], [0], blocks)[0], want, atol=1e-3, rtol=1e-3)

    for shard in (Shard(), Shard(1, 2), Shard(1, 2, whole_experts=True)):
        plain, kept = (experts_of(tmp_path / name, shard, fused=fused) for fused in (False, True))
        assert (kept.gate_up.dtype == torch.uint8) == (name != "gptq-order")
        assert_equal_results(plain, kept)


def test_static_scales_round_the_inputs_of_experts(tmp_path: Path) -> None:
    """gate and up read the same inputs, so the larger of their scales counts."""
    meaning = save_format(tmp_path, "autofp8")
    layers = [name for name in meaning.weights if ".layers.0.mlp.experts." in name]
    scales = {name: 0.01 * (1 + index) for index, name in enumerate(layers)}
    write(
        tmp_path / "plain", tmp_path / "scaled", "autofp8", input_scales=dict.fromkeys(meaning.weights, 0.05) | scales
    )
    experts = experts_of(tmp_path / "scaled", Shard(), fused=False)
    x, one = torch.randn(3, 64), torch.ones(3, 1)
    for expert in range(4):
        gate, up, down = (f"model.layers.0.mlp.experts.{expert}.{kind}_proj" for kind in ("gate", "up", "down"))

        def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
            return InputRounding("fp8", "static", torch.tensor(scale))(x)

        inputs = rounded(x, max(scales[gate], scales[up]))
        gated = torch.nn.functional.silu(inputs @ meaning.weights[gate].T) * (inputs @ meaning.weights[up].T)
        want = rounded(gated, scales[down]) @ meaning.weights[down].T
        chosen = torch.full((3, 1), expert, dtype=torch.int32)
        torch.testing.assert_close(grouped_experts(x, one, chosen, experts), want, atol=1e-4, rtol=1e-4)


def test_experts_are_quantised_at_load_to_fp8_but_not_to_int8(tmp_path: Path) -> None:
    save_reference(tmp_path, CASE | {"mlp_only_layers": []})
    plain = experts_of(tmp_path, Shard(), fused=False)
    for form, equal in ("int8", True), ("fp8", False):
        model = open_model(tmp_path, form=form).load(64, CPU, torch.float32)
        assert isinstance(model, Decoder)
        found = next(model.experts())[1]
        assert torch.equal(found.gate_up, plain.gate_up) == equal
        torch.testing.assert_close(found.gate_up, plain.gate_up, atol=0.05, rtol=0.07)


def test_experts_of_different_formats_are_refused(tmp_path: Path) -> None:
    save_blocks(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    skipped = [*BLOCKS["modules_to_not_convert"], "model.layers.0.mlp.experts.2.up_proj"]
    config["quantization_config"] = BLOCKS | {"modules_to_not_convert": skipped}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="other experts of its layer are quantised differently"):
        open_model(tmp_path).load(64, CPU, torch.float32)
