"""Any decoder of transformers, computed by its own module over our paged KV, through its attention interface.

1. `trace` builds the module on the meta device and runs it once. Our attention function and our mask function note what
   each layer asks of attention: heads, scale, softcap, and the mask, of which the window is read. So the shape comes
   from the model's code, and what our attention cannot do is refused before any weight is read.
2. `load` reads the weights, gives every attention module its layer of the pool, and proves the result: a few tokens in
   two interleaved sequences, in pieces, must come out as transformers' own attention computes them. A model that keeps
   state other than keys and values, or takes positions from elsewhere, does not pass.

A step is one flat sequence [1, T] with position_ids; attention alone knows which sequences it consists of. The head
(with its softcap or scale) runs as the model's own code too: with a base model that only returns what it is given.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from transformers.utils import logging as hf_logging

from common.errors import ConfigError
from engine.attention.base import AttentionBackend, StepShape
from engine.attention.torch_backend import TorchAttention
from engine.layer_kv import LayerKV
from engine.models.base import ModelShape

PAGED, TRACED = "baton", "baton-trace"  # our names in the registries of transformers
TRACE_TOKENS = 4
PROOF_TOKENS, PROOF_BLOCK = 24, 4
PROOF_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # of a token's state, relative; the median token counts
MAX_MASK = 1 << 17  # positions at which a mask is looked at
# Arguments of the attention interface that change nothing here. Anything else may, and is refused.
INERT = {"dropout", "position_ids", "cache_position", "use_cache", "return_dict"}
INERT |= {"output_attentions", "output_hidden_states", "output_router_logits"}
_tracing = threading.Lock()  # the registries are of the process, and a trace is entered in them


@dataclass(frozen=True, slots=True, kw_only=True)
class HfSpec(ModelShape):
    """config: config.json as a canonical text, for it decides what is computed.

    base: path of the module between embedding and last norm; names: those of the attention modules, by layer. factors:
    what a layer multiplies its queries with, where its scale is not the shape's. grouped: has experts that run
    as grouped products. host_traffic: a forward pass copies from the host. output: what the base model returns.
    """

    config: str
    base: str
    names: tuple[str, ...]
    factors: tuple[float, ...]
    grouped: bool
    host_traffic: bool
    output: type = field(repr=False, compare=False)


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
        strange = sorted(name for name, value in rest.items() if name not in INERT and value is not None)
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


class _Given(nn.Module):
    """Stands where the decoder was: its output is its input."""

    def __init__(self, output: type) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return self._output(last_hidden_state=inputs_embeds)


@dataclass(slots=True)
class _Step:
    """What attention needs to know of the running forward pass."""

    cache: Sequence[LayerKV] = ()
    backend: AttentionBackend[Any] | None = None
    metadata: Any = None


@dataclass(frozen=True, slots=True)
class _PagedLayer:
    """Hangs on an attention module of a loaded model, as `paged`."""

    step: _Step
    index: int
    window: int | None
    factor: float


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    """The attention function: query [1, heads, T, D], key and value [1, kv_heads, T, D]; [1, T, heads, D] out."""
    layer: _PagedLayer = module.paged
    backend = layer.step.backend
    assert backend is not None
    if layer.factor != 1.0:
        query = query * layer.factor
    if query.stride(3) != 1:
        query = query.contiguous()
    kv = torch.stack((key[0].transpose(0, 1), value[0].transpose(0, 1)), dim=1)
    cache = layer.step.cache[layer.index]
    out = backend.attend(query[0].transpose(0, 1), kv, cache, layer.step.metadata, layer.window)
    return out.unsqueeze(0), None


class HfModel:
    """A loaded model; see engine/models/base.py."""

    def __init__(self, spec: HfSpec, causal: Any, dtype: torch.dtype) -> None:
        self.spec = spec
        # Outside bf16 transformers computes experts one after the other, with their sizes read on the host.
        self.capturable = not spec.host_traffic and not (spec.grouped and dtype != torch.bfloat16)
        self._step = _Step()
        self._base: Any = causal.get_submodule(spec.base)
        self._causal: Any = causal
        for index, name in enumerate(spec.names):
            module: Any = causal.get_submodule(name)
            module.paged = _PagedLayer(self._step, index, spec.windows[index], spec.factors[index])
        _seal(causal, spec.base, spec.output)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Sequence[LayerKV],
        backend: AttentionBackend[Any],
        metadata: Any,
        rows: Tensor | None = None,
    ) -> Tensor:
        self._step.cache, self._step.backend, self._step.metadata = cache, backend, metadata
        out = self._base(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        states: Tensor = out.last_hidden_state[0]
        return states if rows is None else states[rows]

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._causal(inputs_embeds=hidden[None]).logits[0]
        return logits.float()

    def own(self, tokens: Tensor) -> Tensor:
        """States [T, hidden] of one sequence tokens[T] as transformers alone computes them."""
        self._base.set_attn_implementation("eager")
        try:
            states: Tensor = self._base(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        finally:
            self._base.set_attn_implementation(PAGED)
        return states


def trace(model_dir: Path, eos_token_ids: tuple[int, ...]) -> HfSpec:
    """The spec of a model directory (its config.json is enough); ConfigError for what cannot be served, and why."""
    config = _config(model_dir)
    name = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    found, traffic = _Trace(), _HostTraffic()
    with _reasons(name):
        with _tracing, torch.inference_mode():
            AttentionInterface.register(TRACED, found.attend)
            AttentionMaskInterface.register(TRACED, found.mask)
            with torch.device("meta"):
                causal = _build(config, TRACED, torch.bfloat16)
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
            _seal(causal, names[base], type(out))
            vocab_size: int = causal(inputs_embeds=out.last_hidden_state).logits.shape[-1]
        text = config.get_text_config()
        max_position = _max_position(text)
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
        config=_canonical(config),
        base=names[base],
        names=tuple(names[call.module] for call in calls),
        factors=tuple(call.scale / first.scale for call in calls),
        grouped=traffic.grouped,
        host_traffic=traffic.seen,
        output=type(out),
    )


def load(spec: HfSpec, model_dir: Path, device: torch.device, dtype: torch.dtype, *, seed: int | None) -> HfModel:
    """The model with its weights, or with random ones where a seed is given; proven, see the top of this file."""
    AttentionInterface.register(PAGED, _attend)
    config = _config(model_dir)
    with _reasons(spec.architecture):
        causal = _read(config, model_dir, device, dtype) if seed is None else _invent(config, device, dtype, seed)
        model = HfModel(spec, causal.requires_grad_(False), dtype)
        _prove(model, device, dtype)
    return model


@contextmanager
def _reasons(name: str) -> Iterator[None]:
    """Whatever the foreign code raises, a reason to refuse the model is one readable line."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{name} is not served: {error.message}", field="model") from error
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        if "on meta tensors" in first:
            first = "its forward pass depends on values of tensors"
        elif isinstance(error, KeyError) and TRACED in first:
            first = "it does not take its attention from the interface that all models share"
        else:
            first = f"{type(error).__name__}: {first}"
        raise ConfigError(f"{name} of transformers cannot be served: {first}", field="model") from error


