"""Which kernel computes a product, by the form of the weight and the number of rows.

The tables are from `benchmarks/quantization/products.py` on an H200: the fastest way for the four matrices of an 8B
model together. Each entry serves up to its number of rows.
"""

from __future__ import annotations

from typing import Literal

from engine.kernels.quantized.device_weight import DeviceWeight
from engine.kernels.quantized.gemv import can_gemv
from engine.kernels.quantized.product import Tile
from engine.kernels.quantized.wide import has_wide_product

Method = Tile | Literal["gemv", "wide", "scratch"]
Table = tuple[tuple[int, Method], ...]

ANY = 1 << 30
INT4: Table = (
    (8, Tile(8, 16, 128, 4, 2, True)),
    (16, Tile(16, 32, 128, 4, 2, True)),
    (32, Tile(32, 64, 128, 4, 3)),
    (64, Tile(64, 64, 64, 4, 3)),
    (128, Tile(128, 64, 32, 4, 3, scaled=True)),
    (1024, Tile(128, 128, 32, 8, 2, scaled=True)),
    (ANY, "scratch"),
)
BYTES: Table = (
    (1, "gemv"),
    (8, Tile(8, 16, 128, 4, 4, True)),
    (16, Tile(16, 32, 128, 4, 3, True)),
    (32, Tile(32, 64, 128, 4, 4)),
    (64, Tile(64, 64, 128, 4, 4)),
    (128, Tile(128, 128, 128, 8, 3)),
    (ANY, "wide"),
)
BYTES_ONLY: Table = (*BYTES[:-1], (1024, Tile(128, 128, 128, 8, 3)), (ANY, "scratch"))  # inputs are not quantised


def choose(weight: DeviceWeight, rows: int) -> Method:
    """Returns the fastest way to multiply this number of rows by the weight."""
    if weight.kind == "int4":
        table = INT4
    else:
        table = BYTES if has_wide_product(weight) else BYTES_ONLY
    method = next(method for most, method in table if rows <= most)
    if method == "gemv" and not can_gemv(weight):
        return table[1][1]
    return method
