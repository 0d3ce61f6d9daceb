"""A decoder's operations on a GPU: eight launches a layer, all of which a CUDA graph can hold.

One row: own GEMVs, which read the weights faster than cuBLAS and have norm, activation and residual in their ends.
More rows: cuBLAS, with the residual added in the product's epilogue (in float32: one rounding less than a separate
add), RMSNorm and SiLU x mul as one pass each. Needs triton at import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.base import AttentionBackend
from engine.attention.triton_backend import TritonAttention, TritonMetadata
from engine.kernels.gemv import gemv
from engine.kernels.norm import rms_norm, silu_mul
from engine.kernels.rope_kv import rope_kv_write
from engine.models.ops import Attend

if TYPE_CHECKING:
    from engine.models.decoder import Attention, Norm


class FusedOps:
    """cos, sin: float32[length, D / 2]. Attention must be the Triton backend's."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._cos, self._sin = cos, sin

    def step(self, positions: Tensor, backend: AttentionBackend[Any], metadata: TritonMetadata) -> Attend:
        paged = cast(TritonAttention, backend)

        def attend(qkv: Tensor, attention: Attention, cache: Tensor) -> Tensor:
            heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.head_dim
            q_norm, k_norm = attention.q_norm, attention.k_norm
            rope_kv_write(
                qkv, cache, positions, metadata.slots, self._cos, self._sin, num_heads=heads,
                q_norm=None if q_norm is None else q_norm.weight,
                k_norm=None if k_norm is None else k_norm.weight,
                eps=0.0 if q_norm is None else q_norm.eps,
            )  # fmt: skip
            split = qkv.view(-1, heads + 2 * kv_heads, dim)
            kv = split[:, heads:].view(-1, 2, kv_heads, dim)
            attended = paged.attend_written(split[:, :heads], kv, cache, metadata, attention.window)
            return attended.view(-1, heads * dim)

        return attend

    def norm_linear(self, x: Tensor, norm: Norm, linear: nn.Linear) -> Tensor:
        if x.shape[0] == 1:
            return gemv(x, linear.weight, bias=linear.bias, norm=norm.weight, eps=norm.eps)
        return F.linear(rms_norm(x, norm.weight, norm.eps), linear.weight, linear.bias)

    def norm_swiglu(self, x: Tensor, norm: Norm, gate_up: nn.Linear) -> Tensor:
        if x.shape[0] == 1:
            return gemv(x, gate_up.weight, bias=gate_up.bias, norm=norm.weight, eps=norm.eps, gated=True)
        return silu_mul(self.norm_linear(x, norm, gate_up))

    def add_linear(self, x: Tensor, y: Tensor, linear: nn.Linear) -> Tensor:
        if x.shape[0] == 1:
            return gemv(y, linear.weight, bias=linear.bias, residual=x, out=x)
        x.addmm_(y, linear.weight.t())
        return x if linear.bias is None else x.add_(linear.bias)

    def logits(self, x: Tensor, norm: Norm, weight: Tensor) -> Tensor:
        if x.shape[0] == 1:
            out = torch.empty(1, weight.shape[0], dtype=torch.float32, device=x.device)
            return gemv(x, weight, norm=norm.weight, eps=norm.eps, out=out)
        normed = rms_norm(x, norm.weight, norm.eps)
        if x.dtype == torch.float32:
            return F.linear(normed, weight)
        return torch.mm(normed, weight.t(), out_dtype=torch.float32)
