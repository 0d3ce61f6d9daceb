"""The operations of a decoder layer in a step with adapters, over the operations of any base.

`Decoder` uses them only if a sequence of the step has an adapter, so other steps cost nothing. The base computes its
products as always, also from quantised weights, except that SiLU x mul comes after the adapters' part of gate and up.
"""

from __future__ import annotations

from torch import Tensor

from engine.adapters.rows import StepAdapters
from engine.models.base import ForwardContext
from engine.models.layers import Attention, Embedding, Linear, LinearSlice, RMSNorm
from engine.models.moe import MoE
from engine.models.ops import AttentionFn, TorchOps, WriteKVFn


class AdapterOps(TorchOps):
    """Implements the operations of `TorchOps` by those of `base` and the adapters of the step's tokens."""

    def __init__(self, base: TorchOps, step: StepAdapters) -> None:
        self._base, self._step, self._rows = base, step, step.tokens

    def for_results(self) -> TorchOps:
        return AdapterOps(self._base, StepAdapters(self._step.results))

    def attention_for(self, positions: Tensor, context: ForwardContext) -> AttentionFn:
        return self._base.attention_for(positions, context)

    def kv_write_for(self, positions: Tensor, context: ForwardContext) -> WriteKVFn:
        return self._base.kv_write_for(positions, context)

    def norm_linear(self, x: Tensor, norm: RMSNorm, linear: Linear | LinearSlice) -> Tensor:
        assert isinstance(linear, Linear), "a part of a product has `norm_kv`"
        shrunk = self._rows.shrink(x, self._rows.sites.of(linear), norm)
        if (change := self._rows.row_change(shrunk)) is not None:
            whole = self._base.adapted_row(x, linear, change, norm=norm)
            if whole is not None:
                return whole
        out = self._base.norm_linear(x, norm, linear)
        self._rows.expand(shrunk, out)
        return out

    def norm_kv(self, x: Tensor, norm: RMSNorm, attention: Attention) -> Tensor:
        shrunk = self._rows.shrink(x, self._rows.sites.of(attention.qkv), norm)
        out = self._base.norm_kv(x, norm, attention)
        self._rows.expand(shrunk, out, first_part=1)
        return out

    def norm_swiglu(self, x: Tensor, norm: RMSNorm, gate_up: Linear) -> Tensor:
        shrunk = self._rows.shrink(x, self._rows.sites.of(gate_up), norm)
        whole: Tensor | None = None
        if (change := self._rows.row_change(shrunk)) is not None:
            whole = self._base.adapted_row(x, gate_up, change, norm=norm, gated=True)
        elif (chunk := self._rows.chunk_change(shrunk)) is not None:
            whole = self._base.adapted_swiglu(gate_up, chunk)
        if whole is not None:
            return whole
        return self._rows.expand_swiglu(shrunk, self._base.norm_linear(x, norm, gate_up))

    def add_linear(self, x: Tensor, y: Tensor, linear: Linear) -> Tensor:
        shrunk = self._rows.shrink(y, self._rows.sites.of(linear), None)
        if (change := self._rows.row_change(shrunk)) is not None:
            whole = self._base.adapted_row(y, linear, change, residual=x)
            if whole is not None:
                return whole
        if self._base.is_whole:
            x = self._base.add_linear(x, y, linear)
            self._rows.expand(shrunk, x, factor=linear.multiplier)
            return x
        # y and A are parts of the inputs, so the ranks' B A y sum up with the product in the layer's own all-reduce.
        part = self._base.partial_product(y, linear)
        self._rows.expand(shrunk, part)
        return self._base.add_reduced(x, part, linear)

    def add_experts(self, x: Tensor, norm: RMSNorm, moe: MoE) -> Tensor:
        return self._base.add_experts(x, norm, moe)

    def logits(self, x: Tensor, norm: RMSNorm, head: Linear | Embedding | LinearSlice) -> Tensor:
        shrunk = self._rows.shrink(x, self._rows.sites.head, norm)
        out = self._base.logits(x, norm, head)
        self._rows.expand(shrunk, out)
        return out
