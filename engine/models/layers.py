"""Parameters of a decoder: linear layers, norms, attention and MLP, without their computation.

Each module names its tensors in the checkpoint, so `engine/models/weights.py` loads and shards any of them in one way.
`engine/models/ops.py` computes with these modules in plain torch, `engine/models/fused.py` with Triton kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.models.spec import ModelSpec
from engine.quantization.inputs import InputRounding
from engine.quantization.scheme import Scheme
from engine.quantization.weight import QuantizedWeight


class Linear(nn.Linear):
    """One or more projections of the checkpoint, computed as one product.

    The parameters are uninitialised: they are loaded later, and importing torch's initialisers takes two seconds.

    Args:
        parts: outputs of each projection on this rank, by its name in the checkpoint.
        split: dimension of the weight that ranks split (Megatron-LM, Shoeybi et al. 2019). 0, the outputs: a rank
            computes whole heads and its columns of the MLP. 1, the inputs: a rank computes a partial sum, which an
            all-reduce completes. None: every rank has the whole weight.
    """

    packed: Tensor | None = None  # The weight in another order, see `engine.models.cpu_weights`.
    scales: Tensor | None = None  # [outputs] if the weight is int8.
    scheme: Scheme | None = None  # How the checkpoint quantises the layer. `weight` is empty until it is loaded.
    quantized: QuantizedWeight | None = None  # The weight of kernels that multiply with it; `weight` stays empty.
    prepared: Any = None  # The form of `quantized` that the kernels read.
    rounding: InputRounding | None = None  # Rounds the inputs of a product with a dequantised weight.

    def __init__(self, inputs: int, parts: Mapping[str, int], *, bias: bool, split: int | None = None) -> None:
        super().__init__(inputs, sum(parts.values()), bias=bias)
        self.parts, self.split = dict(parts), split

    def reset_parameters(self) -> None:
        """Does nothing: the parameters are loaded."""


class Embedding(nn.Embedding):
    """Embedding with uninitialised parameters, as in `Linear`. It may also be the LM head."""

    split = None
    packed: Tensor | None = None  # As in `Linear`.
    bias = scales = scheme = quantized = prepared = rounding = None

    def __init__(self, name: str, rows: int, size: int) -> None:
        super().__init__(rows, size)
        self.parts = {name: rows}

    def reset_parameters(self) -> None:
        """Does nothing: the parameters are loaded."""


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension."""

    split = None

    def __init__(self, name: str, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.parts, self.eps = {name: size}, eps


class LinearSlice(NamedTuple):
    """A range of the outputs of a linear layer: weight [out, in], bias [out] and the other forms, as in `Linear`."""

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None
    packed: Tensor | None = None
    quantized: QuantizedWeight | None = None
    prepared: Any = None
    rounding: InputRounding | None = None


class Attention(nn.Module):
    """Grouped-query attention with rotary positions over `inputs` numbers (None: the hidden size) per token."""

    def __init__(self, spec: ModelSpec, window: int | None, inputs: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.window = window
        self.packed_kv: Tensor | None = None  # The packed weight of `kv`, if `qkv` is packed.
        self.prepared_kv: Any = None  # The same for `prepared`.
        projections = {
            "self_attn.q_proj": spec.query_size,
            "self_attn.k_proj": spec.kv_size,
            "self_attn.v_proj": spec.kv_size,
        }
        self.qkv = Linear(inputs or spec.hidden_size, projections, bias=spec.qkv_bias, split=0)
        self.out = Linear(spec.query_size, {"self_attn.o_proj": spec.hidden_size}, bias=spec.out_bias, split=1)
        self.q_norm = RMSNorm("self_attn.q_norm", spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm("self_attn.k_norm", spec.head_dim, spec.norm_eps) if spec.qk_norm else None

    @property
    def kv_rows(self) -> slice:
        """The outputs of `qkv` that are keys and values."""
        return slice(self.heads * self.head_dim, None)

    @property
    def kv(self) -> LinearSlice:
        """The part of `qkv` that computes keys and values."""
        rows, bias, scales, quantized = self.kv_rows, self.qkv.bias, self.qkv.scales, self.qkv.quantized
        return LinearSlice(
            self.qkv.weight[rows],
            None if bias is None else bias[rows],
            None if scales is None else scales[rows],
            self.packed_kv,
            None if quantized is None else quantized.rows(rows),
            self.prepared_kv,
            self.qkv.rounding,
        )


class MLP(nn.Module):
    """SwiGLU feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.gate_up = Linear(hidden, {"mlp.gate_proj": inner, "mlp.up_proj": inner}, bias=spec.mlp_bias, split=0)
        self.down = Linear(inner, {"mlp.down_proj": hidden}, bias=spec.mlp_bias, split=1)


def allocate(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replaces parameters on the meta device by uninitialised ones without gradients on `device`."""
    # Not to_empty: torch's copy of a meta tensor imports modules for a second.
    model._apply(lambda p: torch.empty(p.shape, dtype=dtype, device=device))  # type: ignore[no-untyped-call]
    model.requires_grad_(False)
