"""Finds the shape of a transformers model by running its code once on the meta device, without weights.

Our attention and mask functions record the calls of each layer: heads, scale, softcap, and the mask, which gives the
sliding window. So the shape comes from the model's own code. Models that ask for unsupported attention are refused.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)

from common.errors import ConfigError, describe
from engine.device import out_of_memory_message
from engine.models.base import ModelShape

TRACE_NAME = "baton-trace"  # Name of our functions in the registries of transformers while a model is traced.


@dataclass(frozen=True, slots=True, kw_only=True)
class HfSpec(ModelShape):
    """A model that transformers computes."""

    config: str  # config.json in canonical form. It is part of the revision, because it decides the computation.
    decoder_path: str  # Module path of the decoder, the part between embedding and final norm.
    attention_paths: tuple[str, ...]  # Module paths of the attention layers.
    query_scales: tuple[float, ...]  # Factor on each layer's queries; not 1 if its scale differs from `scale`.
    grouped: bool  # Whether the model has experts that run as grouped products.
    host_traffic: bool  # Whether a forward pass copies from the host.
    output_class: type = field(repr=False, compare=False)  # Class that the decoder returns.


class _IdentityDecoder(nn.Module):
    """The replacement of a model's decoder. It returns its input."""

    def __init__(self, output_class: type) -> None:
        super().__init__()
        self._output_class = output_class

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return self._output_class(last_hidden_state=inputs_embeds)


@contextmanager
def explain_refusal(name: str) -> Iterator[None]:
    """Turns every exception inside into a one-line ConfigError, except out-of-memory errors of the device."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{name} is not supported: {error.message}", field="model") from error
    except Exception as error:
        if isinstance(error, RuntimeError) and out_of_memory_message(error) is not None:
            raise
        first = str(error).strip().split("\n")[0]
        if "on meta tensors" in first:
            first = "its forward pass depends on values of tensors"
        elif isinstance(error, KeyError) and TRACE_NAME in first:
            first = "it does not use the attention interface of transformers"
        else:
            first = describe(error)
        raise ConfigError(f"{name} of transformers is not supported: {first}", field="model") from error


def read_hf_config(model_dir: Path) -> Any:
    """Reads the configuration of a causal decoder. Raises ConfigError for unsupported kinds of layers or rope.

    Code in the directory is not run, and transformers does not ask for permission to run it.
    """
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        first = describe(error)
        raise ConfigError(f"transformers cannot read the config.json of {model_dir}: {first}", field="model") from error
    name = next(iter(config.architectures or ()), f"a model of type {config.model_type}")

    def refusal(reason: str) -> ConfigError:
        return ConfigError(f"{name} is not supported: {reason}", field="model")

    if config.is_encoder_decoder:
        raise refusal("it is an encoder-decoder model")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__ != name:
        raise refusal("transformers has no causal language model for it")
    text = config.get_text_config().to_dict()
    kinds = set(text.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise refusal(f"it has layers of {', '.join(sorted(kinds))}")
    if any("dynamic" in rope["rope_type"] for rope in _ropes(text)):
        raise refusal("with dynamic rope scaling, keys depend on later tokens")
    return config


def _ropes(text: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the rope parameters of a configuration: one set for all layers, or one for each kind of layer."""
    raw = text.get("rope_parameters") or {}
    sets = [raw, *(value for value in raw.values() if isinstance(value, Mapping))]
    return [rope for rope in sets if "rope_type" in rope]


def max_length(text: Any) -> int:
    """Returns the longest sequence in tokens; with longrope its original length, beyond which all keys would change."""
    limits = [r["original_max_position_embeddings"] for r in _ropes(text.to_dict()) if r["rope_type"] == "longrope"]
    return min(map(int, [text.max_position_embeddings, *limits]))


def canonical_config(config: Any) -> str:
    """Returns the configuration as canonical JSON, without fields that do not change the computation."""
    fields = config.to_dict()
    for name in ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "architectures"):
        fields.pop(name, None)
    return json.dumps(fields, sort_keys=True, default=str)


