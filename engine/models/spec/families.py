"""The architectures that our decoder computes: how each differs from Llama, and how its config.json says so.

The defaults of missing fields are those of the config classes in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from common.errors import ConfigError
from engine.models.spec.fields import NotNative, flag, integer, number, uses_mxfp4
from engine.models.spec.model import MXFP4_GROUP, GatedDeltaSpec, LatentSpec, MoeSpec
from engine.models.spec.rope import RopeDefaults

MAX_EXPERTS = 1 << 12  #: Far above every model; loading makes a list of all experts.

Config = Mapping[str, Any]
Bias = Literal["none", "always", "attention_bias", "mlp_bias"]  # Of a projection: a name is the field that decides.
Windows = tuple[int | None, ...]


def _no_windows(config: Config, layers: int) -> Windows:
    return (None,) * layers


def _one_window(config: Config, layers: int) -> Windows:
    """All layers have the window `sliding_window`, if it is set."""
    return (_window(config, None),) * layers


def _mistral_windows(config: Config, layers: int) -> Windows:
    return (_window(config, 4096),) * layers


def _switched_window(config: Config, layers: int) -> Windows:
    """All layers have the window, if `use_sliding_window` is true."""
    return (_window(config, 4096) if flag(config, "use_sliding_window") else None,) * layers


def _qwen_windows(config: Config, layers: int) -> Windows:
    """The layers of `layer_types` have the window, or those from `max_window_layers` on."""
    window = _window(config, 4096) if flag(config, "use_sliding_window") else None
    if config.get("layer_types") is None:
        first = integer(config, "max_window_layers", 28, least=0)
        return tuple(window if i >= first else None for i in range(layers))
    return _typed_windows(config, layers, window)


def _alternating_windows(config: Config, layers: int) -> Windows:
    """The layers of `layer_types` have the window, or every second one from the first on."""
    window = _window(config, 128)
    if config.get("layer_types") is None:
        return tuple(None if i % 2 else window for i in range(layers))
    return _typed_windows(config, layers, window)


def _typed_windows(config: Config, layers: int, window: int | None) -> Windows:
    kinds = config["layer_types"]
    if not isinstance(kinds, list):
        raise ConfigError(f"config.json: layer_types is {kinds!r}, a list is needed", field="model")
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise NotNative(f"layer_types has {unknown[0]!r}, which is not supported")
    if len(kinds) != layers:
        raise NotNative(f"layer_types has {len(kinds)} layers, num_hidden_layers is {layers}")
    if window is None and "sliding_attention" in kinds:
        raise ConfigError("config.json has sliding_attention layers but no sliding window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _window(config: Config, default: int | None) -> int | None:
    window = config.get("sliding_window", default)
    return None if window is None else integer(config, "sliding_window", window)


def _qwen3_moe(config: Config, layers: int) -> MoeSpec:
    size = integer(config, "moe_intermediate_size", 768)
    sparse = _sparse_layers(config, layers)
    return _moe(config, sparse, 128, 8, expert_size=size, normalize=flag(config, "norm_topk_prob"))


def _sparse_layers(config: Config, layers: int) -> tuple[bool, ...]:
    step = integer(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ConfigError(f"config.json: mlp_only_layers is {dense!r}, a list is needed", field="model")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))


def _mixtral(config: Config, layers: int) -> MoeSpec:
    return _moe(config, (True,) * layers, 8, 2)


def _olmoe(config: Config, layers: int) -> MoeSpec:
    if config.get("clip_qkv") is not None:
        raise NotNative("bounds of queries, keys and values (clip_qkv) are not supported")
    return _moe(config, (True,) * layers, 64, 8, normalize=flag(config, "norm_topk_prob"))


def _glm4_moe(config: Config, layers: int) -> MoeSpec:
    size, dense = integer(config, "moe_intermediate_size", 1408), integer(config, "first_k_dense_replace", 1, least=0)
    return _moe(
        config,
        tuple(i >= dense for i in range(layers)),
        128,
        8,
        expert_size=size,
        scoring="sigmoid",
        normalize=flag(config, "norm_topk_prob", True),
        routed_scale=number(config, "routed_scaling_factor", 1.0),
        groups=integer(config, "n_group", 1),
        top_groups=integer(config, "topk_group", 1),
        correction=True,
        shared_size=size * integer(config, "n_shared_experts", 1, least=0),
    )


def _deepseek_v2(config: Config, layers: int) -> MoeSpec:
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise NotNative(f"topk_method {method!r} is not supported for this architecture")
    if flag(config, "norm_topk_prob"):
        raise NotNative("norm_topk_prob is not supported for this architecture")
    grouped = method == "group_limited_greedy"
    groups = {key: integer(config, field, 1) if grouped else 1 for key, field in _GROUP_FIELDS.items()}
    return _deepseek(config, layers, 64, 8, 1407, 2, normalize=False, group_best=1, **groups)


def _deepseek_v3(config: Config, layers: int) -> MoeSpec:
    if (method := config.get("topk_method") or "noaux_tc") != "noaux_tc":
        raise NotNative(f"topk_method {method!r} is not supported for this architecture")
    if (scoring := config.get("scoring_func") or "sigmoid") != "sigmoid":
        raise NotNative(f"scoring_func {scoring!r} is not supported for this architecture")
    groups = {key: integer(config, field, 1) for key, field in _GROUP_FIELDS.items()}
    normalize = flag(config, "norm_topk_prob", True)
    return _deepseek(config, layers, 256, 8, 2048, 1, scoring="sigmoid", normalize=normalize, correction=True, **groups)


_GROUP_FIELDS = {"groups": "n_group", "top_groups": "topk_group"}


def _deepseek(config: Config, layers: int, experts: int, top_k: int, size: int, shared: int, **rest: Any) -> MoeSpec:
    """Makes the spec; the numbers are defaults: of experts, of a token's experts, of their size, of shared experts."""
    if integer(config, "moe_layer_freq", 1) != 1:
        raise NotNative("moe_layer_freq other than 1 is not supported")
    if flag(config, "mlp_bias"):
        raise NotNative("biases in experts (mlp_bias) are not supported")
    size = integer(config, "moe_intermediate_size", size)
    dense = integer(config, "first_k_dense_replace", 3 if rest.get("correction") else 0, least=0)
    return _moe(
        config,
        tuple(i >= dense for i in range(layers)),
        experts,
        top_k,
        expert_size=size,
        routed_scale=number(config, "routed_scaling_factor", 2.5 if rest.get("correction") else 1.0),
        shared_size=size * integer(config, "n_shared_experts", shared, least=0),
        **rest,
    )


