"""The bytes and operations of a model, from its configuration files alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common.errors import ConfigError
from common.kv_layout import DTYPE_BYTES, FP8_DTYPE, KVLayout
from engine.adapters.packed import padded_rank
from engine.adapters.slots import sites_of, unsupported
from engine.config import LATENT_FP8
from engine.kv.groups.state_pool import default_num_states
from engine.models.base import ModelShape
from engine.models.decoder import Decoder
from engine.models.loader import ModelSource, open_model
from engine.models.spec import ModelSpec, Shard
from engine.quantization.scheme import Scheme
from engine.quantization.weight import BLOCK

SCALE_BYTES = 4  # Scales of quantised weights are float32.
KIND_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What one rank holds, reads and computes. Bytes and weights are of all layers together."""

    shape: ModelShape  # Of the rank.
    hidden_size: int
    widest: int  # Numbers of a token that the widest product of a layer writes.
    dense_bytes: float  # Weights that every step reads, without experts and embedding.
    expert_bytes: float  # All experts of the rank.
    other_bytes: float  # The embedding, of which a step reads a few rows.
    token_weights: float  # Weights that one token is multiplied with in the layers.
    head_weights: float  # Weights of the LM head.
    num_experts: int  # Of a layer and all ranks; 0: the model has none.
    top_k: int
    moe_layers: int
    kv_dtype: str
    kv_bytes: float  # Of one token in all layers, as the pool stores it.
    fp8_products: bool  # Inputs and weights of the layers' products are 8-bit floats.
    weights_text: str  # How the weights are quantised; "": not at all.
    ranks: int
    max_adapters: int = 0  # Slots for LoRA adapters.
    max_adapter_rank: int = 0
    adapter_bytes: float = 0.0  # All slots of the rank; on a CPU, the adapters that fill them.
    state_bytes: int = 0  # Of one recurrent state, as a slot of the pool stores it; 0: the model has none.

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights of the rank."""
        return self.dense_bytes + self.expert_bytes + self.other_bytes

    def num_states(self, memory: float, max_seqs: int) -> int:
        """Returns the slots for recurrent states that a pod takes by default; `memory` as in default_num_states."""
        return default_num_states(self.state_bytes, int(memory), max_seqs) if self.state_bytes else 0

    def read_bytes(self, rows: int) -> float:
        """Returns the bytes of weights that a step of `rows` tokens reads. Choices of experts are taken as uniform."""
        if not self.num_experts:
            return self.dense_bytes
        touched = 1 - (1 - self.top_k / self.num_experts) ** rows
        return self.dense_bytes + touched * self.expert_bytes

    def kv_read_bytes(self, context: float) -> float:
        """Returns the bytes of KV that a decode step reads for one sequence: layers with a window read the window."""
        windows = self.shape.windows
        seen = sum(context if window is None else min(context, window) for window in windows)
        return self.kv_bytes * seen / len(windows)

    def attended_pairs(self, tokens: int) -> float:
        """Returns the pairs of tokens that attend in a prompt, summed over layers."""
        total = 0.0
        for window in self.shape.windows:
            span = tokens if window is None else min(tokens, window)
            total += span * span / 2 + (tokens - span) * span
        return total


def model_size(
    model_dir: Path,
    *,
    dtype: str,
    kv_dtype: str = "auto",
    weights: str = "auto",
    ranks: int = 1,
    block_size: int = 16,
    max_adapters: int = 0,
    max_adapter_rank: int = 16,
) -> ModelSize:
    """Returns the size of a rank's part of a model. Raises ConfigError as loading it would.

    `weights`, `max_adapters` and `max_adapter_rank` are the settings of these names, and `kv_dtype` a dtype of the KV
    layout or auto.
    """
    source = open_model(model_dir, form=weights)
    source.check_layers()
    if source.spec.states is not None:
        for field, asked in (("tensor_parallel_size", ranks > 1), ("max_adapters", max_adapters > 0)):
            if asked:
                problem = f"not supported for {source.spec.architecture}, which has a recurrent state; leave it off"
                raise ConfigError(f"{field}: {problem}", field=field)
    shape = Shard(0, ranks).shard_spec(source.spec)
    stored = dtype if kv_dtype == "auto" else kv_dtype
    if shape.latent_dim and stored == FP8_DTYPE:
        raise ConfigError(LATENT_FP8, field="kv_dtype")
    layout = KVLayout(
        model="",
        revision="",
        num_layers=shape.kv_layers,
        num_kv_heads=source.spec.num_kv_heads,
        tensor_parallel=ranks,
        head_dim=shape.head_dim,
        latent_dim=shape.latent_dim,
        block_size=block_size,
        dtype=stored,
    )
    counted = _native(shape, source, dtype) if isinstance(shape, ModelSpec) else _foreign(shape, source, dtype)
    counted = replace(counted, kv_dtype=stored, kv_bytes=layout.block_bytes / block_size, ranks=ranks)
    if shape.states is not None:
        layout = replace(layout, state_bytes=shape.states.slot_bytes(getattr(torch, dtype)))
        return replace(counted, state_bytes=layout.state_pages * layout.block_bytes)
    if not max_adapters:
        return counted
    if not isinstance(shape, ModelSpec):
        raise unsupported("a model that transformers computes")
    model = Decoder(shape, 1, torch.device("meta"), getattr(torch, dtype), fused=False)
    slot = sites_of(model, Shard(0, ranks)).numbers(padded_rank(max_adapter_rank)) * DTYPE_BYTES[dtype]
    room = float(max_adapters * slot)
    return replace(counted, max_adapters=max_adapters, max_adapter_rank=max_adapter_rank, adapter_bytes=room)


def _native(spec: ModelSpec, source: ModelSource, dtype: str) -> ModelSize:
    """Counts the layers of our decoder, built without memory."""
    itemsize = DTYPE_BYTES[dtype]
    model = Decoder(spec, 1, torch.device("meta"), getattr(torch, dtype), fused=False)
    quantization = source.quantization
    dense = expert = token_weights = 0.0
    fp8 = False
    for prefix, linear in model.linears():
        if linear is model.head:
            continue
        # A plain layer is dequantised when it is loaded.
        read = None if linear.plain else quantization
        scheme = None if read is None else read.scheme_of(prefix + next(iter(linear.parts)))
        fp8 |= scheme is not None and scheme.kind == "fp8" and scheme.activations != "none"
        outputs, inputs = linear.out_features, linear.in_features
        dense += _weight_bytes(outputs, inputs, scheme, itemsize) + (
            outputs * itemsize if linear.bias is not None else 0
        )
        token_weights += outputs * inputs
    moe = spec.moe
    for prefix, experts in model.experts():
        assert moe is not None
        names = [] if quantization is None else experts.projection_names()
        if quantization is not None and names:
            with torch.device("meta"):
                experts.set_scheme({name: quantization.scheme_of(prefix + name) for name in names}, keep=True)
        fp8 |= experts.scheme is not None and experts.scheme.kind == "fp8" and experts.scheme.activations != "none"
        expert += sum(parameter.nbytes for parameter in experts.parameters())
        weights = len(experts.down) * 3 * experts.size * experts.hidden
        # Experts that a rank holds whole serve its share of the tokens.
        token_weights += weights * moe.top_k / moe.num_experts
    head = float(spec.vocab_size * spec.hidden_size)
    known = {id(p) for _, module in (*model.linears(), *model.experts()) for p in module.parameters()}
    known.add(id(model.embedding.weight))
    dense += sum(p.numel() * itemsize for p in model.parameters() if id(p) not in known) + head * itemsize
    inner = max(spec.intermediate_size, 0 if moe is None else moe.top_k * moe.expert_size + moe.shared_size)
    return ModelSize(
        shape=spec,
        hidden_size=spec.hidden_size,
        widest=max(2 * inner, spec.query_size + 2 * spec.kv_size),
        dense_bytes=dense,
        expert_bytes=expert,
        other_bytes=0.0 if spec.tie_word_embeddings else head * itemsize,
        token_weights=token_weights,
        head_weights=head,
        num_experts=0 if moe is None else moe.num_experts,
        top_k=0 if moe is None else moe.top_k,
        moe_layers=0 if moe is None else sum(moe.layers),
        kv_dtype="",
        kv_bytes=0.0,
        fp8_products=fp8,
        weights_text=source.weights_text or ("mxfp4 experts" if moe is not None and moe.mxfp4 else ""),
        ranks=1,
    )


def _foreign(shape: ModelShape, source: ModelSource, dtype: str) -> ModelSize:
    """Counts the parameters of a model that transformers computes. Every step is taken to read all of them."""
    from engine.models.hf.spec import build_model, read_hf_config

    with torch.device("meta"):
        causal = build_model(read_hf_config(source.model_dir), "eager", getattr(torch, dtype))
    total = sum(parameter.numel() for parameter in causal.parameters())
    embedding, head = causal.get_input_embeddings().weight, causal.get_output_embeddings().weight
    own = 0 if head is embedding else embedding.numel()
    linears = [m for m in causal.modules() if isinstance(m, torch.nn.Linear)]
    itemsize = DTYPE_BYTES[dtype]
    return ModelSize(
        shape=shape,
        hidden_size=embedding.shape[1],
        widest=max((m.out_features for m in linears if m.weight is not head), default=embedding.shape[1]),
        dense_bytes=float((total - own) * itemsize),
        expert_bytes=0.0,
        other_bytes=float(own * itemsize),
        token_weights=float(total - own - head.numel()),
        head_weights=float(head.numel()),
        num_experts=0,
        top_k=0,
        moe_layers=0,
        kv_dtype="",
        kv_bytes=0.0,
        fp8_products=False,
        weights_text="",
        ranks=1,
    )


def _weight_bytes(outputs: int, inputs: int, scheme: Scheme | None, itemsize: int) -> float:
    """Returns the bytes of one weight, with the scales and zeros of its scheme."""
    if scheme is None:
        return outputs * inputs * itemsize
    if scheme.extent == "block":
        scales = math.ceil(outputs / BLOCK) * math.ceil(inputs / BLOCK)
    else:
        scales = outputs * (inputs // scheme.group_size if scheme.extent == "group" else 1)
    # Most GPTQ checkpoints are symmetric, and the reader drops their zeros.
    zeros = 0 if scheme.symmetric or scheme.layout == "gptq" else scales
    return outputs * inputs * KIND_BYTES[scheme.kind] + scales * SCALE_BYTES + zeros
