"""The part of each parameter that belongs to one rank of a tensor-parallel model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from engine.models.layers import Linear, RMSNorm, Sinks
from engine.models.moe import Experts
from engine.models.spec import Shard
from engine.quantization.weight import QuantizedWeight


def split_dim(module: nn.Module, kind: str) -> int | None:
    """Returns the dimension in which ranks split a parameter. The bias of a partial sum is not split."""
    split: int | None = getattr(module, "split", None)
    return None if kind == "bias" and split == 1 else split


def part_of(weight: QuantizedWeight, linear: Linear, outputs: int, shard: Shard) -> QuantizedWeight:
    """Returns this rank's part of the weight of one projection, which has `outputs` outputs on each rank."""
    if shard.size == 1 or linear.split is None:
        return weight
    if linear.split == 0:
        return weight.rows(slice(shard.rank * outputs, (shard.rank + 1) * outputs))
    return weight.columns(slice(shard.rank * linear.in_features, (shard.rank + 1) * linear.in_features))


def whole_shape_of(module: nn.Module, kind: str, parameter: Tensor, shard: Shard) -> list[int]:
    """Returns the shape of a parameter in the whole model."""
    if isinstance(module, Experts):
        return module.whole_shape(kind, shard)
    shape, split = list(parameter.shape), split_dim(module, kind)
    if split is not None:
        assert isinstance(module, Linear | RMSNorm | Sinks)
        shape[split] = sum(width * own.size for width, own in split_widths(module, split, shard))
    return shape


def split_widths(module: Linear | RMSNorm | Sinks, split: int, shard: Shard) -> list[tuple[int, Shard]]:
    """Returns, for each part of a split parameter, its width on this rank and the ranks with different parts."""
    if isinstance(module, Linear) and split == 1:
        return [(module.in_features, shard)]
    copies: Mapping[str, int] = getattr(module, "copies", {})
    return [(width, shard.among(copies.get(name, 1))) for name, width in module.parts.items()]


def rank_part(module: nn.Module, kind: str, whole: Tensor, shard: Shard) -> Tensor:
    """Returns the part of the whole model's parameter `kind` that belongs to `module`, the module of this rank."""
    if isinstance(module, Experts):
        return module.rank_part(kind, whole, shard)
    split = split_dim(module, kind)
    if split is None:
        return whole
    assert isinstance(module, Linear | RMSNorm | Sinks)
    widths = split_widths(module, split, shard)
    parts = torch.split(whole, [width * own.size for width, own in widths], split)
    owned = zip(parts, widths, strict=True)
    return torch.cat([part.chunk(own.size, split)[own.rank] for part, (_, own) in owned], split)
