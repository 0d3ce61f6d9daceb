"""The kernels of --deterministic against float64, and against themselves in other batches, chunks and tiles."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from engine.kernels.fixed_order import attention as fixed
from engine.kernels.fixed_order.gemm import TileShape, WideShape, fixed_order_gemm
from engine.kv.kv_pool import LayerKV

SMALL = (TileShape(16, 32, 32, 3), TileShape(64, 32, 32, 3), TileShape(16, 64, 32, 3, 4, True))
ON_GPU = torch.cuda.is_available()


def normal(gen: torch.Generator, *shape: int) -> Tensor:
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    return torch.randn(*shape, generator=gen, device=gen.device).to(dtype)


@pytest.mark.parametrize("kind", ["plain", "bias", "add", "gated"])
@pytest.mark.parametrize("shape", [*SMALL, None], ids=str)
@pytest.mark.parametrize("rows", [1, 19])
def test_products(gen: torch.Generator, kind: str, shape: TileShape | None, rows: int) -> None:
    n, k = 80, 96
    x, weight, bias, residual = normal(gen, rows, k), normal(gen, n, k), normal(gen, n), normal(gen, rows, n)
    expected = x.double() @ weight.double().T + (bias.double() if kind in ("bias", "gated") else 0)
    if kind == "gated":
        expected = F.silu(expected[:, : n // 2]) * expected[:, n // 2 :]
        got = fixed_order_gemm(x, weight, bias=bias, gated=True, shape=shape)
    elif kind == "add":
        expected += residual.double()
        got = fixed_order_gemm(x, weight, residual=residual, out=residual, shape=shape)
    else:
        got = fixed_order_gemm(x, weight, bias=bias if kind == "bias" else None, shape=shape)
    assert (got.double() - expected).norm() <= (1e-2 if ON_GPU else 1e-6) * expected.norm()


@pytest.mark.parametrize("kind", ["plain", "add", "gated"])
def test_wide_products(gen: torch.Generator, kind: str) -> None:
    rows, n, k = 70, 96, 64
    x, weight, residual = (normal(gen, *size) for size in ((rows, k), (n, k), (rows, n)))
    expected = x.double() @ weight.double().T
    if kind == "gated":
        expected = F.silu(expected[:, : n // 2]) * expected[:, n // 2 :]
    elif kind == "add":
        expected += residual.double()
    more = {"gated": {"gated": True}, "add": {"residual": residual}, "plain": {}}[kind]
    shape = WideShape() if ON_GPU else WideShape(rows=64, columns=64, depth=32, group=2)
    got = fixed_order_gemm(x, weight, shape=shape, **more)  # type: ignore[arg-type]
    assert (got.double() - expected).norm() <= (1e-2 if ON_GPU else 1e-6) * expected.norm()


@pytest.mark.usefixtures("row_by_row")
def test_a_row_does_not_depend_on_the_number_of_rows_of_its_tile(gen: torch.Generator) -> None:
    x, weight = normal(gen, 40, 96), normal(gen, 64, 96)
    whole = fixed_order_gemm(x, weight, shape=TileShape(16, 32, 32, 3))
    for first, end in ((0, 1), (0, 16), (16, 19), (32, 40)):
        assert fixed_order_gemm(x[first:end], weight, shape=TileShape(16, 32, 32, 3)).equal(whole[first:end])


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("gated", [False, True])
def test_all_shapes_give_equal_bits(gen: torch.Generator, gated: bool) -> None:
    """Among them tiles of mma.sync and wgmma, and TMA."""
    x, weight = normal(gen, 600, 4096), normal(gen, 1024, 4096)
    expected = fixed_order_gemm(x, weight, gated=gated, shape=WideShape())
    shapes = [*SMALL, TileShape(64, 64, 64, 4), TileShape(128, 64, 64, 4, 8), WideShape(columns=128)]
    for shape in shapes:
        assert fixed_order_gemm(x, weight, gated=gated, shape=shape).equal(expected), shape
    for rows in (1, 2, 16, 17, 64, 65, 128, 129, 257, 600):
        assert fixed_order_gemm(x[:rows], weight, gated=gated).equal(expected[:rows]), rows


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter multiply row by row: the bits of a numpy product depend on the row's place in its tile."""
    matmul: Any = np.matmul

    def multiply(a: Any, b: Any, **options: Any) -> Any:
        return np.concatenate([matmul(a[i : i + 1].copy(), b, **options) for i in range(len(a))])

    monkeypatch.setattr(np, "matmul", multiply)


GROUP, KV_HEADS, DIM, BLOCK = 2, 2, 32, 16