def _latent_v2(config: Config) -> LatentSpec:
    return _latent(config, interleaved=True)


def _latent_v3(config: Config) -> LatentSpec:
    return _latent(config, interleaved=flag(config, "rope_interleave", True))


def _latent(config: Config, *, interleaved: bool) -> LatentSpec:
    # null is a value of this field: queries without a latent of their own.
    rank = integer(config, "q_lora_rank", 1536) if config.get("q_lora_rank", 0) is not None else None
    rope = integer(config, "qk_rope_head_dim", 64)
    if rope % 2:
        raise ConfigError(f"config.json: qk_rope_head_dim is {rope}, an even number is needed", field="model")
    return LatentSpec(
        query_rank=rank,
        rank=integer(config, "kv_lora_rank", 512),
        key_dim=integer(config, "qk_nope_head_dim", 128),
        rope_dim=rope,
        value_dim=integer(config, "v_head_dim", 128),
        interleaved=interleaved,
    )


def _granite_moe(config: Config, layers: int) -> MoeSpec:
    return _moe(config, (True,) * layers, 8, 2)


def _qwen3_next(config: Config, layers: int) -> MoeSpec:
    sparse, normalize = _sparse_layers(config, layers), flag(config, "norm_topk_prob", True)
    return _gated_shared_moe(config, sparse, 512, 10, normalize=normalize)


def _qwen3_5_moe(config: Config, layers: int) -> MoeSpec:
    return _gated_shared_moe(config, (True,) * layers, 256, 8)


