"""The 8-bit KV cache in torch: its layout in a block, the codec, and attention over it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import LayoutMismatch
from common.kv_layout import FP8_DTYPE, SEGMENT_ALIGN, KVLayout
from engine.attention.base import StepShape
from engine.attention.torch_backend import TorchAttention
from engine.kv.kv_pool import KVPool, LayerKV, dequantize_e4m3, quantize_e4m3

CPU = torch.device("cpu")


def layout(dtype: str = FP8_DTYPE, **changed: int) -> KVLayout:
    shape = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "block_size": 4} | changed
    return KVLayout("m", "r", dtype=dtype, **shape)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 300), st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_segments_are_aligned_and_disjoint(layers: int, heads: int, dim: int, size: int) -> None:
    made = layout(num_layers=layers, num_kv_heads=heads, head_dim=dim, block_size=size)
    kv, scales = made.segments
    assert (kv.offset, kv.nbytes) == (0, 2 * layers * heads * size * dim)
    assert scales.nbytes == 4 * layers * heads * size, "a bfloat16 for each K and V of a token and head"
    assert scales.offset >= kv.nbytes
    assert scales.offset % SEGMENT_ALIGN == made.block_bytes % SEGMENT_ALIGN == 0
    assert made.block_bytes - (scales.offset + scales.nbytes) < SEGMENT_ALIGN


def test_fp8_blocks_take_half_of_bfloat16_and_have_another_fingerprint() -> None:
    llama = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}
    small, full = layout(**llama), layout("bfloat16", **llama)
    assert 0.5 <= small.block_bytes / full.block_bytes < 0.51
    assert small.fingerprint != full.fingerprint
    with pytest.raises(LayoutMismatch, match="dtype"):
        full.require_equal(small)


def test_layers_and_scales_share_the_block() -> None:
    pool = KVPool(layout(), 3, CPU)
    first, second = pool.layers()
    assert second.scales is not None
    second.kv[1] = 7
    second.scales[1] = 2.0
    assert not pool.segment_view("kv")[:, 0].any()
    content = pool.read_block(1)
    pool.write_block(2, content)
    assert torch.equal(second.kv[2], second.kv[1])
    assert (second.scales[2] == 2.0).all()
    pool.zero([1])
    assert not dequantize_e4m3(second.kv[1], second.scales[1].permute(2, 0, 1), torch.float32).any()
    assert first.scales is not None
    assert not first.scales.any()


@pytest.mark.parametrize("spread", [1e-30, 1e-3, 1.0, 1e4, 1e30])
def test_numbers_keep_four_bits(spread: float) -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)) * spread
    code, scales = quantize_e4m3(x)
    got = dequantize_e4m3(code, scales, torch.float32)
    largest = x.abs().amax(-1, keepdim=True)
    # The error is at most half a step of the mantissa; below the smallest normal number half of the smallest step.
    assert ((got - x).abs() <= torch.maximum(x.abs() / 16, largest * 2.0**-17)).all()
    assert torch.equal(dequantize_e4m3(code, scales, torch.bfloat16).float(), got), "bfloat16 holds them exactly"
    assert torch.equal(scales.float().log2() % 1, torch.zeros(200))
    again, same = quantize_e4m3(got)
    assert torch.equal(dequantize_e4m3(again, same, torch.float32), got)


def test_nan_and_infinity_read_as_nan() -> None:
    x = torch.ones(5, 8)
    x[1, 3], x[2, 0], x[3] = float("nan"), float("inf"), 0.0
    code, scales = quantize_e4m3(x)
    got = dequantize_e4m3(code, scales, torch.float32)
    assert got[1:3].isnan().all()
    assert torch.equal(got[[0, 3, 4]], x[[0, 3, 4]])


def attend(chunks: list[int], q: torch.Tensor, kv: torch.Tensor, poison: bool = False) -> torch.Tensor:
    """Attention of the last rows of q over an 8-bit cache written in chunks; another block may be NaN."""
    pool = KVPool(layout(), 12, CPU)
    layer = pool.layers()[0]
    backend = TorchAttention(pool.layers(), q.shape[1], (None,), pool.dummy_block)
    blocks = [[5, 2, 9, 0, 7]]
    if poison:
        pool.data[[1, 3, 4]] = 0xFF
    outs, start = [], 0
    for size in chunks:
        rows = slice(start, start + size)
        outs.append(backend.attend(q[rows], kv[rows], layer, backend.prepare(StepShape([start], [size], blocks)), None))
        start += size
    return torch.cat(outs)


def test_attention_over_an_8_bit_cache() -> None:
    gen = torch.Generator().manual_seed(2)
    q, kv = torch.randn(18, 4, 16, generator=gen), torch.randn(18, 2, 2, 16, generator=gen)

    def exact(kv: torch.Tensor) -> torch.Tensor:
        k, v = kv.double().repeat_interleave(2, 2).permute(1, 2, 0, 3)
        scores = q.double().transpose(0, 1) @ k.transpose(1, 2) / 4
        hidden = torch.ones(18, 18).triu(1).bool()
        return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)

    whole = attend([18], q, kv)
    rounded = exact(dequantize_e4m3(*quantize_e4m3(kv), torch.float32))
    assert (whole - rounded).norm() / rounded.norm() < 1e-6
    assert 1e-3 < (whole - exact(kv)).norm() / exact(kv).norm() < 0.05
    for chunks in ([5, 13], [4, 4, 4, 4, 2], [1] * 18):
        torch.testing.assert_close(attend(chunks, q, kv, poison=True), whole, atol=1e-6, rtol=1e-5)


def test_softcap_and_scale() -> None:
    gen = torch.Generator().manual_seed(3)
    q, kv = 5 * torch.randn(9, 2, 16, generator=gen), torch.randn(9, 2, 2, 16, generator=gen)
    pool = KVPool(layout("float32"), 6, CPU)
    backend = TorchAttention(pool.layers(), 2, (4,), pool.dummy_block, scale=0.6, softcap=3.0)
    shape = StepShape([0], [9], [[4, 1, 2]])
    got = backend.attend(q, kv, pool.layers()[1], backend.prepare(shape), 4)
    k, v = kv.double().permute(1, 2, 0, 3)
    scores = 3 * (q.double().transpose(0, 1) @ k.transpose(1, 2) * 0.6 / 3).tanh()
    seen = torch.ones(9, 9).tril().bool() & torch.ones(9, 9).triu(-3).bool()
    want = (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_a_layer_has_scales_only_with_e4m3() -> None:
    with pytest.raises(AssertionError):
        LayerKV(torch.zeros(1, 2, 1, 4, 8, dtype=torch.uint8))
