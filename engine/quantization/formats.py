"""Reads how a checkpoint is quantised: `quantization_config` of config.json, or the older files beside it.

    quant_method          stored as
    compressed-tensors    pack-quantized (4 and 8 bits), float-quantized (FP8), int-quantized (INT8), naive-quantized
    fp8                   blocks of 128 x 128 (weight_scale_inv), or one scale per weight (AutoFP8)
    modelopt              FP8 with one scale per weight; in hf_quant_config.json too
    awq                   the GEMM layout; in quant_config.json too
    gptq                  4 and 8 bits, formats gptq and gptq_v2; in quantize_config.json too
    mxfp4                 the experts of gpt-oss

Every other format, and every property that changes the numbers and is not known here, is refused in one line.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.model.generation import read_json
from engine.quantization import compressed_tensors
from engine.quantization.config_fields import Fields
from engine.quantization.scheme import Quantization, Rule, Scheme
from engine.quantization.weight import BLOCK

METHODS = ("compressed-tensors", "fp8", "modelopt", "awq", "gptq", "mxfp4")

#: Files that may hold the configuration if config.json does not, with the method that they are of.
_OTHER_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
_LAYERS = r"model\.layers\."
_HEAD = Rule(r"lm_head$", None)


def read_quantization(model_dir: Path, config: Mapping[str, Any]) -> Quantization | None:
    """Returns how the checkpoint of a model directory is quantised; None: it is not.

    `config` is the content of config.json. Raises ConfigError, which names format and file, for all that is not
    supported.
    """
    for key, default in (("quantization_config", None), ("compression_config", "compressed-tensors")):
        if config.get(key):
            return _parse(config[key], "config.json", default)
    for file, method in _OTHER_FILES.items():
        if content := read_json(model_dir / file):
            return _parse(content.get("quantization") if method == "modelopt" else content, file, method)
    return None


def _parse(content: Any, file: str, default: str | None) -> Quantization:
    fields = Fields(content, file, default or "quantization_config")
    method = fields.method = str(fields.raw.get("quant_method") or default or "unknown")
    match method.lower():
        case "compressed-tensors":
            return Quantization(method, file, compressed_tensors.rules(fields), kv_scales=True)
        case "fp8":
            return Quantization(method, file, _fp8(fields), kv_scales=True)
        case "modelopt":
            return Quantization(method, file, _modelopt(fields), kv_scales=True)
        case "awq":
            return Quantization(method, file, _awq(fields))
        case "gptq":
            return Quantization(method, file, _gptq(fields))
        case "mxfp4":  # of experts only; `MoeSpec` says so
            return Quantization(method, file, ())
    raise ConfigError(f"{file}: weights of the format {method!r} are not supported; supported are {', '.join(METHODS)}")


def _fp8(fields: Fields) -> tuple[Rule, ...]:
    """FP8 of Qwen and DeepSeek (blocks), and of AutoFP8."""
    fields.require("fmt", (None, "e4m3", "float8_e4m3fn"))
    fields.require("scale_fmt", (None, "float32", "ue8m0"))  # the tensors' dtype says how scales are stored
    activations = fields.require("activation_scheme", ("dynamic", "static"))
    block = fields.raw.get("weight_block_size")
    if block is None:
        inputs = "static" if activations == "static" else "token"
        scheme = Scheme(layout="plain", kind="fp8", extent="tensor", activations=inputs)  # type: ignore[arg-type]
    else:
        fields.require("weight_block_size", ([BLOCK, BLOCK],))
        fields.require("activation_scheme", ("dynamic",))
        scale_name = "weight_scale_inv"
        scheme = Scheme(layout="plain", kind="fp8", extent="block", activations="group", scale_name=scale_name)
    skipped = fields.names("modules_to_not_convert") + fields.names("ignored_layers")
    return (_HEAD, *_skip(skipped), Rule(_LAYERS, scheme))


def _modelopt(fields: Fields) -> tuple[Rule, ...]:
    """FP8 of NVIDIA's ModelOpt: one scale per weight, and one for its inputs."""
    fields.require("quant_algo", ("FP8",))
    fields.require("kv_cache_quant_algo", (None, "FP8"))
    skipped = fields.names("exclude_modules") + fields.names("ignore")
    globs = [Rule(fnmatch.translate(name), None) for name in skipped if "*" in name]
    scheme = Scheme(layout="plain", kind="fp8", extent="tensor", activations="static")
    return (_HEAD, *globs, *_skip([name for name in skipped if "*" not in name]), Rule(_LAYERS, scheme))


