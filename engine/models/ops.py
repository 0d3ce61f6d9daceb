"""The operations of a decoder layer, in plain torch.

`TorchOps` serves the CPU. Its subclass `engine.models.fused.FusedOps` computes the same in Triton kernels. One
operation is the largest unit that one kernel launch can compute, so `Decoder` defines the order of launches for both.
`add_linear` overwrites the residual stream x [T, hidden].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kv.groups.state_pool import LayerState
from engine.kv.kv_pool import LayerKV
from engine.models.base import ForwardContext
from engine.models.cpu_weights import place, product
from engine.models.gated_delta.layer import DeltaProjections, GatedDelta
from engine.models.gated_delta.rule import gated_delta_torch
from engine.models.layers import Attention, Embedding, LatentAttention, Linear, LinearSlice, RMSNorm
from engine.models.moe import MoE, grouped_experts, route
from engine.models.spec import RopeSpec
from engine.models.spec.rope import yarn_scale
from engine.quantization.weight import QuantizedWeight

if TYPE_CHECKING:
    from engine.kernels.adapters.changes import ChunkChange, RowChange

#: Attention of one layer: (qkv [T, (heads + 2 * kv_heads) * D], parameters, layer of the KV pool) to [T, heads * D].
#: Normalises queries and keys, rotates them, writes keys and values to the pool and attends. Overwrites qkv.
AttentionFn = Callable[[Tensor, Attention, LayerKV], Tensor]
#: The KV write of one layer: like `AttentionFn` for keys and values only, [T, 2 * kv_heads * D], without attention.
WriteKVFn = Callable[[Tensor, Attention, LayerKV], None]
AllReduce = Callable[[Tensor], None]


class LatentProjections(NamedTuple):
    """The inputs of multi-head latent attention, before norm of the latents and rotation."""

    query: Tensor  # [T, heads * (key_dim + rope_dim)].
    latent: Tensor  # [T, rank + rope_dim].


#: Latent attention of one layer, like `AttentionFn`: (projections, parameters, layer of the KV pool) to [T, heads *
#: value_dim].
LatentAttentionFn = Callable[[LatentProjections, LatentAttention, LayerKV], Tensor]
#: The write of one layer's latents: like `WriteKVFn`, with latents [T, rank + rope_dim].
WriteLatentFn = Callable[[Tensor, LatentAttention, LayerKV], None]

#: One gated delta layer: (projections, parameters, states) to [T, value_heads * value_dim]. Advances the states.
GatedDeltaFn = Callable[[DeltaProjections, GatedDelta, LayerState], Tensor]


class TorchOps:
    """The operations in plain torch. Rows are tokens; a row depends on other rows only through the KV pool.

    Args:
        cos, sin: tables of `rotate_` [length, D] in the model's dtype.
        all_reduce: replaces the partial sum of a rank by the sum of all ranks. None: this is the whole model.
    """

    def __init__(self, cos: Tensor, sin: Tensor, all_reduce: AllReduce | None = None) -> None:
        self._cos, self._sin, self._all_reduce = cos, sin, all_reduce

    @property
    def is_whole(self) -> bool:
        """Whether the weights are those of the whole model, not of one rank."""
        return self._all_reduce is None

    def for_results(self) -> TorchOps:
        """Returns the operations for those tokens of the step alone that need hidden states."""
        return self

    def place(self, linear: Linear, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        """Gives a layer its quantised weight, in the form with which these operations multiply inputs of `dtype`."""
        place(linear, weight, dtype)

    def place_kv(self, attention: Attention, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        """Gives `attention.kv` a weight of its own, where it cannot be a part of that of `qkv`. weight: that of qkv."""

    def attention_for(self, positions: Tensor, context: ForwardContext) -> AttentionFn:
        """Prepares the attention of one step: does the work that all layers share, once."""
        rotate = self._rotation(positions)

        def attend(qkv: Tensor, attention: Attention, cache: LayerKV) -> Tensor:
            query, kv = rotate(qkv, attention, attention.heads)
            attended = context.backend.attend(query, kv, cache, context.metadata, attention.window, attention.sinks)
            return attended.reshape(-1, attention.heads * attention.head_dim)

        return attend

    def kv_write_for(self, positions: Tensor, context: ForwardContext) -> WriteKVFn:
        """Prepares the KV write of one step, for layers that compute keys and values only."""
        rotate = self._rotation(positions)

        def write(kv: Tensor, attention: Attention, cache: LayerKV) -> None:
            context.backend.write(rotate(kv, attention, 0)[1], cache, context.metadata)

        return write

    def latent_attention_for(self, positions: Tensor, context: ForwardContext) -> LatentAttentionFn:
        """Does what `attention_for` does, for latent attention in the absorbed form.

        The matrix that makes a head's key from a latent is applied to the head's query instead, and the matrix that
        makes the value to the result. All heads then attend to the latents themselves.
        """
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

        def attend(projected: LatentProjections, attention: LatentAttention, cache: LayerKV) -> Tensor:
            query, rotating = attention.split_query(projected.query)
            absorbed = query.new_empty(*query.shape[:2], attention.rank + attention.rope_dim)
            absorbed[..., : attention.rank] = torch.bmm(query.transpose(0, 1), attention.key_up).transpose(0, 1)
            absorbed[..., attention.rank :] = _rotated(rotating, cos, sin, interleaved=attention.interleaved)
            latents = _latents(projected.latent, attention, cos, sin)
            attended = context.backend.attend(absorbed, latents, cache, context.metadata, None)
            values = torch.bmm(attended.transpose(0, 1), attention.value_up.transpose(1, 2))
            return values.transpose(0, 1).flatten(1)

        return attend

    def latent_write_for(self, positions: Tensor, context: ForwardContext) -> WriteLatentFn:
        """Does what `kv_write_for` does, for latents."""
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

        def write(latent: Tensor, attention: LatentAttention, cache: LayerKV) -> None:
            context.backend.write(_latents(latent, attention, cos, sin), cache, context.metadata)

        return write

    def latent_projections(self, x: Tensor, norm: RMSNorm, attention: LatentAttention) -> LatentProjections:
        """Computes the inputs of latent attention from x [T, hidden]."""
        if attention.q_down is None or attention.q_norm is None:
            query = self.norm_linear(x, norm, attention.q)
        else:
            query = self.norm_linear(self.norm_linear(x, norm, attention.q_down), attention.q_norm, attention.q)
        return LatentProjections(query, self.norm_linear(x, norm, attention.kv_down))

    def delta_projections(self, x: Tensor, norm: RMSNorm, layer: GatedDelta) -> DeltaProjections:
        """Computes the inputs of a gated delta layer from x [T, hidden]."""
        return DeltaProjections(self.norm_linear(x, norm, layer.mixed), self.norm_linear(x, norm, layer.gates))

    def gated_delta_for(self, context: ForwardContext) -> GatedDeltaFn:
        """Prepares the gated delta layers of one step."""
        assert context.states is not None
        rows = context.states.rows
        return lambda projected, layer, state: gated_delta_torch(projected, layer, state, rows)

    def gate(self, attended: Tensor, gate: Tensor) -> Tensor:
        """Returns results of attention times sigmoid(gate), [T, heads * D] each. Overwrites `attended`."""
        return attended.mul_(gate.sigmoid())

    def _rotation(self, positions: Tensor) -> Callable[[Tensor, Attention, int], tuple[Tensor, Tensor]]:
        """Returns rotate(qkv, attention, heads), which normalises and rotates qkv in place.

        The results are views of qkv: queries [T, heads, D], and keys and values [T, 2, kv_heads, D].
        """
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

        def rotate(qkv: Tensor, attention: Attention, heads: int) -> tuple[Tensor, Tensor]:
            kv_heads, dim = attention.kv_heads, attention.head_dim
            split = qkv.view(-1, heads + 2 * kv_heads, dim)
            query, keys = split[:, :heads], split[:, heads : heads + kv_heads]
            if attention.q_norm is not None and attention.k_norm is not None:
                norm = self._joint_norm if attention.joint_norm else rms_norm_torch
                if heads:
                    query.copy_(norm(query, attention.q_norm))
                keys.copy_(norm(keys, attention.k_norm))
            rotate_(split[:, : heads + kv_heads], cos, sin)
            return query, split[:, heads:].view(-1, 2, kv_heads, dim)

        return rotate

    def _joint_norm(self, heads: Tensor, norm: RMSNorm) -> Tensor:
        """Returns the norm over the heads [T, H, D] of all ranks together."""
        squares = heads.float().square().flatten(1).sum(1, keepdim=True)
        count = torch.full_like(squares[:1], heads[0].numel())
        if self._all_reduce is not None:
            joint = torch.cat((squares, count))
            self._all_reduce(joint)
            squares, count = joint[:-1], joint[-1:]
        scale = torch.rsqrt(squares / count + norm.eps).unsqueeze(-1)
        return (heads.float() * scale).to(heads.dtype) * norm.weight.view(heads.shape[1:])

    def norm_linear(self, x: Tensor, norm: RMSNorm, linear: Linear | LinearSlice) -> Tensor:
        """Returns linear(norm(x)), [T, out]."""
        return product(rms_norm_torch(x, norm), linear)

    def norm_kv(self, x: Tensor, norm: RMSNorm, attention: Attention) -> Tensor:
        """Returns the keys and values of norm(x), [T, 2 * kv_heads * D]."""
        return self.norm_linear(x, norm, attention.kv)

    def norm_swiglu(self, x: Tensor, norm: RMSNorm, gate_up: Linear) -> Tensor:
        """Returns silu(gate(norm(x))) * up(norm(x)), [T, intermediate]. gate is the first half of gate_up's rows."""
        gate, up = self.norm_linear(x, norm, gate_up).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def add_linear(self, x: Tensor, y: Tensor, linear: Linear) -> Tensor:
        """Returns x + linear(y) * linear.multiplier, which overwrites x."""
        if self._all_reduce is None:
            return x.add_(product(y, linear), alpha=linear.multiplier)
        return self.add_reduced(x, self.partial_product(y, linear), linear)

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
        """Computes norm(x) @ weight.T of one row with the change by its adapter, then adds it to `residual` in place.

        With `gated` the result is silu(gate) * up. Returns None, and changes nothing, if no kernel does this at once.
        """
        return None

    def adapted_swiglu(self, gate_up: Linear, change: ChunkChange) -> Tensor | None:
        """Returns silu(gate) * up of `change.x` with the change by the adapter that all rows have.

        Returns None if no kernel does this at once.
        """
        return None

    def partial_product(self, y: Tensor, linear: Linear) -> Tensor:
        """Returns the product of a rank's part of y and of a weight that is split by inputs, without bias, [T, out]."""
        return product(y, LinearSlice(linear.weight, scales=linear.scales, rounding=linear.rounding))

    def add_reduced(self, x: Tensor, part: Tensor, linear: Linear) -> Tensor:
        """Returns x + (sum of the ranks' `part` + bias) * linear.multiplier, which overwrites x and part."""
        assert self._all_reduce is not None
        self._all_reduce(part)
        x.add_(part, alpha=linear.multiplier)
        return x if linear.bias is None else x.add_(linear.bias, alpha=linear.multiplier)

    def add_experts(self, x: Tensor, norm: RMSNorm, moe: MoE) -> Tensor:
        """Returns x plus the experts' result for norm(x), which overwrites x."""
        normed = rms_norm_torch(x, norm)
        part = grouped_experts(normed, *route(normed, moe.router), moe.experts)
        if moe.shared is not None:
            gate, up = product(normed, moe.shared.gate_up).chunk(2, dim=-1)
            shared = product(F.silu(gate).mul_(up), moe.shared.down)
            if moe.shared_gate is not None:
                shared.mul_(product(normed, moe.shared_gate).sigmoid())
            part.add_(shared, alpha=moe.shared.down.multiplier)
        if self._all_reduce is not None:
            self._all_reduce(part)
        return x.add_(part)

    def prepare_experts(self, moe: MoE) -> object:
        """Prepares loaded experts: plain torch needs weights in the model's dtype."""
        moe.experts.dequantize(moe.router.weight.dtype)
        return None

    def logits(self, x: Tensor, norm: RMSNorm, head: Linear | Embedding | LinearSlice) -> Tensor:
        """Returns norm(x) @ head.weight.T as float32[T, vocab]."""
        return product(rms_norm_torch(x, norm), head).float()


