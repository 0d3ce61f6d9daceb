"""Rotary position embeddings (Su et al. 2021): frequencies per scaling kind, and the cos and sin tables.

Scaling kinds: linear (position interpolation, Chen et al. 2023), llama3 (wavelength-dependent interpolation of
Llama 3.1), yarn (Peng et al. 2023). Dimension i is rotated with dimension i + head_dim / 2, as Hugging Face checkpoints
expect.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.models.spec import RopeSpec


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """Returns the angular frequencies per token, float32[head_dim / 2], and the factor on cos and sin (yarn)."""
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
    """Returns cos and sin, float32[length, head_dim / 2] each, for positions 0..length-1."""
    inv_freq, factor = inverse_frequencies(spec, head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inv_freq)
    return angles.cos() * factor, angles.sin() * factor


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates heads[T, H, D] in place by cos, sin[T, 1, D / 2]."""
    low, high = heads.chunk(2, dim=-1)
    rotated = torch.addcmul(high * cos, low, sin)
    low.mul_(cos).addcmul_(high, sin, value=-1.0)
    high.copy_(rotated)


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
    def scale(mscale: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * mscale * math.log(spec.factor) + 1.0

    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return scale(spec.mscale) / scale(spec.mscale_all_dim)
    return scale(1.0)
