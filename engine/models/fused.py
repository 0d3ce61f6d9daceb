"""The operations of a decoder layer on a GPU: seven to ten kernel launches per layer, all capturable in a CUDA graph.

The kernels depend on the number of rows (tokens):

    1          GEMV with norm, activation and residual add fused; it reads the weights faster than cuBLAS
    2 to 16    skinny GEMM with activation and residual add fused
    17 to 2047 cuBLAS; the residual add is in its epilogue (float32: one rounding less than a separate add); RMSNorm
               and SiLU x mul are one kernel each
    from 2048  as for 17 to 2047, but gate and up with a fused SiLU x mul on Hopper

Layers with experts have kernels of their own, see engine/kernels/experts/layer.py. This module needs triton at import.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.triton_backend import TritonAttention
from engine.kernels.experts.layer import ExpertLayer, mixture
from engine.kernels.experts.routing import RoutingRule
from engine.kernels.experts.weight import ExpertWeight, fp8_weight, mxfp4_weight, plain_weight
from engine.kernels.gemm import MAX_SKINNY_ROWS, MIN_SWIGLU_ROWS, gemm_swiglu, gemv, skinny_gemm, supports_gemm_swiglu
from engine.kernels.kv_write import rope_kv_write
from engine.kernels.norm import rms_norm, silu_mul
from engine.kv.kv_pool import LayerKV
from engine.models.base import ForwardContext
from engine.models.layers import Attention, Embedding, Linear, LinearSlice, RMSNorm
from engine.models.moe import MoE
from engine.models.ops import AttentionFn, TorchOps, WriteKVFn, float32_product


class FusedOps(TorchOps):
    """The operations in Triton kernels. The attention must be `TritonAttention`, and the rope tables float32."""

    def attention_for(self, positions: Tensor, context: ForwardContext) -> AttentionFn:
        backend, metadata = cast(TritonAttention, context.backend), context.metadata

        def attend(qkv: Tensor, attention: Attention, cache: LayerKV) -> Tensor:
            heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.head_dim
            self._rotate_and_write(qkv, attention, heads, cache, positions, backend.slot_mapping(metadata, cache))
            split = qkv.view(-1, heads + 2 * kv_heads, dim)
            kv = split[:, heads:].view(-1, 2, kv_heads, dim)
            attended = backend.attend_written(split[:, :heads], kv, cache, metadata, attention.window, attention.sinks)
            return attended.view(-1, heads * dim)

        return attend

    def kv_write_for(self, positions: Tensor, context: ForwardContext) -> WriteKVFn:
        backend = cast(TritonAttention, context.backend)

        def write(kv: Tensor, attention: Attention, cache: LayerKV) -> None:
            slots = backend.slot_mapping(context.metadata, cache)
            self._rotate_and_write(kv, attention, 0, cache, positions, slots)

        return write

    def _rotate_and_write(
        self, qkv: Tensor, attention: Attention, heads: int, cache: LayerKV, positions: Tensor, slots: Tensor
    ) -> None:
        """Rotates qkv, which has `heads` query heads, in place and writes its keys and values to the pool."""
        q_norm, k_norm = attention.q_norm, attention.k_norm
        norms: dict[str, Any] = {"eps": 0.0}
        if attention.joint_norm:
            self._norm_jointly(qkv, attention, heads)
        elif q_norm is not None and k_norm is not None:
            norms = {"q_norm": q_norm.weight, "k_norm": k_norm.weight, "eps": q_norm.eps}
        tables = self._cos, self._sin
        rope_kv_write(qkv, cache, positions, slots, *tables, num_heads=heads, **norms)

    def _norm_jointly(self, qkv: Tensor, attention: Attention, heads: int) -> None:
        """Normalises the queries and the keys of qkv in place, each over all heads together."""
        dim, kv_heads = attention.head_dim, attention.kv_heads
        for first, count, norm in ((0, heads, attention.q_norm), (heads, kv_heads, attention.k_norm)):
            part = qkv[:, first * dim : (first + count) * dim]
            if not count or norm is None:
                continue
            if self._all_reduce is None:
                rms_norm(part, norm.weight, norm.eps, out=part)
            else:
                split = part.view(-1, count, dim)
                split.copy_(self._joint_norm(split, norm))

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
        if linear.multiplier != 1.0:
            return x.add_(F.linear(y, linear.weight, linear.bias), alpha=linear.multiplier)
        if len(x) == 1:
            return gemv(y, linear.weight, bias=linear.bias, residual=x, out=x)
        if len(x) <= MAX_SKINNY_ROWS:
            return skinny_gemm(y, linear.weight, bias=linear.bias, residual=x, out=x)
        x.addmm_(y, linear.weight.t())
        return x if linear.bias is None else x.add_(linear.bias)

    def add_experts(self, x: Tensor, norm: RMSNorm, moe: MoE) -> Tensor:
        layer = moe.prepared or self.prepare_experts(moe)
        gated = None if moe.shared is None else self.norm_swiglu(x, norm, moe.shared.gate_up)
        if self._all_reduce is None:
            x = mixture(x, layer, norm.weight, norm.eps, residual=x, out=x)
        else:
            part = mixture(x, layer, norm.weight, norm.eps)
            self._all_reduce(part)
            x.add_(part)
        return x if gated is None or moe.shared is None else self.add_linear(x, gated, moe.shared.down)

    def prepare_experts(self, moe: MoE) -> ExpertLayer:
        """Brings the loaded parameters into the form of the kernels and keeps it in the module.

        MXFP4 weights are rearranged and the module's own are freed, so this belongs before the KV pool is allocated.
        """
        router, experts = moe.router, moe.experts

        def weight(numbers: Tensor, scales: Tensor | None) -> ExpertWeight:
            if scales is None:
                return plain_weight(numbers)
            made = mxfp4_weight(numbers, scales) if numbers.dtype == torch.uint8 else fp8_weight(numbers, scales)
            if made.numbers.data_ptr() != numbers.data_ptr():
                numbers.data, scales.data = numbers.new_empty(0), scales.new_empty(0)
            return made

        prepared = ExpertLayer(
            router=router.weight,
            rule=RoutingRule(
                router.top_k,
                sigmoid=router.scoring == "sigmoid",
                normalize=router.normalize,
                scale=router.scale,
                groups=router.groups,
                top_groups=router.top_groups,
                first=experts.first,
            ),
            gate_up=weight(experts.gate_up, experts.gate_up_scales),
            down=weight(experts.down, experts.down_scales),
            router_bias=router.bias,
            correction=router.correction,
            gate_up_bias=experts.gate_up_bias,
            down_bias=experts.down_bias,
            gpt_oss=experts.activation == "gpt_oss",
        )
        moe.prepared = prepared
        return prepared

    def logits(self, x: Tensor, norm: RMSNorm, head: Linear | Embedding | LinearSlice) -> Tensor:
        weight = head.weight
        if len(x) > MAX_SKINNY_ROWS:
            return float32_product(rms_norm(x, norm.weight, norm.eps), weight)
        out = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
        if len(x) == 1:
            return gemv(x, weight, norm=norm.weight, eps=norm.eps, out=out)
        return skinny_gemm(rms_norm(x, norm.weight, norm.eps), weight, out=out)
