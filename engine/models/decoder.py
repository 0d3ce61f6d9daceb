"""The decoder of the Llama family, with an MLP or a mixture of experts in each layer. Models differ in their spec.

The tokens of all sequences of a step form one flat dimension T. q, k and v are one GEMM; gate and up are one GEMM.
The LM head, and the last layer after its attention, run only for the requested rows. If few rows are requested,
the last layer's attention also runs for these rows only, and the other tokens get keys and values there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import ConfigError
from engine.adapters.ops import AdapterOps
from engine.adapters.rows import AdapterRows, StepAdapters
from engine.kernels.cpu.compiled import is_available
from engine.kv.groups.state_pool import LayerState
from engine.kv.kv_pool import LayerKV
from engine.models.base import ForwardContext
from engine.models.cpu_weights import can_pack, pack
from engine.models.gated_delta.layer import DeltaProjections, GatedDelta
from engine.models.layers import MLP, Attention, Embedding, LatentAttention, Linear, RMSNorm, allocate
from engine.models.moe import Experts, MoE
from engine.models.ops import AllReduce, LatentProjections, RowWiseOps, TorchOps, rms_norm_torch, rope_tables
from engine.models.single_row import SingleRowOps
from engine.models.spec import HybridModelSpec, LatentModelSpec, ModelSpec
from engine.quantization.scheme import Quantization
from engine.quantization.weight import QuantizedWeight

#: The last layer attends for the requested rows alone if there are at most MAX_SINGLE_ROWS of them and the step has at
#: least MIN_TOKENS_PER_ROW tokens for each. With fewer tokens the extra kernel launches cost more than they save.
MAX_SINGLE_ROWS = 8
MIN_TOKENS_PER_ROW = 128
#: Weights of the layers from which compiled kernels gain more than the import of numba costs.
MIN_COMPILED_WEIGHTS = 8 << 20

#: The attention, or the KV write, of a step: the function that `TorchOps` makes for the layers' kind of attention.
StepFn = Callable[[Any, Any, Any], Any]
LayerCache = LayerKV | LayerState  #: Keys and values, or a recurrent state, of the tokens before the step.


class Layer(nn.Module):
    """Decoder layer `index`: attention and MLP or experts, each with a norm before it and a residual add after it."""

    def __init__(self, spec: ModelSpec, index: int) -> None:
        super().__init__()
        norms: dict[str, Any] = {"eps": spec.norm_eps, "zero_centred": spec.zero_centred}
        self.attention_norm = RMSNorm("input_layernorm", spec.hidden_size, **norms)
        self.attention: Attention | LatentAttention | GatedDelta
        if isinstance(spec, LatentModelSpec):
            self.attention = LatentAttention(spec)
        elif isinstance(spec, HybridModelSpec):
            self.attention = GatedDelta(spec) if spec.delta.layers[index] else Attention(spec, None)
        else:
            self.attention = Attention(spec, spec.windows[index])
        self.mlp_norm = RMSNorm("post_attention_layernorm", spec.hidden_size, **norms)
        self.mlp: MLP | MoE
        if spec.moe is not None and spec.has_experts(index):
            self.mlp = MoE(spec, spec.moe)
        else:
            self.mlp = MLP(spec)

    def forward(self, x: Tensor, cache: LayerCache, ops: TorchOps, attend: StepFn, rows: Tensor | None) -> Tensor:
        """Returns the residual stream after this layer, of all tokens or of `rows`. Overwrites x."""
        attention, gate = self.attention, None
        projected: Tensor | LatentProjections | DeltaProjections
        if isinstance(attention, LatentAttention):
            projected = ops.latent_projections(x, self.attention_norm, attention)
        elif isinstance(attention, GatedDelta):
            projected = ops.delta_projections(x, self.attention_norm, attention)
        else:
            gate, projected = attention.split_gate(ops.norm_linear(x, self.attention_norm, attention.qkv))
        attended = attend(projected, attention, cache)
        if gate is not None:
            attended = ops.gate(attended, gate)
        if rows is not None:
            x, attended, ops = x[rows], attended[rows], ops.for_results()
        x = ops.add_linear(x, attended, self.attention.out)
        if isinstance(self.mlp, MoE):
            return ops.add_experts(x, self.mlp_norm, self.mlp)
        gated = ops.norm_swiglu(x, self.mlp_norm, self.mlp.gate_up)
        return ops.add_linear(x, gated, self.mlp.down)

    def write_kv(self, x: Tensor, cache: LayerCache, ops: TorchOps, write: StepFn) -> None:
        """Computes and writes the keys and values of all tokens, without attention and MLP."""
        attention = self.attention
        assert not isinstance(attention, GatedDelta)
        if isinstance(attention, LatentAttention):
            kv = ops.norm_linear(x, self.attention_norm, attention.kv_down)
        else:
            kv = ops.norm_kv(x, self.attention_norm, attention)
        write(kv, attention, cache)


class Decoder(nn.Module):
    """The whole model. Its parameters are uninitialised until `engine.models.weights` fills them.

    Args:
        max_len: longest sequence in tokens; sizes the rope tables.
        fused: use Triton kernels instead of plain torch; needs the Triton attention backend. None: True on a GPU.
        all_reduce: makes this a tensor-parallel shard; has the meaning of `all_reduce` in `TorchOps`.
        quantization: how linear layers are quantised; None: not at all.
        deterministic: compute every token in one order of sums. The attention backend must do so too.
    """

    def __init__(
        self,
        spec: ModelSpec,
        max_len: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        fused: bool | None = None,
        all_reduce: AllReduce | None = None,
        quantization: Quantization | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        #: Bytes of the quantised linear layers, as they were loaded. Experts: `quantized_size`.
        self.quantized_bytes = 0
        with torch.device("meta"):
            self.embedding = Embedding("model.embed_tokens", spec.vocab_size, spec.hidden_size)
            self.layers = nn.ModuleList(Layer(spec, index) for index in range(spec.num_layers))
            self.norm = RMSNorm("model.norm", spec.hidden_size, spec.norm_eps, zero_centred=spec.zero_centred)
            own_head = Linear(spec.hidden_size, {"lm_head": spec.vocab_size}, bias=False)
            own_head.plain = True
            self.head = self.embedding if spec.tie_word_embeddings else own_head
            self.capturable = device.type == "cuda" if fused is None else fused
            if quantization is not None:
                self._set_schemes(quantization)
        allocate(self, device, dtype)
        quantized = quantization is not None
        forms = {"quantized": quantized, "deterministic": deterministic}
        self._ops = make_ops(spec, max_len, device, dtype, self.capturable, all_reduce, **forms)
        self._row_ops: SingleRowOps | None = None  #: The operations of a step of one token, if the weights are packed.

    def _set_schemes(self, quantization: Quantization) -> None:
        """Sets the scheme of each linear layer. Raises ConfigError if layers of one product have different schemes."""
        for prefix, linear in self.linears():
            schemes = {name: quantization.scheme_of(prefix + name) for name in linear.parts}
            first, *others = schemes
            for other in others:
                if schemes[other] != schemes[first]:
                    texts = [s.text if (s := schemes[name]) else "not quantised" for name in (first, other)]
                    raise ConfigError(
                        f"{quantization.file}: weights of the format {quantization.method!r} are not supported: "
                        f"{prefix}{first} is {texts[0]}, {prefix}{other} is {texts[1]}; they must be alike",
                        field="model",
                    )
            linear.scheme = schemes[first]
            if linear.plain and linear.scheme is not None and linear.scheme.layout == "load":
                linear.scheme = None
            if linear.scheme is not None and not linear.plain:
                linear.weight = nn.Parameter(torch.empty(0))
        for prefix, experts in self.experts():
            schemes = {prefix + name: quantization.scheme_of(prefix + name) for name in experts.projection_names()}
            stacked = prefix + experts.names.down
            scheme = None if schemes else quantization.scheme_of(stacked)
            if scheme is not None and scheme.layout != "load":
                problem = f"weights of the format {quantization.method!r} are not supported for experts in one tensor"
                raise ConfigError(f"{quantization.file}: {problem} ({stacked})", field="model")
            # int8 is for products of oneDNN with one matrix, so experts keep their dtype.
            if schemes and not all(s and s.layout == "load" and s.kind == "int8" for s in schemes.values()):
                experts.set_scheme(schemes, keep=self.capturable)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Yields the linear layers, each with the prefix of its names in the checkpoint."""
        for index, layer in enumerate(self.layers):
            for module in layer.modules():
                if isinstance(module, Linear):
                    yield f"model.layers.{index}.", module
        if isinstance(self.head, Linear):
            yield "", self.head

    def experts(self) -> Iterator[tuple[str, Experts]]:
        """Yields the experts of the layers, each with the prefix of its names in the checkpoint."""
        for index, layer in enumerate(self.layer_list):
            if isinstance(layer.mlp, MoE):
                yield f"model.layers.{index}.", layer.mlp.experts

    def quantized_size(self) -> int:
        """Returns the bytes of the quantised weights of linear layers and experts, before `prepare`."""
        return self.quantized_bytes + sum(experts.quantized_bytes for _, experts in self.experts())

    def place(self, linear: Linear, weight: QuantizedWeight) -> None:
        """Gives a layer with a scheme its weight."""
        self.quantized_bytes += weight.nbytes
        if linear.plain:
            linear.weight.copy_(weight.dequantize(linear.weight.dtype, linear.in_features))
        else:
            self._ops.place(linear, weight, self.embedding.weight.dtype)
            attention = self.layer_list[-1].attention
            if isinstance(attention, Attention) and linear is attention.qkv:
                self._ops.place_kv(attention, weight, self.embedding.weight.dtype)

    @property
    def layer_list(self) -> list[Layer]:
        return cast(list[Layer], list(self.layers))

    def forward(self, tokens: Tensor, positions: Tensor, context: ForwardContext, rows: Tensor | None = None) -> Tensor:
        """Computes hidden states [R, hidden] before the final norm."""
        if context.adapters is not None:
            return self._forward(AdapterOps(self._ops, context.adapters), tokens, positions, context, rows)
        if self._row_ops is not None and len(tokens) == 1:
            with self._row_ops.one_thread():
                return self._forward(self._row_ops, tokens, positions, context, rows)
        return self._forward(self._ops, tokens, positions, context, rows)

    def _forward(
        self, ops: TorchOps, tokens: Tensor, positions: Tensor, context: ForwardContext, rows: Tensor | None
    ) -> Tensor:
        attend, hook, last = self._attention_for(ops, positions, context), context.layer_hook, self.layer_list[-1]
        x, cache = self._run_body(ops, tokens, context, attend), self._caches(context)[-1]
        few = rows is not None and len(rows) <= MAX_SINGLE_ROWS and len(rows) * MIN_TOKENS_PER_ROW <= len(tokens)
        if rows is not None and few and not isinstance(last.attention, GatedDelta):
            last.write_kv(x, cache, ops, self._kv_write_for(ops, positions, context))
            context = context._replace(metadata=context.backend.select_tokens(context.metadata, rows, positions))
            attend, ops = self._attention_for(ops, positions[rows], context), ops.for_results()
            x, rows = x[rows], None
        x = last.forward(x, cache, ops, attend, rows)
        if hook is not None:
            hook(len(self.layers), x)
        return x

    def write_kv(self, tokens: Tensor, positions: Tensor, context: ForwardContext) -> None:
        ops = self._ops if context.adapters is None else AdapterOps(self._ops, context.adapters)
        x = self._run_body(ops, tokens, context, self._attention_for(ops, positions, context))
        write = self._kv_write_for(ops, positions, context)
        self.layer_list[-1].write_kv(x, self._caches(context)[-1], ops, write)

    def _attention_for(self, ops: TorchOps, positions: Tensor, context: ForwardContext) -> StepFn:
        if isinstance(self.spec, LatentModelSpec):
            return ops.latent_attention_for(positions, context)
        attend = ops.attention_for(positions, context)
        if not isinstance(self.spec, HybridModelSpec):
            return attend
        delta = ops.gated_delta_for(context)
        return lambda projected, layer, cache: (delta if isinstance(layer, GatedDelta) else attend)(
            projected, layer, cache
        )

    def _caches(self, context: ForwardContext) -> Sequence[LayerCache]:
        """Returns the keys and values, or the recurrent states, of each layer."""
        if not isinstance(self.spec, HybridModelSpec):
            return context.cache
        assert context.states is not None
        states, kv = iter(context.states.layers), iter(context.cache)
        return [next(states) if is_delta else next(kv) for is_delta in self.spec.delta.layers]

    def _kv_write_for(self, ops: TorchOps, positions: Tensor, context: ForwardContext) -> StepFn:
        latent = isinstance(self.spec, LatentModelSpec)
        return (ops.latent_write_for if latent else ops.kv_write_for)(positions, context)

    def _run_body(self, ops: TorchOps, tokens: Tensor, context: ForwardContext, attend: StepFn) -> Tensor:
        """Returns the residual stream [T, hidden] before the last layer."""
        x = F.embedding(tokens, self.embedding.weight)
        if context.adapters is not None:
            context.adapters.tokens.add_embedding(x, tokens)
        if self.spec.embedding_multiplier != 1.0:
            x.mul_(self.spec.embedding_multiplier)
        caches = self._caches(context)
        for index, layer in enumerate(self.layer_list):
            if context.layer_hook is not None:
                context.layer_hook(index, x)
            if index + 1 < len(self.layers):
                x = layer.forward(x, caches[index], ops, attend, None)
        return x

    def final_norm(self, hidden: Tensor) -> Tensor:
        return rms_norm_torch(hidden, self.norm)

    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        if adapters is not None:
            logits = AdapterOps(self._ops, StepAdapters(adapters)).logits(hidden, self.norm, self.head)
        elif self._row_ops is not None and len(hidden) == 1:
            with self._row_ops.one_thread():
                logits = self._row_ops.logits(hidden, self.norm, self.head)
        else:
            logits = self._ops.logits(hidden, self.norm, self.head)
        return logits if self.spec.logits_divisor == 1.0 else logits.div_(self.spec.logits_divisor)

    def prepare(self) -> None:
        """Brings loaded weights into the form that the device's kernels need."""
        for layer in self.layer_list:
            if isinstance(layer.mlp, MoE):
                layer.mlp.experts.check_scales()
                self._ops.prepare_experts(layer.mlp)

    def pack(self, *, keep_head: bool) -> None:
        """Packs the loaded weights if the device is a CPU that can use them, see `cpu_weights.pack`."""
        weight = self.embedding.weight
        if weight.device.type != "cpu" or not can_pack(weight.dtype):
            return
        plain = type(self._ops) is TorchOps and self._ops.is_whole and not any(self.experts())
        rows = plain and weight.dtype == torch.float32
        pack(self.embedding, list(self.layers), self.head, keep_head=keep_head, row_weights=rows)
        if rows:
            self._row_ops = make_single_row_ops(self._ops, [linear for prefix, linear in self.linears() if prefix])


