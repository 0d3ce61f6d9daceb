"""Parameters of a decoder: linear layers, norms, attention and MLP, without their computation.

Each module names its tensors in the checkpoint, so `weights/load.py` loads and shards any of them in one way.
`engine/models/ops.py` computes with these modules in plain torch, `engine/models/fused.py` with Triton kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.models.spec import LatentModelSpec, ModelSpec
from engine.quantization.inputs import InputRounding
from engine.quantization.scheme import Scheme

LATENT_EPS = 1e-6  # Of the norms of latents; config.json has no field for it.


class Target(NamedTuple):
    """The destination of a checkpoint tensor."""

    tensor: Tensor | None  # A parameter, or its part of a joined parameter. None: only other ranks have it.
    split: int | None = None  # Dimension in which ranks split the checkpoint tensor. None: every rank has all of it.
    order: Tensor | None = None  # int64: row i of `tensor` is row order[i] of this rank's part.
    #: For tensors of another shape than `tensor`: their shape, and the function that reads this rank's part.
    shape: tuple[int, ...] | None = None
    read: Callable[[Any], Tensor] | None = None
    shift: float = 0.0  # Added to the checkpoint's numbers.
    replaces: frozenset[str] = frozenset()  # Names of tensors that a checkpoint with this tensor lacks.
    copies: int = 1  # Neighbouring ranks that have the same part.


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
    row_weight: Tensor | None = None  # [inputs, outputs], the weight for products of one row, see `cpu_weights`.
    scales: Tensor | None = None  # [outputs] if the weight is int8.
    scheme: Scheme | None = None  # How the checkpoint quantises the layer. `weight` is empty until it is loaded.
    prepared: Any = None  # A quantised weight in the form that the kernels read; `weight` stays empty.
    rounding: InputRounding | None = None  # Rounds the inputs of a product with a dequantised weight.
    multiplier = 1.0  # Factor on the product where it is added to the residual stream.
    plain = False  # The weight has the model's dtype in any case: a quantised one is dequantised when it is loaded.

    def __init__(self, inputs: int, parts: Mapping[str, int], *, bias: bool, split: int | None = None) -> None:
        super().__init__(inputs, sum(parts.values()), bias=bias)
        self.parts, self.split = dict(parts), split
        self.orders: Mapping[str, Tensor] = {}  # By part: the order of its rows, see `Target.order`.
        self.copies: Mapping[str, int] = {}  # By part: neighbouring ranks that have the same rows; default: 1.

    def reset_parameters(self) -> None:
        """Does nothing: the parameters are loaded."""


class Embedding(nn.Embedding):
    """Embedding with uninitialised parameters, as in `Linear`. It may also be the LM head."""

    split = None
    packed: Tensor | None = None  # As in `Linear`.
    row_weight: Tensor | None = None  # As in `Linear`.
    bias = scales = scheme = prepared = rounding = None

    def __init__(self, name: str, rows: int, size: int) -> None:
        super().__init__(rows, size)
        self.parts = {name: rows}
        self.orders: Mapping[str, Tensor] = {}
        self.copies: Mapping[str, int] = {}

    def reset_parameters(self) -> None:
        """Does nothing: the parameters are loaded."""


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension.

    Args:
        split: 0 if each rank has a part of the dimension, None if each rank has all of it.
        order: the order of the weight's numbers, see `Target.order`.
        copies: neighbouring ranks that have the same part.
        zero_centred: the checkpoint has the weight minus one. The weight is then float32, as the sum needs its bits.
    """

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        *,
        split: int | None = None,
        order: Tensor | None = None,
        copies: int = 1,
        zero_centred: bool = False,
    ) -> None:
        super().__init__()
        self.shift = 1.0 if zero_centred else 0.0
        self.float32_parameters = ("weight",) if zero_centred else ()
        self.weight = nn.Parameter(torch.empty(size))
        self.parts, self.eps, self.split = {name: size}, eps, split
        self.orders: Mapping[str, Tensor] = {} if order is None else {name: order}
        self.copies: Mapping[str, int] = {name: copies}


class Sinks(nn.Module):
    """The logit of each query head that takes part in the softmax of its scores, without a key."""

    split = 0

    def __init__(self, name: str, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))
        self.parts = {name: heads}


class LinearSlice(NamedTuple):
    """A range of the outputs of a linear layer: weight [out, in], bias [out] and the other forms, as in `Linear`."""

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None
    packed: Tensor | None = None
    prepared: Any = None
    rounding: InputRounding | None = None


