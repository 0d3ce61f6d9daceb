"""The canonical form of a weight: parts of it and joined parts are those of the dequantised matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from engine.quantization.inputs import input_rounding
from engine.quantization.weight import BLOCK, QuantizedWeight, concatenate, pack_nibbles


@st.composite
def weights(draw: st.DrawFn, outputs: int = 0, inputs: int = 0) -> QuantizedWeight:
    """A weight of any kind, with up to 300 outputs and 320 inputs."""
    kind = draw(st.sampled_from(["fp8", "int8", "int4"]))
    block = kind == "fp8" and draw(st.booleans())
    outputs = outputs or draw(st.sampled_from([16, 64, 130, 256, 300]))
    inputs = inputs or draw(st.sampled_from([64, 128, 192, 320]))
    size = BLOCK if block else draw(st.sampled_from([32, 64, inputs]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    groups = -(-inputs // size)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    if kind == "int4":
        numbers = pack_nibbles(integers(0, 16, outputs, inputs).to(torch.uint8))
    elif kind == "int8":
        numbers = integers(-128, 128, outputs, inputs).to(torch.int8)
    else:
        numbers = torch.randn(outputs, inputs, generator=random).to(torch.float8_e4m3fn)
    zeros = None
    if kind != "fp8" and draw(st.booleans()):
        low, dtype = (0, torch.uint8) if kind == "int4" else (-100, torch.int8)
        zeros = integers(low, low + 16, outputs, groups).to(dtype)
    order = (
        torch.randperm(inputs, generator=random) if kind != "fp8" and size < inputs and draw(st.booleans()) else None
    )
    rows = -(-outputs // BLOCK) if block else outputs
    scales = torch.rand(rows, groups, generator=random) + 0.1
    return QuantizedWeight(kind, numbers, scales, zeros, order, block, group_size=size)


def dense(weight: QuantizedWeight, inputs: int | None = None) -> torch.Tensor:
    return weight.dequantize(torch.float32, inputs)


@settings(max_examples=60, deadline=None)
@given(weights(), st.data())
def test_rows_are_rows_of_the_matrix(weight: QuantizedWeight, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, weight.shape[0] - 1))
    stop = data.draw(st.integers(start + 1, weight.shape[0]))
    part = weight.rows(slice(start, stop))
    assert torch.equal(dense(part), dense(weight)[start:stop])
    if weight.block and start % BLOCK == 0:
        assert part.block


@settings(max_examples=60, deadline=None)
@given(weights(), st.sampled_from([1, 2, 4]))
def test_columns_of_all_ranks_are_the_matrix(weight: QuantizedWeight, ranks: int) -> None:
    width = weight.shape[1] // ranks
    parts = [weight.columns(slice(rank * width, (rank + 1) * width)) for rank in range(ranks)]
    assert torch.equal(torch.cat([dense(part, width) for part in parts], 1), dense(weight))
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)).double()
    if weight.order is not None:  # a product reads its inputs through the order
        for rank, part in enumerate(parts):
            inputs = x[:, rank * width : (rank + 1) * width]
            plain = QuantizedWeight(part.kind, part.numbers, part.scales, part.zeros, group_size=part.group_size)
            found = inputs[:, part.order] @ dense(plain).double().t()
            torch.testing.assert_close(found, inputs @ dense(part, width).double().t())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_joined_weights_are_one_above_the_other(data: st.DataObject) -> None:
    first = data.draw(weights(inputs=192))
    parts = [first, first.rows(slice(0, 16)), first]
    assert torch.equal(dense(concatenate(parts)), torch.cat([dense(part) for part in parts]))


def test_parts_that_differ_are_named() -> None:
    def weight(size: int, order: torch.Tensor | None = None) -> QuantizedWeight:
        numbers = torch.zeros(8, 64, dtype=torch.int8)
        return QuantizedWeight("int8", numbers, torch.ones(8, 64 // size), order=order, group_size=size)

    with pytest.raises(ValueError, match="group_size 32 and 64"):
        concatenate([weight(32), weight(64)])
    with pytest.raises(ValueError, match="activation orders that differ"):
        concatenate([weight(32), weight(32, torch.arange(63, -1, -1))])


def test_a_group_is_not_split_into_crumbs() -> None:
    weight = QuantizedWeight("int8", torch.zeros(8, 96, dtype=torch.int8), torch.ones(8, 3), group_size=32)
    assert weight.columns(slice(0, 48)).group_size == 16
    with pytest.raises(
        ConfigError, match=r"inputs 12 to 24 of a layer split a quantisation group of 32 into parts of 4"
    ):
        weight.columns(slice(12, 24))


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("activations", ["token", "group", "static"])
def test_rounded_inputs_are_near_and_rounding_is_idempotent(kind: str, activations: str) -> None:
    scale = torch.tensor(0.019) if activations == "static" else None
    numbers = torch.zeros(4, 200).to(torch.float8_e4m3fn if kind == "fp8" else torch.int8)
    weight = QuantizedWeight(
        kind,  # type: ignore[arg-type]
        numbers,
        torch.ones(4, 1),
        activations=activations,  # type: ignore[arg-type]
        input_scale=scale,
        group_size=200,
    )
    rounding = input_rounding(weight)
    assert rounding is not None
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(1)).clamp(-2.4, 2.4)
    x[2] = 0.0
    found = rounding(x)
    assert not found[2].any()
    step = 1 / 16 if kind == "fp8" else 0.55 / 127
    assert ((found - x).abs() <= step * x.abs().clamp(min=x.abs().amax() * (0.01 if kind == "fp8" else 1))).all()
    torch.testing.assert_close(rounding(found), found)
