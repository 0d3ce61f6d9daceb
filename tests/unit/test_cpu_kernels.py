"""The compiled kernels of a CPU against float64."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.base import StepShape
from engine.attention.fixed_order import RowWiseAttention
from engine.attention.torch_backend import TorchAttention
from engine.kernels.cpu.compiled import compiled, is_available
from engine.kv.kv_pool import LayerKV
from engine.models.ops import rotate_

pytestmark = pytest.mark.skipif(not is_available(), reason="numba is not installed")
KV_HEADS, DIM, SIZE = 2, 8, 4


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def reference(
    query: Tensor,
    kv: Tensor,
    positions: list[int],
    blocks: list[list[int]],
    first: int,
    window: int | None,
    sinks: Tensor,
) -> Tensor:
    """Returns the attention of each row in float64. kv: [blocks, 2, kv_heads, size, D]."""
    rows = []
    for row, (position, table) in enumerate(zip(positions, blocks, strict=True)):
        start = max(first, 0 if window is None else position - window + 1)
        keys, values = kv[table].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, start : position + 1].double()
        q = query[row].double().view(KV_HEADS, -1, DIM)
        scores = torch.cat((q @ keys.transpose(1, 2) * DIM**-0.5, sinks.double().view(KV_HEADS, -1, 1)), dim=-1)
        rows.append((scores.softmax(-1)[..., :-1] @ values).flatten(0, 1))
    return torch.stack(rows)


@given(data=st.data())
@pytest.mark.parametrize("threads", [1, 3])
def test_tokens_attend_to_their_blocks(threads: int, data: st.DataObject) -> None:
    draw = data.draw
    fold, layers = draw(st.integers(1, 3)), 2
    positions = draw(st.lists(st.integers(0, 21), min_size=1, max_size=5))
    first = draw(st.integers(0, min(positions)))
    window = draw(st.none() | st.integers(1, 9))
    seed = draw(st.integers(0, 99))
    count = sum(position // SIZE + 1 for position in positions) + 2
    pool = torch.randn(count, layers, 2, KV_HEADS, SIZE, DIM, generator=generator(seed))
    if draw(st.booleans()):  # kv_order "heads": the layers of a head are neighbours
        pool = pool.permute(0, 3, 1, 2, 4, 5).contiguous().permute(0, 2, 3, 1, 4, 5)
    order = torch.randperm(count, generator=generator(seed)).tolist()
    blocks = [[order.pop() for _ in range(position // SIZE + 1)] for position in positions]
    caches = [LayerKV(pool[:, layer]) for layer in range(layers)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.attention.torch_backend.MIN_COMPILED_BYTES", 0)
        patch.setattr("engine.attention.torch_backend.MIN_SPLIT_BYTES", 512)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        backend = TorchAttention(caches, KV_HEADS * fold, (window,), count - 1, first_position=first)
        metadata = backend.prepare(StepShape(positions, [1] * len(positions), blocks))
    assert metadata.tokens is not None
    assert threads > 1 or len(metadata.tokens.parts) == 1
    query = torch.randn(len(positions), KV_HEADS * (fold + 2), DIM, generator=generator(seed + 1))[:, : KV_HEADS * fold]
    kv = torch.randn(len(positions), 2, KV_HEADS, DIM, generator=generator(seed + 2))
    sinks = torch.randn(KV_HEADS * fold, generator=generator(seed + 3)) if draw(st.booleans()) else None
    out = backend.attend(query, kv, caches[1], metadata, window, sinks)
    none = torch.full((KV_HEADS * fold,), float("-inf"))
    expected = reference(query, pool[:, 1], positions, blocks, first, window, none if sinks is None else sinks)
    assert torch.allclose(out.double(), expected, atol=1e-5)
    for row, (position, table) in enumerate(zip(positions, blocks, strict=True)):
        assert torch.equal(pool[table[-1], 1, :, :, position % SIZE], kv[row])


def test_deterministic_attention_uses_one_order_of_sums_for_prompts_and_single_tokens() -> None:
    pool = torch.zeros(4, 1, 2, KV_HEADS, SIZE, DIM)
    query, kv = torch.randn(6, KV_HEADS, DIM, generator=generator(1)), torch.randn(6, 2, KV_HEADS, DIM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.attention.torch_backend.MIN_COMPILED_BYTES", 0)
        backend = RowWiseAttention([LayerKV(pool[:, 0])], KV_HEADS, (None,), 3)
    whole = backend.prepare(StepShape([0], [6], [[0, 1]]))
    found = backend.attend(query, kv, LayerKV(pool[:, 0]), whole, None)
    last = backend.prepare(StepShape([5], [1], [[0, 1]]))
    assert torch.equal(backend.attend(query[5:], kv[5:], LayerKV(pool[:, 0]), last, None), found[5:])
    assert last.tokens is None


def test_a_number_that_is_not_finite_is_not_hidden() -> None:
    from engine.kernels.cpu.rows import rms_norm, swiglu

    x = torch.tensor([[1.0, float("nan"), 2.0, 3.0]])
    rms_norm(x.numpy(), np.ones(4, np.float32), 1e-5, x.numpy())
    assert x.isnan().all()
    out = torch.empty(1, 2)
    swiglu(torch.tensor([[1.0, float("nan"), 2.0, 3.0]]).numpy(), out.numpy())
    assert out.isnan().tolist() == [[False, True]]


def test_exponentials() -> None:
    from engine.kernels.cpu.exp import exp_in_place

    x = -torch.rand(5000, generator=generator(1)) * 87
    expected, found = x.double().exp(), x.clone()
    exp_in_place(found.numpy(), np.empty(len(x), np.float32))
    assert ((found - expected).abs() / expected <= 2e-7 + 8e-8 * x.abs()).all()
    edges = torch.tensor([0.0, -1e30, float("-inf")])
    exp_in_place(edges.numpy(), np.empty(3, np.float32))
    assert edges[0] == 1
    assert (edges[1:] < 1e-37).all()


@pytest.mark.parametrize("rows", [1, 3])
def test_norm_activation_and_rotation(rows: int) -> None:
    from engine.kernels.cpu.rows import rms_norm, rotate, swiglu

    x, weight = torch.randn(rows, 50, generator=generator(2)) * 30, torch.randn(50, generator=generator(3))
    out, gated = torch.empty_like(x), torch.empty(rows, 25)
    rms_norm(x.numpy(), weight.numpy(), 1e-6, out.numpy())
    assert torch.allclose(out, F.rms_norm(x, (50,), weight, 1e-6), atol=1e-5)
    swiglu(x.numpy(), gated.numpy())
    assert torch.allclose(gated, F.silu(x[:, :25]) * x[:, 25:], rtol=1e-5, atol=1e-5)
    heads, angles = torch.randn(rows, 10, generator=generator(4)), torch.randn(5, generator=generator(5))
    cos, sin = angles.cos().repeat(2), torch.cat((-angles.sin(), angles.sin()))
    expected = heads[None].clone()
    rotate_(expected, cos, sin)
    rotate(heads.numpy(), cos.numpy(), sin.numpy())
    assert torch.allclose(heads, expected[0], atol=1e-6)


def test_product_with_int8_weights() -> None:
    from engine.kernels.cpu.rows import int8_product

    x, scales = torch.randn(1, 77, generator=generator(6)), torch.rand(30, generator=generator(7))
    numbers = torch.randint(-127, 128, (30, 77), dtype=torch.int8, generator=generator(8))
    out = torch.empty(1, 30)
    int8_product(x.numpy(), numbers.numpy(), scales.numpy(), out.numpy())
    expected = x.double() @ (numbers.double() * scales.double()[:, None]).T
    assert torch.allclose(out.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("error", [RuntimeError("no locator"), OSError("no space left"), EOFError("cut file")])
def test_kernels_are_compiled_although_their_code_cannot_be_kept(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numba

    njit = numba.njit

    def without_disk(*args: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise error
        return njit(*args, **options)

    monkeypatch.setattr(numba, "njit", without_disk)
    double = compiled("float32(float32)")(lambda x: x + x)
    assert double(1.5) == 3


def test_a_numba_that_cannot_be_imported_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    monkeypatch.setitem(sys.modules, "numba", None)
    assert not is_available.__wrapped__()
