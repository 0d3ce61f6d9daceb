"""The weights of a layer's experts on the device, and how kernels read them.

    plain   [E, N, K] in the dtype of the inputs
    fp8     e4m3 bytes [E, N, K]; float32 scales per output, or per block of 128 x 128 numbers
    mxfp4   e2m1 numbers with an e8m0 scale for 32 inputs, eight numbers in an int32
    int4    numbers 0 to 15, eight in an int32 with the first in the lowest bits; a scale and perhaps a zero for a group

The eight numbers of an mxfp4 word are placed so that a shift and a mask make two numbers of bfloat16 in one register.
A bfloat16 has its sign in bit 15 and its lowest exponent bits and highest mantissa bit in bits 8 to 6; with the other
bits zero, the bits s, e, e, m there are the number of e2m1 times 2^-126:

    bit of a half word    15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    pair of numbers        0  3  3  1  3  3  2  0  0  0  1  1  1  2  2  2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.errors import ConfigError

PLAIN, FP8, MXFP4, INT4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
GROUP = 32  # Inputs of an mxfp4 scale.
FP8_BLOCK = 128  # Rows and columns of a block of e4m3 numbers that share a scale.
_HALVES = tl.constexpr(0x81C081C0 - (1 << 32))
_SIGNS = tl.constexpr(0x80008000 - (1 << 32))


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """One matrix of all experts: E times [N, K]."""

    kind: int  # PLAIN, FP8, MXFP4 or INT4.
    numbers: Tensor  # plain: [E, N, K]. fp8: uint8 [E, N, K]. mxfp4 and int4: int32 [E, N, K / 8].
    #: fp8: float32 [E, N, 1], or [E, N / 128, K / 128] rounded up. mxfp4: uint8 [E, N, K / 32 rounded up to 4]. int4:
    #: float16 or float32 [E, N, groups].
    scales: Tensor | None = None
    zeros: Tensor | None = None  # int4: uint8 [E, N, groups]; None: all zeros are 8.

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, N and K."""
        experts, outputs, width = self.numbers.shape
        return experts, outputs, width * 8 if self.kind in (MXFP4.value, INT4.value) else width

    @property
    def nbytes(self) -> int:
        """Bytes of numbers, scales and zeros."""
        return sum(tensor.nbytes for tensor in (self.numbers, self.scales, self.zeros) if tensor is not None)

    def largest_step(self, inputs: int) -> int:
        """Returns how many inputs, at most `inputs`, a step of a product may have: one scale covers them."""
        in_blocks = self.kind == FP8.value and self.scales is not None and self.scales.shape[2] > 1
        return min(inputs, FP8_BLOCK) if in_blocks else inputs

    def scale_tensor(self, placeholder: Tensor) -> Tensor:
        """Returns the scales as a kernel's argument: those of mxfp4 four at a time, as int32."""
        if self.scales is None:
            return placeholder
        return self.scales.view(torch.int32) if self.kind == MXFP4.value else self.scales

    def scale_args(self) -> dict[str, int]:
        """Returns how a kernel addresses the scales: rows and inputs of a scale, and the sizes of the tensor."""
        _, outputs, inputs = self.shape
        if self.scales is None:
            return {"SN": 1, "SK": 1, "SROWS": 1, "SGROUPS": 1}
        rows, groups = self.scales.shape[1:]
        if self.kind == MXFP4.value:
            return {"SN": 1, "SK": GROUP, "SROWS": rows, "SGROUPS": groups}
        if self.kind == INT4.value:
            return {"SN": 1, "SK": inputs // groups, "SROWS": rows, "SGROUPS": groups}
        in_blocks = rows != outputs or groups > 1
        return {
            "SN": FP8_BLOCK if in_blocks else 1,
            "SK": FP8_BLOCK if groups > 1 else inputs,
            "SROWS": rows,
            "SGROUPS": groups,
        }


def plain_weight(weight: Tensor) -> ExpertWeight:
    """Returns the weight [E, N, K] as it is."""
    assert weight.is_contiguous()
    return ExpertWeight(PLAIN.value, weight)


def fp8_weight(numbers: Tensor, scales: Tensor) -> ExpertWeight:
    """Returns a weight of e4m3 numbers [E, N, K].

    Args:
        scales: float32 [E, N, 1], or [E, ceil(N / 128), ceil(K / 128)] for blocks.
    """
    experts, outputs, inputs = numbers.shape
    blocks = (experts, -(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK))
    if tuple(scales.shape) not in ((experts, outputs, 1), blocks):
        raise ConfigError(f"scales {tuple(scales.shape)} do not fit e4m3 experts {tuple(numbers.shape)}", field="model")
    return ExpertWeight(FP8.value, numbers.contiguous().view(torch.uint8), scales.float().contiguous())


def mxfp4_weight(numbers: Tensor, scales: Tensor) -> ExpertWeight:
    """Returns a weight of e2m1 numbers, rearranged for the kernels. Peak memory is the result and one expert.

    Args:
        numbers: uint8 [E, N, K / 2], the low nibble is the even input; K is a multiple of 32.
        scales: uint8 [E, N, K / 32], powers of two with a bias of 127.
    """
    experts, outputs, width = numbers.shape
    groups = width * 2 // GROUP
    if width * 2 % GROUP or scales.shape != (experts, outputs, groups):
        raise ConfigError(
            f"scales {tuple(scales.shape)} do not fit MXFP4 experts {tuple(numbers.shape)}", field="model"
        )
    words = torch.empty(experts, outputs, width // 4, dtype=torch.int32, device=numbers.device)
    for source, target in zip(numbers, words, strict=True):
        target.copy_(_pack_words(source))
    padded = scales.new_zeros(experts, outputs, -(-groups // 4) * 4)
    padded[..., :groups] = scales
    return ExpertWeight(MXFP4.value, words, padded)


def int4_weight(numbers: Tensor, scales: Tensor, zeros: Tensor | None = None) -> ExpertWeight:
    """Returns a weight of 4-bit numbers. The numbers share their memory with the argument.

    Args:
        numbers: uint8 [E, N, K / 2], the low nibble is the even input; K is a multiple of 32.
        scales: float32 [E, N, groups] for groups of a multiple of 32 inputs; stored as float16 if that is exact.
        zeros: uint8 as scales. None: all are 8.
    """
    experts, outputs, width = numbers.shape
    groups = scales.shape[2]
    fits = scales.shape[:2] == (experts, outputs) and width * 2 % (groups * GROUP) == 0
    if not fits or (zeros is not None and zeros.shape != scales.shape):
        raise ConfigError(
            f"scales {tuple(scales.shape)} do not fit 4-bit experts {tuple(numbers.shape)}", field="model"
        )
    half = scales.half()
    scales = half if bool((half.float() == scales).all()) else scales.contiguous()
    return ExpertWeight(INT4.value, numbers.contiguous().view(torch.int32), scales, zeros)


def _pack_words(numbers: Tensor) -> Tensor:
    """Packs uint8 [N, K / 2] to int32 [N, K / 8] with the bits of this module's first comment."""
    pairs = numbers.view(len(numbers), -1, 4).to(torch.int64)  # byte p: numbers 2p and 2p + 1

    def halves(nibble: Tensor) -> Tensor:
        sign, rest = nibble >> 3, nibble & 7
        word = (sign << 15 | rest << 6) >> torch.tensor([0, 3, 6, 0], device=nibble.device)
        last = sign << 14 | (rest >> 2) << 13 | (rest & 3) << 10
        word[..., 3] = last[..., 3]
        return word.sum(-1)

    word = halves(pairs & 15) | halves(pairs >> 4) << 16
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


@triton.jit
def unpack_pairs(word):
    """Unpacks int32 words to four int32 tensors. Each holds two bfloat16: numbers 2p (low half) and 2p + 1 (high)."""
    last = ((word << 1) & _SIGNS) | ((word >> 5) & 0x01000100) | ((word >> 4) & 0x00C000C0)
    return word & _HALVES, (word << 3) & _HALVES, (word << 6) & _HALVES, last


@triton.jit
def low(pair):
    """Returns the low bfloat16 as fp32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(pair):
    """Returns the high bfloat16 as fp32."""
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def unpack_floats(words, ROWS: tl.constexpr, K: tl.constexpr):
    """Unpacks int32 words [ROWS, K / 8] to fp32 [ROWS, K], 2^126 times too small. A thread keeps its registers."""
    p0, p1, p2, p3 = unpack_pairs(words)
    lows = tl.join(tl.join(low(p0), low(p2)), tl.join(low(p1), low(p3)))
    highs = tl.join(tl.join(high(p0), high(p2)), tl.join(high(p1), high(p3)))
    return tl.join(lows, highs).reshape(ROWS, K)


@triton.jit
def _nibble(words, shift: tl.constexpr):
    """Returns a number of 4-bit words, less 8, as fp32: 16 bits below the exponent of 128 they count ones."""
    place = (words << (16 - shift)) if shift < 16 else (words >> (shift - 16))
    return ((place & 0x000F0000) | 0x43000000).to(tl.float32, bitcast=True) - 136.0


@triton.jit
def unpack_nibbles(words, ROWS: tl.constexpr, K: tl.constexpr):
    """Unpacks int32 words [ROWS, K / 8] of 4-bit numbers to fp32 [ROWS, K], less 8. A thread keeps its registers."""
    lows = tl.join(tl.join(_nibble(words, 0), _nibble(words, 16)), tl.join(_nibble(words, 8), _nibble(words, 24)))
    highs = tl.join(tl.join(_nibble(words, 4), _nibble(words, 20)), tl.join(_nibble(words, 12), _nibble(words, 28)))
    return tl.join(lows, highs).reshape(ROWS, K)


@triton.jit
def decode_e4m3(code, NATIVE: tl.constexpr):
    """Decodes e4m3 bytes to fp32. NATIVE: the device converts (sm_89 and later); the code NaN is then NaN."""
    if NATIVE:
        x = code.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    else:
        bits = code.to(tl.int32)
        x = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return x


@triton.jit
def activate(gate, up, GPT_OSS: tl.constexpr):
    """Returns silu(gate) * up, or the clamped activation of gpt-oss."""
    if GPT_OSS:
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        y = (up + 1.0) * gate / (1.0 + tl.exp(-1.702 * gate))
    else:
        y = gate / (1.0 + tl.exp(-gate)) * up
    return y