def build_model(config: Any, attention: str, dtype: torch.dtype) -> Any:
    """Builds a causal language model that is not loaded; `attention` is a name in transformers' registry."""
    config = copy.deepcopy(config)  # from_config writes the choice of attention into it
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval()


def replace_decoder(causal: Any, decoder_path: str, output_class: type) -> None:
    """Reduces a causal model to its LM head: inputs_embeds are now the decoder's last states."""
    causal.set_submodule(decoder_path, _IdentityDecoder(output_class))


TRACE_TOKENS = 4
MAX_MASK = 1 << 17  # Max positions at which a mask is evaluated.
#: Arguments of the attention interface that do not change the result here. Other arguments are refused.
IGNORED_ARGUMENTS = {"dropout", "position_ids", "cache_position", "use_cache", "return_dict"}
IGNORED_ARGUMENTS |= {"output_attentions", "output_hidden_states", "output_router_logits"}
_tracing = threading.Lock()  # Held during a trace: the registries of transformers are global.
_Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Any]  # Maps (batch, head, query, key) to whether it is seen.


@dataclass(frozen=True, slots=True)
class _Call:
    """One recorded attention call."""

    module: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int | None
    mask: _Mask | None


@dataclass(slots=True)
class _Trace:
    """A recorder of the attention calls of a forward pass on the meta device."""

    calls: list[_Call] = field(default_factory=list)
    #: Masks by the id of the placeholder tensor that `mask` returned. The tensor is kept so that its id stays unique.
    masks: dict[int, tuple[Tensor, _Mask]] = field(default_factory=dict)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        if attention_mask is not None and id(attention_mask) not in self.masks:
            raise ConfigError("the model changes the attention mask itself")
        mask = None if attention_mask is None else self.masks[id(attention_mask)][1]
        scale, softcap, window = (options.pop(name, None) for name in ("scaling", "softcap", "sliding_window"))
        causal = options.pop("is_causal", None)
        if causal is None:
            causal = vars(module).get("is_causal", True)
        unknown = sorted(name for name, value in options.items() if name not in IGNORED_ARGUMENTS and value is not None)
        if unknown:
            raise ConfigError(f"attention with {', '.join(unknown)} is not supported")
        if not causal:
            raise ConfigError("attention that is not causal is not supported")
        if key.shape != value.shape:
            shapes = f"{key.shape[3]} and {value.shape[3]}"
            raise ConfigError(f"keys and values of different shapes ({shapes}) are not supported")
        if query.shape[0] != 1 or query.shape[2] != TRACE_TOKENS or key.shape[2] != TRACE_TOKENS:
            raise ConfigError("attention over keys other than those of the sequence's tokens is not supported")
        heads, dim = (query.shape[1], key.shape[1]), query.shape[3]
        self.calls.append(_Call(module, *heads, dim, scale or dim**-0.5, softcap or None, window, mask))
        return query.transpose(1, 2).contiguous(), None

    def mask(self, *_: Any, mask_function: Callable[..., Any], **__: Any) -> Tensor:
        placeholder = torch.empty(1, 1, TRACE_TOKENS, TRACE_TOKENS, device="meta")
        self.masks[id(placeholder)] = (placeholder, mask_function)
        return placeholder


class _HostTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A detector of copies from the host, which no CUDA graph captures. Reads of values fail on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = self.grouped = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.grouped |= "grouped_mm" in func.__name__
        aten, packet = torch.ops.aten, func.overloadpacket
        if packet in (aten.to, aten._to_copy, aten.copy_):
            self.seen |= any(isinstance(a, Tensor) and a.device.type == "cpu" for a in args)
        elif packet in (aten.detach_, aten.lift_fresh):  # the last operation of torch.tensor(..., device=...)
            self.seen |= args[0].device.type == "meta"
        return out