class Attention(nn.Module):
    """Grouped-query attention with rotary positions over `inputs` numbers (None: the hidden size) per token.

    If only the first dimensions of a head rotate, the dimensions are in the order of `rotary_order`.
    """

    def __init__(self, spec: ModelSpec, window: int | None, inputs: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.window = window
        self.packed_kv: Tensor | None = None  # The packed weight of `kv`, if `qkv` is packed.
        self.prepared_kv: Any = None  # The same for `prepared`.
        queries, keys, values = (f"self_attn.{name}_proj" for name in "qkv")
        #: Numbers of the output gate. They come before the queries in the result of `qkv`.
        self.gate_size = spec.query_size if spec.output_gate else 0
        projections = {queries: self.gate_size + spec.query_size, keys: spec.kv_size, values: spec.kv_size}
        self.qkv = Linear(inputs or spec.hidden_size, projections, bias=spec.qkv_bias, split=0)
        self.qkv.copies = {keys: spec.kv_copies, values: spec.kv_copies}
        self.out = Linear(spec.query_size, {"self_attn.o_proj": spec.hidden_size}, bias=spec.out_bias, split=1)
        self.out.multiplier = spec.residual_multiplier
        order = rotary_order(spec.head_dim, spec.rope.rotated(spec.head_dim))
        if order is not None:
            self.qkv.orders = {queries: _of_heads(order, self.heads), keys: _of_heads(order, self.kv_heads)}
        if self.gate_size:
            self.qkv.orders = {**self.qkv.orders, queries: _gates_first(order, self.heads, self.head_dim)}
        #: Whether the norms are over all heads together, those of the other ranks included.
        self.joint_norm = spec.qk_norm == "all"
        self.q_norm = self._norm("self_attn.q_norm", spec, self.heads, order, 1)
        self.k_norm = self._norm("self_attn.k_norm", spec, self.kv_heads, order, spec.kv_copies)
        self.sink_logits = Sinks("self_attn.sinks", self.heads) if spec.sinks else None

    def _norm(self, name: str, spec: ModelSpec, heads: int, order: Tensor | None, copies: int) -> RMSNorm | None:
        if spec.qk_norm is None:
            return None
        if not self.joint_norm:
            return RMSNorm(name, spec.head_dim, spec.norm_eps, order=order, zero_centred=spec.zero_centred)
        joint = None if order is None else _of_heads(order, heads)
        return RMSNorm(name, heads * spec.head_dim, spec.norm_eps, split=0, order=joint, copies=copies)

    @property
    def sinks(self) -> Tensor | None:
        """The logits [heads] of `Sinks`, None if the model has none."""
        return None if self.sink_logits is None else self.sink_logits.weight

    @property
    def kv_rows(self) -> slice:
        """The outputs of `qkv` that are keys and values."""
        return slice(self.gate_size + self.heads * self.head_dim, None)

    def split_gate(self, projected: Tensor) -> tuple[Tensor | None, Tensor]:
        """Returns views of the result of `qkv`: the output gate, None if there is none, and the rest."""
        size = self.gate_size
        return (projected[:, :size], projected[:, size:]) if size else (None, projected)

    @property
    def kv(self) -> LinearSlice:
        """The part of `qkv` that computes keys and values."""
        rows, bias, scales = self.kv_rows, self.qkv.bias, self.qkv.scales
        return LinearSlice(
            self.qkv.weight[rows],
            None if bias is None else bias[rows],
            None if scales is None else scales[rows],
            self.packed_kv,
            self.prepared_kv,
            self.qkv.rounding,
        )


class LatentAttention(nn.Module):
    """Multi-head latent attention (`LatentSpec`). Ranks split the heads; every rank computes all latents.

    Attributes:
        q: makes the queries of this rank, from the states or from the output of `q_down`.
        kv_down: makes the latent and the rotating key of a token, [rank + rope_dim].
        kv_up: of each head, the matrix [key_dim, rank] for its key and [value_dim, rank] for its value.
    """

    def __init__(self, spec: LatentModelSpec) -> None:
        super().__init__()
        latent, hidden, heads, bias = spec.latent, spec.hidden_size, spec.num_heads, spec.qkv_bias
        self.heads, self.rank, self.interleaved = heads, latent.rank, latent.interleaved
        self.key_dim, self.rope_dim, self.value_dim = latent.key_dim, latent.rope_dim, latent.value_dim
        query = heads * (latent.key_dim + latent.rope_dim)
        self.q_down: Linear | None = None
        self.q_norm: RMSNorm | None = None
        if latent.query_rank is None:
            self.q = Linear(hidden, {"self_attn.q_proj": query}, bias=False, split=0)
        else:
            self.q_down = Linear(hidden, {"self_attn.q_a_proj": latent.query_rank}, bias=bias)
            self.q_norm = RMSNorm("self_attn.q_a_layernorm", latent.query_rank, LATENT_EPS)
            self.q = Linear(latent.query_rank, {"self_attn.q_b_proj": query}, bias=False, split=0)
        self.kv_down = Linear(hidden, {"self_attn.kv_a_proj_with_mqa": latent.rank + latent.rope_dim}, bias=bias)
        self.kv_norm = RMSNorm("self_attn.kv_a_layernorm", latent.rank, LATENT_EPS)
        outputs = heads * (latent.key_dim + latent.value_dim)
        self.kv_up = Linear(latent.rank, {"self_attn.kv_b_proj": outputs}, bias=False, split=0)
        self.kv_up.plain = True
        self.out = Linear(heads * latent.value_dim, {"self_attn.o_proj": hidden}, bias=spec.out_bias, split=1)
        self.out.multiplier = spec.residual_multiplier

    def split_query(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Returns views of queries [T, heads * (key_dim + rope_dim)]: [T, heads, key_dim] and [T, heads, rope_dim]."""
        heads = query.view(-1, self.heads, self.key_dim + self.rope_dim)
        return heads[..., : self.key_dim], heads[..., self.key_dim :]

    @property
    def key_up(self) -> Tensor:
        """The matrix of each head's key, [heads, key_dim, rank]."""
        return self.kv_up.weight.view(self.heads, -1, self.rank)[:, : self.key_dim]

    @property
    def value_up(self) -> Tensor:
        """The matrix of each head's value, [heads, value_dim, rank]."""
        return self.kv_up.weight.view(self.heads, -1, self.rank)[:, self.key_dim :]


class MLP(nn.Module):
    """SwiGLU feed-forward layer: down(silu(gate(x)) * up(x)).

    Args:
        name: name of the module in the checkpoint.
        size: intermediate size on this rank. None: the model's.
    """

    def __init__(self, spec: ModelSpec, name: str = "mlp", size: int | None = None) -> None:
        super().__init__()
        hidden, inner = spec.hidden_size, size or spec.intermediate_size
        parts = {f"{name}.gate_proj": inner, f"{name}.up_proj": inner}
        self.gate_up = Linear(hidden, parts, bias=spec.mlp_bias, split=0)
        self.down = Linear(inner, {f"{name}.down_proj": hidden}, bias=spec.mlp_bias, split=1)
        self.down.multiplier = spec.residual_multiplier


def rotary_order(head_dim: int, rotated: int) -> Tensor | None:
    """Returns the order of a head's dimensions in which all of them rotate; None if all rotate in the given order.

    Our rotation pairs dimension i with i + head_dim / 2. A checkpoint that rotates the first dimensions only pairs i
    with i + rotated / 2. The other dimensions rotate by an angle of zero. Scores do not depend on the order, because
    queries and keys have the same.
    """
    if rotated == head_dim:
        return None
    half = (head_dim - rotated) // 2
    rotating, fixed = torch.arange(rotated, device="cpu"), torch.arange(rotated, head_dim, device="cpu")
    return torch.cat((rotating[: rotated // 2], fixed[:half], rotating[rotated // 2 :], fixed[half:]))


def _of_heads(order: Tensor, heads: int) -> Tensor:
    """Returns the order of the rows of `heads` heads, each in the same order."""
    return (torch.arange(heads, device="cpu")[:, None] * len(order) + order).flatten()


def _gates_first(order: Tensor | None, heads: int, head_dim: int) -> Tensor:
    """Returns the order of a projection that has a query and a gate for each head: all gates, then all queries.

    `order` is that of a head's query, None for the given one.
    """
    dims = torch.arange(head_dim, device="cpu")
    firsts = torch.arange(heads, device="cpu")[:, None] * 2 * head_dim
    gates, queries = firsts + head_dim + dims, firsts + (dims if order is None else order)
    return torch.cat((gates.flatten(), queries.flatten()))


def allocate(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replaces parameters on the meta device by uninitialised ones without gradients on `device`.

    float32 parameters get the dtype, except those that their module names in `float32_parameters`.
    """
    # Not to_empty: torch's copy of a meta tensor imports modules for a second.
    model._apply(  # type: ignore[no-untyped-call]
        lambda p: torch.empty(p.shape, dtype=dtype if p.dtype == torch.float32 else p.dtype, device=device)
    )
    for module in model.modules():
        for name in getattr(module, "float32_parameters", ()):
            setattr(module, name, nn.Parameter(getattr(module, name).float()))
    model.requires_grad_(False)
