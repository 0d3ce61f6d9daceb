"""The Triton backend gives the results of the torch backend: mixed steps, two windows, chunked prefill."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from common.kv_layout import FP8_DTYPE, KVLayout
from engine.attention.base import StepShape
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import DecodeRows, TritonAttention
from engine.kernels.dense_prefill import cudnn_prefill, dense_prefill, gather_kv
from engine.kernels.paged_prefill import list_tiles, max_tiles
from engine.kv.kv_pool import KVPool
from tests.rigs.engine.paged import TOLERANCE, PagedCase, error

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def both(shape, dtype, steps, heads, windows, device, gen, fp8=False, order="layers", **scores):
    """Runs the same steps through both backends, each with its own pool. Returns the largest error.

    shape: (blocks, layers, kv_heads, block_size, head_dim). Blocks of no row are NaN, except the dummy block.
    """
    blocks, layers, kv_heads, block_size, dim = shape
    name = FP8_DTYPE if fp8 else str(dtype).removeprefix("torch.")
    layout = KVLayout("m", "r", layers, kv_heads, dim, block_size, name, kv_order=order)
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


@pytest.mark.parametrize("fp8", [False, True], ids=["full", "fp8"])
def test_a_pool_ordered_by_heads(fp8, device, gen):
    steps = [StepShape([0, 0], [20, 1], [[7, 2, 9], [0, 5]]), StepShape([20, 1], [1, 8], [[7, 2, 9], [0, 5]])]
    got = both((12, 2, 2, 8, 16), torch.float32, steps, 6, (None, 11), device, gen, fp8, order="heads")
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


@pytest.mark.parametrize("num_decodes", [0, 2])
@pytest.mark.parametrize("fp8", [False, True], ids=["full", "fp8"])
def test_listed_rows_equal_prepared_ones(num_decodes, fp8, device, gen):
    """Rows, tokens and tiles are padded, as in a captured step. Without decoding rows the list has all rows."""
    cuda, most_tokens, most_rows = device.type == "cuda", 48, 6
    dtype, dim = (torch.bfloat16, 128) if cuda else (torch.float32, 16)
    pool = KVPool(KVLayout("m", "r", 1, 2, dim, 4, FP8_DTYPE if fp8 else str(dtype).removeprefix("torch.")), 50, device)
    kinds = (TritonAttention, TorchAttention)
    listed, plain = (kind(pool.layers(), 4, (None, 9), pool.dummy_block) for kind in kinds)
    layer, starts, num_new = pool.layers()[0], [3, 17, 0, 12], [1, 2, 9, 30]
    blocks = torch.randperm(50, generator=gen, device=device).tolist()
    blocks = [blocks[:1], blocks[1:6], blocks[6:9], blocks[9:20]]

    def random(*size):
        return torch.randn(*size, generator=gen, device=device).to(dtype)

    cached = [row for row, start in enumerate(starts) if start]
    before = StepShape([0] * len(cached), [starts[row] for row in cached], [blocks[row] for row in cached])
    plain.write(random(sum(before.num_new), 2, 2, dim), layer, plain.prepare(before))
    step, count = StepShape(starts, num_new, blocks), sum(num_new)
    slots = torch.full((most_tokens,), -1, dtype=torch.int32, device=device)
    prepared = listed.prepare(step)
    slots[:count] = prepared.slot_mapping
    firsts, ends = np.cumsum([0, *num_new]), np.add(starts, num_new)

    def padded(values, size, value):
        return torch.tensor([*values, *[value] * (size - len(values))], dtype=torch.int32, device=device)

    tables = torch.zeros(most_rows, 12, dtype=torch.int32, device=device)
    tables[:4, : prepared.tables.shape[1]] = prepared.tables
    size = listed.tile_list_size(most_tokens, most_rows)
    chunks = np.array(starts[num_decodes:]), np.array(num_new[num_decodes:])
    tiles = padded(listed.list_tiles(*chunks, num_decodes, most_tokens), size, 99)
    decode = None
    if num_decodes:
        cu_q = padded(firsts[: num_decodes + 1], most_rows + 1, firsts[num_decodes])
        decode = DecodeRows(cu_q, padded(ends[:num_decodes], most_rows, 0), 2)
    rows = padded(firsts, most_rows + 1, count), padded(ends, most_rows, 0)
    metadata = listed.listed_metadata(slots, *rows, tables, tiles, decode)
    q, kv = random(most_tokens, 4, dim), random(most_tokens, 2, 2, dim)
    for window in (None, 9):
        want = plain.attend(q[:count], kv[:count], layer, plain.prepare(step), window)
        got = listed.attend(q, kv, layer, metadata, window)
        assert error(got[:count], want.double()) < TOLERANCE[dtype]


def test_tiles_have_each_query_row_once_and_the_most_work_first() -> None:
    starts, num_new, group, block_m = np.array([0, 40, 7]), np.array([33, 8, 1]), 4, 16
    count, *pairs = list_tiles(starts, num_new, 5, group, block_m).tolist()
    tiles = list(zip(pairs[::2], pairs[1::2], strict=True))
    assert count == len(tiles) == len(set(tiles)) <= max_tiles(42, 3, group, block_m)
    covered = {row: sorted(first for b, first in tiles if b == row + 5) for row in range(3)}
    for row, new in enumerate(num_new.tolist()):
        assert covered[row] == list(range(0, new * group, block_m))
    keys = [starts[b - 5] + first // group for b, first in tiles]
    assert keys == sorted(keys, reverse=True)
    assert list_tiles(starts[:0], num_new[:0], 0, group, block_m).tolist() == [0]


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