def trace_spec(model_dir: Path, eos_token_ids: tuple[int, ...]) -> HfSpec:
    """Returns the spec of a model directory. Raises ConfigError if the model is not supported. Needs no weights."""
    config = read_hf_config(model_dir)
    name = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    trace, traffic = _Trace(), _HostTraffic()
    with explain_refusal(name):
        with _tracing, torch.inference_mode():
            AttentionInterface.register(TRACE_NAME, trace.attend)
            AttentionMaskInterface.register(TRACE_NAME, trace.mask)
            with torch.device("meta"):
                causal = build_model(config, TRACE_NAME, torch.bfloat16)
                tokens = torch.zeros(1, TRACE_TOKENS, dtype=torch.int64)
            if causal._is_stateful:
                raise ConfigError("its layers keep state other than keys and values")
            decoder = causal.get_decoder()
            if decoder is causal:
                raise ConfigError("its class does not define the decoder (get_decoder returns the whole model)")
            paths = {module: path for path, module in causal.named_modules()}
            with traffic:
                # The mask keeps transformers from searching position_ids for packed sequences.
                out = decoder(input_ids=tokens, attention_mask=tokens + 1, position_ids=tokens, use_cache=False)
            replace_decoder(causal, paths[decoder], type(out))
            vocab_size: int = causal(inputs_embeds=out.last_hidden_state).logits.shape[-1]
        text = config.get_text_config()
        max_position = max_length(text)
        calls = _checked(trace.calls, text.num_hidden_layers)
        windows = tuple(_window(call, max_position) for call in calls)
    first = calls[0]
    return HfSpec(
        architecture=name,
        vocab_size=vocab_size,
        num_layers=len(calls),
        num_heads=first.heads,
        num_kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        windows=windows,
        scale=first.scale,
        softcap=first.softcap,
        max_position=max_position,
        eos_token_ids=eos_token_ids,
        config=canonical_config(config),
        decoder_path=paths[decoder],
        attention_paths=tuple(paths[call.module] for call in calls),
        query_scales=tuple(call.scale / first.scale for call in calls),
        grouped=traffic.grouped,
        host_traffic=traffic.seen,
        output_class=type(out),
    )


def _checked(calls: list[_Call], num_layers: int) -> list[_Call]:
    """Returns the calls. Raises ConfigError unless each layer has one, all with the same heads and softcap."""
    if len({call.module for call in calls}) != num_layers or len(calls) != num_layers:
        others = "the other layers compute attention themselves, or keep state other than keys and values"
        calls_text = f"{len(calls)} of its {num_layers} layers use the attention interface of transformers once"
        raise ConfigError(f"{calls_text}; {others}")
    kinds = {(call.heads, call.kv_heads, call.head_dim, call.softcap) for call in calls}
    if len(kinds) > 1:
        raise ConfigError("its layers differ in heads, head dim or softcap")
    if calls[0].heads % calls[0].kv_heads:
        raise ConfigError(f"{calls[0].heads} query heads are not a multiple of {calls[0].kv_heads} kv heads")
    return calls


def _window(call: _Call, max_position: int) -> int | None:
    """Returns the window of a call, None for full attention. Raises ConfigError if rows of the mask differ in it."""
    mask = call.mask
    if mask is None:
        return call.window
    length = min(max_position, MAX_MASK)
    keys, zero = torch.arange(length), torch.zeros((), dtype=torch.int64)

    def row(query: int) -> Tensor:
        return torch.as_tensor(mask(zero, zero, torch.tensor(query), keys)).expand(length)

    window = int(row(length - 1).sum())
    for query in {0, 1, length // 2, window - 1, min(window, length - 1), length - 1}:
        if not torch.equal(row(query), (keys <= query) & (keys > query - window)):
            raise ConfigError("its attention mask is neither causal nor a sliding window")
    if window == length:
        window = max(call.window or length, length)
        return None if window >= max_position else window
    if call.window not in (None, window):
        raise ConfigError(f"its attention mask has a window of {window}, but its layers pass {call.window}")
    return window
