"""The Triton backend against the torch backend: mixed steps, two windows, chunked prefill by either."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from common.kv_layout import FP8_DTYPE, KVLayout
from engine.attention.base import StepShape
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import TritonAttention
from engine.kernels.dense_prefill import cudnn_prefill, dense_prefill
from engine.kernels.prefix import gather_kv
from engine.kv_pool import KVPool

from .paged import TOLERANCE, PagedCase, error

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def both(shape, dtype, steps, heads, windows, device, gen, fp8=False, **scores):
    """Runs the same steps through both backends on pools of their own; returns the worst error.

    shape: (blocks, layers, kv_heads, block_size, head_dim). Blocks that no row owns are NaN, but for the dummy block.
    """
    blocks, layers, kv_heads, block_size, dim = shape
    name = FP8_DTYPE if fp8 else str(dtype).removeprefix("torch.")
    layout = KVLayout("m", "r", layers, kv_heads, dim, block_size, name)
    owned = {block for row in steps[0].blocks for block in row}
    pools = [KVPool(layout, blocks, device) for _ in range(2)]
    for pool in pools:
        pool.data[[block for block in range(blocks) if block not in owned]] = 0xFF
    backends = [
        kind(pool.layers(), heads, windows, pool.dummy_block, **scores)
        for kind, pool in zip((TritonAttention, TorchAttention), pools, strict=True)
    ]
    worst = 0.0
    for step in steps:
        tokens = sum(step.num_new)
        q = torch.randn(tokens, heads, dim, generator=gen, device=device).to(dtype)
        kv = torch.randn(tokens, 2, kv_heads, dim, generator=gen, device=device).to(dtype)
        metadata = [backend.prepare(step) for backend in backends]
        for layer, window in enumerate(windows):
            outs = [
                backend.attend(q, kv, pool.layers()[layer], meta, window)
                for backend, pool, meta in zip(backends, pools, metadata, strict=True)
            ]
            assert outs[0].shape == q.shape
            worst = max(worst, error(outs[0], outs[1].double()))
    assert torch.equal(pools[0].data, pools[1].data)
    return worst


@pytest.mark.parametrize(("fp8", "scores"), [(False, {}), (True, {"scale": 0.5, "softcap": 5.0})])
def test_mixed_steps(fp8, scores, device, gen):
    blocks = [[7, 2, 9, 11], [0, 5, 4], [1, 10, 3], [6, 8]]
    steps = [
        StepShape([0, 0, 0, 0], [20, 1, 9, 3], blocks),
        StepShape([20, 1, 9, 3], [1, 8, 10, 1], blocks),
    ]
    shape = (15, 2, 2, 8, 16)
    got = both(shape, torch.float32, steps, 6, (None, 11), device, gen, fp8, **scores)
    assert got < TOLERANCE[torch.float32]


@needs_cuda
@pytest.mark.parametrize("fp8", [False, True], ids=["full", "fp8"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_long_rows(dim, softcap, fp8, device, gen):
    blocks = [list(range(200)), list(range(200, 400))]
    steps = [
        StepShape([0], [1024], blocks[:1]),
        StepShape([1024, 0], [1024, 1100], blocks),
        StepShape([2048, 1100], [777, 1], blocks),
    ]
    shape = (402, 2, 2, 16, dim)
    got = both(shape, torch.bfloat16, steps, 8, (None, 300), device, gen, fp8, softcap=softcap)
    assert got < TOLERANCE[torch.bfloat16]


@needs_cuda
@pytest.mark.parametrize("fp8", [False, True], ids=["full", "fp8"])
def test_equal_prompts_side_by_side(fp8, device, gen):
    blocks = [list(range(64 * row, 64 * row + 64)) for row in range(4)]
    shape = (258, 1, 2, 16, 128)
    step = StepShape([3, 0, 0, 0], [1, 1024, 1024, 1024], blocks)
    got = both(shape, torch.bfloat16, [step], 8, (None,), device, gen, fp8)
    assert got < TOLERANCE[torch.bfloat16]


@needs_cuda
@pytest.mark.parametrize(("new", "length"), [(1, 1), (300, 300), (129, 1000), (1024, 2048)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 2), (6, 2), (71, 1)])
def test_dense_prefill(new, length, heads, kv_heads, device, gen):
    case = PagedCase(
        [length],
        [new],
        heads=heads,
        kv_heads=kv_heads,
        dim=128,
        block_size=16,
        dtype=torch.bfloat16,
        device=device,
        gen=gen,
    )
    dtype = torch.bfloat16
    keys, values = gather_kv(case.layer, case.tables[0], length, dtype=dtype)
    reference = case.reference()
    own = dense_prefill(case.q, keys, values, scale=case.scale)
    assert error(own, reference) < TOLERANCE[torch.bfloat16]
    start = length - new
    fresh = [x[start:] for x in (keys, values)]
    prefix = (keys[:start], values[:start]) if start else None
    assert error(cudnn_prefill(case.q, *fresh, prefix, scale=case.scale), reference) < TOLERANCE[torch.bfloat16]
