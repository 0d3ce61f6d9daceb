"""The operations of a step of one token on a CPU, with compiled kernels instead of small calls of torch.

Products with float32 weights stay torch's, which read them at the memory's bandwidth. Products with int8 weights are
compiled: one thread reads 13 GB/s where torch's product, which AVX2 slows down, reads 6 (one core of an EPYC).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu.rows import int8_product, rms_norm, rotate, swiglu
from engine.kv.kv_pool import LayerKV
from engine.models.base import ForwardContext
from engine.models.layers import Attention, Embedding, Linear, LinearSlice, RMSNorm
from engine.models.ops import AttentionFn, TorchOps
from engine.models.single_row import MIN_SPLIT_BYTES, SingleRowOps

#: Threads of torch's int8 product that are as fast as one of the compiled product.
EQUAL_THREADS = 2


class Int8Weight(NamedTuple):
    """The weight of a layer as the compiled product reads it."""

    numbers: np.ndarray  # int8 [n, k].
    scales: np.ndarray  # float32 [n].
    bias: Tensor | None  # float32 [n].


class CompiledRowOps(SingleRowOps):
    """`SingleRowOps` with compiled kernels. Numba must be installed."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        super().__init__(cos, sin)
        self._int8_weights: dict[Linear, Int8Weight | None] = {}  #: The layers' weights, after their first product.

    def attention_for(self, positions: Tensor, context: ForwardContext) -> AttentionFn:
        attend_jointly_normed = TorchOps.attention_for(self, positions, context)
        cos, sin = self._cos[positions].view(-1).numpy(), self._sin[positions].view(-1).numpy()

        def attend(qkv: Tensor, attention: Attention, cache: LayerKV) -> Tensor:
            if attention.joint_norm:
                return attend_jointly_normed(qkv, attention, cache)
            heads, kv_heads = attention.heads, attention.kv_heads
            split = qkv.view(heads + 2 * kv_heads, attention.head_dim)
            if attention.q_norm is not None and attention.k_norm is not None:
                _norm_in_place(split[:heads], attention.q_norm)
                _norm_in_place(split[heads : heads + kv_heads], attention.k_norm)
            rotate(split[: heads + kv_heads].numpy(), cos, sin)
            kv = split[heads:].view(1, 2, kv_heads, attention.head_dim)
            query = split[:heads].unsqueeze(0)
            attended = context.backend.attend(query, kv, cache, context.metadata, attention.window, attention.sinks)
            return attended.reshape(1, -1)

        return attend

    def _norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        normed = torch.empty_like(x)
        rms_norm(x.numpy(), norm.weight.detach().numpy(), norm.eps, normed.numpy())
        return normed

    def _swiglu(self, gate_up: Tensor) -> Tensor:
        result = gate_up.new_empty(1, gate_up.shape[1] // 2)
        swiglu(gate_up.numpy(), result.numpy())
        return result

    def _general_product(self, x: Tensor, linear: Linear | Embedding | LinearSlice) -> Tensor:
        threads = max(self._threads, torch.get_num_threads())
        weight = self._int8_weight(linear) if isinstance(linear, Linear) else None
        if weight is None or (threads > EQUAL_THREADS and weight.numbers.nbytes >= MIN_SPLIT_BYTES):
            return super()._general_product(x, linear)
        result = x.new_empty(1, len(weight.numbers))
        int8_product(x.numpy(), weight.numbers, weight.scales, result.numpy())
        return result if weight.bias is None else result.add_(weight.bias)

    def _int8_weight(self, linear: Linear) -> Int8Weight | None:
        """Returns the weight of a layer for the compiled product, or None if it has none."""
        if linear not in self._int8_weights:
            weight: Int8Weight | None = None
            if linear.scales is not None and linear.rounding is None:
                weight = Int8Weight(linear.weight.detach().numpy(), linear.scales.float().numpy(), linear.bias)
            self._int8_weights[linear] = weight
        return self._int8_weights[linear]


def _norm_in_place(heads: Tensor, norm: RMSNorm) -> None:
    rms_norm(heads.numpy(), norm.weight.detach().numpy(), norm.eps, heads.numpy())
