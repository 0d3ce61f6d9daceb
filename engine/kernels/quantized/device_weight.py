"""The form in which a GPU keeps a quantised weight. It is made once, after loading."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.quantized.unpack import magic
from engine.quantization.weight import Activations, Kind, QuantizedWeight

MAX_WIDTH = 128  # Largest number of columns between two 4-bit numbers of a word.
FIELDS = 4  # 4-bit numbers in a word.


@dataclass(frozen=True, slots=True)
class DeviceWeight:
    """Weight [N, K] of a linear layer for the kernels of this package.

    int4 numbers are packed in int16 words, so that all numbers of a tile are unpacked by the same shift:

        columns   0 .. W-1   W .. 2W-1   2W .. 3W-1   3W .. 4W-1   4W .. 5W-1  ...     W: width
        word      0 .. W-1   0 .. W-1    0 .. W-1     0 .. W-1     W .. 2W-1
        bits      0 .. 3     4 .. 7      8 .. 11      12 .. 15     0 .. 3

    Bytes (fp8, int8) stay in the order of the checkpoint, which `torch._scaled_mm` reads too.
    """

    kind: Kind
    numbers: Tensor  #: e4m3 or int8 [N, K]; int4: int16 [N, K / 4], K rounded up to a multiple of 4 * width.
    #: float32 [G, N]; with `block` [G, ceil(N / 128)], where G is contiguous, as cuBLAS reads it. int4 with zeros and
    #: scales of 16 bits: int32 [G, N], the scale is the upper half, the offset in the dtype `compute` the lower half.
    scales: Tensor
    scale_dtype: torch.dtype  #: dtype of a scale: float32, or float16 or bfloat16 if packed with an offset.
    offsets: Tensor | None  #: [G, N] in the dtype `compute`, the summand of a number (see unpack.py). None: constant.
    order: Tensor | None  #: int64 [K]: the input of each column. None: the identity.
    inputs: int  #: K.
    group: int  #: Columns that share a scale. 0: all.
    width: int  #: Power of two that divides the group, at most MAX_WIDTH; the width of int4 words.
    block: bool  #: A scale covers 128 x 128 numbers.
    compute: torch.dtype  #: dtype of the product's operands.
    activations: Activations  #: How the checkpoint quantises inputs, see `QuantizedWeight`.
    input_scale: Tensor | None  #: float32 []: scale of the inputs, with "static".

    @property
    def outputs(self) -> int:
        return self.numbers.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.numbers, self.scales, self.offsets, self.order, self.input_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def prepare(weight: QuantizedWeight, compute: torch.dtype) -> DeviceWeight:
    """Packs a weight for products in the dtype `compute`, on the device of the weight."""
    columns = weight.shape[1]
    group = 0 if weight.per_output else weight.group_size
    width = min(MAX_WIDTH, group & -group) if group else MAX_WIDTH
    numbers = weight.numbers.contiguous()
    if weight.kind == "int4":
        width = width if group else min(width, max(16, columns & -columns))
        numbers = _words(weight.unpacked(), width)
    scales, scale_dtype = weight.scales.contiguous().t(), torch.float32  # a rank's part is not contiguous
    if not weight.block:
        scales = scales.contiguous()
    offsets = None
    if weight.zeros is not None:
        offsets = -(weight.zeros.t().float() + (magic(compute) if weight.kind == "int4" else 0))
        offsets = offsets.to(compute).contiguous()
    if weight.kind == "int4" and offsets is not None and compute != torch.float32 and (exact := _exact_half(scales)):
        scales = scales.to(exact).view(torch.int16).int() << 16 | (offsets.view(torch.int16).int() & 0xFFFF)
        scale_dtype, offsets = exact, None
    return DeviceWeight(
        weight.kind,
        numbers,
        scales,
        scale_dtype,
        offsets,
        weight.order,
        columns,
        group,
        width,
        weight.block,
        compute,
        weight.activations,
        weight.input_scale,
    )


def _words(numbers: Tensor, width: int) -> Tensor:
    """Packs uint8 [N, K] with values from 0 to 15, see `DeviceWeight`."""
    rows, columns = numbers.shape
    fields = F.pad(numbers, (0, -columns % (FIELDS * width))).view(rows, -1, FIELDS, width)
    words = fields[:, :, 0].short()
    for i in range(1, FIELDS):
        words |= fields[:, :, i].short() << 4 * i
    return words.flatten(1)


def _exact_half(scales: Tensor) -> torch.dtype | None:
    """Returns a dtype of 16 bits that holds the scales exactly."""
    exact = (dtype for dtype in (torch.float16, torch.bfloat16) if torch.equal(scales.to(dtype).float(), scales))
    return next(exact, None)
