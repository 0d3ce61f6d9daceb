"""The Triton backend gives the results of the torch backend: mixed steps, two windows, chunked prefill."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from common.kv_layout import FP8_DTYPE, KVLayout
from engine.attention.base import StepShape
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import TritonAttention
from engine.kernels.dense_prefill import cudnn_prefill, dense_prefill, gather_kv
from engine.kv.kv_pool import KVPool
from tests.rigs.engine.paged import TOLERANCE, PagedCase, error

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def both(shape, dtype, steps, heads, windows, device, gen, fp8=False, **scores):
    """Runs the same steps through both backends, each with its own pool. Returns the largest error.

    shape: (blocks, layers, kv_heads, block_size, head_dim). Blocks of no row are NaN, except the dummy block.
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
            selected = [
                attend_selected(backend, q, kv, pool.layers()[layer], meta, window, step)
                for backend, pool, meta in zip(backends, pools, metadata, strict=True)
            ]
            worst = max(worst, *(error(out, outs[1][rows].double()) for out, rows in selected))
    assert torch.equal(pools[0].data, pools[1].data)
    return worst


def attend_selected(backend, q, kv, cache, metadata, window, step):
    """Attends for the last token of each row and the step's first token only, with `select_tokens`.

    Their keys and values are in the cache; the `kv` argument is NaN and must not be used.
    """
    ends = torch.tensor(step.num_new).cumsum(0)
    rows = torch.cat([ends - 1, torch.zeros(1, dtype=torch.int64)]).to(q.device)
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(step.starts, step.num_new, strict=True)]).to(q.device)
    unused = torch.full_like(kv[rows], float("nan"))
    return backend.attend(q[rows], unused, cache, backend.select_tokens(metadata, rows, positions), window), rows


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
def test_dense_prefill_rows(dim, softcap, fp8, device, gen):
    blocks = [list(range(200)), list(range(200, 400))]
    steps = [
        StepShape([0], [1024], blocks[:1]),
        StepShape([1024, 0], [1024, 1100], blocks),
        StepShape([2048, 1100], [777, 1], blocks),
    ]
    shape = (402, 2, 2, 16, dim)
    got = both(shape, torch.bfloat16, steps, 8, (None, 300), device, gen, fp8, softcap=softcap)
    assert got < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("start", "new"), [(0, 2048), (0, 1024), (2048, 2048), (1024, 2048), (14336, 1024)])
def test_chunk_metadata_selects_the_kernels_of_prepare(start: int, new: int, device: torch.device) -> None:
    layout = KVLayout("m", "r", 1, 2, 64, 16, "bfloat16")
    pool = KVPool(layout, 4, device)
    backend = TritonAttention(pool.layers(), 4, (None,), pool.dummy_block)
    backend._dense_ok = True  # as on a Hopper
    assert backend.has_cudnn_plan(start, new)
    blocks = list(range(-(-(start + new) // 16)))
    (row,) = backend.prepare(StepShape([start], [new], [blocks])).dense_rows
    slots = torch.zeros(new, dtype=torch.int32, device=device)
    tables = torch.zeros(1, len(blocks) + 5, dtype=torch.int32, device=device)
    tables[0, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    metadata = backend.chunk_metadata(slots, row.cu_q.clone(), row.seq_lens.clone(), tables, start=start)
    assert metadata.decode is None
    assert metadata.paged == ()
    (captured,) = metadata.dense_rows
    for name in ("first_token", "start", "max_new", "cudnn_tokens", "count"):
        assert getattr(captured, name) == getattr(row, name), name
    assert row.cudnn_tokens == new
    assert captured.tables[0, : len(blocks)].tolist() == row.tables[0].tolist()


def test_rows_that_cudnn_does_not_compute_whole_have_no_plan(device: torch.device) -> None:
    pool = KVPool(KVLayout("m", "r", 1, 2, 64, 16, "bfloat16"), 4, device)
    backend = TritonAttention(pool.layers(), 4, (None,), pool.dummy_block)
    backend._dense_ok = True
    assert not backend.has_cudnn_plan(100, 2048)
    assert not backend.has_cudnn_plan(0, 2047)
    assert not backend.has_cudnn_plan(0, 8)
    assert not TritonAttention(pool.layers(), 4, (None,), pool.dummy_block, softcap=3.0).has_cudnn_plan(0, 2048)
    backend._dense_ok = False
    assert not backend.has_cudnn_plan(0, 2048)


@needs_cuda
def test_captured_chunks_equal_eager_chunks(device, gen):
    """cuDNN, gather and merge in a graph that is captured once and replayed for other blocks."""
    layout = KVLayout("m", "r", 1, 2, 128, 16, "bfloat16")
    pool = KVPool(layout, 260, device)
    backend = TritonAttention(pool.layers(), 8, (None,), pool.dummy_block)
    layer = pool.layers()[0]
    if not backend.has_cudnn_plan(1024, 1024):
        pytest.skip("needs a Hopper GPU")
    tables = torch.zeros(1, 140, dtype=torch.int32, device=device)
    slots = torch.full((1024,), -1, dtype=torch.int32, device=device)
    cu_q = torch.tensor([0, 1024], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([2048], dtype=torch.int32, device=device)
    q = torch.zeros(1024, 8, 128, dtype=torch.bfloat16, device=device)
    kv = torch.zeros(1024, 2, 2, 128, dtype=torch.bfloat16, device=device)
    metadata = backend.chunk_metadata(slots, cu_q, seq_lens, tables, start=1024)
    backend.attend(q, kv, layer, metadata, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attend(q, kv, layer, metadata, None)
    for first in (0, 128):
        blocks = list(range(first, first + 128))
        old = torch.randn(1024, 2, 2, 128, generator=gen, device=device).to(torch.bfloat16)
        q.copy_(torch.randn(q.shape, generator=gen, device=device))
        kv.copy_(torch.randn(kv.shape, generator=gen, device=device))
        backend.write(old, layer, backend.prepare(StepShape([0], [1024], [blocks])))
        plain = backend.prepare(StepShape([1024], [1024], [blocks]))
        want = backend.attend(q.clone(), kv.clone(), layer, plain, None)
        tables[0, :128] = torch.tensor(blocks, dtype=torch.int32, device=device)
        slots.copy_(plain.slot_mapping)
        graph.replay()
        assert error(out, want.double()) == 0.0


@needs_cuda
@pytest.mark.parametrize("fp8", [False, True], ids=["full", "fp8"])
def test_equal_prompts_in_one_cudnn_call(fp8, device, gen):
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
    assert error(dense_prefill(case.q, keys, values, scale=case.scale), reference) < TOLERANCE[torch.bfloat16]
    start = length - new
    new_kv = [x[start:] for x in (keys, values)]
    prefix = (keys[:start], values[:start]) if start else None
    assert error(cudnn_prefill(case.q, *new_kv, prefix, scale=case.scale), reference) < TOLERANCE[torch.bfloat16]
