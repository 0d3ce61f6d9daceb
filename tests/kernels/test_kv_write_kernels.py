"""The kernels that write the 8-bit KV cache produce the same bits as the codec in torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from engine.kernels.kv_write import kv_write, rope_kv_write
from engine.kernels.pool import decode
from engine.kv.kv_pool import LayerKV, quantize_e4m3
from tests.rigs.engine.paged import NAN_BYTE, poisoned_layer

FP8 = torch.uint8
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy in the interpreter warns about NaN


@triton.jit
def _decode_all(codes, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, decode(tl.load(codes + i), tl.float32))


def test_decode_reads_every_byte(device):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    out = torch.full((256,), -1.0, device=device)
    _decode_all[(1,)](codes, out, N=256)
    want = codes.view(torch.float8_e4m3fn).float()
    finite = want.isfinite()
    assert int((~finite).sum()) == 2
    assert torch.equal(out[finite], want[finite])


def hostile(tokens: int, heads: int, dim: int, device: torch.device, gen: torch.Generator) -> torch.Tensor:
    """Returns [tokens, 2, heads, dim] over many magnitudes, with ties, subnormals, zeros, NaN and infinity."""
    x = torch.randn(tokens, 2, heads, dim, generator=gen, device=device)
    x *= 10.0 ** torch.randint(-7, 3, (tokens, 2, heads, dim), generator=gen, device=device)
    x[1] *= 1e-35
    x[2] *= 1e30
    x[3, 0] = 0.0
    x[4, 0, 0, 1], x[4, 1, 0, 2] = float("nan"), float("inf")
    ties = (
        torch.arange(dim, device=device) / 16 + 1 / 32
    )  # half-way between neighbours, and beyond the last number of a binade
    x[5, 0, 0] = ties / ties.max() * 1.984375
    return x


def check(layer: LayerKV, want: torch.Tensor, slots: list[int]) -> None:
    """Asserts that the written slots hold the codec's bits of `want`, and that all other slots are still NaN."""
    assert layer.scales is not None
    codes, scales = quantize_e4m3(want)
    size = layer.block_size
    written = {slot for slot in slots if slot >= 0}
    for t, slot in enumerate(slots):
        if slot < 0:
            continue
        got = layer.scales[slot // size, :, slot % size].T
        torch.testing.assert_close(got, scales[t], rtol=0, atol=0, equal_nan=True)
        numbers = ~scales[t].isnan()
        assert torch.equal(layer.kv[slot // size, :, :, slot % size][numbers], codes[t][numbers])
    for slot in set(range(layer.kv.shape[0] * size)) - written:
        assert (layer.kv[slot // size, :, :, slot % size] == NAN_BYTE).all()
        assert layer.scales[slot // size, :, slot % size].isnan().all()


@pytest.mark.parametrize(("kv_heads", "dim"), [(3, 16), (1, 80)])
def test_kv_write_produces_the_codecs_bits(kv_heads, dim, device, gen):
    slots = [0, 31, -1, 17, 8, 9, 30]
    layer = poisoned_layer(4, 2, 1, kv_heads, 8, dim, FP8, device)
    new = hostile(len(slots), kv_heads, dim, device, gen)
    kv_write(new, layer, torch.tensor(slots, device=device))
    check(layer, new, slots)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 80)])
@pytest.mark.parametrize("norm", [False, True])
def test_rope_kv_write_writes_the_keys_that_it_leaves_in_qkv(heads, kv_heads, dim, norm, device, gen):
    slots = [0, 31, -1, 17, 8, 9]
    layer = poisoned_layer(4, 2, 1, kv_heads, 8, dim, FP8, device)
    queries = torch.randn(len(slots), heads, dim, generator=gen, device=device)
    new = hostile(len(slots), kv_heads, dim, device, gen).flatten(1, 2)
    qkv = torch.cat([queries, new], 1).flatten(1).to(torch.float16 if device.type == "cpu" else torch.bfloat16)
    angle = torch.rand(32, dim // 2, generator=gen, device=device) * 6
    weights = torch.randn(2, dim, generator=gen, device=device) if norm else (None, None)
    rope_kv_write(
        qkv,
        layer,
        torch.arange(len(slots), device=device),
        torch.tensor(slots, device=device),
        angle.cos(),
        angle.sin(),
        num_heads=heads,
        q_norm=weights[0],
        k_norm=weights[1],
    )
    check(layer, qkv.view(len(slots), -1, dim)[:, heads:].unflatten(1, (2, kv_heads)).float(), slots)


@pytest.mark.parametrize("size", [2048, 3000, 1 << 20])
def test_a_weight_that_is_brought_to_the_cache_changes_nothing(size, device, gen):
    """A device without PDL does not prefetch."""
    qkv, angle = torch.randn(1, 4 * 16, generator=gen, device=device), torch.rand(4, 8, generator=gen, device=device)
    soon, place = torch.ones(size, device=device, dtype=torch.bfloat16), torch.tensor([3], device=device)
    results = []
    for early in (None, soon):
        layer, copy = LayerKV(torch.zeros(2, 2, 1, 8, 16, device=device)), qkv.clone()
        rope_kv_write(copy, layer, place, place, angle.cos(), angle.sin(), num_heads=2, soon=early)
        results.append((copy, layer.kv))
    assert all(map(torch.equal, *results))
    assert bool((soon == 1).all())
