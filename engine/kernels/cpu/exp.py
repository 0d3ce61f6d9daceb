"""The exponential function over an array."""

from __future__ import annotations

import numpy as np

from engine.kernels.cpu.compiled import compiled

LOG2_E, LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
MIN_EXPONENT = np.float32(-87.0)  #: exp of smaller numbers is not a normal float32.


@compiled("void(float32[::1], float32[::1])")
def exp_in_place(x: np.ndarray, powers: np.ndarray) -> None:
    """Replaces x[n] by exp(x), for x at most 0. powers[n] is overwritten.

    x * log2(e) is an integer plus a rest in [-0.5, 0.5]. The rest's exponential is a polynomial, the integer's is made
    from the bits of a float32. The relative error is at most 2e-7 + 8e-8 * |x|. A loop over a library's `exp` does not
    use vector instructions. Below MIN_EXPONENT the result is exp(MIN_EXPONENT).
    """
    bits = powers.view(np.int32)
    for i in range(len(x)):
        scaled = max(x[i], MIN_EXPONENT) * LOG2_E
        integer = np.floor(scaled + np.float32(0.5))
        rest = (scaled - integer) * LN_2
        value = np.float32(1 / 5040)
        value = value * rest + np.float32(1 / 720)
        value = value * rest + np.float32(1 / 120)
        value = value * rest + np.float32(1 / 24)
        value = value * rest + np.float32(1 / 6)
        value = value * rest + np.float32(1 / 2)
        value = value * rest + np.float32(1)
        value = value * rest + np.float32(1)
        bits[i] = (np.int32(integer) + np.int32(127)) << 23
        x[i] = value
    for i in range(len(x)):
        x[i] *= powers[i]
