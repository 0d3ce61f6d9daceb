"""Which kernel computes a product, by the form of the weight and the number of rows.

The tables are from `benchmarks/quantization/products.py` on an H200: the fastest way for the four matrices of an 8B
model together. Each entry serves up to its number of rows. Where inputs of 8 bits are possible, cuBLAS is faster than
our kernels from 17 rows.
"""

from __future__ import annotations

from typing import Literal

from engine.kernels.quantized.device_weight import DeviceWeight
from engine.kernels.quantized.product import Tile
from engine.kernels.quantized.wide import has_wide_product

Method = Tile | Literal["wide", "scratch"]
Table = tuple[tuple[int, Method], ...]

ANY = 1 << 30
MIDDLE4: Table = (
    (32, Tile(32, 64, 128, 4, 3)),
    (128, Tile(64, 64, 64, 4, 3)),
    (ANY, "scratch"),
)
INT4: Table = ((8, Tile(8, 16, 128, 4, 2, split=True)), (16, Tile(16, 64, 128, 4, 3)), *MIDDLE4)
INT4_ZEROS: Table = (
    (8, Tile(8, 32, 128, 4, 2, split=True)),
    (16, Tile(16, 32, 128, 4, 2, split=True)),
    *MIDDLE4,
)
FEW8: Table = ((8, Tile(8, 16, 128, 4, 4, split=True)), (16, Tile(16, 32, 128, 4, 3, split=True)))
BYTES: Table = (*FEW8, (ANY, "wide"))
BYTES_ONLY: Table = (  # inputs are not quantised
    *FEW8,
    (32, Tile(32, 32, 128, 4, 3, split=True)),
    (128, Tile(64, 64, 128, 4, 4)),
    (ANY, "scratch"),
)
TABLES = (INT4, INT4_ZEROS, BYTES, BYTES_ONLY)


def choose(weight: DeviceWeight, rows: int) -> Method:
    """Returns the fastest way to multiply this number of rows by the weight."""
    if weight.kind == "int4":
        constant = weight.offsets is None and weight.scales.is_floating_point()
        table = INT4 if constant else INT4_ZEROS
    else:
        table = BYTES if has_wide_product(weight) else BYTES_ONLY
    return next(method for most, method in table if rows <= most)
