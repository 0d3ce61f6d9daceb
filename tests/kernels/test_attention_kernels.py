"""Paged attention kernels against float64, with pools and outputs that are NaN elsewhere.

Shapes are tiny in the interpreter. On a GPU some tests have the head dims, groupings and dtypes of real models.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.dense_prefill import gather_kv, merge_attention
from engine.kernels.paged_decode import DecodeWorkspace, decode_workspace, paged_decode, plan_decode
from engine.kernels.paged_prefill import paged_prefill
from tests.rigs.engine.paged import TOLERANCE, PagedCase, error

CUDA = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
FP8 = torch.uint8

# heads, kv_heads, head dim, block size, dtype of the cache: ratios 1 to 5, 7, 8, 16 and 71, all supported head dims
SHAPES = [
    (1, 1, 64, 16, None),
    (4, 2, 96, 16, None),
    (3, 1, 80, 16, None),
    (4, 1, 16, 8, None),
    (5, 1, 32, 16, None),
    (7, 1, 24, 16, None),
    (16, 2, 128, 32, None),
    (16, 1, 64, 16, None),
    (2, 1, 256, 16, None),
    (71, 1, 64 if CUDA else 16, 16, None),
    (3, 1, 80, 16, FP8),
    (7, 1, 24, 8, FP8),
    (16, 2, 128, 32, FP8),
    (2, 1, 256, 16, FP8),
    *([(71, 1, 64, 16, FP8)] if CUDA else []),  # the interpreter takes seconds for 71 heads
]


def decode(
    case: PagedCase,
    programs: int,
    max_query: int,
    window: int = 0,
    softcap: float = 0.0,
    first: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs `paged_decode` once, with workspace and output set to NaN before."""
    heads, dim = case.q.shape[1:]
    kv_heads = case.layer.num_kv_heads
    space: DecodeWorkspace = decode_workspace(programs, heads, kv_heads, max_query, dim, case.q.device)
    plan = plan_decode(
        case.cu_q,
        case.seq_lens,
        space,
        num_kv_heads=kv_heads,
        head_dim=dim,
        itemsize=case.layer.kv.element_size(),
        window=window,
    )
    space.part.fill_(float("nan"))
    space.part_lse.fill_(float("nan"))
    case.out.fill_(float("nan"))
    return paged_decode(
        case.q,
        case.layer,
        case.tables,
        case.cu_q,
        case.seq_lens,
        plan,
        space,
        max_query=max_query,
        scale=case.scale,
        softcap=softcap,
        first=first,
        sinks=sinks,
        out=case.out,
    )


