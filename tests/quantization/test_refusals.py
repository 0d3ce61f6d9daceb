"""Formats that are not supported, and damaged files: one line that names format, file or tensor."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.support.quantized_files import write
from common.errors import ConfigError
from engine.models.loader import open_model
from tests.rigs.engine.bare_model import GPT2, bare_model

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FOUR = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
EIGHT = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}


def ct(weights: dict[str, Any], inputs: Any = None, form: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **more}


def refusal(directory: Path, quantization: Any, *, file: str = "config.json") -> str:
    """Returns the error of a model with this quantization config."""
    bare_model(directory, CONFIG | ({"quantization_config": quantization} if file == "config.json" else {}))
    if file != "config.json":
        (directory / file).write_text(json.dumps(quantization))
    with pytest.raises(ConfigError) as error:
        open_model(directory)
    assert "\n" not in error.value.message
    assert file in error.value.message
    return error.value.message


@pytest.mark.parametrize(
    ("config", "words"),
    [
        *(({"quant_method": name}, f"format {name!r}") for name in ("bitsandbytes", "gguf", "hqq", "auto-round")),
        ({"bits": 4}, "format 'unknown'"),
        (["awq"], "an object is needed"),
        (AWQ | {"version": "gemv_fast"}, "version 'gemv_fast' is another layout"),
        (AWQ | {"bits": 8}, "bits is 8, 4 is supported"),
        (AWQ | {"zero_point": False}, "zero_point is False"),
        (AWQ | {"group_size": 20}, "group_size is 20, a multiple of 16"),
        (AWQ | {"group_size": True}, "group_size is True"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head', a list"),
        (GPTQ | {"bits": 3}, "bits is 3, 4 or 8 is supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (GPTQ | {"checkpoint_format": "gptq_p"}, "checkpoint_format is 'gptq_p'"),
        (GPTQ | {"modules_in_block_to_quantize": ["mlp.up_proj"]}, "a list of lists of names"),
        (GPTQ | {"dynamic": {"+:.*up_proj": {"bits": 2}}}, "bits is 2"),
        (GPTQ | {"dynamic": {"+:(": {"bits": 4}}}, "not valid"),
        (GPTQ | {"dynamic": {"-:(a+)+$": {}}}, "too complex"),
        (GPTQ | {"dynamic": {".*up_proj": {"bits": 8}}}, "gate_proj is int4, .*up_proj is int8"),
        (FP8 | {"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme is 'static'"),
        (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2'"),
        (FP8 | {"scale_fmt": "e5m3"}, "scale_fmt is 'e5m3'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4'"),
        (ct(FOUR, form="marlin-24"), "format 'marlin-24' with 4-bit int weights"),
        (ct(FOUR | {"num_bits": 2}), "num_bits is 2"),
        (ct(FOUR | {"type": "float"}, form="nvfp4-pack-quantized"), "num_bits is 4, 8 is supported"),
        (ct(FOUR, {"num_bits": 8, "type": "int"}), "inputs of packed weights"),
        (ct(EIGHT, {"num_bits": 4, "type": "float"}, "float-quantized"), "num_bits is 4"),
        (ct(EIGHT, {"num_bits": 8, "type": "float", "symmetric": False}, "float-quantized"), "zero points"),
        (ct(EIGHT | {"strategy": "block"}, form="float-quantized"), "block_structure is None"),
        (ct(EIGHT, {"num_bits": 8, "type": "float", "strategy": "token"}, "float-quantized"), "strategy 'token'"),
        (ct(FOUR, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (ct(FOUR, transform_config={"config_groups": {}}), "transform_config"),
        (ct(FOUR, ignore=["re:(x*)*"]), "too complex"),
        (ct(FOUR, ignore=["re:" + ".?" * 60 + "Z"]), "too complex"),
        (ct(FOUR, ignore=[r"re:([a-z.]+|\\)*Z"]), "too complex"),
        (ct(FOUR, ignore=["re:(?x)([a-z.]+) *Z"]), "too complex"),
        (ct(FOUR, ignore=["re:" + "(.|.)" * 31 + "Z"]), "too complex"),
        ({"quant_method": "compressed-tensors", "format": "x", "config_groups": {}}, "config_groups is empty"),
    ],
)
def test_a_format_that_is_not_supported_is_named(config: Any, words: str, tmp_path: Path) -> None:
    if "gate_proj" in words:  # the layers of one product, found when the model is made
        source = open_model(bare_model(tmp_path, CONFIG | {"quantization_config": config}), "dummy")
        with pytest.raises(ConfigError, match=words):
            source.load(16, CPU, torch.float32)
        return
    message = refusal(tmp_path, config)
    assert re.search(words, message), message


def test_other_files_name_the_format_too(tmp_path: Path) -> None:
    assert "'INT4'" in refusal(tmp_path / "a", {"quantization": {"quant_algo": "INT4"}}, file="hf_quant_config.json")
    assert "bits is 2" in refusal(tmp_path / "b", {"bits": 2, "group_size": 32}, file="quantize_config.json")
    assert "w_bit is 3" in refusal(tmp_path / "c", {"w_bit": 3, "q_group_size": 64}, file="quant_config.json")


def test_a_model_of_transformers_or_a_second_quantization_is_refused(tmp_path: Path) -> None:
    bare_model(tmp_path / "a", GPT2 | {"quantization_config": AWQ})
    with pytest.raises(
        ConfigError, match=r"config\.json: weights of the format 'awq' are not supported for this model"
    ):
        open_model(tmp_path / "a")
    bare_model(tmp_path / "b", CONFIG | {"quantization_config": AWQ})
    with pytest.raises(ConfigError, match=r"weights fp8: the checkpoint is quantised already, as awq \(int4"):
        open_model(tmp_path / "b", form="fp8")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain")
    bare_model(directory, CONFIG)
    generator = torch.Generator().manual_seed(0)
    shapes = {f"model.layers.0.self_attn.{name}_proj": (64, 64) for name in "qo"}
    shapes |= {f"model.layers.0.self_attn.{name}_proj": (32, 64) for name in "kv"}
    shapes |= {f"model.layers.0.mlp.{name}_proj": (64, 64) for name in ("gate", "up", "down")}
    shapes |= {"model.embed_tokens": (64, 64), "lm_head": (64, 64)}
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    norms = ("model.norm", *(f"model.layers.0.{name}_layernorm" for name in ("input", "post_attention")))
    save_file(tensors | {f"{name}.weight": torch.ones(64) for name in norms}, directory / "model.safetensors")
    return directory


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("form", "tensor", "change", "words"),
    [
        ("awq", "qweight", lambda t: t.to(torch.int16), "has dtype int16, expected int32"),
        ("awq", "qweight", lambda t: t[:, :4].contiguous(), r"has shape \(64, 4\), expected \(64, 8\)"),
        ("awq", "qzeros", lambda t: t.repeat(2, 1), r"has shape \(4, 8\), expected \(2, 8\)"),
        ("awq", "scales", lambda t: t.int(), "has dtype int32, expected float16 or bfloat16 or float32"),
        ("awq", "scales", lambda t: t * torch.inf, "not a finite number"),
        ("awq", "scales", None, "the checkpoint lacks .*scales"),
        ("awq", "bias", lambda t: torch.ones(64), "does not use"),
        ("gptq", "g_idx", lambda t: t + 1, "has groups from 1 to 2, expected 0 to 1"),
        ("gptq", "g_idx", lambda t: t * 0, "has groups that have not 32 inputs each"),
        ("gptq", "g_idx", lambda t: t.flip(0), "cannot be one product: they have activation orders that differ"),
        ("ct-w4", "weight_shape", lambda t: t + 1, r"is \[65, 65\], expected \[64, 64\]"),
        ("ct-fp8-channel", "weight", lambda t: t.float(), "has dtype float32, expected float8_e4m3fn"),
        (
            "ct-fp8-tensor",
            "weight_scale",
            lambda t: t.repeat(3),
            r"has shape \(3,\), expected \(1, 1\) or \(1,\) or \(\)",
        ),
        ("ct-fp8-tensor", "input_scale", lambda t: -t, "a positive number is needed"),
        ("ct-int8", "weight_zero_point", lambda t: torch.ones(64, 1, dtype=torch.int8), "is not zero"),
        ("fp8-block", "weight", lambda t: (t.view(torch.uint8) | 0x7F).view(t.dtype), "has a number that is NaN"),
        ("fp8-block", "weight_scale_inv", lambda t: t.repeat(2, 1), r"has shape \(2, 1\), expected \(1, 1\)"),
        ("fp8-block", "weight_scale", lambda t: torch.ones(1), "does not use"),
    ],
)
def test_a_damaged_tensor_is_named(
    form: str, tensor: str, change: Any, words: str, plain: Path, tmp_path: Path
) -> None:
    write(plain, tmp_path, form)
    tensors, name = load_file(tmp_path / "model.safetensors"), f"{Q}.{tensor}"
    changed = tensors.pop(name, torch.zeros(0))
    if change is not None:
        tensors[name] = change(changed).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=words) as error:
        open_model(tmp_path).load(16, CPU, torch.float32)
    assert Q in error.value.message


def test_scales_of_the_kv_cache_and_biases_of_zeros_are_not_used(plain: Path, tmp_path: Path) -> None:
    for form, name, tensor in (
        ("ct-fp8-tensor", "model.layers.0.self_attn.k_scale", torch.ones(1)),
        ("modelopt", "model.layers.0.self_attn.v_proj.v_scale", torch.ones(1)),
        ("gptq", f"{Q}.bias", torch.zeros(64)),
    ):
        write(plain, tmp_path / form, form)
        file = tmp_path / form / "model.safetensors"
        save_file(load_file(file) | {name: tensor}, file)
        open_model(tmp_path / form).load(16, CPU, torch.float32)


def test_quantised_numbers_without_a_config_are_refused(plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path, "ct-fp8-channel")
    bare_model(tmp_path, CONFIG)
    with pytest.raises(ConfigError, match="has dtype float8_e4m3fn: the quantization config does not name this layer"):
        open_model(tmp_path).load(16, CPU, torch.float32)


def test_a_quantised_head_is_dequantised(plain: Path, tmp_path: Path) -> None:
    from benchmarks.support.quantized_files import QuantizedWriter

    write(plain, tmp_path, "gptq")
    file, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(file)
    packed, meant = QuantizedWriter(32, 0).gptq("lm_head", tensors.pop("lm_head.weight"))
    save_file(tensors | {f"lm_head.{kind}": tensor for kind, tensor in packed.items()}, file)
    config["quantization_config"]["lm_head"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    model: Any = open_model(tmp_path).load(16, CPU, torch.float32)
    torch.testing.assert_close(model.head.weight, meant, rtol=0, atol=1e-6)


def test_scales_may_be_powers_of_two_in_eight_bits(plain: Path, tmp_path: Path) -> None:
    """DeepSeek's `scale_fmt` ue8m0: the tensors are float8_e8m0fnu, or float32."""
    write(plain, tmp_path, "fp8-block")
    file, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors, weights = load_file(file), []
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith("weight_scale_inv")}
    for dtype in (torch.float32, torch.float8_e8m0fnu):
        powers = {name: tensor.log2().round().exp2().to(dtype) for name, tensor in scales.items()}
        save_file(tensors | powers, file)
        model: Any = open_model(tmp_path).load(16, CPU, torch.float32)
        weights.append(model.layers[0].mlp.down.weight)
    assert torch.equal(*weights)