class RowWiseOps(TorchOps):
    """The operations of `TorchOps`, one row at a time, so that a row's bits do not depend on other rows.

    torch selects the order of sums by the shape, and the code path of the last numbers by the size and the address.
    Each row is therefore a new tensor, and every operation sees a matrix of one row.
    """

    def norm_linear(self, x: Tensor, norm: RMSNorm, linear: Linear | LinearSlice) -> Tensor:
        return torch.cat([TorchOps.norm_linear(self, row, norm, linear) for row in _single_rows(x)])

    def norm_swiglu(self, x: Tensor, norm: RMSNorm, gate_up: Linear) -> Tensor:
        return torch.cat([TorchOps.norm_swiglu(self, row, norm, gate_up) for row in _single_rows(x)])

    def add_linear(self, x: Tensor, y: Tensor, linear: Linear) -> Tensor:
        pairs = zip(_single_rows(x), _single_rows(y), strict=True)
        return x.copy_(torch.cat([TorchOps.add_linear(self, row, part, linear) for row, part in pairs]))

    def logits(self, x: Tensor, norm: RMSNorm, head: Linear | Embedding | LinearSlice) -> Tensor:
        return torch.cat([TorchOps.logits(self, row, norm, head) for row in _single_rows(x)])

    def _rotation(self, positions: Tensor) -> Callable[[Tensor, Attention, int], tuple[Tensor, Tensor]]:
        rotations = [TorchOps._rotation(self, position) for position in torch.split(positions, 1)]

        def rotate(qkv: Tensor, attention: Attention, heads: int) -> tuple[Tensor, Tensor]:
            rows = _single_rows(qkv)
            for rotate_row, row in zip(rotations, rows, strict=True):
                rotate_row(row, attention, heads)
            split = torch.cat(rows).view(len(qkv), -1, attention.head_dim)
            return split[:, :heads], split[:, heads:].view(len(qkv), 2, attention.kv_heads, attention.head_dim)

        return rotate