def prefill(
    case: PagedCase,
    max_query: int,
    window: int = 0,
    softcap: float = 0.0,
    block_m: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    case.out.fill_(float("nan"))
    return paged_prefill(
        case.q,
        case.layer,
        case.tables,
        case.cu_q,
        case.seq_lens,
        max_query=max_query,
        scale=case.scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        out=case.out,
        block_m=block_m,
    )


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size", "kv_dtype"), SHAPES)
def test_decode(heads, kv_heads, dim, block_size, kv_dtype, device, gen):
    case = PagedCase(
        [1, 150, 64],
        [1, 3, 1],
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        block_size=block_size,
        dtype=torch.float32,
        kv_dtype=kv_dtype,
        device=device,
        gen=gen,
    )
    for programs, window in ((5, 0), (3, 50)):
        assert error(decode(case, programs, 3, window), case.reference(window)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("lengths", "new", "window"), [([1, 150, 64], [1, 1, 1], 50), ([200], [1], 0), ([70, 9], [2, 1], 20)]
)
def test_decode_of_e4m3_with_keys_per_warp(lengths, new, window, device, gen):
    case = PagedCase(
        lengths,
        new,
        heads=8,
        kv_heads=2,
        dim=32,
        block_size=16,
        dtype=torch.float16,
        kv_dtype=FP8,
        device=device,
        gen=gen,
    )
    assert error(decode(case, 3, max(new), window), case.reference(window)) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("programs", [1, 23])
def test_decode_with_shares_that_end_anywhere(programs, device, gen):
    case = PagedCase(
        [1, 200, 63, 64],
        [1, 3, 2, 1],
        heads=4,
        kv_heads=2,
        dim=16,
        block_size=16,
        dtype=torch.float32,
        device=device,
        gen=gen,
    )
    for window in (0, 50):
        assert error(decode(case, programs, 3, window), case.reference(window)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_sinks_count_once_per_row(kv_dtype, device, gen):
    """Decode programs split one sequence in parts, and leave another whole; every row has its head's sink once."""
    case = PagedCase(
        [5, 200, 30],
        [1, 2, 1],
        heads=6,
        kv_heads=2,
        dim=16,
        block_size=16,
        dtype=torch.float32,
        kv_dtype=kv_dtype,
        device=device,
        gen=gen,
    )
    sinks = torch.tensor([0.0, 3.0, -2.0, 9.0, 1e4, -1e4], device=device)
    for programs, window in ((1, 0), (5, 0), (3, 50)):
        want = case.reference(window, sinks=sinks)
        assert error(decode(case, programs, 2, window, sinks=sinks), want) < TOLERANCE[torch.float32]
        assert error(prefill(case, 2, window, sinks=sinks), want) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("group", [1, 3, 16])
@pytest.mark.parametrize("new", [1, 2, 8])
def test_decode_of_several_new_tokens(group, new, device, gen):
    case = PagedCase(
        [new, 70, 90],
        [new, 1, new],
        heads=group,
        kv_heads=1,
        dim=16,
        block_size=16,
        dtype=torch.float32,
        device=device,
        gen=gen,
    )
    assert error(decode(case, 4, new), case.reference()) < TOLERANCE[torch.float32]


def test_decode_of_an_empty_sequence_is_zero(device, gen):
    case = PagedCase(
        [20, 1], [1, 1], heads=2, kv_heads=1, dim=16, block_size=16, dtype=torch.float32, device=device, gen=gen
    )
    case.seq_lens[1] = 0
    out = decode(case, 3, 1)
    assert (out[1] == 0).all()
    assert error(out[:1], case.reference()[:1]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("rows", [0, 2])
def test_decode_skips_padding_rows_at_the_end(rows, device, gen):
    case = PagedCase(
        [90, 33], [2, 1], heads=2, kv_heads=1, dim=16, block_size=16, dtype=torch.float32, device=device, gen=gen
    )
    case.cu_q = torch.tensor([*case.cu_q[: rows + 1].tolist(), *[int(case.cu_q[rows])] * 3], dtype=torch.int32).to(
        device
    )
    case.seq_lens = torch.tensor([*case.lens[:rows], 0, 0, 0], dtype=torch.int32, device=device)
    case.tables = torch.cat([case.tables[:rows], torch.zeros_like(case.tables[:1]).expand(3, -1)])
    out = decode(case, 3, 2)
    assert error(out, case.reference()) < TOLERANCE[torch.float32] if rows else bool(out.isnan().all())


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size", "kv_dtype"), SHAPES)
def test_prefill(heads, kv_heads, dim, block_size, kv_dtype, device, gen):
    case = PagedCase(
        [1, 90, 40],
        [1, 17, 9],
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        block_size=block_size,
        dtype=torch.float32,
        kv_dtype=kv_dtype,
        device=device,
        gen=gen,
    )
    rows = 32 if heads // kv_heads < 16 else 128
    for window in (0, 37):
        assert error(prefill(case, 17, window, block_m=rows), case.reference(window)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["full", "fp8"])
def test_softcap_and_scale(kv_dtype, device, gen):
    case = PagedCase(
        [40, 90],
        [3, 2],
        heads=4,
        kv_heads=2,
        dim=16,
        block_size=16,
        dtype=torch.float32,
        kv_dtype=kv_dtype,
        device=device,
        gen=gen,
        scale=0.7,
        spread=4.0,
    )
    want = case.reference(softcap=20.0)
    assert error(case.reference(), want) > 0.01, "the softcap has no effect in this test"
    assert error(decode(case, 3, 3, softcap=20.0), want) < TOLERANCE[torch.float32]
    assert error(prefill(case, 3, softcap=20.0), want) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["full", "fp8"])
def test_half_precision(kv_dtype, device, gen):
    dtype = torch.bfloat16 if CUDA else torch.float16  # the interpreter has no bf16 dot
    case = PagedCase(
        [70, 20],
        [2, 2],
        heads=4,
        kv_heads=2,
        dim=16,
        block_size=16,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        gen=gen,
    )
    assert error(decode(case, 3, 2), case.reference()) < TOLERANCE[dtype]
    assert error(prefill(case, 2, block_m=16), case.reference()) < TOLERANCE[dtype]


@needs_cuda
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [
        (8, 8, 64),
        (71, 1, 64),
        (12, 4, 80),
        (32, 8, 96),
        (32, 8, 128),
        (28, 4, 128),
        (10, 2, 128),
        (8, 4, 256),
        (16, 1, 256),
    ],
)
@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["full", "fp8"])
def test_shapes_of_real_models(heads, kv_heads, dim, kv_dtype, device, gen):
    def case(lens: list[int], queries: list[int]) -> PagedCase:
        return PagedCase(
            lens,
            queries,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            block_size=16,
            dtype=torch.bfloat16,
            kv_dtype=kv_dtype,
            device=device,
            gen=gen,
        )

    for one in (case([1, 17, 300, 1024, 4000], [1] * 5), case([8, 700, 2049], [8, 5, 1])):
        for window in (0, 256):
            out = decode(one, 256, max(one.queries), window)
            assert error(out, one.reference(window)) < TOLERANCE[torch.bfloat16]
    one = case([1, 500, 1500], [1, 130, 900])
    for window in (0, 256):
        assert error(prefill(one, 900, window), one.reference(window)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("length", [1, 16, 77])
@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["full", "fp8"])
def test_gather_kv(length, kv_dtype, device, gen):
    dtype = torch.bfloat16 if kv_dtype is None or CUDA else torch.float32
    case = PagedCase(
        [80], [1], heads=2, kv_heads=2, dim=80, block_size=16, dtype=dtype, kv_dtype=kv_dtype, device=device, gen=gen
    )
    keys, values = gather_kv(case.layer, case.tables[0], length, dtype=dtype)
    want_k, want_v = case.dense(0)
    assert keys.shape == (length, 2, 80)
    assert torch.equal(keys, want_k[:, :length].transpose(0, 1).to(dtype))
    assert torch.equal(values, want_v[:, :length].transpose(0, 1).to(dtype))


def test_merge_attention_gives_attention_over_all_keys(device, gen):
    rows, heads, dim, keys = 5, 3, 24, 40
    scores = torch.randn(rows, heads, keys, generator=gen, device=device).double() * 3
    values = torch.randn(heads, keys, dim, generator=gen, device=device).double()

    def part(lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.einsum("rhk,hkd->rhd", scores[..., lo:hi].softmax(-1), values[:, lo:hi])
        return out.float(), scores[..., lo:hi].logsumexp(-1).float()

    (a, la), (b, lb) = part(0, 25), part(25, keys)
    out = torch.full((rows, heads, dim), float("nan"), device=device)
    merge_attention(a, la, b, lb, out)
    assert error(out, torch.einsum("rhk,hkd->rhd", scores.softmax(-1), values)) < TOLERANCE[torch.float32]