def _gated_shared_moe(config: Config, layers: tuple[bool, ...], experts: int, top_k: int, **rest: Any) -> MoeSpec:
    size, shared = (integer(config, f"{kind}_intermediate_size", 512) for kind in ("moe", "shared_expert"))
    return _moe(config, layers, experts, top_k, expert_size=size, shared_size=shared, shared_gate=True, **rest)


def _gated_delta(config: Config, layers: int, *, grouped: bool = False) -> GatedDeltaSpec:
    kinds = config.get("layer_types")
    if kinds is None:
        step = integer(config, "full_attention_interval", 4)
        kinds = ["full_attention" if (i + 1) % step == 0 else "linear_attention" for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        problem = f"layer_types is {kinds!r}, a list of num_hidden_layers ({layers}) kinds is needed"
        raise ConfigError(f"config.json: {problem}", field="model")
    unknown = [kind for kind in kinds if kind not in ("full_attention", "linear_attention")]
    if unknown:
        raise NotNative(f"layer_types has {unknown[0]!r}, which is not supported")
    if "full_attention" not in kinds:
        raise NotNative("a model without a layer of full_attention is not supported")
    key_heads = integer(config, "linear_num_key_heads", 16)
    value_heads = integer(config, "linear_num_value_heads", 32)
    if value_heads % key_heads:
        problem = f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}"
        raise ConfigError(f"config.json: {problem}", field="model")
    return GatedDeltaSpec(
        layers=tuple(kind == "linear_attention" for kind in kinds),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=integer(config, "linear_key_head_dim", 128),
        value_dim=integer(config, "linear_value_head_dim", 128),
        taps=integer(config, "linear_conv_kernel_dim", 4, least=2),
        grouped=grouped,
    )


def _grouped_gated_delta(config: Config, layers: int) -> GatedDeltaSpec:
    return _gated_delta(config, layers, grouped=True)


def _gpt_oss(config: Config, layers: int) -> MoeSpec:
    if (number(config, "swiglu_alpha", 1.702), number(config, "swiglu_limit", 7.0)) != (1.702, 7.0):
        raise NotNative("swiglu_alpha other than 1.702 and swiglu_limit other than 7 are not supported")
    mxfp4 = uses_mxfp4(config)
    for name in ("hidden_size", "intermediate_size"):
        if mxfp4 and (size := integer(config, name)) % MXFP4_GROUP:
            problem = f"{name} is {size}, weights of the format 'mxfp4' need a multiple of {MXFP4_GROUP}"
            raise ConfigError(f"config.json: {problem}", field="model")
    options: dict[str, Any] = dict.fromkeys(("router_bias", "gate_up_bias", "down_bias"), True)
    return _moe(config, (True,) * layers, 128, 4, activation="gpt_oss", mxfp4=mxfp4, **options)


def _moe(
    config: Config, layers: tuple[bool, ...], experts: int, top_k: int, *, expert_size: int | None = None, **rest: Any
) -> MoeSpec:
    """Makes the spec; `experts` and `top_k` are defaults. An expert has the size of an MLP if expert_size is None."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    name = next((name for name in names if config.get(name) is not None), names[0])
    experts, top_k = integer(config, name, experts), integer(config, "num_experts_per_tok", top_k)
    if experts > MAX_EXPERTS:
        raise ConfigError(f"config.json: {name} is {experts}, at most {MAX_EXPERTS} are supported")
    if top_k > experts:
        raise ConfigError(f"config.json: num_experts_per_tok is {top_k}, at most {experts} experts exist")
    spec = MoeSpec(
        num_experts=experts,
        num_local=experts,
        top_k=top_k,
        expert_size=expert_size or integer(config, "intermediate_size"),
        layers=layers,
        **rest,
    )
    size, remainder = divmod(experts, spec.groups)
    if remainder or spec.top_groups > spec.groups or spec.top_groups * size < top_k or (spec.groups > 1 and size < 2):
        groups = f"n_group {spec.groups} and topk_group {spec.top_groups}"
        raise ConfigError(f"config.json: {groups} do not fit {experts} experts, of which a token takes {top_k}")
    return spec


_USUAL_ROPE = RopeDefaults()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """An architecture. The defaults are Llama's."""

    qkv_bias: Bias = "attention_bias"
    out_bias: Bias = "attention_bias"
    attention_bias: bool = False  # Default of the field of this name.
    mlp_bias: Bias = "none"
    qk_norm: Literal["head", "all"] | None = None
    qk_norm_field: str | None = None  # Field that says whether qk_norm holds. None: it always does.
    head_dim: int | None = None  # Default of the field. None: the hidden size over the heads.
    norm_eps: float = 1e-6  # Default of the field rms_norm_eps.
    windows: Callable[[Config, int], Windows] = _no_windows
    rope: RopeDefaults = _USUAL_ROPE
    moe: Callable[[Config, int], MoeSpec] | None = None  # Its experts by config.json and number of layers.
    latent: Callable[[Config], LatentSpec] | None = None  # Its multi-head latent attention by config.json.
    delta: Callable[[Config, int], GatedDeltaSpec] | None = None  # Its gated delta layers, like `moe`.
    sinks: bool = False
    multipliers: bool = False  # config.json has multipliers of embedding, attention, residual stream and logits.
    extra_layers: str | None = None  # Field with the number of layers for multi-token prediction.
    mxfp4: bool = False  # The experts may be in MXFP4.


