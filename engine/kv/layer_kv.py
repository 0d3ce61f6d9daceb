"""Keys and values of one layer in all blocks of the pool, in the model's dtype or in 8 bits with scales.

The 8-bit format is e4m3 (OCP, no infinities). One scale covers the head_dim numbers of one token, one kv head, and K
or V:

- A token is quantized once, when it is written. The bytes of a block thus do not depend on the steps that wrote it.
- The scale is the power of two that brings the largest number into [128, 256). It multiplies without rounding, so all
  readers see the same numbers. A finer scale would not be more accurate, because e4m3 has an exponent of its own.
- Scales are bfloat16. The scales of K and V are side by side, so one 32-bit load reads both.
- A vector with a NaN, an infinity or a number past 2^127 has a NaN scale and reads as NaN.
- A code and a scale of zero bytes read as 0.0, so a zeroed pool is valid.

`engine/kernels/e4m3.py` computes the same bits on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: A float32 NaN.
NAN_BITS = 0x7FC00000


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Views of one layer's keys and values; strided over blocks."""

    kv: Tensor  # [num_blocks, 2 (K, V), kv_heads, block_size, head_dim]; uint8 for e4m3
    scales: Tensor | None = None  # bfloat16 [num_blocks, kv_heads, block_size, 2 (K, V)] for e4m3, else None

    def __post_init__(self) -> None:
        assert (self.scales is not None) == (self.kv.dtype == torch.uint8)
        assert self.kv.stride(4) == 1
        assert self.scales is None or self.scales.stride(3) == 1

    @property
    def num_kv_heads(self) -> int:
        return self.kv.shape[2]

    @property
    def block_size(self) -> int:
        return self.kv.shape[3]

    @property
    def head_dim(self) -> int:
        return self.kv.shape[4]


def quantize_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes x [..., D] to e4m3 bytes, uint8 [..., D], and scales, bfloat16 [...]."""
    wide = x.float()
    exponent = wide.abs().amax(-1).view(torch.int32) >> 23
    # Exponents are biased by 127. The scale's exponent, e = exponent - 7, brings the largest number into [128, 256);
    # 254 - e is the exponent of the inverse power of two.
    bits = torch.where(exponent >= 254, NAN_BITS, (exponent - 7).clamp_(min=1) << 23)
    inverse = ((254 << 23) - bits).view(torch.float32)
    code = (wide * inverse[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return code, bits.view(torch.float32).to(torch.bfloat16)


def dequantize_e4m3(code: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers of e4m3 bytes [..., D] with scales [...]; exact in bfloat16 and float32.

    The bits of an e4m3 number, shifted, are a float16 that is 256 times smaller. torch's conversion is ten times slower
    on a CPU.
    """
    halves = (code.view(torch.int8).to(torch.int16) << 7).bitwise_and_(~0x4000).view(torch.float16)
    return halves.to(dtype).mul_((scales.to(dtype) * 256)[..., None])
