"""The operations of a decoder layer on a GPU with one order of sums: the bits of a row do not depend on other rows.

RMSNorm is a kernel of its own at every number of rows. Each product is `fixed_order_gemm`, with bias, SiLU x mul or
residual add in its epilogue. This module needs triton at import.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.fixed_order.gemm import fixed_order_gemm
from engine.kernels.norm import rms_norm
from engine.models.fused import FusedOps
from engine.models.layers import Embedding, Linear, LinearSlice, RMSNorm


class FixedOrderOps(FusedOps):
    """The operations of `FusedOps` in an order that the number of rows does not change. Not for a shard of a model."""

    def norm_linear(self, x: Tensor, norm: RMSNorm, linear: Linear | LinearSlice) -> Tensor:
        return fixed_order_gemm(rms_norm(x, norm.weight, norm.eps), linear.weight, bias=linear.bias)

    def norm_swiglu(self, x: Tensor, norm: RMSNorm, gate_up: Linear) -> Tensor:
        return fixed_order_gemm(rms_norm(x, norm.weight, norm.eps), gate_up.weight, bias=gate_up.bias, gated=True)

    def add_linear(self, x: Tensor, y: Tensor, linear: Linear) -> Tensor:
        assert self._all_reduce is None
        return fixed_order_gemm(y, linear.weight, bias=linear.bias, residual=x, out=x)

    def logits(self, x: Tensor, norm: RMSNorm, head: Linear | Embedding | LinearSlice) -> Tensor:
        out = torch.empty(len(x), len(head.weight), dtype=torch.float32, device=x.device)
        return fixed_order_gemm(rms_norm(x, norm.weight, norm.eps), head.weight, out=out)