def _single_rows(x: Tensor) -> list[Tensor]:
    """Returns a copy of each row of x [T, n], [1, n] each."""
    return [row.clone() for row in torch.split(x, 1)]


def float32_product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x @ weight.T as float32, without a rounding between the product and the result on a GPU."""
    if x.dtype == torch.float32 or x.device.type == "cpu":
        return F.linear(x, weight).float()
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def rms_norm_torch(x: Tensor, norm: RMSNorm) -> Tensor:
    """Returns the RMSNorm over the last dimension, computed in float32."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
    if norm.weight.dtype == torch.float32:
        return F.rms_norm(x.float(), norm.weight.shape, norm.weight, norm.eps).to(x.dtype)
    return norm.weight * F.rms_norm(x.float(), norm.weight.shape, None, norm.eps).to(x.dtype)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """Returns the angular frequencies per token, float32[head_dim / 2], and the factor on cos and sin (yarn).

    head_dim is the number of dimensions that rotate.

    Rotary position embeddings: Su et al. 2021. Scaling kinds: linear (position interpolation, Chen et al. 2023), llama3
    (wavelength-dependent interpolation of Llama 3.1), yarn (Peng et al. 2023).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / (spec.theta**exponents)
    if spec.kind == "default":
        return inv_freq, 1.0
    if spec.kind == "linear":
        return inv_freq / spec.factor, 1.0
    if spec.kind == "llama3":
        return _llama3_frequencies(spec, inv_freq), 1.0
    return _yarn_frequencies(spec, inv_freq, head_dim), _yarn_attention_factor(spec)


def rope_tables(spec: RopeSpec, head_dim: int, length: int) -> tuple[Tensor, Tensor]:
    """Returns cos and sin, float32[length, head_dim / 2] each, for positions 0..length-1.

    Dimensions that do not rotate, the last ones of each half (`layers.rotary_order`), have an angle of zero.
    """
    rotated = spec.rotated(head_dim)
    inv_freq, factor = inverse_frequencies(spec, rotated)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inv_freq)
    fixed = (head_dim - rotated) // 2
    return F.pad(angles.cos() * factor, (0, fixed), value=1.0), F.pad(angles.sin() * factor, (0, fixed))


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates heads[T, H, D] in place: dimension i with i + D / 2, as in HF checkpoints.

    cos and sin are [T, 1, D]: the numbers of `rope_tables` twice, the first half of sin with the opposite sign.
    """
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(cos).addcmul_(swapped, sin)


