"""A linear layer with a quantised weight, with the operations around it, in the fastest way for the number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.gemm import MIN_SWIGLU_ROWS, gemm_swiglu, supports_gemm_swiglu
from engine.kernels.norm import rms_norm, silu_mul
from engine.kernels.quantized.choice import choose
from engine.kernels.quantized.dequantize import dequantize
from engine.kernels.quantized.device_weight import DeviceWeight
from engine.kernels.quantized.product import product
from engine.kernels.quantized.split import can_split, split_product
from engine.kernels.quantized.tables import Method
from engine.kernels.quantized.wide import wide_product
from engine.quantization.weight import BLOCK


def quantized_linear(
    x: Tensor,
    weight: DeviceWeight,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    method: Method | None = None,
) -> Tensor:
    """Computes norm(x) @ weight.T + bias, then adds a residual or multiplies silu(gate) by up.

    Args:
        x: [R, inputs] in the dtype `weight.compute`.
        norm: weight of an RMSNorm with `eps`.
        residual: [R, N]. Not with `gated`.
        gated: the first half of the weight's rows is gate, the second is up. The result is [R, N / 2].
        out: result, in any dtype. None allocates it; may be the residual.
        method: how to compute it. None: `choose`.
    """
    method = method or choose(weight, len(x))
    if weight.order is not None:
        x = (x if norm is None else rms_norm(x, norm, eps))[:, weight.order]
        norm = None
    halves = gated and not (weight.block and weight.outputs // 2 % BLOCK)  # no block has rows of gate and of up
    if method == "wide":
        y = wide_product(x, weight, norm=norm, eps=eps)
    else:
        x = x if norm is None else rms_norm(x, norm, eps, early=True)
        if method == "scratch":
            return _scratch(x, dequantize(weight), bias, residual, gated, out)
        if gated == halves:
            run = split_product if method.split and can_split(weight, method) else product
            return run(x, weight, method, bias=bias, residual=residual, gated=gated, out=out)
        y = product(x, weight, method)
    return _finish(y, bias, residual, gated, out)


def _scratch(
    x: Tensor, plain: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor | None
) -> Tensor:
    """Computes `quantized_linear` with a plain weight [N, K] and rows x that are normed."""
    fits = bias is None and out is None and plain.dtype == torch.bfloat16 and len(plain) % 32 == plain.shape[1] % 8 == 0
    if gated and fits and len(x) >= MIN_SWIGLU_ROWS and supports_gemm_swiglu(x.device):
        return gemm_swiglu(x, plain)
    if residual is not None and residual is out:
        out.addmm_(x, plain.t())
        return out if bias is None else out.add_(bias)
    return _finish(torch.nn.functional.linear(x, plain), bias, residual, gated, out)


def _finish(y: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor | None) -> Tensor:
    """Applies what follows a product y, which it may overwrite."""
    if bias is not None:
        y = y.add_(bias)
    if gated:
        y = silu_mul(y)
    elif residual is not None and residual is out:
        return out.add_(y)
    elif residual is not None:
        y = y.add_(residual)
    return y if out is None else out.copy_(y)
