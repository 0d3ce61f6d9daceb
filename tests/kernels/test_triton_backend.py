"""The Triton backend against the torch backend: mixed steps, two windows, chunked prefill by either."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from engine.attention.base import StepShape
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import TritonAttention
from engine.kernels.dense_prefill import cudnn_prefill, dense_prefill
from engine.kernels.prefix import gather_kv

from .paged import TOLERANCE, PagedCase, error

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def both(cache_shape, dtype, steps, heads, windows, device, gen):
    """Runs the same steps through both backends on pools of their own; returns the worst error."""
    worst = 0.0
    pools = [torch.zeros(cache_shape, dtype=dtype, device=device) for _ in range(2)]
    backends = [
        kind(pool, heads, windows, cache_shape[0] - 1)
        for kind, pool in zip((TritonAttention, TorchAttention), pools, strict=True)
    ]
    kv_heads, dim = cache_shape[3], cache_shape[5]
    for step in steps:
        tokens = sum(step.num_new)
        q = torch.randn(tokens, heads, dim, generator=gen, device=device).to(dtype)
        kv = torch.randn(tokens, 2, kv_heads, dim, generator=gen, device=device).to(dtype)
        metadata = [backend.prepare(step) for backend in backends]
        for layer, window in enumerate(windows):
            outs = [
                backend.attend(q, kv, pool[:, layer], meta, window)
                for backend, pool, meta in zip(backends, pools, metadata, strict=True)
            ]
            assert outs[0].shape == q.shape
            worst = max(worst, error(outs[0], outs[1].double()))
    assert torch.equal(pools[0][:-1], pools[1][:-1])
    return worst


def test_mixed_steps(device, gen):
    blocks = [[7, 2, 9, 11], [0, 5, 4], [1, 10, 3], [6, 8]]
    steps = [
        StepShape([0, 0, 0, 0], [20, 1, 9, 3], blocks),
        StepShape([20, 1, 9, 3], [1, 8, 10, 1], blocks),
        StepShape([21, 9, 19, 4], [1, 1, 1, 1], blocks),
    ]
    shape = (13, 2, 2, 2, 8, 16)
    assert both(shape, torch.float32, steps, 6, (None, 11), device, gen) < TOLERANCE[torch.float32]


@needs_cuda
@pytest.mark.parametrize("dim", [64, 128])
def test_long_rows(dim, device, gen):
    blocks = [list(range(200)), list(range(200, 400))]
    steps = [
        StepShape([0], [1024], blocks[:1]),
        StepShape([1024, 0], [1024, 1100], blocks),
        StepShape([2048, 1100], [777, 1], blocks),
    ]
    shape = (402, 2, 2, 2, 16, dim)
    assert both(shape, torch.bfloat16, steps, 8, (None, 300), device, gen) < TOLERANCE[torch.bfloat16]


@needs_cuda
@pytest.mark.parametrize(("new", "length"), [(1, 1), (300, 300), (129, 1000), (1024, 2048)])
def test_dense_prefill(new, length, device, gen):
    case = PagedCase(
        [length], [new], heads=12, kv_heads=2, dim=128, block_size=16, dtype=torch.bfloat16, device=device, gen=gen
    )
    keys, values = gather_kv(case.kv, case.tables[0], length, multiple=128)
    reference = case.reference()
    own = dense_prefill(case.q, keys, values, length=length, scale=case.scale)
    assert error(own, reference) < TOLERANCE[torch.bfloat16]
    start = length - new
    fresh = [x[:, start:length].transpose(0, 1) for x in (keys, values)]
    prefix = gather_kv(case.kv, case.tables[0], start) if start else None
    assert error(cudnn_prefill(case.q, *fresh, prefix, scale=case.scale), reference) < TOLERANCE[torch.bfloat16]
