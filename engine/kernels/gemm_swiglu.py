"""GEMM with SiLU x mul in its epilogue, for many rows: a persistent kernel on TMA descriptors (Hopper).

A tile computes BN columns of gate and the same BN columns of up as one product of twice the width. So both numbers of a
pair are in one thread's registers, and the kernel stores half of the computed numbers. A program computes every SMS-th
tile and loads for the next tile while it finishes one. For the L2 cache, tiles are ordered in bands of GROUP tile rows,
column by column inside a band.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

MIN_ROWS = 2048  # Smallest number of rows for this kernel. With fewer rows, cuBLAS followed by `silu_mul` is as fast.
#: Rows, columns and depth of a tile, pipeline stages, and tile rows of a band.
BM, BN, BK, STAGES, GROUP = 128, 128, 64, 4, 16


@triton.jit(do_not_specialize=["rows"])
def _swiglu_kernel(
    x,
    weight,
    out,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    SMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles_m = tl.cdiv(rows, BM)
    tiles_n: tl.constexpr = (N + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, SMS, flatten=True):
        first = tile // (GROUP * tiles_n) * GROUP
        size = tl.minimum(tiles_m - first, GROUP)
        m0 = (first + tile % (GROUP * tiles_n) % size) * BM
        n0 = tile % (GROUP * tiles_n) // size * BN
        acc = tl.zeros([BM, 2 * BN], tl.float32)
        for k0 in tl.range(0, K, BK, num_stages=STAGES):
            a = x.load([m0, k0])
            w = weight.load([0, n0, k0]).reshape(2 * BN, BK)
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        gate, up = acc.reshape(BM, 2, BN).permute(0, 2, 1).split()
        out.store([m0, n0], (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype))


@cache
def supports_gemm_swiglu(device: torch.device) -> bool:
    """Returns whether `gemm_swiglu` is faster than cuBLAS on this device. Cached: a device does not change."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def gemm_swiglu(
    x: torch.Tensor, weight: torch.Tensor, *, tile: tuple[int, int, int] = (BM, BN, BK), group: int = GROUP
) -> torch.Tensor:
    """Computes silu(x @ gate.T) * (x @ up.T), [rows, N].

    Args:
        x: [rows, K], contiguous rows of a multiple of 16 bytes.
        weight: [2 * N, K], the N rows of gate, then the N rows of up; contiguous rows of a multiple of 16 bytes. A row
            of N outputs must be a multiple of 16 bytes too.
        tile: values of BM, BN and BK.
        group: number of tile rows in a band.
    """
    rows, k = x.shape
    n = weight.shape[0] // 2
    assert weight.shape[1] == k
    assert weight.stride(1) == x.stride(1) == 1
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    bm, bn, bk = tile
    strides = [n * weight.stride(0), weight.stride(0), 1]
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    _swiglu_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [bm, bk]),
        TensorDescriptor(weight, [2, n, k], strides, [2, bn, bk]),
        TensorDescriptor.from_tensor(out, [bm, bn]),
        rows,
        N=n,
        K=k,
        BM=bm,
        BN=bn,
        BK=bk,
        GROUP=group,
        SMS=programs,
        STAGES=STAGES,
        num_warps=8,
    )
    return out
