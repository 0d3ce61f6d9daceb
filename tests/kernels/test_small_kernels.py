"""RoPE + KV write, norms, SiLU x mul, GEMV and GEMMs against float64. Outputs and pools are NaN before the launch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.gemm import MAX_SKINNY_ROWS, gemm_swiglu, gemv, skinny_gemm, supports_gemm_swiglu
from engine.kernels.kv_write import rope_kv_write
from engine.kernels.norm import rms_norm, silu_mul
from engine.kv.kv_pool import LayerKV
from tests.rigs.engine.paged import error

EPS = 1e-5


def norm64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 80), (5, 5, 96), (0, 2, 16)])
@pytest.mark.parametrize("norm", [False, True])
def test_rope_kv_write(heads, kv_heads, dim, norm, device, gen):
    tokens, block_size = 5, 8
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=gen, device=device)
    pool = torch.full((4, 3, 2, kv_heads, block_size, dim), float("nan"), device=device)
    kv = pool[:, 1]
    layer = LayerKV(kv)
    positions = torch.tensor([0, 7, 3, 30, 9], device=device)
    slots = torch.tensor([0, 31, -1, 17, 8], device=device)
    angle = torch.rand(32, dim // 2, generator=gen, device=device) * 6
    cos, sin = angle.cos(), angle.sin()
    weights = torch.randn(2, dim, generator=gen, device=device) if norm else (None, None)
    original = qkv.clone()
    rope_kv_write(
        qkv, layer, positions, slots, cos, sin, num_heads=heads, q_norm=weights[0], k_norm=weights[1], eps=EPS
    )

    q, k, v = original.double().view(tokens, -1, dim).split([heads, kv_heads, kv_heads], 1)
    if norm:
        q, k = norm64(q, weights[0]), norm64(k, weights[1])

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        c, s = cos[positions].double()[:, None], sin[positions].double()[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    want = torch.cat([rotate(q), rotate(k), v], 1).flatten(1)
    assert error(qkv, want) < 1e-6
    k, v = want.view(tokens, -1, dim)[:, heads:].split([kv_heads, kv_heads], 1)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert error(kv[slot // block_size, 0, :, slot % block_size], k[t]) < 1e-6
            assert error(kv[slot // block_size, 1, :, slot % block_size], v[t]) < 1e-6
    assert int(pool.isfinite().sum()) == 4 * 2 * kv_heads * dim


@pytest.mark.parametrize("n", [1, 96, 577])
@pytest.mark.parametrize("add", [False, True])
def test_rms_norm(n, add, device, gen):
    x, residual = torch.randn(2, 3, n + 5, generator=gen, device=device)[:, :, :n].unbind(0)
    weight = torch.randn(n, generator=gen, device=device)
    before = residual.double() + x.double() if add else x.double()
    out = torch.full((3, n), float("nan"), device=device)
    rms_norm(x, weight, EPS, residual=residual if add else None, out=out)
    assert error(out, norm64(before, weight)) < 1e-6
    if add:
        assert error(residual, before) < 1e-6


@pytest.mark.parametrize("n", [1, 100, 2050])
def test_silu_mul(n, device, gen):
    x = torch.randn(3, 2 * n, generator=gen, device=device) * 3
    out = torch.full((3, n), float("nan"), device=device)
    silu_mul(x, out)
    gate, up = x.double().chunk(2, -1)
    assert error(out, torch.nn.functional.silu(gate) * up) < 1e-6


@pytest.mark.parametrize(("n", "k"), [(6, 64), (7, 100), (32, 2100)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("end", ["plain", "residual", "gated"])
def test_gemv(n, k, norm, end, device, gen):
    gated = end == "gated"
    x = torch.randn(1, k, generator=gen, device=device)
    weight = torch.randn(n * (1 + gated), k + 4, generator=gen, device=device)[:, :k]
    bias = torch.randn(n * (1 + gated), generator=gen, device=device)
    scale = torch.randn(k, generator=gen, device=device) if norm else None
    residual = torch.randn(1, n, generator=gen, device=device) if end == "residual" else None
    want = (norm64(x, scale) if scale is not None else x.double()) @ weight.double().T + bias.double()
    if gated:
        gate, up = want.chunk(2, -1)
        want = torch.nn.functional.silu(gate) * up
    if residual is not None:
        want = want + residual.double()
    out = torch.full((1, n), float("nan"), device=device)
    gemv(x, weight, bias=bias, norm=scale, eps=EPS, residual=residual, gated=gated, out=out)
    assert error(out, want) < 2e-6


@pytest.mark.parametrize(("rows", "n", "k"), [(2, 70, 100), (MAX_SKINNY_ROWS, 64, 128), (5, 7, 16)])
@pytest.mark.parametrize("end", ["plain", "residual", "gated"])
def test_skinny_gemm(rows, n, k, end, device, gen):
    gated = end == "gated"
    x = torch.randn(rows, k + 3, generator=gen, device=device)[:, :k]
    weight = torch.randn(n * (1 + gated), k + 4, generator=gen, device=device)[:, :k]
    bias = torch.randn(n * (1 + gated), generator=gen, device=device)
    out = torch.full((rows, n), float("nan"), device=device)
    want = x.double() @ weight.double().T + bias.double()
    if gated:
        gate, up = want.chunk(2, -1)
        want = torch.nn.functional.silu(gate) * up
    residual = None
    if end == "residual":
        residual = out.normal_(generator=gen)
        want = want + residual.double()
    assert skinny_gemm(x, weight, bias=bias, residual=residual, gated=gated, out=out) is out
    assert error(out, want) < 2e-6
    alone = skinny_gemm(x[1:2], weight, bias=bias, gated=gated)
    assert torch.equal(alone, skinny_gemm(x, weight, bias=bias, gated=gated)[1:2])


@pytest.mark.parametrize(("rows", "n", "k"), [(70, 48, 40), (16, 16, 64), (1, 8, 8)])
def test_gemm_swiglu(rows, n, k, device, gen):
    x = torch.randn(rows, k + 8, generator=gen, device=device)[:, :k]
    weight = torch.randn(2 * n, k, generator=gen, device=device)
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    got = gemm_swiglu(x, weight, tile=(16, 16, 16), group=2)
    assert error(got, torch.nn.functional.silu(gate) * up) < 2e-6


@pytest.mark.skipif(
    not (torch.cuda.is_available() and supports_gemm_swiglu(torch.device("cuda"))), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("rows", [2048, 2500])
def test_gemm_swiglu_in_the_shapes_of_prompts(rows, device, gen):
    x = torch.randn(rows, 1024, generator=gen, device=device).bfloat16()
    weight = (torch.randn(2 * 1416, 1024, generator=gen, device=device) / 32).bfloat16()
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    assert error(gemm_swiglu(x, weight), torch.nn.functional.silu(gate) * up) < 4e-3
