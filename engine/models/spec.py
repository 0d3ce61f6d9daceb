"""Reads a Hugging Face config.json into a `ModelSpec`, the description of a model for our decoder.

A feature that our decoder does not compute raises NotNative, so a model that loads is computed exactly. Rope is read in
both formats: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling` (older versions).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError, describe
from common.model.directory import decoder_architecture
from common.model.generation import eos_ids_of
from engine.models.base import ModelShape

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
MAX_SIZE = 2**31 - 1  #: Largest integer of a config.json.
MAX_LAYERS = 1 << 14  #: Far above every model; a spec holds a window for each layer.


class NotNative(ConfigError):
    """The configuration is valid, but our decoder does not support it. transformers may support it."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. `kind`, one of ROPE_KINDS, decides which fields are used."""

    kind: str
    theta: float
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(ModelShape):
    """A decoder of the Llama family."""

    hidden_size: int
    intermediate_size: int
    norm_eps: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    rope: RopeSpec

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_config(model_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads config.json and generation_config.json ({} if it is missing). Raises ConfigError like `read_json`."""
    config = read_json(model_dir / "config.json", required=True)
    return config, read_json(model_dir / "generation_config.json", required=False)


def eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the end-of-sequence tokens of both files, generation_config.json first, for ModelShape."""
    return tuple(dict.fromkeys(eos_ids_of(generation, "generation_config.json") + eos_ids_of(config, "config.json")))


def parse_spec(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelSpec:
    """Returns the spec of a parsed config.json, with the end-of-sequence tokens of both files."""
    name = decoder_architecture(config)
    if name not in ARCHITECTURES:
        raise NotNative(f"{name} has no native code; native are {', '.join(ARCHITECTURES)}", field="model")
    activation = config.get("hidden_act") or "silu"
    if activation != "silu":
        raise NotNative(f"activation {activation!r} is not supported (hidden_act of {name})")

    heads, hidden, layers = (_int(config, k) for k in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    if layers > MAX_LAYERS:
        raise ConfigError(f"config.json: num_hidden_layers is {layers}, at most {MAX_LAYERS} are supported")
    kv_heads = _int(config, "num_key_value_heads", heads)
    head_dim = _int(config, "head_dim", 128 if name == "Qwen3ForCausalLM" else hidden // heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise NotNative(f"head_dim {head_dim} is odd; rotary embeddings need an even head_dim")

    max_position = _int(config, "max_position_embeddings")
    rope = _parse_rope(config, max_position)
    bias = _flag(config, "attention_bias")
    return ModelSpec(
        architecture=name,
        vocab_size=_int(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_int(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        qkv_bias=name == "Qwen2ForCausalLM" or (bias and name != "MistralForCausalLM"),
        out_bias=bias and name in ("LlamaForCausalLM", "Qwen3ForCausalLM"),
        mlp_bias=_flag(config, "mlp_bias") and name == "LlamaForCausalLM",
        qk_norm=name == "Qwen3ForCausalLM",
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        windows=_parse_windows(name, config, layers),
        rope=rope,
        max_position=_scaled_max_position(rope, max_position),
        eos_token_ids=eos_token_ids(config, generation or {}),
    )


def _parse_windows(name: str, config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Returns the window of each layer, with the rules and defaults of the config classes in transformers."""
    if name == "LlamaForCausalLM":
        return (None,) * layers
    window = config.get("sliding_window", 4096)
    window = None if window is None else _int(config, "sliding_window", window)
    if name == "MistralForCausalLM":
        return (window,) * layers
    if not _flag(config, "use_sliding_window"):
        window = None
    kinds = config.get("layer_types")
    if kinds is None:
        first = _int(config, "max_window_layers", 28, least=0)
        return tuple(window if i >= first else None for i in range(layers))
    if not isinstance(kinds, list):
        raise ConfigError(f"config.json: layer_types is {kinds!r}, a list is needed", field="model")
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != layers:
        raise NotNative(f"layer_types of {name} are not supported: {sorted(unknown) or len(kinds)}")
    if window is None and "sliding_attention" in kinds:
        raise ConfigError(f"{name} has sliding_attention layers but no sliding window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _parse_rope(config: Mapping[str, Any], max_position: int) -> RopeSpec:
    """Reads rope in either format. Raises ConfigError if the config has both formats and they differ."""
    present = [raw for key in ("rope_parameters", "rope_scaling") if (raw := config.get(key))]
    first, *others = [_rope_of(raw, config, max_position) for raw in present or [{}]]
    if any(other != first for other in others):
        raise ConfigError("config.json: rope_parameters and rope_scaling differ, keep one of them", field="model")
    return first


def _rope_of(raw: Any, config: Mapping[str, Any], max_position: int) -> RopeSpec:
    if not isinstance(raw, Mapping) or any(isinstance(v, Mapping) for v in raw.values()):
        raise NotNative("rope parameters that differ by layer are not supported")
    kind = str(raw.get("rope_type") or raw.get("type") or "default")
    if kind not in ROPE_KINDS:
        raise NotNative(f"rope scaling {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
    if _number(raw, "partial_rotary_factor", _number(config, "partial_rotary_factor", 1.0)) != 1.0:
        raise NotNative("partial rotary embeddings are not supported")
    theta = _number(raw, "rope_theta", _number(config, "rope_theta", 10000.0))
    if kind == "default":
        return RopeSpec(kind, theta)
    required = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ()}[kind]
    missing = [key for key in required if raw.get(key) is None]
    if missing:
        raise ConfigError(f"rope scaling {kind!r} lacks {', '.join(missing)}")
    key = "original_max_position_embeddings"
    original = _int(config, key, _int(raw, key, max_position))
    lowest = dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), 0.0)
    lowest |= dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"), -math.inf)
    numbers = {name: _number(raw, name, 0.0, above=low) for name, low in lowest.items() if raw.get(name) is not None}
    factor, truncate = _number(raw, "factor", max_position / original), _flag(raw, "truncate", True)
    return RopeSpec(kind, theta, factor, original, truncate=truncate, **numbers)


def _scaled_max_position(rope: RopeSpec, max_position: int) -> int:
    """Returns the context length after rope scaling. llama3 configs already state the extended length."""
    if rope.kind == "yarn":
        return max(max_position, int(rope.original_max_position * rope.factor))
    if rope.kind == "linear":
        return int(max_position * rope.factor)
    return max_position


def _number(config: Mapping[str, Any], key: str, default: float, *, above: float = 0.0) -> float:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not above < value < math.inf:
        raise ConfigError(f"config.json: {key} is {value!r}, a {'positive ' * (above == 0.0)}number is needed")
    return float(value)


def _flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {key} is {value!r}, true or false is needed")
    return value


def _int(config: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, float) and value.is_integer():  # 2048.0, as some tools write it
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_SIZE:
        raise ConfigError(f"config.json: {key} is {value!r}, an integer from {least} to {MAX_SIZE} is needed")
    return value


def read_json(path: Path, *, required: bool) -> dict[str, Any]:
    """Reads a JSON object; {} if the file is missing and not required. Raises ConfigError for every other failure."""
    if not path.is_file():
        if required:
            raise ConfigError(f"{path} does not exist: {path.parent} is not a model directory", field="model")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {describe(error)}", field="model") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object", field="model")
    return value


def shard_error(text: str) -> ConfigError:
    """Returns the error of a model that cannot be split as configured."""
    return ConfigError(f"tensor_parallel_size: {text}", field="tensor_parallel_size")


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` in a group of `size`; 1: the whole model. `layers.Linear` says how weights are split."""

    rank: int = 0
    size: int = 1

    def shard_spec(self, spec: ModelShape) -> ModelShape:
        """Returns the shape of this rank's part. Raises ConfigError if the model cannot be split into `size` parts."""
        if self.size == 1:
            return spec
        if not isinstance(spec, ModelSpec):
            raise shard_error(f"{spec.architecture} is computed by transformers, on one device only")
        names = {"num_kv_heads": "num_key_value_heads", "num_heads": "num_attention_heads"}
        parts: dict[str, Any] = {}
        for field in ("num_kv_heads", "num_heads", "intermediate_size"):
            parts[field], rest = divmod(getattr(spec, field), self.size)
            if rest:
                name = names.get(field, field)
                raise shard_error(f"{self.size} does not divide the model's {name}, {getattr(spec, field)}")
        # Only rank 0 computes logits. With a tied embedding the other ranks allocate no LM head.
        return replace(spec, **parts, tie_word_embeddings=spec.tie_word_embeddings or self.rank > 0)


UNSHARDED = Shard()
