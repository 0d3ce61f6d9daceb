"""The operations of a decoder layer on a GPU: seven to ten kernel launches per layer, all capturable in a CUDA graph.

The kernels depend on the number of rows (tokens):

    1          GEMV with norm, activation and residual add fused; it reads the weights faster than cuBLAS
    2 to 16    skinny GEMM with activation and residual add fused
    17 to 2047 cuBLAS; the residual add is in its epilogue (float32: one rounding less than a separate add); RMSNorm
               and SiLU x mul are one kernel each
    from 2048  as for 17 to 2047, but gate and up with a fused SiLU x mul on Hopper

This module needs triton at import.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.triton_backend import TritonAttention, TritonMetadata
from engine.kernels.gemm import MAX_SKINNY_ROWS, MIN_SWIGLU_ROWS, gemm_swiglu, gemv, skinny_gemm, supports_gemm_swiglu
from engine.kernels.kv_write import rope_kv_write
from engine.kernels.norm import rms_norm, silu_mul
from engine.kv.kv_pool import LayerKV
from engine.models.base import ForwardContext
from engine.models.layers import Attention, Embedding, Linear, LinearSlice, RMSNorm
from engine.models.ops import AttentionFn, TorchOps, WriteKVFn, float32_product


class FusedOps(TorchOps):
    """The operations in Triton kernels. The attention must be `TritonAttention`, and the rope tables float32."""

    def attention_for(self, positions: Tensor, context: ForwardContext) -> AttentionFn:
        backend, metadata = cast(TritonAttention, context.backend), context.metadata

        def attend(qkv: Tensor, attention: Attention, cache: LayerKV) -> Tensor:
            heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.head_dim
            self._rotate_and_write(qkv, attention, heads, cache, positions, metadata)
            split = qkv.view(-1, heads + 2 * kv_heads, dim)
            kv = split[:, heads:].view(-1, 2, kv_heads, dim)
            attended = backend.attend_written(split[:, :heads], kv, cache, metadata, attention.window)
            return attended.view(-1, heads * dim)

        return attend

    def kv_write_for(self, positions: Tensor, context: ForwardContext) -> WriteKVFn:
        def write(kv: Tensor, attention: Attention, cache: LayerKV) -> None:
            self._rotate_and_write(kv, attention, 0, cache, positions, context.metadata)

        return write

    def _rotate_and_write(
        self, qkv: Tensor, attention: Attention, heads: int, cache: LayerKV, positions: Tensor, metadata: TritonMetadata
    ) -> None:
        """Rotates qkv, which has `heads` query heads, in place and writes its keys and values to the pool."""
        q_norm, k_norm = attention.q_norm, attention.k_norm
        norms: dict[str, Any] = {"eps": 0.0}
        if q_norm is not None and k_norm is not None:
            norms = {"q_norm": q_norm.weight, "k_norm": k_norm.weight, "eps": q_norm.eps}
        tables = self._cos, self._sin
        rope_kv_write(qkv, cache, positions, metadata.slot_mapping, *tables, num_heads=heads, **norms)

    def norm_linear(self, x: Tensor, norm: RMSNorm, linear: Linear | LinearSlice) -> Tensor:
        if len(x) == 1:
            return gemv(x, linear.weight, bias=linear.bias, norm=norm.weight, eps=norm.eps)
        normed = rms_norm(x, norm.weight, norm.eps)
        if len(x) <= MAX_SKINNY_ROWS:
            return skinny_gemm(normed, linear.weight, bias=linear.bias)
        return F.linear(normed, linear.weight, linear.bias)

    def norm_swiglu(self, x: Tensor, norm: RMSNorm, gate_up: Linear) -> Tensor:
        if len(x) == 1:
            return gemv(x, gate_up.weight, bias=gate_up.bias, norm=norm.weight, eps=norm.eps, gated=True)
        normed = rms_norm(x, norm.weight, norm.eps)
        if len(x) <= MAX_SKINNY_ROWS:
            return skinny_gemm(normed, gate_up.weight, bias=gate_up.bias, gated=True)
        fits = gate_up.weight.dtype == torch.bfloat16 and gate_up.bias is None and gate_up.out_features % 16 == 0
        if len(x) >= MIN_SWIGLU_ROWS and fits and gate_up.in_features % 8 == 0 and supports_gemm_swiglu(x.device):
            return gemm_swiglu(normed, gate_up.weight)
        return silu_mul(F.linear(normed, gate_up.weight, gate_up.bias))

    def add_linear(self, x: Tensor, y: Tensor, linear: Linear) -> Tensor:
        if self._all_reduce is not None:
            return super().add_linear(x, y, linear)
        if len(x) == 1:
            return gemv(y, linear.weight, bias=linear.bias, residual=x, out=x)
        if len(x) <= MAX_SKINNY_ROWS:
            return skinny_gemm(y, linear.weight, bias=linear.bias, residual=x, out=x)
        x.addmm_(y, linear.weight.t())
        return x if linear.bias is None else x.add_(linear.bias)

    def logits(self, x: Tensor, norm: RMSNorm, head: Linear | Embedding | LinearSlice) -> Tensor:
        weight = head.weight
        if len(x) > MAX_SKINNY_ROWS:
            return float32_product(rms_norm(x, norm.weight, norm.eps), weight)
        out = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
        if len(x) == 1:
            return gemv(x, weight, norm=norm.weight, eps=norm.eps, out=out)
        return skinny_gemm(rms_norm(x, norm.weight, norm.eps), weight, out=out)
