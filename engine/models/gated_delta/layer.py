"""The parameters of a gated delta layer.

A layer makes queries, keys and values of all heads from a token's state, convolves each channel over the last tokens,
and applies the gated delta rule (`engine/models/gated_delta/rule.py`). The result of each head is normalised and
multiplied with silu(z), and a projection adds it to the residual stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.models.layers import Linear, RMSNorm, Target
from engine.models.spec import GatedDeltaSpec, HybridModelSpec


class DeltaProjections(NamedTuple):
    """The products of a gated delta layer with the normalised states of a step."""

    mixed: Tensor  # [T, channels + value_size]: queries, keys, values and z, each of all heads.
    gates: Tensor  # [T, 2 * value_heads]: the logits of beta, then the inputs of the decay.


class DeltaRule(nn.Module):
    """The parameters of the convolution and of the rule.

    Attributes:
        conv: [channels, taps], the newest token's tap last.
        decay_log, decay_bias: float32 [value_heads]. The logarithm of a token's decay is -exp(decay_log) *
            softplus(a + decay_bias).
    """

    float32_parameters = ("decay_log", "decay_bias")

    def __init__(self, delta: GatedDeltaSpec) -> None:
        super().__init__()
        self.conv = nn.Parameter(torch.empty(delta.channels, delta.taps))
        self.decay_log = nn.Parameter(torch.empty(delta.value_heads))
        self.decay_bias = nn.Parameter(torch.empty(delta.value_heads))

    def targets(self) -> Iterator[tuple[str, Target]]:
        """Yields the name and the destination of each checkpoint tensor."""
        channels, taps = self.conv.shape
        conv = Target(self.conv, shape=(channels, 1, taps), read=lambda part: part[:].squeeze(1))
        yield "linear_attn.conv1d.weight", conv
        yield "linear_attn.A_log", Target(self.decay_log)
        yield "linear_attn.dt_bias", Target(self.decay_bias)


class GatedDelta(nn.Module):
    """A gated delta layer in place of the attention of a decoder layer."""

    def __init__(self, spec: HybridModelSpec) -> None:
        super().__init__()
        delta, hidden = spec.delta, spec.hidden_size
        self.key_heads, self.value_heads = delta.key_heads, delta.value_heads
        self.key_dim, self.value_dim, self.channels = delta.key_dim, delta.value_dim, delta.channels
        values = delta.value_heads * delta.value_dim
        if delta.grouped:
            name = "linear_attn.in_proj_qkvz"
            self.mixed = Linear(hidden, {name: delta.channels + values}, bias=False)
            per_head = values // delta.key_heads
            self.mixed.orders = {name: _parts_first(delta.key_heads, (delta.key_dim, delta.key_dim, *(per_head,) * 2))}
            name = "linear_attn.in_proj_ba"
            self.gates = Linear(hidden, {name: 2 * delta.value_heads}, bias=False)
            self.gates.orders = {name: _parts_first(delta.key_heads, (delta.value_heads // delta.key_heads,) * 2)}
        else:
            parts = {"linear_attn.in_proj_qkv": delta.channels, "linear_attn.in_proj_z": values}
            self.mixed = Linear(hidden, parts, bias=False)
            parts = dict.fromkeys(("linear_attn.in_proj_b", "linear_attn.in_proj_a"), delta.value_heads)
            self.gates = Linear(hidden, parts, bias=False)
        self.gates.plain = True
        self.rule = DeltaRule(delta)
        self.norm = RMSNorm("linear_attn.norm", delta.value_dim, spec.norm_eps)
        self.out = Linear(values, {"linear_attn.out_proj": hidden}, bias=False)


def _parts_first(heads: int, sizes: tuple[int, ...]) -> Tensor:
    """Returns the order of rows that brings the first part of all heads before the second part of all, and so on.

    The checkpoint has the parts of each head, of these sizes, side by side.
    """
    rows = torch.arange(heads * sum(sizes), device="cpu").view(heads, -1)
    return torch.cat([part.flatten() for part in torch.split(rows, list(sizes), 1)])