def _awq(fields: Fields) -> tuple[Rule, ...]:
    """AutoAWQ's GEMM layout."""
    version = fields.raw.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise fields.refused(f"version {version!r} is another layout, 'gemm' is supported")
    bits = "bits" if "bits" in fields.raw else "w_bit"
    group = "group_size" if "group_size" in fields.raw else "q_group_size"
    fields.require(bits, (4,))
    fields.require("zero_point", (None, True))
    scheme = Scheme(layout="awq", kind="int4", **_groups(fields, group), symmetric=False)
    return (_HEAD, *_skip(fields.names("modules_to_not_convert")), Rule(_LAYERS, scheme))


def _gptq(fields: Fields) -> tuple[Rule, ...]:
    """GPTQ, with the overrides of single layers in `dynamic` (GPTQModel)."""
    rules = [] if fields.flag("lm_head", False) else [_HEAD]
    dynamic = fields.raw.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise fields.refused(f"dynamic is {dynamic!r}, an object is needed")
    for key, changes in dynamic.items():
        pattern = fields.pattern(str(key).removeprefix("+:").removeprefix("-:"), "dynamic")
        if str(key).startswith("-:"):
            rules.append(Rule(pattern, None))
            continue
        if not isinstance(changes, Mapping):
            raise fields.refused(f"dynamic has {changes!r} for {key!r}, an object is needed")
        rules.append(Rule(pattern, _gptq_scheme(Fields({**fields.raw, **changes}, fields.file, fields.method))))
    inside = fields.raw.get("modules_in_block_to_quantize")  # of optimum: names in a layer, in lists
    if inside is None:
        return (*rules, Rule(rf"{_LAYERS}|lm_head$", _gptq_scheme(fields)))
    if not isinstance(inside, list) or not all(isinstance(names, list) for names in inside):
        raise fields.refused(f"modules_in_block_to_quantize is {inside!r}, a list of lists of names is needed")
    names = [str(name) for group in inside for name in group]
    layers = rf"{_LAYERS}\d+\.(?:{'|'.join(map(re.escape, names))})$"
    return (*rules, Rule(rf"{layers}|lm_head$", _gptq_scheme(fields)))


def _gptq_scheme(fields: Fields) -> Scheme:
    bits = fields.require("bits", (4, 8))
    fields.require("quant_method", (None, "gptq"))
    fields.require("pack_dtype", (None, "int32"))
    form = fields.require("checkpoint_format", (None, "gptq", "gptq_v2"))
    return Scheme(
        layout="gptq",
        kind="int4" if bits == 4 else "int8",
        **_groups(fields, "group_size"),
        symmetric=False,  # the files have zeros in any case
        ordered=True,  # and a g_idx
        zero_shift=0 if form == "gptq_v2" else 1,
    )


def _groups(fields: Fields, key: str) -> dict[str, Any]:
    """Returns extent and group_size; -1 is one scale per output."""
    return {"extent": "channel"} if fields.raw.get(key) == -1 else {"extent": "group", "group_size": fields.group(key)}


def _skip(names: list[str]) -> list[Rule]:
    """Rules for modules that are not converted: a name is one or more whole parts of a layer's dotted name."""
    # One rule: configs of mixtures of experts name hundreds of modules, and such a model has thousands of layers.
    return [Rule(rf"(.*\.)?(?:{'|'.join(map(re.escape, names))})(\.|$)", None)] if names else []
