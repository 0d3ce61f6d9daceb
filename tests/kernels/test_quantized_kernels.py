"""Products with quantised weights against float64, for every form of a weight and odd shapes. Outputs begin as NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.kernels.norm import rms_norm
from engine.kernels.quantized.activations import LARGEST, quantize
from engine.kernels.quantized.choice import choose
from engine.kernels.quantized.dequantize import dequantize
from engine.kernels.quantized.device_weight import DeviceWeight, prepare
from engine.kernels.quantized.linear import quantized_linear
from engine.kernels.quantized.product import Tile
from engine.kernels.quantized.split import can_split, split_product
from engine.kernels.quantized.wide import has_wide_product
from engine.quantization.inputs import input_rounding
from engine.quantization.weight import QuantizedWeight, pack_nibbles
from tests.rigs.engine.paged import error

EPS = 1e-5
DTYPES = [torch.float32, torch.float16]  # the interpreter has no bfloat16 products
if torch.cuda.is_available():
    DTYPES.append(torch.bfloat16)
TOLERANCE = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 8e-3}
FEW, MANY, SPLIT = Tile(8, 64, 128, 4, 2), Tile(16, 64, 32, 4, 2), Tile(8, 64, 16, 2, 2, True)
#: Name: kind, outputs, inputs, group (0: per output, -1: blocks of 128 x 128), whether it has zeros, and an order.
FORMS: dict[str, tuple[Any, int, int, int, bool, bool]] = {
    "int4-group-32": ("int4", 38, 256, 32, False, False),
    "int4-group-64-zeros": ("int4", 24, 320, 64, True, False),
    "int4-group-128-zeros-order": ("int4", 20, 512, 128, True, True),
    "int4-per-output": ("int4", 18, 200, 0, False, False),
    "int4-per-output-zeros": ("int4", 18, 128, 0, True, False),
    "int8-per-output": ("int8", 22, 100, 0, False, False),
    "int8-group-64-zeros-order": ("int8", 20, 192, 64, True, True),
    "fp8-per-output": ("fp8", 26, 130, 0, False, False),
    "fp8-blocks": ("fp8", 256, 300, -1, False, False),
    "fp8-blocks-odd-edges": ("fp8", 166, 140, -1, False, False),
}


def random_weight(name: str, gen: torch.Generator, device: torch.device) -> QuantizedWeight:
    kind, n, k, group, zeros, ordered = FORMS[name]
    groups = -(-k // (128 if group < 0 else group)) if group else 1
    scales = torch.rand(-(-n // 128) if group < 0 else n, groups, generator=gen, device=device).half().float() + 0.5
    scales *= 1.0 if kind == "fp8" else 2.0**-6  # exact in 16 bits, and no result exceeds float16
    if kind == "fp8":
        numbers = torch.randn(n, k, generator=gen, device=device).to(torch.float8_e4m3fn)
        numbers.view(torch.uint8)[0, :4] = torch.tensor([1, 0x87, 0x7E, 0xFE], device=device)  # subnormal, largest
    else:
        low, high, dtype = (0, 16, torch.uint8) if kind == "int4" else (-128, 128, torch.int8)
        numbers = torch.randint(low, high, (n, k), generator=gen, device=device).to(dtype)
    zero = None
    if zeros:
        zero = torch.randint(low, high, (n, groups), generator=gen, device=device).to(dtype)
    order = torch.randperm(k, generator=gen, device=device) if ordered else None
    packed = pack_nibbles(numbers) if kind == "int4" else numbers
    size = 128 if group < 0 else group or k
    return QuantizedWeight(kind, packed, scales, zero, order, group < 0, group_size=size)


def expected(
    x: Tensor, weight: QuantizedWeight, bias: Tensor, norm: Tensor | None, residual: Tensor | None, gated: bool
) -> Tensor:
    x = x.double()
    if norm is not None:
        x = x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()
    y = x @ weight.dequantize(torch.float64).T + bias.double()
    if gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual.double()


def check(
    weight: QuantizedWeight, prepared: DeviceWeight, rows: int, end: str, method: Any, gen: torch.Generator
) -> None:
    device, dtype = prepared.numbers.device, prepared.compute
    n, k = weight.shape
    gated = end == "gated"
    x = torch.randn(rows, k + 3, generator=gen, device=device).to(dtype)[:, :k]
    bias = torch.randn(n, generator=gen, device=device).to(dtype)
    norm = None if end == "residual" else torch.rand(k, generator=gen, device=device).to(dtype) + 0.5
    out = torch.full((rows, n // 2 if gated else n), float("nan"), dtype=dtype, device=device)
    residual = out.normal_(generator=gen).clone() if end == "residual" else None
    want = expected(x, weight, bias, norm, residual, gated)
    got = quantized_linear(
        x, prepared, bias=bias, norm=norm, eps=EPS, residual=None if residual is None else out, gated=gated, out=out,
        method=method,
    )  # fmt: skip
    assert got is out
    assert error(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_products(name, dtype, device, gen):
    weight = random_weight(name, gen, device)
    prepared = prepare(weight, dtype)
    check(weight, prepared, 3, "norm", FEW, gen)
    check(weight, prepared, 19, "residual", MANY, gen)
    check(weight, prepared, 5, "gated", MANY._replace(scaled=dtype != torch.float32), gen)
    check(weight, prepared, 4, "residual", "scratch", gen)
    check(weight, prepared, 5, "gated", MANY._replace(splits=3), gen)


@pytest.mark.parametrize("name", ["int4-group-32", "int8-group-64-zeros-order", "fp8-blocks"])
@pytest.mark.parametrize("end", ["norm", "gated", "residual"])
def test_parts_of_k(name, end, device, gen):
    """Every warp has a part of K. The result of a row does not depend on the other rows."""
    weight = random_weight(name, gen, device)
    prepared = prepare(weight, torch.float32)
    tile = SPLIT._replace(words=prepared.width if weight.kind == "int4" else 16)
    if not can_split(prepared, tile):
        tile = tile._replace(warps=1)
    check(weight, prepared, 3, end, tile, gen)
    if can_split(prepared, tile):
        x = torch.randn(4, weight.shape[1], generator=gen, device=device)
        assert torch.equal(split_product(x, prepared, tile)[1:2], split_product(x[1:2], prepared, tile))


@pytest.mark.parametrize("name", FORMS)
def test_a_prepared_weight_is_the_weight(name, device, gen):
    weight = random_weight(name, gen, device)
    prepared = prepare(weight, torch.float32)
    plain = dequantize(prepared)
    if weight.order is not None:
        plain = torch.empty_like(plain).index_copy_(1, weight.order, plain)
    assert torch.equal(plain, weight.dequantize(torch.float32))


def test_the_scales_of_a_ranks_blocks_have_no_gaps(device):
    """cuBLAS reads the scales of blocks as one range of memory, without a stride."""
    numbers = torch.zeros(256, 1024, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.arange(16.0, device=device).view(2, 8)
    weight = QuantizedWeight("fp8", numbers, scales, block=True, activations="group", group_size=128)
    part = prepare(weight.columns(slice(512, 1024)), torch.bfloat16)
    assert part.block
    assert part.scales.stride() == (1, 4)
    assert part.scales.t().tolist() == [[4, 5, 6, 7], [12, 13, 14, 15]]


@pytest.mark.parametrize("name", FORMS)
def test_every_number_of_rows_has_a_method(name, device, gen):
    prepared = prepare(random_weight(name, gen, device), torch.float32)
    for rows in (1, 2, 17, 100, 5000):
        method = choose(prepared, rows)
        assert method == "scratch" if rows == 5000 else isinstance(method, Tile)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8], ids=["fp8", "int8"])
@pytest.mark.parametrize("group", [False, True], ids=["token", "group"])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_quantized_inputs(kind, group, norm, device, gen):
    x = torch.randn(3, 256 + 13, generator=gen, device=device)[:, :256] * 7
    x[2] = 0
    weight = torch.rand(256, generator=gen, device=device) + 0.5 if norm else None
    numbers, scales = quantize(x, kind, group=group, norm=weight, eps=EPS)
    want = x.double()
    if weight is not None:
        want = want * (want.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    assert scales.stride(0) == 1
    parts = want.view(3, -1, 128 if group else 256)
    assert torch.allclose(scales[:2], (parts.abs().amax(-1) / LARGEST[kind]).float()[:2], rtol=1e-5)
    back = (numbers.double().view(3, scales.shape[1], -1) * scales.double()[..., None]).flatten(1)
    step = parts.abs().amax(-1, keepdim=True) / (127 if kind == torch.int8 else 14)  # the widest step of the type
    assert bool(((back - want).view(parts.shape).abs() <= step * 0.501).all())


def test_a_static_scale_clamps_inputs(device):
    x = torch.tensor([[1.0, -3.0, 1000.0, -1000.0]], device=device)
    numbers, scales = quantize(x, torch.float8_e4m3fn, static=torch.tensor(0.5, device=device))
    assert numbers.float().tolist() == [[2.0, -6.0, 448.0, -448.0]]
    assert scales.tolist() == [[0.5]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs products of 8 bits")
@pytest.mark.parametrize("name", ["int8", "fp8", "fp8-static", "fp8-blocks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_products_of_8_bits(name, dtype, device, gen):
    """Inputs are quantised, as the checkpoint says. Any number of rows is possible."""
    n, k, kind = 512, 1024, "int8" if name == "int8" else "fp8"
    blocks, static = name == "fp8-blocks", name == "fp8-static"
    scales = torch.rand(*((4, 8) if blocks else (n, 1)), generator=gen, device=device) + 0.5
    scales *= 2.0**-6 if dtype == torch.float16 else 1.0  # no result exceeds float16
    numbers = torch.randn(n, k, generator=gen, device=device) * (20 if kind == "int8" else 1)
    numbers = numbers.round().to(torch.int8) if kind == "int8" else numbers.to(torch.float8_e4m3fn)
    activations: Any = "group" if blocks else "static" if static else "token"
    input_scale = torch.tensor(0.01, device=device) if static else None
    size = 128 if blocks else k
    weight = QuantizedWeight(
        kind, numbers, scales, block=blocks, activations=activations, input_scale=input_scale, group_size=size
    )
    prepared = prepare(weight, dtype)
    if not has_wide_product(prepared):
        pytest.skip("this card has no such product")
    rounded = input_rounding(weight)
    assert rounded is not None
    ends = ("norm", "gated", "residual")
    for rows, end in [*((70, end) for end in ends), *((rows, ends[rows % 3]) for rows in (*range(1, 10), 17, 2047))]:
        x = torch.randn(rows, k, generator=gen, device=device).to(dtype)
        norm = None if end == "residual" else (torch.rand(k, generator=gen, device=device) + 0.5).to(dtype)
        residual = torch.randn(rows, n, generator=gen, device=device).to(dtype) if end == "residual" else None
        inputs = x if norm is None else rms_norm(x, norm, EPS)
        want = expected(rounded(inputs.float()), weight, torch.zeros(n, device=device), None, residual, end == "gated")
        got = quantized_linear(
            x, prepared, norm=norm, eps=EPS, residual=residual, gated=end == "gated", out=residual, method="wide"
        )
        assert error(got, want) < TOLERANCE[torch.bfloat16], (rows, end)  # the product may be of this dtype


@pytest.mark.parametrize("group", [False, True], ids=["token", "group"])
def test_quantized_inputs_may_have_more_rows(group, device, gen):
    x = torch.randn(3, 256, generator=gen, device=device)
    numbers, scales = quantize(x, torch.int8, group=group, multiple=16)
    assert (numbers.shape, scales.shape, scales.stride(0)) == ((16, 256), (16, 2 if group else 1), 1)
    want = quantize(x, torch.int8, group=group)
    assert torch.equal(numbers[:3], want[0])
    assert torch.equal(scales[:3], want[1])