_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_HYBRID_ROPE = RopeDefaults(partial=0.25)
FAMILIES = {
    "LlamaForCausalLM": ModelFamily(mlp_bias="mlp_bias"),
    "MistralForCausalLM": ModelFamily(qkv_bias="none", out_bias="none", windows=_mistral_windows),
    "Qwen2ForCausalLM": ModelFamily(qkv_bias="always", out_bias="none", windows=_qwen_windows),
    "Qwen3ForCausalLM": ModelFamily(qk_norm="head", head_dim=128, windows=_qwen_windows),
    "Qwen3MoeForCausalLM": ModelFamily(qk_norm="head", windows=_switched_window, moe=_qwen3_moe),
    "MixtralForCausalLM": ModelFamily(
        qkv_bias="none",
        out_bias="none",
        norm_eps=1e-5,
        windows=_one_window,
        rope=RopeDefaults(theta=1e6),
        moe=_mixtral,
    ),
    "OlmoeForCausalLM": ModelFamily(qk_norm="all", norm_eps=1e-5, moe=_olmoe),
    "Glm4MoeForCausalLM": ModelFamily(
        out_bias="none",
        qk_norm="head",
        qk_norm_field="use_qk_norm",
        norm_eps=1e-5,
        rope=RopeDefaults(partial=0.5),
        moe=_glm4_moe,
        extra_layers="num_nextn_predict_layers",
    ),
    "Qwen3NextForCausalLM": ModelFamily(
        qk_norm="head", head_dim=256, rope=_HYBRID_ROPE, moe=_qwen3_next, delta=_grouped_gated_delta
    ),
    "Qwen3_5ForCausalLM": ModelFamily(qk_norm="head", head_dim=256, rope=_HYBRID_ROPE, delta=_gated_delta),
    "Qwen3_5MoeForCausalLM": ModelFamily(
        qk_norm="head", head_dim=256, rope=_HYBRID_ROPE, moe=_qwen3_5_moe, delta=_gated_delta
    ),
    "DeepseekV2ForCausalLM": ModelFamily(moe=_deepseek_v2, latent=_latent_v2),
    "DeepseekV3ForCausalLM": ModelFamily(moe=_deepseek_v3, latent=_latent_v3, extra_layers="num_nextn_predict_layers"),
    "GraniteMoeForCausalLM": ModelFamily(moe=_granite_moe, multipliers=True),
    "GptOssForCausalLM": ModelFamily(
        attention_bias=True,
        head_dim=64,
        norm_eps=1e-5,
        windows=_alternating_windows,
        rope=RopeDefaults(theta=150000.0, scaling=_GPT_OSS_YARN),
        moe=_gpt_oss,
        sinks=True,
        mxfp4=True,
    ),
}
ARCHITECTURES = tuple(FAMILIES)
