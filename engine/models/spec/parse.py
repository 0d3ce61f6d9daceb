"""Reads a Hugging Face config.json into a `ModelSpec`, the description of a model for our decoder.

A feature that our decoder does not compute raises NotNative, so a model that loads is computed exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.model.directory import decoder_architecture
from common.model.generation import eos_ids_of
from engine.models.spec.families import ARCHITECTURES, FAMILIES, Bias
from engine.models.spec.fields import NotNative, flag, integer, number, read_json, uses_mxfp4
from engine.models.spec.model import HybridModelSpec, LatentModelSpec, ModelSpec
from engine.models.spec.rope import parse_rope, yarn_magnitude
from engine.models.spec.text_tower import text_config

MAX_LAYERS = 1 << 14  #: Far above every model; a spec holds a window for each layer.


def read_config(model_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads config.json, of a multimodal model its text part, and generation_config.json ({} if it is missing).

    Raises ConfigError like `read_json`.
    """
    config = text_config(read_json(model_dir / "config.json", required=True))
    return config, read_json(model_dir / "generation_config.json", required=False)


def eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the end-of-sequence tokens of both files, generation_config.json first, for ModelShape."""
    return tuple(dict.fromkeys(eos_ids_of(generation, "generation_config.json") + eos_ids_of(config, "config.json")))


def parse_spec(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelSpec:
    """Returns the spec of a parsed config.json, with the end-of-sequence tokens of both files."""
    name = decoder_architecture(config)
    family = FAMILIES.get(name)
    if family is None:
        raise NotNative(f"{name} has no native code; native are {', '.join(ARCHITECTURES)}", field="model")
    if uses_mxfp4(config) and not family.mxfp4:
        raise ConfigError(f"config.json: weights of the format 'mxfp4' are not supported for {name}", field="model")
    activation = config.get("hidden_act") or "silu"
    if activation != "silu":
        raise NotNative(f"activation {activation!r} is not supported (hidden_act of {name})")

    heads, hidden, layers = (integer(config, k) for k in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    if layers > MAX_LAYERS:
        raise ConfigError(f"config.json: num_hidden_layers is {layers}, at most {MAX_LAYERS} are supported")
    latent = None if family.latent is None else family.latent(config)
    if latent is None:
        kv_heads = integer(config, "num_key_value_heads", heads)
        head_dim = integer(config, "head_dim", family.head_dim or hidden // heads)
    else:
        kv_heads, head_dim = 1, latent.rank + latent.rope_dim
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    max_position = integer(config, "max_position_embeddings")
    rope = parse_rope(config, max_position, family.rope)
    if latent is None and (head_dim % 2 or rope.rotated(head_dim) % 2):
        raise NotNative(f"{rope.rotated(head_dim)} dimensions of a head of {head_dim} rotate; both must be even")

    def bias(kind: Bias) -> bool:
        return kind == "always" or (kind != "none" and flag(config, kind, family.attention_bias))

    def multiplier(key: str) -> float:
        return number(config, key, 1.0) if family.multipliers else 1.0

    scale = multiplier("attention_multiplier") if family.multipliers else None
    if latent is not None:
        scale = (latent.key_dim + latent.rope_dim) ** -0.5 * yarn_magnitude(rope) ** 2
    delta = None if family.delta is None else family.delta(config, layers)
    kv_layers = layers if delta is None else layers - sum(delta.layers)
    moe = None if family.moe is None else family.moe(config, layers)
    # Without MLPs a config.json may lack their size.
    inner = None if delta is None or moe is None or not all(moe.layers) else moe.expert_size
    qk_norm = family.qk_norm if family.qk_norm_field is None or flag(config, family.qk_norm_field) else None
    fields = dict[str, Any](
        architecture=name,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(config, "intermediate_size", inner),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=number(config, "rms_norm_eps", family.norm_eps),
        qkv_bias=bias(family.qkv_bias),
        out_bias=bias(family.out_bias),
        mlp_bias=bias(family.mlp_bias),
        qk_norm=qk_norm,
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        windows=family.windows(config, kv_layers),
        scale=scale,
        rope=rope,
        moe=moe,
        sinks=family.sinks,
        embedding_multiplier=multiplier("embedding_multiplier"),
        residual_multiplier=multiplier("residual_multiplier"),
        logits_divisor=multiplier("logits_scaling"),
        extra_layers=0 if family.extra_layers is None else integer(config, family.extra_layers, 1, least=0),
        max_position=rope.max_position(max_position),
        eos_token_ids=eos_token_ids(config, generation or {}),
    )
    if delta is not None:
        return HybridModelSpec(**fields, delta=delta)
    return ModelSpec(**fields) if latent is None else LatentModelSpec(**fields, latent=latent)
