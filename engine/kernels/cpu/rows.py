"""Norm, gated activation, rotation and the product with 8-bit weights, each for one row."""

from __future__ import annotations

import numpy as np

from engine.kernels.cpu.compiled import compiled
from engine.kernels.cpu.exp import exp_in_place


@compiled("void(float32[:, ::1], float32[::1], float32, float32[:, ::1])")
def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    """Computes the RMSNorm of x [R, n] in out [R, n], which may be x."""
    rows, columns = x.shape
    for row in range(rows):
        squares = np.float32(0)
        for i in range(columns):
            squares += x[row, i] * x[row, i]
        factor = np.float32(1) / np.sqrt(squares / np.float32(columns) + eps)
        for i in range(columns):
            out[row, i] = x[row, i] * factor * weight[i]


@compiled("void(float32[:, ::1], float32[:, ::1])")
def swiglu(gate_up: np.ndarray, out: np.ndarray) -> None:
    """Computes silu(gate) * up in out [R, n]. gate_up: [R, 2 * n], the gates of a row first."""
    rows, columns = out.shape
    powers = np.empty(columns, np.float32)
    for row in range(rows):
        for i in range(columns):
            out[row, i] = -abs(gate_up[row, i])
        exp_in_place(out[row], powers)
        for i in range(columns):
            gate, power = gate_up[row, i], out[row, i]  # power: exp(-|gate|), which is never infinite
            share = (np.float32(1) if gate >= 0 else power) / (np.float32(1) + power)
            out[row, i] = gate * share * gate_up[row, columns + i]


@compiled("void(float32[:, ::1], float32[::1], float32[::1])")
def rotate(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    """Rotates heads [H, D] in place, as `engine.models.ops.rotate_` does. cos, sin: [D]."""
    half = heads.shape[1] // 2
    for head in range(heads.shape[0]):
        for d in range(half):
            first, second = heads[head, d], heads[head, d + half]
            heads[head, d] = first * cos[d] + second * sin[d]
            heads[head, d + half] = second * cos[d + half] + first * sin[d + half]


@compiled("void(float32[:, ::1], int8[:, ::1], float32[::1], float32[:, ::1])")
def int8_product(x: np.ndarray, numbers: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Computes x @ (numbers * scales).T in out [1, n]. x: [1, k]. numbers: [n, k]. scales: [n]."""
    outputs, inputs = numbers.shape
    for output in range(outputs):
        total = np.float32(0)
        for i in range(inputs):
            total += np.float32(numbers[output, i]) * x[0, i]
        out[0, output] = total * scales[output]
