"""Which kernel computes a product, by the form of the weight, its outputs and the number of rows.

The tables are from `benchmarks/quantization/products.py` on an H200 with the matrices of an 8B model. A matrix with few
outputs has few tiles, so from 17 rows several programs compute parts of K there.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from engine.kernels.quantized.device_weight import DeviceWeight
from engine.kernels.quantized.product import Tile
from engine.kernels.quantized.wide import has_wide_product

FEW_OUTPUTS = 5120  # Largest number of outputs of a matrix with few outputs.
ANY = 1 << 30

Method = Tile | Literal["wide", "scratch"]


class Entry(NamedTuple):
    """The methods for up to `rows` rows."""

    rows: int
    few: Method  # for matrices with few outputs
    many: Method


Table = tuple[Entry, ...]


def _same(rows: int, method: Method) -> Entry:
    return Entry(rows, method, method)


INT4_128 = Entry(128, Tile(128, 64, 32, 4, 3, scaled=True, splits=4), Tile(128, 64, 32, 4, 3, scaled=True))
INT4: Table = (
    _same(8, Tile(8, 16, 128, 4, 2, split=True)),
    _same(16, Tile(16, 64, 64, 4, 3, splits=4)),
    Entry(32, Tile(32, 64, 64, 4, 3, splits=4), Tile(32, 64, 128, 4, 3)),
    Entry(64, Tile(64, 64, 64, 4, 3, splits=4), Tile(64, 64, 64, 4, 3)),
    INT4_128,
    _same(ANY, "scratch"),
)
INT4_ZEROS: Table = (
    _same(8, Tile(8, 32, 128, 4, 2, split=True)),
    Entry(16, Tile(16, 32, 128, 4, 2, split=True), Tile(16, 64, 64, 4, 3, splits=4)),
    _same(32, Tile(32, 64, 64, 4, 3, splits=4)),
    Entry(64, Tile(64, 64, 32, 4, 3, splits=4), Tile(64, 64, 32, 4, 4, scaled=True)),
    INT4_128,
    _same(ANY, "scratch"),
)
FEW8: Table = (
    _same(8, Tile(8, 16, 128, 4, 4, split=True)),
    _same(16, Tile(16, 32, 128, 4, 3, split=True)),
)
MIDDLE8 = Tile(32, 64, 128, 4, 4, splits=4), Tile(64, 64, 128, 4, 3, splits=4)
BYTES: Table = (*FEW8, Entry(32, MIDDLE8[0], "wide"), Entry(64, MIDDLE8[1], "wide"), _same(ANY, "wide"))
BYTES_ONLY: Table = (  # inputs are not quantised
    *FEW8,
    Entry(32, MIDDLE8[0], Tile(32, 64, 128, 4, 4, splits=2)),
    Entry(64, MIDDLE8[1], Tile(64, 64, 128, 4, 3, splits=2)),
    Entry(128, Tile(128, 64, 128, 4, 3, splits=4), Tile(64, 64, 128, 4, 4)),
    _same(ANY, "scratch"),
)


def choose(weight: DeviceWeight, rows: int) -> Method:
    """Returns the fastest way to multiply this number of rows by the weight."""
    if weight.kind == "int4":
        constant = weight.offsets is None and weight.scales.is_floating_point()
        table = INT4 if constant else INT4_ZEROS
    else:
        table = BYTES if has_wide_product(weight) else BYTES_ONLY
    entry = next(entry for entry in table if rows <= entry.rows)
    return entry.few if weight.outputs <= FEW_OUTPUTS else entry.many
