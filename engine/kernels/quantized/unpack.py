"""Conversion of quantised numbers to the dtype of a product, inside a kernel.

All conversions are elementwise, so a tile keeps its layout in registers: 4-bit numbers of one 16-bit word are columns
of four different tiles (see `DeviceWeight`). The inline assembly converts two or four numbers at a time:

    int4   the bits of a number become the low bits of the mantissa of 128 (bfloat16) or 1024 (float16), which the
           sum with an offset removes: -(128 + zero) or -(1024 + zero). Every step is exact.
    int8   as int4 with 7 bits; the sign bit is bit 7, which doubles the 128 that is subtracted.
    fp8    the bits of an e4m3, shifted into the place of exponent and mantissa, are a number that is smaller by a power
           of two. This includes subnormal numbers.

Without inline assembly (interpreter, float32) the same formulas are plain Triton operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def has_assembly(dtype: torch.dtype) -> bool:
    """Returns whether kernels may use inline assembly for products of this dtype."""
    return dtype != torch.float32 and torch.version.hip is None and not triton.knobs.runtime.interpret


def magic(dtype: torch.dtype) -> int:
    """Returns the number whose mantissa the conversion of a 4-bit number fills."""
    return 1024 if dtype == torch.float16 else 128


@triton.jit
def _int4(words, shift, offset):
    """Converts the 4 bits at `shift` of int16 words to the dtype of `offset` and adds `offset`."""
    if offset.dtype == tl.float16:
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 t, one;
            mov.b32 one, 0x3C003C00;
            shr.b32 t, $1, $2;
            lop3.b32 t, t, 0x000F000F, 0x64006400, 0xEA;
            fma.rn.f16x2 $0, t, one, $4;
            }""",
            "=r,r,r,r,r",
            [words, shift, offset],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 t, one;
            mov.b32 one, 0x3F803F80;
            shr.b32 t, $1, $2;
            lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, t, one, $4;
            }""",
            "=r,r,r,r,r",
            [words, shift, offset],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return result


@triton.jit
def _scaled_int4(words, shift, offset, high, low):
    """Converts as `_int4`, then multiplies by the scale high + low with one rounding."""
    if offset.dtype == tl.float16:
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u, one, zero;
            mov.b32 one, 0x3C003C00;
            mov.b32 zero, 0x80008000;
            shr.b32 t, $1, $2;
            lop3.b32 t, t, 0x000F000F, 0x64006400, 0xEA;
            fma.rn.f16x2 t, t, one, $4;
            fma.rn.f16x2 u, t, $6, zero;
            fma.rn.f16x2 $0, t, $5, u;
            }""",
            "=r,r,r,r,r,r,r",
            [words, shift, offset, high, low],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u, one, zero;
            mov.b32 one, 0x3F803F80;
            mov.b32 zero, 0x80008000;
            shr.b32 t, $1, $2;
            lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 t, t, one, $4;
            fma.rn.bf16x2 u, t, $6, zero;
            fma.rn.bf16x2 $0, t, $5, u;
            }""",
            "=r,r,r,r,r,r,r",
            [words, shift, offset, high, low],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return result


@triton.jit
def _int8(numbers, offset):
    """Converts int8 to the dtype of `offset` and adds `offset`."""
    if offset.dtype == tl.float16:
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, one, bias;
            mov.b32 one, 0x3C003C00;
            mov.b32 bias, 0xE480E480;
            prmt.b32 a, $2, 0, 0x4140;
            prmt.b32 b, $2, 0, 0x4342;
            lop3.b32 a, a, 0x00800080, 0x64006400, 0xBE;
            lop3.b32 b, b, 0x00800080, 0x64006400, 0xBE;
            fma.rn.f16x2 a, a, one, bias;
            fma.rn.f16x2 b, b, one, bias;
            fma.rn.f16x2 $0, a, one, $3;
            fma.rn.f16x2 $1, b, one, $4;
            }""",
            "=r,=r,r,r,r",
            [numbers, offset],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, s, t, one, minus;
            mov.b32 one, 0x3F803F80;
            mov.b32 minus, 0xBF80BF80;
            prmt.b32 a, $2, 0, 0x4140;
            prmt.b32 b, $2, 0, 0x4342;
            lop3.b32 s, a, 0x00800080, 0x43004300, 0xEA;
            lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
            fma.rn.bf16x2 a, s, minus, a;
            lop3.b32 t, b, 0x00800080, 0x43004300, 0xEA;
            lop3.b32 b, b, 0x007F007F, 0x43004300, 0xEA;
            fma.rn.bf16x2 b, t, minus, b;
            fma.rn.bf16x2 $0, a, one, $3;
            fma.rn.bf16x2 $1, b, one, $4;
            }""",
            "=r,=r,r,r,r",
            [numbers, offset],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return result


@triton.jit
def _fp8(codes, HALF: tl.constexpr):
    """Converts e4m3 bytes to float16 (HALF) or bfloat16. The byte permutation fills the upper byte with the sign."""
    if HALF:
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, up, zero;
            mov.b32 up, 0x5C005C00;
            mov.b32 zero, 0x80008000;
            prmt.b32 a, $2, 0, 0x9180;
            prmt.b32 b, $2, 0, 0xB3A2;
            shl.b32 a, a, 7;
            shl.b32 b, b, 7;
            and.b32 a, a, 0xBF80BF80;
            and.b32 b, b, 0xBF80BF80;
            fma.rn.f16x2 $0, a, up, zero;
            fma.rn.f16x2 $1, b, up, zero;
            }""",
            "=r,=r,r",
            [codes],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, up, zero;
            mov.b32 up, 0x7B807B80;
            mov.b32 zero, 0x80008000;
            prmt.b32 a, $2, 0, 0x9180;
            prmt.b32 b, $2, 0, 0xB3A2;
            shl.b32 a, a, 4;
            shl.b32 b, b, 4;
            and.b32 a, a, 0x87F087F0;
            and.b32 b, b, 0x87F087F0;
            fma.rn.bf16x2 $0, a, up, zero;
            fma.rn.bf16x2 $1, b, up, zero;
            }""",
            "=r,=r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return result


@triton.jit
def e4m3(code):
    """Converts e4m3 bytes to float32 with integer operations."""
    bits = code.to(tl.int32)
    return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def convert(tile, shift, offset, KIND: tl.constexpr, ASM: tl.constexpr):
    """Converts a tile of numbers to the dtype of `offset`, which is added to integers.

    Args:
        tile: int16 words of int4, else bytes.
        shift: place of the 4 bits of int4.
        offset: see `DeviceWeight.offsets`; broadcastable to the tile.
    """
    if ASM:
        if KIND == "int4":
            result = _int4(tile, shift, offset)
        elif KIND == "int8":
            result = _int8(tile, offset)
        else:
            result = _fp8(tile, offset.dtype == tl.float16)
    else:
        if KIND == "int4":
            magic: tl.constexpr = 1024.0 if offset.dtype == tl.float16 else 128.0
            number = ((tile.to(tl.int32) >> shift) & 15).to(tl.float32) + (magic + offset.to(tl.float32))
        elif KIND == "int8":
            number = tile.to(tl.int8, bitcast=True).to(tl.float32) + offset.to(tl.float32)
        else:
            number = e4m3(tile)
        result = number.to(offset.dtype)
    return result


@triton.jit
def convert_scaled(words, shift, offset, scale, ASM: tl.constexpr):
    """Converts int4 as `convert` and multiplies by the float32 scale, which is broadcastable to the tile."""
    if ASM:
        high = scale.to(offset.dtype)
        low = (scale - high.to(tl.float32)).to(offset.dtype)
        result = _scaled_int4(words, shift, offset, high, low)
    else:
        result = (convert(words, shift, offset, "int4", ASM).to(tl.float32) * scale).to(offset.dtype)
    return result
