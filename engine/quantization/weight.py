"""The canonical form of a quantised weight: what a checkpoint of any format becomes, on any device.

    weight[n, order[k]] = (number[n, k] - zero[n, g(k)]) * scale[n, g(k)]        g(k) = k // group_size

Numbers are e4m3 (`fp8`), signed 8-bit integers (`int8`) or unsigned 4-bit integers (`int4`). Scales are float32, so
those of every checkpoint are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from common.errors import ConfigError

Kind = Literal["fp8", "int8", "int4"]
Activations = Literal["none", "token", "group", "static"]

BLOCK = 128  #: Rows and columns of a block that has one scale.
FIXED_ZERO = 8  #: Zero of 4-bit numbers without zeros of their own.
MIN_GROUP = 16  #: Smallest group that a split of a weight may make.
_ORDER_GROUP = 32  # A rank's part of an ordered weight has groups of at most this size.


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The weight [N, K] of a linear layer in 4 or 8 bits per number.

    A weight with `order` reads its inputs through it: x[:, order] has one column for each column of `numbers`. K is the
    length of `order`. It exceeds the inputs of the layer if a split padded groups; padded columns are zero weights.
    """

    kind: Kind
    #: fp8: float8_e4m3fn [N, K]. int8: int8 [N, K]. int4: uint8 [N, K / 2], values 0 to 15, the low nibble is even k.
    numbers: Tensor
    #: float32 [N, G]; G = 1: one scale per output. With `block`: [ceil(N / 128), ceil(K / 128)].
    scales: Tensor
    zeros: Tensor | None = None  #: [N, G], uint8 for int4, int8 for int8. None: int4 has the zero 8, the others 0.
    order: Tensor | None = None  #: int64 [K]: the input of each column (activation order). None: k.
    block: bool = False  #: One scale covers 128 x 128 numbers; those at the edges cover less.
    #: How inputs are quantised: not at all, per token, per token and group of 128 inputs, or by `input_scale`.
    activations: Activations = "none"
    input_scale: Tensor | None = None  #: float32 []: scale of the inputs, with `static`.
    #: Inputs that share a scale; K if G = 1. Only the last group of fp8 numbers may be shorter.
    group_size: int = 0

    def __post_init__(self) -> None:
        outputs, inputs = self.shape
        groups = self.scales.shape[1]
        assert self.scales.dtype == torch.float32
        assert self.scales.shape[0] == (-(-outputs // BLOCK) if self.block else outputs), "scales per row or block"
        assert groups == -(-inputs // self.group_size), "scales per group"
        assert self.kind == "fp8" or groups * self.group_size == inputs, "groups are full"
        assert self.zeros is None or self.zeros.shape == self.scales.shape
        assert self.zeros is None or self.zeros.dtype == (torch.uint8 if self.kind == "int4" else torch.int8)
        assert self.order is None or self.order.shape == (inputs,)
        assert (self.activations == "static") == (self.input_scale is not None)

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        rows, width = self.numbers.shape
        return rows, width * 2 if self.kind == "int4" else width

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.numbers, self.scales, self.zeros, self.order, self.input_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def per_output(self) -> bool:
        """Whether every output has one scale for all its inputs."""
        return not self.block and self.scales.shape[1] == 1

    def unpacked(self) -> Tensor:
        """Returns the numbers [N, K] in the order of the columns: e4m3, int8, or uint8 from 0 to 15."""
        if self.kind != "int4":
            return self.numbers
        return torch.stack((self.numbers & 15, self.numbers >> 4), dim=-1).flatten(1)

    def row_scales(self) -> Tensor:
        """Returns the scales as [N, G], those of blocks repeated for each row."""
        return self.scales.repeat_interleave(BLOCK, 0)[: self.shape[0]] if self.block else self.scales

    def dequantize(self, dtype: torch.dtype, inputs: int | None = None) -> Tensor:
        """Returns the weight [N, inputs], computed in float32. `inputs` is K, unless a split padded groups."""
        outputs, width = self.shape
        numbers = self.unpacked().float()
        zeros = FIXED_ZERO if self.kind == "int4" else 0
        if self.zeros is not None:
            numbers = numbers - self.zeros.float().repeat_interleave(self.group_size, 1)[:, :width]
        elif zeros:
            numbers = numbers - zeros
        weight = numbers.mul_(self.row_scales().repeat_interleave(self.group_size, 1)[:, :width])
        if self.order is None:
            return weight.to(dtype)
        # Added, not copied: padded columns add zeros to an input that another column has.
        natural = weight.new_zeros(outputs, width if inputs is None else inputs)
        return natural.index_add_(1, self.order, weight).to(dtype)

    def to(self, device: torch.device) -> QuantizedWeight:
        """Returns the weight on a device."""
        names = ("numbers", "scales", "zeros", "order", "input_scale")
        moved = {name: value.to(device) for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **moved)

    def rows(self, part: slice) -> QuantizedWeight:
        """Returns the weight of a range of outputs. It shares memory, unless the range does not begin with a block."""
        start, stop, _ = part.indices(self.shape[0])
        scales, block = self.scales, self.block
        if block and start % BLOCK == 0:
            scales = scales[start // BLOCK : -(-stop // BLOCK)]
        else:
            scales, block = self.row_scales()[start:stop], False
        return replace(
            self,
            numbers=self.numbers[start:stop],
            scales=scales,
            block=block,
            zeros=None if self.zeros is None else self.zeros[start:stop],
        )

    def reordered(self, order: Tensor) -> QuantizedWeight:
        """Returns the weight whose output i is output order[i]."""
        order = order.to(self.numbers.device)
        zeros = None if self.zeros is None else self.zeros[order]
        return replace(self, numbers=self.numbers[order], scales=self.row_scales()[order], block=False, zeros=zeros)

    def columns(self, part: slice) -> QuantizedWeight:
        """Returns the weight of a range of inputs, for a rank of a row-parallel layer. The inputs count from its start.

        Groups are split into equal parts if the range does not begin or end with a group. A weight with an activation
        order gets groups of at most 32 inputs, filled up with zero columns. ConfigError if a group cannot be split.
        """
        start, stop, _ = part.indices(self.shape[1])
        if self.order is not None:
            return self._ordered_columns(start, stop)
        size = self.group_size
        if self.per_output:
            size, groups = stop - start, slice(0, 1)
            scales, zeros, block = self.scales, self.zeros, False
        else:
            split = math.gcd(size, start) if stop == self.shape[1] else math.gcd(size, start, stop)
            if split < MIN_GROUP or (self.kind != "fp8" and (stop - start) % split):
                raise ConfigError(
                    f"tensor_parallel_size: inputs {start} to {stop} of a layer split a quantisation group of {size} "
                    f"into parts of {split}: use fewer ranks",
                    field="tensor_parallel_size",
                )
            block = self.block and split == size
            scales = self.scales if block else self.row_scales()
            repeats, groups = size // split, slice(start // split, -(-stop // split))
            scales = scales.repeat_interleave(repeats, 1)[:, groups]
            zeros = None if self.zeros is None else self.zeros.repeat_interleave(repeats, 1)[:, groups]
            size = split
        packed = 2 if self.kind == "int4" else 1
        if start % packed or stop % packed:
            problem = f"inputs {start} to {stop} of a layer of 4-bit weights are not whole bytes: use fewer ranks"
            raise ConfigError(f"tensor_parallel_size: {problem}", field="tensor_parallel_size")
        numbers = self.numbers[:, start // packed : stop // packed].contiguous()
        return replace(self, numbers=numbers, scales=scales, zeros=zeros, group_size=size, block=block)

    def _ordered_columns(self, start: int, stop: int) -> QuantizedWeight:
        """Returns `columns` of a weight with an order: each group keeps its columns of the range and zero columns."""
        assert self.order is not None
        size = math.gcd(self.group_size, _ORDER_GROUP)
        numbers = self.unpacked()
        order, columns, groups = [], [], []
        for group in range(self.scales.shape[1]):
            span = self.order[group * self.group_size : (group + 1) * self.group_size]
            kept = ((span >= start) & (span < stop)).nonzero().flatten()
            padding = -len(kept) % size
            order += [span[kept] - start, span.new_zeros(padding)]
            columns.append(numbers[:, group * self.group_size :][:, kept])
            if padding:
                columns.append(self._zero_columns(group, padding))
            groups += [group] * ((len(kept) + padding) // size)
        packed = pack_nibbles(torch.cat(columns, 1)) if self.kind == "int4" else torch.cat(columns, 1)
        return replace(
            self,
            numbers=packed,
            scales=self.scales[:, groups],
            zeros=None if self.zeros is None else self.zeros[:, groups],
            order=torch.cat(order),
            group_size=size,
        )

    def _zero_columns(self, group: int, count: int) -> Tensor:
        """Returns numbers [N, count] that are zero weights."""
        if self.zeros is not None:
            return self.zeros[:, group : group + 1].expand(-1, count)
        fill = FIXED_ZERO if self.kind == "int4" else 0
        return torch.full((self.shape[0], count), fill, dtype=self.unpacked().dtype, device=self.numbers.device)


def pack_nibbles(values: Tensor) -> Tensor:
    """Packs uint8 [N, K] with values from 0 to 15 to `QuantizedWeight.numbers` of int4."""
    return values[:, 0::2] | (values[:, 1::2] << 4)


def concatenate(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Joins weights along their outputs; every part keeps its scales. The largest input scale is that of the result.

    Raises ValueError that names the first property in which the parts differ, if one weight cannot describe them.
    """
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    for name in ("kind", "group_size", "activations"):
        if len(values := {str(getattr(part, name)) for part in parts}) > 1:
            raise ValueError(f"{name} {' and '.join(sorted(values))}")
    for part in parts[1:]:
        if (first.order is None) != (part.order is None) or (
            first.order is not None and part.order is not None and not torch.equal(first.order, part.order)
        ):
            raise ValueError("activation orders that differ")
    block = first.block and all(part.shape[0] % BLOCK == 0 for part in parts[:-1])
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([_explicit_zeros(part) for part in parts])
    input_scales = [part.input_scale for part in parts if part.input_scale is not None]
    return replace(
        first,
        numbers=torch.cat([part.numbers for part in parts]),
        scales=torch.cat([part.scales if block else part.row_scales() for part in parts]),
        zeros=zeros,
        block=block,
        input_scale=torch.stack(input_scales).amax(0) if input_scales else None,
    )


def _explicit_zeros(part: QuantizedWeight) -> Tensor:
    if part.zeros is not None:
        return part.zeros
    if part.kind == "int4":
        return torch.full_like(part.scales, FIXED_ZERO, dtype=torch.uint8)
    return torch.zeros_like(part.scales, dtype=torch.int8)