def _latents(latent: Tensor, attention: LatentAttention, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the vectors [T, 1, 1, rank + rope_dim] of the KV pool for projections [T, rank + rope_dim]."""
    normed = rms_norm_torch(latent[:, : attention.rank], attention.kv_norm)
    key = _rotated(latent[:, None, attention.rank :], cos, sin, interleaved=attention.interleaved)
    return torch.cat((normed, key[:, 0]), dim=-1)[:, None, None]


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Returns rotated heads [T, H, D]; interleaved: dimensions 2 * i and 2 * i + 1 are now i and i + D / 2."""
    pairs = heads.view(*heads.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2) if interleaved else heads.clone()
    rotate_(pairs, cos, sin)
    return pairs


def _llama3_frequencies(spec: RopeSpec, inv_freq: Tensor) -> Tensor:
    wavelength = 2 * math.pi / inv_freq
    cycles = spec.original_max_position / wavelength
    smooth = (cycles - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * inv_freq / spec.factor + smooth * inv_freq


def _yarn_frequencies(spec: RopeSpec, inv_freq: Tensor, head_dim: int) -> Tensor:
    def dimension(rotations: float) -> float:
        """Returns the dimension that makes this many rotations within the original length."""
        ratio = spec.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq / spec.factor * ramp + inv_freq * (1 - ramp)


def _yarn_attention_factor(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return yarn_scale(spec, spec.mscale) / yarn_scale(spec, spec.mscale_all_dim)
    return yarn_scale(spec, 1.0)