def _config(model_dir: Path) -> Any:
    """The configuration of a causal decoder whose kinds of layers and of rope can be served."""
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        raise ConfigError(f"transformers cannot read the config.json of {model_dir}: {first}", field="model") from error
    name = next(iter(config.architectures or ()), f"a model of type {config.model_type}")
    if config.is_encoder_decoder:
        raise ConfigError(f"{name} is not served: its decoder reads an encoder's output too", field="model")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__ != name:
        raise ConfigError(f"{name} is not served: transformers knows it as no causal language model", field="model")
    text = config.get_text_config().to_dict()
    kinds = set(text.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ConfigError(f"{name} is not served: it has layers of {', '.join(sorted(kinds))}", field="model")
    if any("dynamic" in rope["rope_type"] for rope in _ropes(text)):
        raise ConfigError(
            f"{name} is not served: with dynamic rope scaling, keys depend on later tokens", field="model"
        )
    return config


def _ropes(text: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rope parameters of a configuration, one set for all layers or one for each kind."""
    raw = text.get("rope_parameters") or {}
    each = [raw, *(value for value in raw.values() if isinstance(value, Mapping))]
    return [rope for rope in each if "rope_type" in rope]


def _max_position(text: Any) -> int:
    """Longest sequence. With longrope all keys would change where it exceeds the original length: it ends there."""
    longest = int(text.max_position_embeddings)
    for rope in _ropes(text.to_dict()):
        if rope["rope_type"] == "longrope":
            longest = min(longest, int(rope["original_max_position_embeddings"]))
    return longest


def _canonical(config: Any) -> str:
    """What the configuration says about the computation, in one spelling."""
    said = config.to_dict()
    for aside in ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "architectures"):
        said.pop(aside, None)
    return json.dumps(said, sort_keys=True, default=str)


def _build(config: Any, attention: str, dtype: torch.dtype) -> Any:
    # A configuration belongs to its model: building one writes the choice of attention into it.
    own = copy.deepcopy(config)
    return AutoModelForCausalLM.from_config(own, attn_implementation=attention, dtype=dtype).eval()


def _seal(causal: Any, base: str, output: type) -> None:
    """From now on the causal model is its head alone: inputs_embeds are the last states of the decoder below it."""
    causal.set_submodule(base, _Given(output))


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


def _read(config: Any, model_dir: Path, device: torch.device, dtype: torch.dtype) -> Any:
    hf_logging.disable_progress_bar()
    causal, report = AutoModelForCausalLM.from_pretrained(
        model_dir,
        config=config,
        dtype=dtype,
        attn_implementation=PAGED,
        device_map=None if device.type == "cpu" else device,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if report.get(kind):
            raise ConfigError(f"its checkpoint has {len(report[kind])} {kind}, such as {min(report[kind])}")
    return causal.eval()


def _invent(config: Any, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """Random weights as the model's own code draws them, on the device."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(seed)
        return _build(config, PAGED, dtype)


@torch.inference_mode()
def _prove(model: HfModel, device: torch.device, dtype: torch.dtype) -> None:
    """ConfigError unless two interleaved sequences, in pieces, come out as they do in transformers alone."""
    spec = model.spec
    length = min(PROOF_TOKENS, spec.max_position)
    blocks = -(-length // PROOF_BLOCK)
    size = (2 * blocks + 1, 2, spec.num_kv_heads, PROOF_BLOCK, spec.head_dim)
    cache = [LayerKV(torch.zeros(size, dtype=dtype, device=device)) for _ in range(spec.num_layers)]
    backend = TorchAttention(cache, spec.num_heads, spec.windows, 2 * blocks, scale=spec.scale, softcap=spec.softcap)
    ids = torch.randint(spec.vocab_size, (2, length), generator=torch.Generator().manual_seed(1)).to(device)
    expected = [model.own(row) for row in ids]
    tables = [list(range(0, 2 * blocks, 2)), list(range(1, 2 * blocks, 2))]
    errors: list[Tensor] = []
    for ranges in _pieces(length):
        rows = [row for row, (start, end) in enumerate(ranges) if end > start]
        starts, counts = [ranges[r][0] for r in rows], [ranges[r][1] - ranges[r][0] for r in rows]
        metadata = backend.prepare(StepShape(starts, counts, [tables[r] for r in rows]))
        tokens = torch.cat([ids[r, slice(*ranges[r])] for r in rows])
        positions = torch.cat([torch.arange(*ranges[r], device=device) for r in rows])
        got = model.hidden(tokens, positions, cache, backend, metadata)
        want = torch.cat([expected[r][slice(*ranges[r])] for r in rows]).float()
        errors.append((got.float() - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-20))
    error = float(torch.cat(errors).median())
    if not error < PROOF_TOLERANCE[dtype]:
        raise ConfigError(
            f"in pieces it computes something else than at once (relative error {error:.2g}): its layers keep state "
            f"other than keys and values, or know positions from elsewhere"
        )


def _pieces(length: int) -> list[list[tuple[int, int]]]:
    """Two sequences cut differently: chunks, single tokens, and one of them alone at the end."""
    third, half = length // 3, length // 2
    return [
        [(0, third), (0, half)],
        [(third, third + 1), (half, half + 1)],
        [(third + 1, length), (half + 1, length - 1)],
        [(length, length), (length - 1, length)],
    ]
