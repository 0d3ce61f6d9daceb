"""Which method computes a product, by its form, rows and outputs. Written by `benchmarks/quantization/tune.py`.

The methods are the fastest in a chain of layers of an 8B model on an H200. Those for more than 128 rows are of
`benchmarks/quantization/products.py`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from engine.kernels.quantized.product import Tile

FEW_OUTPUTS, MIDDLE_OUTPUTS = 5120, 16384  # Largest numbers of outputs of a matrix with few and with middle outputs.
ANY = 1 << 30

Method = Tile | Literal["wide", "scratch"]


class Entry(NamedTuple):
    """The methods for up to `rows` rows."""

    rows: int
    few: Method  # for matrices with few outputs
    middle: Method
    many: Method


Table = tuple[Entry, ...]

INT4: Table = (
    Entry(
        8,
        Tile(8, 16, 128, 4, 2, split=True),
        Tile(8, 16, 128, 4, 2, split=True),
        Tile(8, 16, 128, 4, 2, split=True),
    ),
    Entry(
        16,
        Tile(16, 64, 64, 4, 3, splits=4),
        Tile(16, 64, 64, 4, 3, splits=4),
        Tile(16, 64, 64, 4, 3, splits=4),
    ),
    Entry(
        32,
        Tile(32, 64, 64, 4, 3, splits=4),
        Tile(32, 64, 128, 4, 3),
        Tile(32, 64, 128, 4, 3),
    ),
    Entry(
        64,
        Tile(64, 64, 64, 4, 3, splits=4),
        Tile(64, 64, 64, 4, 3),
        Tile(64, 64, 64, 4, 3),
    ),
    Entry(
        128,
        Tile(128, 64, 32, 4, 3, scaled=True, splits=4),
        Tile(128, 64, 32, 4, 3, scaled=True),
        Tile(128, 64, 32, 4, 3, scaled=True),
    ),
    Entry(
        ANY,
        "scratch",
        "scratch",
        "scratch",
    ),
)

INT4_ZEROS: Table = (
    Entry(
        8,
        Tile(8, 16, 128, 4, 2, split=True, lines=16, sums=True),
        Tile(8, 16, 128, 4, 2, split=True, sums=True),
        Tile(8, 64, 128, 4, 3, lines=16, sums=True),
    ),
    Entry(
        16,
        Tile(16, 16, 128, 4, 2, split=True, sums=True),
        Tile(16, 32, 128, 4, 2, split=True),
        Tile(16, 64, 64, 4, 4, splits=2, sums=True),
    ),
    Entry(
        32,
        Tile(32, 64, 64, 4, 3, splits=4, sums=True),
        Tile(32, 64, 64, 4, 3, splits=4, sums=True),
        Tile(32, 64, 64, 4, 3, splits=4, sums=True),
    ),
    Entry(
        64,
        Tile(64, 64, 32, 4, 4, scaled=True, splits=4),
        Tile(64, 64, 32, 4, 4, scaled=True, splits=4),
        Tile(64, 64, 32, 4, 4, scaled=True),
    ),
    Entry(
        128,
        Tile(128, 64, 32, 4, 3, scaled=True, splits=4),
        Tile(128, 64, 32, 4, 3, scaled=True, splits=4),
        Tile(128, 128, 32, 8, 2, scaled=True),
    ),
    Entry(
        ANY,
        "scratch",
        "scratch",
        "scratch",
    ),
)

BYTES: Table = (
    Entry(
        8,
        Tile(8, 16, 128, 8, 4, split=True, lines=32),
        Tile(8, 16, 128, 4, 4, split=True),
        Tile(8, 64, 128, 4, 4, splits=2),
    ),
    Entry(
        16,
        Tile(16, 16, 128, 4, 4, split=True),
        Tile(16, 16, 128, 4, 4, split=True),
        Tile(16, 16, 128, 4, 4, split=True),
    ),
    Entry(
        32,
        Tile(32, 64, 128, 4, 4, splits=4),
        "wide",
        Tile(32, 64, 128, 4, 3, splits=2),
    ),
    Entry(
        64,
        "wide",
        "wide",
        "wide",
    ),
    Entry(
        ANY,
        "wide",
        "wide",
        "wide",
    ),
)

BYTES_ONLY: Table = (
    Entry(
        8,
        Tile(8, 16, 128, 8, 4, split=True, lines=32),
        Tile(8, 16, 128, 4, 4, split=True),
        Tile(8, 64, 128, 4, 4, splits=2),
    ),
    Entry(
        16,
        Tile(16, 16, 128, 4, 4, split=True),
        Tile(16, 16, 128, 4, 4, split=True),
        Tile(16, 16, 128, 4, 4, split=True),
    ),
    Entry(
        32,
        Tile(32, 64, 128, 4, 4, splits=4),
        Tile(32, 64, 128, 4, 4, splits=2),
        Tile(32, 64, 128, 4, 4, splits=2),
    ),
    Entry(
        64,
        Tile(64, 64, 128, 4, 3, splits=4),
        Tile(64, 64, 128, 4, 3, splits=2),
        Tile(64, 64, 128, 4, 3, splits=2),
    ),
    Entry(
        128,
        Tile(128, 64, 128, 4, 3, splits=4),
        Tile(64, 64, 128, 4, 4),
        Tile(64, 64, 128, 4, 4),
    ),
    Entry(
        ANY,
        "scratch",
        "scratch",
        "scratch",
    ),
)
