"""RMSNorm with a fused residual add, and SiLU x mul. Arithmetic is fp32, with one rounding at each store.

In a decode step these kernels take no longer than a launch, so with PDL (pdl.py) they are launched while the GEMM
before them finishes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pdl import launch_next_and_wait, pdl_args, wait_for_previous


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    x_row,
    residual_row,
    out_row,
    eps,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, triton.next_power_of_2(N))
    ok = i < N
    w = tl.load(weight + i, mask=ok, other=0.0).to(tl.float32)
    if EARLY:
        launch_next_and_wait(PDL)
    else:
        wait_for_previous(PDL)  # the weight is constant; x comes from the kernel before
    h = tl.load(x + row * x_row + i, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        h += tl.load(residual + row * residual_row + i, mask=ok, other=0.0).to(tl.float32)
        h = h.to(residual.dtype.element_ty)
        tl.store(residual + row * residual_row + i, h, mask=ok)
        h = h.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h, 0) / N + eps)
    tl.store(out + row * out_row + i, (h * rstd * w).to(out.dtype.element_ty), mask=ok)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Returns out, the RMSNorm of x [rows, N]. `out` may be x; None allocates it.

    With a residual [rows, N], returns the RMSNorm of residual + x and stores the sum to residual. early: the next
    kernel is a product, which may load weights while the kernel before this one runs (pdl.py).
    """
    rows, n = x.shape
    assert x.stride(1) == 1
    assert residual is None or residual.stride(1) == 1
    out = torch.empty_like(x) if out is None else out
    target = x if residual is None else residual
    strides, warps = (x.stride(0), target.stride(0), out.stride(0)), min(16, max(1, triton.next_power_of_2(n) // 512))
    options = {"ADD": residual is not None, "EARLY": early, "N": n, **pdl_args(x.device)}
    _rms_norm_kernel[(rows,)](x, target, weight, out, *strides, eps, **options, num_warps=warps)
    return out


@triton.jit
def _silu_mul_kernel(x, out, x_row, out_row, N: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    ok = i < N
    wait_for_previous(PDL)
    gate = tl.load(x + row * x_row + i, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + N + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + i, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=ok)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """Computes silu(gate) * up, [rows, N], from gate_up [rows, 2 * N] with the gate first. None allocates `out`."""
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty(rows, n, dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    _silu_mul_kernel[(triton.cdiv(n, 1024), rows)](
        gate_up, out, gate_up.stride(0), out.stride(0), N=n, BN=1024, num_warps=4, **pdl_args(gate_up.device)
    )
    return out
