"""Paged attention kernels against float64, over pools of NaN and poisoned outputs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.paged_decode import decode_workspace, paged_decode, plan_decode
from engine.kernels.paged_prefill import paged_prefill
from engine.kernels.prefix import gather_kv, merge_parts

from .paged import TOLERANCE, PagedCase, error

SHAPES = [(4, 1, 16, 8), (2, 2, 80, 16), (6, 2, 96, 16), (8, 2, 64, 32)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), SHAPES)
@pytest.mark.parametrize("window", [0, 50])
def test_decode(heads, kv_heads, dim, block_size, window, device, gen):
    case = PagedCase(
        [1, 300, 63, 64, 129], [1, 3, 2, 1, 1],
        heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size, dtype=torch.float32, device=device, gen=gen,
    )  # fmt: skip
    for programs in (1, 5, 23):
        space = decode_workspace(programs, heads, kv_heads, 3, dim, device)
        plan = plan_decode(
            case.cu_q, case.seq_lens, space, num_kv_heads=kv_heads, head_dim=dim, itemsize=4, window=window
        )
        space.part.fill_(float("nan"))
        case.out.fill_(float("nan"))
        paged_decode(
            case.q, case.kv, case.tables, case.cu_q, case.seq_lens, plan, space,
            max_query=3, scale=case.scale, out=case.out,
        )  # fmt: skip
        assert error(case.out, case.reference(window)) < TOLERANCE[torch.float32]


def test_decode_of_an_empty_sequence_is_zero(device, gen):
    case = PagedCase(
        [20, 1], [1, 1], heads=2, kv_heads=1, dim=16, block_size=16, dtype=torch.float32, device=device, gen=gen
    )
    case.seq_lens[1] = 0
    space = decode_workspace(3, 2, 1, 1, 16, device)
    plan = plan_decode(case.cu_q, case.seq_lens, space, num_kv_heads=1, head_dim=16, itemsize=4)
    case.out.fill_(float("nan"))
    out = paged_decode(
        case.q, case.kv, case.tables, case.cu_q, case.seq_lens, plan, space, max_query=1, scale=0.25, out=case.out
    )
    assert (out[1] == 0).all()
    assert error(out[:1], case.reference()[:1]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), SHAPES)
@pytest.mark.parametrize("window", [0, 37])
def test_prefill(heads, kv_heads, dim, block_size, window, device, gen):
    case = PagedCase(
        [1, 150, 64, 97], [1, 70, 64, 5],
        heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size, dtype=torch.float32, device=device, gen=gen,
    )  # fmt: skip
    paged_prefill(
        case.q, case.kv, case.tables, case.cu_q, case.seq_lens,
        max_query=70, scale=case.scale, window=window, out=case.out, block_m=32,
    )  # fmt: skip
    assert error(case.out, case.reference(window)) < TOLERANCE[torch.float32]


def test_half_precision(device, gen):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter has no bf16 dot
    case = PagedCase([70, 20], [2, 2], heads=4, kv_heads=2, dim=16, block_size=16, dtype=dtype, device=device, gen=gen)
    space = decode_workspace(3, 4, 2, 2, 16, device)
    plan = plan_decode(case.cu_q, case.seq_lens, space, num_kv_heads=2, head_dim=16, itemsize=4)
    case.out.fill_(float("nan"))
    args = (case.q, case.kv, case.tables, case.cu_q, case.seq_lens)
    decoded = paged_decode(*args, plan, space, max_query=2, scale=case.scale, out=case.out)
    assert error(decoded, case.reference()) < TOLERANCE[dtype]
    prefilled = paged_prefill(*args, max_query=2, scale=case.scale, block_m=16)
    assert error(prefilled, case.reference()) < TOLERANCE[dtype]


@pytest.mark.parametrize("length", [1, 16, 77])
def test_gather(length, device, gen):
    case = PagedCase(
        [80], [1], heads=2, kv_heads=2, dim=80, block_size=16, dtype=torch.bfloat16, device=device, gen=gen
    )
    keys, values = gather_kv(case.kv, case.tables[0], length)
    want_k, want_v = case.dense(0)
    assert torch.equal(keys, want_k[:, :length])
    assert torch.equal(values, want_v[:, :length])


def test_merge_of_two_parts_is_the_whole(device, gen):
    rows, heads, dim, keys = 5, 3, 24, 40
    scores = torch.randn(rows, heads, keys, generator=gen, device=device).double() * 3
    values = torch.randn(heads, keys, dim, generator=gen, device=device).double()

    def part(lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.einsum("rhk,hkd->rhd", scores[..., lo:hi].softmax(-1), values[:, lo:hi])
        return out.float(), scores[..., lo:hi].logsumexp(-1).float()

    (a, la), (b, lb) = part(0, 25), part(25, keys)
    out = torch.full((rows, heads, dim), float("nan"), device=device)
    merge_parts(a, la, b, lb, out)
    assert error(out, torch.einsum("rhk,hkd->rhd", scores.softmax(-1), values)) < TOLERANCE[torch.float32]
