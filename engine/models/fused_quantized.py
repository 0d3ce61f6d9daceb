"""The operations of `FusedOps` for layers with quantised weights. Layers of plain weights are computed by `FusedOps`.

The kernels, and which of them computes how many rows, are in `engine.kernels.quantized`. This module needs triton at
import.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.kernels.quantized.choice import choose
from engine.kernels.quantized.device_weight import prepare
from engine.kernels.quantized.linear import quantized_linear
from engine.models.fused import FusedOps
from engine.models.layers import Attention, Linear, LinearSlice, RMSNorm
from engine.quantization.weight import QuantizedWeight


class QuantizedFusedOps(FusedOps):
    """Operations in Triton kernels, of a model in which layers have quantised weights."""

    def place(self, linear: Linear, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        linear.weight = nn.Parameter(torch.empty(0, dtype=dtype, device=weight.numbers.device), requires_grad=False)
        linear.prepared = prepare(weight, dtype)
        choose(linear.prepared, 1)  # asks what the device supports, which a CUDA graph cannot capture

    def place_kv(self, attention: Attention, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        attention.prepared_kv = prepare(weight.rows(attention.kv_rows), dtype)

    def norm_linear(self, x: Tensor, norm: RMSNorm, linear: Linear | LinearSlice) -> Tensor:
        if linear.prepared is None:
            return super().norm_linear(x, norm, linear)
        return quantized_linear(x, linear.prepared, bias=linear.bias, norm=norm.weight, eps=norm.eps)

    def norm_swiglu(self, x: Tensor, norm: RMSNorm, gate_up: Linear) -> Tensor:
        if gate_up.prepared is None:
            return super().norm_swiglu(x, norm, gate_up)
        return quantized_linear(x, gate_up.prepared, bias=gate_up.bias, norm=norm.weight, eps=norm.eps, gated=True)

    def add_linear(self, x: Tensor, y: Tensor, linear: Linear) -> Tensor:
        if linear.prepared is None or not self.is_whole:
            return super().add_linear(x, y, linear)
        if linear.multiplier == 1.0:
            return quantized_linear(y, linear.prepared, bias=linear.bias, residual=x, out=x)
        x.add_(quantized_linear(y, linear.prepared), alpha=linear.multiplier)
        return x if linear.bias is None else x.add_(linear.bias, alpha=linear.multiplier)

    def partial_product(self, y: Tensor, linear: Linear) -> Tensor:
        return super().partial_product(y, linear) if linear.prepared is None else quantized_linear(y, linear.prepared)
