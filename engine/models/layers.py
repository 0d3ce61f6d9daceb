"""Parameters of a decoder layer: projections, norms, attention and MLP, without their computation.

`engine/models/ops.py` computes with these modules in plain torch, `engine/models/fused.py` with Triton kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.models.spec import ModelSpec


class Linear(nn.Linear):
    """Linear layer that leaves its parameters uninitialised.

    The weights are loaded later, and importing torch's initialisers takes two seconds.
    """

    def reset_parameters(self) -> None:
        """Does nothing: the parameters are loaded."""


class Embedding(nn.Embedding):
    """Embedding that leaves its parameters uninitialised, as `Linear` does."""

    def reset_parameters(self) -> None:
        """Does nothing: the parameters are loaded."""


@dataclass(frozen=True, slots=True)
class LinearSlice:
    """A range of the outputs of a linear layer."""

    #: Weight, [out, in].
    weight: Tensor
    #: Bias, [out].
    bias: Tensor | None


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps


class Attention(nn.Module):
    """Grouped-query attention with rotary positions. Queries and keys are normalised per head if `spec.qk_norm`."""

    def __init__(self, spec: ModelSpec, window: int | None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.window = window
        self.qkv = Linear(spec.hidden_size, spec.query_size + 2 * spec.kv_size, bias=spec.qkv_bias)
        self.out = Linear(spec.query_size, spec.hidden_size, bias=spec.out_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None

    @property
    def kv_rows(self) -> slice:
        """The outputs of `qkv` that are keys and values."""
        return slice(self.heads * self.head_dim, None)

    @property
    def kv(self) -> LinearSlice:
        """The part of `qkv` that computes keys and values."""
        rows, bias = self.kv_rows, self.qkv.bias
        return LinearSlice(self.qkv.weight[rows], None if bias is None else bias[rows])


class MLP(nn.Module):
    """SwiGLU feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_up = Linear(spec.hidden_size, 2 * spec.intermediate_size, bias=spec.mlp_bias)
        self.down = Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)
