"""One layer of the KV pool in kernels: its tensors and strides as one argument, and the 8-bit format (e4m3, scales).

`engine/kv/kv_pool.py` defines the format and computes the same bits in torch. Encoding is integer arithmetic, so it
rounds to nearest even on every device and in the interpreter. Decoding is the hardware's conversion without the scale;
callers apply the scale to scores or probabilities.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kv.kv_pool import NAN_BITS, LayerKV


class PoolArgs(NamedTuple):
    """The tensors of a layer and their strides in elements."""

    kv: Tensor  # [num_blocks, 2 (K, V), kv_heads, block_size, head_dim].
    #: 8-bit cache: the bfloat16 scales of K and V of a token, as int32 pairs or as int16 bits. Else a placeholder.
    scales: Tensor
    kv_block: int
    kv_which: int
    kv_head: int
    kv_token: int
    scale_block: int
    scale_head: int
    scale_token: int


def pool_args(layer: LayerKV, scale_dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> PoolArgs:
    """Returns the layer as a kernel's argument.

    Args:
        scale_dtype: int32 to read both scales of a token at once, int16 to write them one by one.
        kv_dtype: views an 8-bit cache as this dtype.
    """
    if layer.scales is None:
        return PoolArgs._make((layer.kv, layer.kv, *layer.kv.stride()[:4], 0, 0, 0))
    kv = layer.kv if kv_dtype is None else layer.kv.view(kv_dtype)
    scales = layer.scales.view(scale_dtype)
    return PoolArgs._make((kv, scales, *kv.stride()[:4], *scales.stride()[:3]))


NAN = tl.constexpr(NAN_BITS)


def has_native_e4m3() -> bool:
    """Returns whether kernels may use the e4m3 conversions of PTX. Returns False in the interpreter."""
    return torch.version.hip is None and not triton.knobs.runtime.interpret


@triton.jit
def magnitude(x):
    """Returns the largest |x| of fp32 x [.., D] as int32 bits. The bits order like the numbers, with NaN above all."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def scale_of(largest):
    """Returns the bits of the fp32 scale for vectors of this `magnitude`. Their upper half is the stored bfloat16."""
    exponent = largest >> 23
    return tl.where(exponent >= 254, NAN, tl.maximum(exponent - 7, 1) << 23)


@triton.jit
def encode(x, scale):
    """Encodes fp32 x to uint8. scale is given as bits; x / scale must be below 256, or the scale NaN."""
    inverse = ((254 << 23) - scale).to(tl.float32, bitcast=True)
    y = tl.abs(x * inverse)
    bits = y.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the numbers of e4m3 are multiples of 2^-9. Adding 2^14 rounds to them and leaves them in the last bits.
    small = (y + 16384.0).to(tl.int32, bitcast=True) & 0xF
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(y < 0.015625, small, normal) | sign).to(tl.uint8)


@triton.jit
def decode(code, dtype: tl.constexpr):
    """Decodes uint8 to numbers without their scale. The path through fp32 converts two numbers at a time."""
    x = code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return x.to(tl.float32).to(dtype)


@triton.jit
def unpack(pairs, NATIVE: tl.constexpr):
    """Decodes int16 pairs of e4m3 [.., D / 2] to two fp16 tensors without scales: the even and the odd elements.

    A tile stays in 16-bit elements up to here, because shared memory can transpose an operand of a matrix product only
    in 16-bit elements; bytes would be read one by one.

    Args:
        NATIVE: use the conversion of sm_89 and later.
    """
    if NATIVE:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            .reg .b16 even, odd;
            prmt.b32 t, $2, 0, 0x3120;
            mov.b32 {even, odd}, t;
            cvt.rn.f16x2.e4m3x2 $0, even;
            cvt.rn.f16x2.e4m3x2 $1, odd;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:  # shifted, the bits of an e4m3 are the bits of a float16 that is 256 times smaller
        even = ((((pairs << 8) >> 1) & -16385).to(tl.float16, bitcast=True) * 256.0).to(tl.float16)
        odd = ((((pairs & -256) >> 1) & -16385).to(tl.float16, bitcast=True) * 256.0).to(tl.float16)
    return even, odd


@triton.jit
def key_scale(pair):
    """Returns the fp32 scale of K from an int32 with the bfloat16 scales of K and V."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def value_scale(pair):
    """Returns the fp32 scale of V from an int32 with the bfloat16 scales of K and V."""
    return (pair & -65536).to(tl.float32, bitcast=True)
