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

from engine.attention.triton_backend import TritonAttention, TritonMetadata
from engine.kernels.adapters.changes import ChunkChange, RowChange
from engine.kernels.experts.layer import ExpertLayer, mixture
from engine.kernels.experts.routing import RoutingRule
from engine.kernels.experts.weight import ExpertWeight, fp8_weight, int4_weight, mxfp4_weight, plain_weight
from engine.kernels.gated_delta.layer import gated_delta
from engine.kernels.gemm import MAX_SKINNY_ROWS, MIN_SWIGLU_ROWS, gemm_swiglu, gemv, skinny_gemm, supports_gemm_swiglu
from engine.kernels.kv_write import rope_kv_write
from engine.kernels.latent.write import latent_write
from engine.kernels.norm import rms_norm, silu_mul
from engine.kv.groups.state_pool import LayerState
from engine.kv.kv_pool import LayerKV
from engine.models.base import ForwardContext
from engine.models.gated_delta.layer import DeltaProjections, GatedDelta
from engine.models.layers import Attention, Embedding, LatentAttention, Linear, LinearSlice, RMSNorm
from engine.models.moe import MoE
from engine.models.ops import (
    AttentionFn,
    GatedDeltaFn,
    LatentAttentionFn,
    LatentProjections,
    TorchOps,
    WriteKVFn,
    WriteLatentFn,
    float32_product,
)
from engine.quantization.weight import FIXED_ZERO

#: Largest output projection that one row brings to the L2 cache while it attends: half of an H100's cache.
PREFETCH_BYTES = 24 << 20
MIN_PREFETCH_BYTES = 1 << 20


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
        tables, out = (self._cos, self._sin), attention.out.weight
        soon = out if MIN_PREFETCH_BYTES <= out.nbytes <= PREFETCH_BYTES else None
        rope_kv_write(qkv, cache, positions, slots, *tables, num_heads=heads, soon=soon, **norms)

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

    def latent_attention_for(self, positions: Tensor, context: ForwardContext) -> LatentAttentionFn:
        backend, metadata = cast(TritonAttention, context.backend), context.metadata

        def attend(projected: LatentProjections, attention: LatentAttention, cache: LayerKV) -> Tensor:
            query, rotating = attention.split_query(projected.query)
            tokens, heads, rank = len(query), attention.heads, attention.rank
            absorbed = query.new_empty(tokens, heads, rank + attention.rope_dim)
            torch.bmm(query.transpose(0, 1), attention.key_up, out=absorbed[..., :rank].transpose(0, 1))
            # Attention starts while this kernel ends, so this one comes after the product.
            self._write_latents(
                projected.latent, attention, cache, positions, metadata, query=rotating, rotated=absorbed[..., rank:]
            )
            attended = backend.attend_written(absorbed, projected.latent, cache, metadata, None)
            values = query.new_empty(tokens, heads, attention.value_dim)
            torch.bmm(attended.transpose(0, 1), attention.value_up.transpose(1, 2), out=values.transpose(0, 1))
            return values.flatten(1)

        return attend

    def latent_write_for(self, positions: Tensor, context: ForwardContext) -> WriteLatentFn:
        def write(latent: Tensor, attention: LatentAttention, cache: LayerKV) -> None:
            self._write_latents(latent, attention, cache, positions, context.metadata)

        return write

    def _write_latents(
        self,
        latent: Tensor,
        attention: LatentAttention,
        cache: LayerKV,
        positions: Tensor,
        metadata: TritonMetadata,
        query: Tensor | None = None,
        rotated: Tensor | None = None,
    ) -> None:
        """Writes new latents [T, rank + rope_dim] to the pool, and rotates queries as `latent_write` does."""
        norm, tables = attention.kv_norm, (self._cos, self._sin)
        places = cache, positions, metadata.slot_mapping
        options: dict[str, Any] = {"interleaved": attention.interleaved, "query": query, "rotated": rotated}
        latent_write(latent, norm.weight, norm.eps, *places, *tables, **options)

    def gated_delta_for(self, context: ForwardContext) -> GatedDeltaFn:
        assert context.states is not None
        rows = context.states.device

        def compute(projected: DeltaProjections, layer: GatedDelta, state: LayerState) -> Tensor:
            rule, norm = layer.rule, layer.norm
            weights: dict[str, Any] = {"conv": rule.conv, "norm": norm.weight, "eps": norm.eps}
            weights |= {"decay_log": rule.decay_log, "decay_bias": rule.decay_bias}
            return gated_delta(*projected, state, rows, **weights, key_heads=layer.key_heads)

        return compute

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
        if _fits_swiglu(x, gate_up):
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

    def adapted_row(
        self,
        x: Tensor,
        linear: Linear,
        change: RowChange,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor | None:
        if linear.prepared is not None or linear.multiplier != 1.0 or not self.is_whole:
            return None
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        more: dict[str, Any] = {"norm": weight, "eps": eps, "residual": residual, "out": residual, "gated": gated}
        return gemv(x, linear.weight, bias=linear.bias, change=change, **more)

    def adapted_swiglu(self, gate_up: Linear, change: ChunkChange) -> Tensor | None:
        if gate_up.prepared is not None or not _fits_swiglu(change.x, gate_up):
            return None
        return gemm_swiglu(change.x, gate_up.weight, change=change)

    def add_experts(self, x: Tensor, norm: RMSNorm, moe: MoE) -> Tensor:
        layer = moe.prepared or self.prepare_experts(moe)
        gated = None if moe.shared is None else self.norm_swiglu(x, norm, moe.shared.gate_up)
        if gated is not None and moe.shared_gate is not None:
            logits = F.linear(rms_norm(x, norm.weight, norm.eps), moe.shared_gate.weight)
            gated.mul_(logits.sigmoid_())
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

        def weight(name: str) -> ExpertWeight:
            numbers, *more = (getattr(experts, name + kind) for kind in ("", "_scales", "_zeros"))
            scales, zeros = more
            if scales is None:
                return plain_weight(numbers)
            if zeros is not None:
                made = int4_weight(numbers, scales, None if bool((zeros == FIXED_ZERO).all()) else zeros)
            else:
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
                group_best=router.group_best,
                first=experts.first,
            ),
            gate_up=weight("gate_up"),
            down=weight("down"),
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


def _fits_swiglu(x: Tensor, gate_up: Linear) -> bool:
    """Returns whether `gemm_swiglu` computes this product, and faster than cuBLAS."""
    fits = gate_up.weight.dtype == torch.bfloat16 and gate_up.bias is None and gate_up.out_features % 16 == 0
    return fits and len(x) >= MIN_SWIGLU_ROWS and gate_up.in_features % 8 == 0 and supports_gemm_swiglu(x.device)