def make_ops(
    spec: ModelSpec,
    max_len: int,
    device: torch.device,
    dtype: torch.dtype,
    fused: bool,
    all_reduce: AllReduce | None,
    *,
    quantized: bool = False,
    deterministic: bool = False,
) -> TorchOps:
    """Makes the operations of a decoder's layers. fused: in Triton kernels. quantized: for quantised weights too.

    deterministic: in one order of sums, for weights that are not quantised.
    """
    cos, sin = rope_tables(spec.rope, spec.rope_dim, max_len)
    if fused:
        if quantized:
            from engine.models.fused_quantized import QuantizedFusedOps as Ops
        elif deterministic:
            from engine.models.fixed_order import FixedOrderOps as Ops  # type: ignore[assignment]
        else:
            from engine.models.fused import FusedOps as Ops  # type: ignore[assignment]

        return Ops(cos.to(device), sin.to(device), all_reduce)
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return (RowWiseOps if deterministic else TorchOps)(cos.to(device, dtype), sin.to(device, dtype), all_reduce)


def make_single_row_ops(ops: TorchOps, linears: Sequence[Linear]) -> SingleRowOps:
    """Returns the fastest operations of one row, with the rope tables of `ops`. linears: all products of the layers."""
    if sum(linear.in_features * linear.out_features for linear in linears) >= MIN_COMPILED_WEIGHTS and is_available():
        from engine.models.compiled_row import CompiledRowOps

        return CompiledRowOps.of(ops, linears)
    return SingleRowOps.of(ops, linears)