def pool(gen: torch.Generator, length: int) -> LayerKV:
    return LayerKV(normal(gen, -(-length // BLOCK) + 1, 2, KV_HEADS, BLOCK, DIM), None)


def rows(layer: LayerKV, lengths: list[int], queries: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    small, device = torch.int32, layer.kv.device
    tables = torch.arange(len(layer.kv), dtype=small, device=device).expand(len(lengths), -1).contiguous()
    cu_q = torch.tensor([0, *itertools.accumulate(queries)], dtype=small, device=device)
    return tables, cu_q, torch.tensor(lengths, dtype=small, device=device)


def decode(
    q: Tensor,
    layer: LayerKV,
    lengths: list[int],
    queries: list[int],
    *,
    window: int = 0,
    programs: int = 5,
    first: int = 0,
) -> Tensor:
    tables, cu_q, lens = rows(layer, lengths, queries)
    plan = fixed.plan_decode(cu_q, lens, num_programs=programs, num_kv_heads=KV_HEADS, window=window)
    out = torch.full_like(q, float("nan"))
    kind = {"max_query": max(queries), "scale": 0.2, "first": first, "out": out}
    return fixed.paged_decode(q, layer, tables, cu_q, lens, plan, **kind)  # type: ignore[arg-type]


def prompt(q: Tensor, layer: LayerKV, length: int, *, window: int = 0, softcap: float = 0.0) -> Tensor:
    kind = {"max_query": len(q), "scale": 0.2, "window": window, "softcap": softcap}
    return fixed.paged_prefill(q, layer, *rows(layer, [length], [len(q)]), **kind)  # type: ignore[arg-type]


def exact(q: Tensor, layer: LayerKV, length: int, *, window: int = 0, softcap: float = 0.0) -> Tensor:
    both = layer.kv.double().permute(1, 2, 0, 3, 4).reshape(2, KV_HEADS, -1, DIM)[:, :, :length]
    keys, values = both.repeat_interleave(GROUP, dim=1).unbind(0)
    scores = q.double().transpose(0, 1) @ keys.transpose(1, 2) * 0.2
    scores = torch.tanh(scores / softcap) * softcap if softcap else scores
    position = torch.arange(length - len(q), length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)[None]
    hidden = (key > position) | ((key <= position - window) if window else torch.zeros_like(key > position))
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (600, 0.0), (0, 3.0)])
def test_prompts(gen: torch.Generator, window: int, softcap: float) -> None:
    length = 1100
    layer, q = pool(gen, length), normal(gen, 45, GROUP * KV_HEADS, DIM)
    got, expected = (f(q, layer, length, window=window, softcap=softcap) for f in (prompt, exact))
    assert (got.double() - expected).norm() <= (1e-2 if ON_GPU else 1e-5) * expected.norm()


@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize("window", [0, 600])
def test_decode_gives_the_bits_of_prompts_in_every_batch_and_split_of_the_work(
    gen: torch.Generator, window: int
) -> None:
    length = 1100
    layer, q = pool(gen, length), normal(gen, 45, GROUP * KV_HEADS, DIM)
    whole = prompt(q, layer, length, window=window)
    chunks = [prompt(q[first:end], layer, length - 45 + end, window=window) for first, end in ((0, 20), (20, 45))]
    assert torch.cat(chunks).equal(whole)
    places = [0, 3, 44]
    ends = [length - 45 + place + 1 for place in places]
    for programs in (1, 5, 64):
        assert decode(q[places], layer, ends, [1] * 3, window=window, programs=programs).equal(whole[places])
    assert decode(q[-1:], layer, [length], [1], window=window).equal(whole[-1:])
    assert decode(q[7:12], layer, [length - 45 + 12], [5], window=window).equal(whole[7:12])


def test_short_and_empty_rows(gen: torch.Generator) -> None:
    layer = pool(gen, 100)
    q = normal(gen, 6, GROUP * KV_HEADS, DIM)
    got = decode(q, layer, [1, 64, 0, 100], [1, 2, 0, 3])
    parts = [exact(q[:1], layer, 1), exact(q[1:3], layer, 64), exact(q[3:6], layer, 100)]
    assert (got.double() - torch.cat(parts)).norm() <= (1e-2 if ON_GPU else 1e-5) * torch.cat(parts).norm()


def test_keys_before_the_first_are_not_seen(gen: torch.Generator) -> None:
    layer, q = pool(gen, 100), normal(gen, 1, GROUP * KV_HEADS, DIM)
    before = decode(q, layer, [100], [1], first=1)
    layer.kv[0, :, :, 0] += 1
    assert decode(q, layer, [100], [1], first=1).equal(before)