def test_optimum_lists_the_modules_that_are_quantised(tmp_path: Path) -> None:
    config = GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj", "mlp.gate_proj"]]}
    source = open_model(bare_model(tmp_path, CONFIG | {"quantization_config": config}))
    assert source.quantization is not None
    layer = "model.layers.0.mlp.{}_proj"
    found = [source.quantization.scheme_of(name) for name in (Q, layer.format("up"), layer.format("down"), "lm_head")]
    assert [scheme is None for scheme in found] == [False, False, True, True]


def test_a_name_or_a_pattern_of_compressed_tensors_comes_before_all_linear_layers(tmp_path: Path) -> None:
    """Groups are not in the order of the file: the one whose target says more about a layer decides."""
    config = ct(FOUR)
    groups, layer = config["config_groups"], "model.layers.0.mlp.{}_proj"
    groups["group_1"] = {"targets": ["re:.*(gate|up|down)_proj$"], "weights": FOUR | {"num_bits": 8}}
    groups["group_2"] = {"targets": [layer.format("down")], "weights": FOUR | {"group_size": 64}}
    source = open_model(bare_model(tmp_path, CONFIG | {"quantization_config": config}))
    assert source.quantization is not None
    schemes = [source.quantization.scheme_of(name) for name in (Q, layer.format("up"), layer.format("down"))]
    assert [scheme.text for scheme in schemes if scheme] == [
        "int4, groups of 32",
        "int8, groups of 32",
        "int4, groups of 64",
    ]


def test_a_config_may_name_thousands_of_layers(tmp_path: Path) -> None:
    names = [f"model.layers.{index}.mlp.gate" for index in range(2000)]
    for key, config in (("modules_to_not_convert", FP8), ("ignore", ct(FOUR))):
        source = open_model(bare_model(tmp_path, CONFIG | {"quantization_config": config | {key: names}}))
        assert source.quantization is not None
        found = [source.quantization.scheme_of(f"model.layers.{index}.mlp.gate") for index in (0, 10, 1999, 2000)]
        assert [scheme is None for scheme in found] == [True, True, True, False]
