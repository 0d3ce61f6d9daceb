"""What a decoder of transformers asks of attention, by its own code: one run on the meta device, before any weight.

Our attention function and our mask function take notes of each layer: heads, scale, softcap, and the mask, of which the
window is read. So the shape comes from the model's code, and what our attention cannot do is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AttentionMaskInterface

from common.errors import ConfigError
from engine.models.hf.config import (
    TRACE_NAME,
    HfSpec,
    build_model,
    canonical_config,
    explain_refusal,
    max_length,
    read_hf_config,
    replace_decoder,
)

TRACE_TOKENS = 4
MAX_MASK = 1 << 17  # positions at which a mask is looked at
# Arguments of the attention interface that change nothing here. Anything else may, and is refused.
IGNORED_ARGUMENTS = {"dropout", "position_ids", "cache_position", "use_cache", "return_dict"}
IGNORED_ARGUMENTS |= {"output_attentions", "output_hidden_states", "output_router_logits"}
_tracing = threading.Lock()  # the registries are of the process, and a trace is entered in them


@dataclass(frozen=True, slots=True)
class _Mask:
    """What the model passed to the mask interface: (batch, head, query, key) to "is visible"."""

    visible: Callable[[Tensor, Tensor, Tensor, Tensor], Any]


@dataclass(frozen=True, slots=True)
class _Call:
    """One attention call of the trace."""

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
    """Collects a forward pass on the meta device; a mask is known by the identity of the tensor that stands for it."""

    calls: list[_Call] = field(default_factory=list)
    masks: dict[int, tuple[Tensor, _Mask]] = field(default_factory=dict)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **rest: Any
    ) -> tuple[Tensor, None]:
        mask = None
        if attention_mask is not None:
            if id(attention_mask) not in self.masks:
                raise ConfigError("the model adds something of its own to the attention mask")
            mask = self.masks[id(attention_mask)][1]
        scale, softcap, window = (rest.pop(name, None) for name in ("scaling", "softcap", "sliding_window"))
        causal = rest.pop("is_causal", None)
        if causal is None:
            causal = vars(module).get("is_causal", True)
        strange = sorted(name for name, value in rest.items() if name not in IGNORED_ARGUMENTS and value is not None)
        if strange:
            raise ConfigError(f"attention with {', '.join(strange)} is not served")
        if not causal:
            raise ConfigError("attention that is not causal is not served")
        if key.shape != value.shape:
            raise ConfigError(
                f"keys and values of different shapes ({key.shape[3]} and {value.shape[3]}) are not served"
            )
        if query.shape[0] != 1 or query.shape[2] != TRACE_TOKENS or key.shape[2] != TRACE_TOKENS:
            raise ConfigError("attention over something else than the tokens' own keys is not served")
        dim = query.shape[3]
        self.calls.append(
            _Call(module, query.shape[1], key.shape[1], dim, scale or dim**-0.5, softcap or None, window, mask)
        )
        return query.transpose(1, 2).contiguous(), None

    def mask(self, *_: Any, mask_function: Callable[..., Any], **__: Any) -> Tensor:
        marker = torch.empty(1, 1, TRACE_TOKENS, TRACE_TOKENS, device="meta")
        self.masks[id(marker)] = (marker, _Mask(mask_function))
        return marker


class _HostTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what a CUDA graph cannot hold: copies from the host. (Reads of a value fail on the meta device.)"""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = self.grouped = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.grouped |= "grouped_mm" in func.__name__
        aten, packet = torch.ops.aten, func.overloadpacket
        if packet in (aten.to, aten._to_copy, aten.copy_):
            self.seen |= any(isinstance(a, Tensor) and a.device.type == "cpu" for a in args)
        elif packet in (aten.detach_, aten.lift_fresh):  # the end of torch.tensor(..., device=...)
            self.seen |= args[0].device.type == "meta"
        return out


def trace_spec(model_dir: Path, eos_token_ids: tuple[int, ...]) -> HfSpec:
    """The spec of a model directory (its config.json is enough); ConfigError for what cannot be served, and why."""
    config = read_hf_config(model_dir)
    name = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    found, traffic = _Trace(), _HostTraffic()
    with explain_refusal(name):
        with _tracing, torch.inference_mode():
            AttentionInterface.register(TRACE_NAME, found.attend)
            AttentionMaskInterface.register(TRACE_NAME, found.mask)
            with torch.device("meta"):
                causal = build_model(config, TRACE_NAME, torch.bfloat16)
                tokens = torch.zeros(1, TRACE_TOKENS, dtype=torch.int64)
            if causal._is_stateful:
                raise ConfigError("its layers keep state other than keys and values")
            base = causal.get_decoder()
            if base is causal:
                raise ConfigError("its class does not say which part of it is the decoder below the head")
            names = {module: path for path, module in causal.named_modules()}
            with traffic:
                # With a mask given, transformers does not look into position_ids for packed sequences.
                out = base(input_ids=tokens, attention_mask=tokens + 1, position_ids=tokens, use_cache=False)
            replace_decoder(causal, names[base], type(out))
            vocab_size: int = causal(inputs_embeds=out.last_hidden_state).logits.shape[-1]
        text = config.get_text_config()
        max_position = max_length(text)
        calls = _checked(found.calls, text.num_hidden_layers)
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
        decoder_path=names[base],
        attention_paths=tuple(names[call.module] for call in calls),
        query_scales=tuple(call.scale / first.scale for call in calls),
        grouped=traffic.grouped,
        host_traffic=traffic.seen,
        output_class=type(out),
    )


def _checked(calls: list[_Call], num_layers: int) -> list[_Call]:
    """The calls, one for each layer and all alike."""
    if len({call.module for call in calls}) != num_layers or len(calls) != num_layers:
        raise ConfigError(
            f"{len(calls)} of its {num_layers} layers use the attention interface of transformers once; the others "
            f"compute attention themselves or keep state other than keys and values"
        )
    kinds = {(call.heads, call.kv_heads, call.head_dim, call.softcap) for call in calls}
    if len(kinds) > 1:
        raise ConfigError("its layers differ in heads, head dim or softcap")
    if calls[0].heads % calls[0].kv_heads:
        raise ConfigError(f"{calls[0].heads} query heads do not divide among {calls[0].kv_heads} kv heads")
    return calls


def _window(call: _Call, max_position: int) -> int | None:
    """The sliding window, read from the mask: all rows that are looked at must see exactly so many tokens back."""
    mask = call.mask
    if mask is None:
        return call.window
    length = min(max_position, MAX_MASK)
    keys, zero = torch.arange(length), torch.zeros((), dtype=torch.int64)

    def row(query: int) -> Tensor:
        return torch.as_tensor(mask.visible(zero, zero, torch.tensor(query), keys)).expand(length)

    window = int(row(length - 1).sum())
    for query in {0, 1, length // 2, window - 1, min(window, length - 1), length - 1}:
        if not torch.equal(row(query), (keys <= query) & (keys > query - window)):
            raise ConfigError("its attention mask is neither causal nor a sliding window")
    if window == length:
        window = max(call.window or length, length)
        return None if window >= max_position else window
    if call.window not in (None, window):
        raise ConfigError(f"its attention mask has a window of {window}, its layers say {call.window}")
    return window
