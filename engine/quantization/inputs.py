"""Quantises the inputs of a layer as its checkpoint says, in float32: for a CPU, and as the reference of kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.quantization.weight import BLOCK, Activations, Kind, QuantizedWeight

LARGEST = {"fp8": 448.0, "int8": 127.0}  #: Largest number of a kind that a scale maps to.
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class InputRounding:
    """Rounds the inputs [T, K] of a layer to the numbers that a quantised product would multiply.

    The scale of a token, or of its groups of 128 inputs, brings the largest number to `LARGEST`.
    """

    kind: Kind
    activations: Activations
    scale: Tensor | None  # float32 [], with activations `static`

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the rounded inputs in the dtype of x."""
        wide, width = x.float(), x.shape[-1]
        largest = LARGEST[self.kind]
        if self.activations == "group":
            wide = F.pad(wide, (0, -width % BLOCK)).view(len(x), -1, BLOCK)
        scale = self.scale
        if scale is None:
            scale = (wide.abs().amax(dim=-1, keepdim=True) / largest).clamp_(min=_TINY)
        numbers = wide / scale
        if self.kind == "fp8":
            rounded = numbers.clamp_(-largest, largest).to(torch.float8_e4m3fn).float()
        else:
            rounded = numbers.round_().clamp_(-largest - 1, largest)
        rounded = rounded.mul_(scale)
        return (rounded.flatten(-2)[..., :width] if self.activations == "group" else rounded).to(x.dtype)


def input_rounding(weight: QuantizedWeight) -> InputRounding | None:
    """Returns how the inputs of a layer with this weight are rounded; None: not at all."""
    if weight.activations == "none":
        return None
    return InputRounding(weight.kind, weight.activations, weight.input_scale)
