"""What the layers of a decoder compute, and its execution in plain torch: the CPU's, and the oracle of the fused one.

An operation is as large as the largest thing that one launch can do, so that `Decoder` states the order of launches
once and either execution keeps to it. The residual stream x [T, hidden] belongs to the operations: `add_linear`
overwrites it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.base import AttentionBackend
from engine.kv.layer_kv import LayerKV
from engine.models.rope import rotate_

if TYPE_CHECKING:
    from engine.models.decoder import Attention, RMSNorm

# Of one step: (qkv [T, (heads + 2 * kv_heads) * D], parameters, one layer of the pool) to [T, heads * D]. Norms queries
# and keys, rotates them, writes keys and values to the pool and attends; qkv is scratch afterwards.
AttentionFn = Callable[[Tensor, "Attention", LayerKV], Tensor]
# The same of keys and values alone, [T, 2 * kv_heads * D], as far as it writes to the pool.
WriteKVFn = Callable[[Tensor, "Attention", LayerKV], None]


@dataclass(frozen=True, slots=True)
class LinearSlice:
    """Some of the outputs of a linear layer: weight [out, in], bias [out]."""

    weight: Tensor
    bias: Tensor | None


class DecoderOps(Protocol):
    """Rows are tokens; every result depends on its own row alone, except through the pool."""

    def attention_for(self, positions: Tensor, backend: AttentionBackend[Any], metadata: Any) -> AttentionFn:
        """The attention of one step, with everything that its layers share."""

    def kv_write_for(self, positions: Tensor, backend: AttentionBackend[Any], metadata: Any) -> WriteKVFn:
        """What `step` gives, for layers of which nothing but keys and values is wanted."""

    def norm_linear(self, x: Tensor, norm: RMSNorm, linear: nn.Linear | LinearSlice) -> Tensor:
        """linear(norm(x)), [T, out]."""

    def norm_swiglu(self, x: Tensor, norm: RMSNorm, gate_up: nn.Linear) -> Tensor:
        """silu(gate) * up of norm(x), [T, intermediate]; gate_up's first half of rows is the gate."""

    def add_linear(self, x: Tensor, y: Tensor, linear: nn.Linear) -> Tensor:
        """x + linear(y), written over x and returned."""

    def logits(self, x: Tensor, norm: RMSNorm, weight: Tensor) -> Tensor:
        """norm(x) @ weight.T as float32[T, vocab]."""


class TorchOps:
    """cos, sin: [length, D / 2] in the model's dtype."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._cos, self._sin = cos, sin

    def attention_for(self, positions: Tensor, backend: AttentionBackend[Any], metadata: Any) -> AttentionFn:
        rotate = self._rotation(positions)

        def attend(qkv: Tensor, attention: Attention, cache: LayerKV) -> Tensor:
            query, kv = rotate(qkv, attention, attention.heads)
            attended = backend.attend(query, kv, cache, metadata, attention.window)
            return attended.reshape(-1, attention.heads * attention.head_dim)

        return attend

    def kv_write_for(self, positions: Tensor, backend: AttentionBackend[Any], metadata: Any) -> WriteKVFn:
        rotate = self._rotation(positions)

        def keep(kv: Tensor, attention: Attention, cache: LayerKV) -> None:
            backend.write(rotate(kv, attention, 0)[1], cache, metadata)

        return keep

    def _rotation(self, positions: Tensor) -> Callable[[Tensor, Attention, int], tuple[Tensor, Tensor]]:
        """From qkv with so many query heads to queries [T, heads, D] and new keys and values [T, 2, kv_heads, D], in
        its memory.
        """
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

        def rotate(qkv: Tensor, attention: Attention, heads: int) -> tuple[Tensor, Tensor]:
            kv_heads, dim = attention.kv_heads, attention.head_dim
            split = qkv.view(-1, heads + 2 * kv_heads, dim)
            query, keys = split[:, :heads], split[:, heads : heads + kv_heads]
            if attention.q_norm is not None and attention.k_norm is not None:
                query.copy_(rms_norm_torch(query, attention.q_norm))
                keys.copy_(rms_norm_torch(keys, attention.k_norm))
            rotate_(split[:, : heads + kv_heads], cos, sin)
            return query, split[:, heads:].view(-1, 2, kv_heads, dim)

        return rotate

    def norm_linear(self, x: Tensor, norm: RMSNorm, linear: nn.Linear | LinearSlice) -> Tensor:
        return F.linear(rms_norm_torch(x, norm), linear.weight, linear.bias)

    def norm_swiglu(self, x: Tensor, norm: RMSNorm, gate_up: nn.Linear) -> Tensor:
        gate, up = self.norm_linear(x, norm, gate_up).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def add_linear(self, x: Tensor, y: Tensor, linear: nn.Linear) -> Tensor:
        return x.add_(F.linear(y, linear.weight, linear.bias))

    def logits(self, x: Tensor, norm: RMSNorm, weight: Tensor) -> Tensor:
        return F.linear(rms_norm_torch(x, norm), weight).float()


def rms_norm_torch(x: Tensor, norm: RMSNorm) -> Tensor:
    """Root mean square norm over the last dimension, computed in float32."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
    return norm.weight * F.rms_norm(x.float(), norm.weight.shape, None, norm.eps).to(x.dtype)
