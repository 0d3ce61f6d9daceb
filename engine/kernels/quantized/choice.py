"""Which kernel computes a product, by the form of the weight, its outputs and the number of rows (`tables`).

A matrix with few outputs has few tiles, so from 17 rows on several programs compute parts of K there.
"""

from __future__ import annotations

from engine.kernels.quantized.device_weight import DeviceWeight
from engine.kernels.quantized.tables import (
    BYTES,
    BYTES_ONLY,
    FEW_OUTPUTS,
    INT4,
    INT4_ZEROS,
    MIDDLE_OUTPUTS,
    Method,
    Table,
)
from engine.kernels.quantized.wide import has_wide_product


def table_of(weight: DeviceWeight) -> Table:
    """Returns the methods for the form of the weight."""
    if weight.kind == "int4":
        constant = weight.offsets is None and weight.scales.is_floating_point()
        return INT4 if constant else INT4_ZEROS
    return BYTES if has_wide_product(weight) else BYTES_ONLY  # BYTES_ONLY: inputs are not quantised


def choose(weight: DeviceWeight, rows: int) -> Method:
    """Returns the fastest way to multiply this number of rows by the weight."""
    entry = next(entry for entry in table_of(weight) if rows <= entry.rows)
    if weight.outputs <= FEW_OUTPUTS:
        return entry.few
    return entry.middle if weight.outputs <= MIDDLE_OUTPUTS else entry.many
