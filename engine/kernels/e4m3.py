"""The 8-bit numbers of the KV cache inside kernels. The format, and the same bits in torch: `engine/kv/layer_kv.py`.

Encoding is integer arithmetic: it rounds to nearest even on every device and in the interpreter. Decoding is the
hardware's conversion, without the scale, which callers fold into what they multiply anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kv.layer_kv import NAN_BITS, LayerKV

NAN = tl.constexpr(NAN_BITS)


@triton.jit
def magnitude(x):
    """Of fp32 x[.., D]: its largest |x| as bits, which order like the numbers do, NaN above all."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def scale_of(largest):
    """Bits of the fp32 scale of vectors whose `magnitude` is given; their upper half is the bfloat16 that is kept."""
    exponent = largest >> 23
    return tl.where(exponent >= 254, NAN, tl.maximum(exponent - 7, 1) << 23)


@triton.jit
def encode(x, scale):
    """Bytes of fp32 x under scales given as bits; x / scale is below 256, or the scale is NaN."""
    inverse = ((254 << 23) - scale).to(tl.float32, bitcast=True)
    y = tl.abs(x * inverse)
    bits = y.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Adding 2^14 leaves multiples of 2^-9, the step of e4m3 below 2^-6, in the last bits.
    small = (y + 16384.0).to(tl.int32, bitcast=True) & 0xF
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(y < 0.015625, small, normal) | sign).to(tl.uint8)


@triton.jit
def decode(code, dtype: tl.constexpr):
    """Numbers of bytes, without their scale. To bfloat16 by way of fp32, which packs two a conversion."""
    x = code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return x.to(tl.float32).to(dtype)


@triton.jit
def unpack(pairs, NATIVE: tl.constexpr):
    """fp16 numbers of int16 [.., D / 2] that hold neighbours: those at even and those at odd places, without scales.

    A tile is kept in 16-bit elements until here, because shared memory gives transposed operands of a matrix product in
    those only; bytes would be read one by one. NATIVE: the conversion of sm_89 and later, two registers at a time.
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
    else:  # the bits of e4m3, moved, are those of a float16 that is 256 times smaller
        even = ((((pairs << 8) >> 1) & -16385).to(tl.float16, bitcast=True) * 256.0).to(tl.float16)
        odd = ((((pairs & -256) >> 1) & -16385).to(tl.float16, bitcast=True) * 256.0).to(tl.float16)
    return even, odd


@triton.jit
def key_scale(pair):
    """fp32 scale of K from an int32 that holds the bfloat16 scales of K and V."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def value_scale(pair):
    """fp32 scale of V from an int32 that holds the bfloat16 scales of K and V."""
    return (pair & -65536).to(tl.float32, bitcast=True)


def scale_halves(layer: LayerKV) -> tuple[torch.Tensor, int, int, int]:
    """What a kernel that writes scales takes: int16 bits of bfloat16, K and V beside each other, and the strides of
    block, head and token. Without scales: a pointer that it does not follow.
    """
    if layer.scales is None:
        return layer.kv, 0, 0, 0
    halves = layer.scales.view(torch.int16)
    return halves, halves.stride(0), halves.stride(1), halves.stride(2)


def scale_pairs(layer: LayerKV) -> tuple[torch.Tensor, int, int, int]:
    """What a kernel that reads scales takes: an int32 for each K and V, and the strides of block, head and token."""
    if layer.scales is None:
        return layer.kv, 0, 0, 0
    pairs = layer.scales.view(torch.int32)
    return pairs, pairs.stride(0), pairs.stride(1), pairs.stride(2)
