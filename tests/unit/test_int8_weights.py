"""Weights on a CPU: packed products, the accuracy of 8 bits, the independence of rows, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.types import SamplingParams
from engine.llm import LLM
from engine.models.cpu_weights import can_pack, place, product
from engine.models.decoder import Decoder
from engine.models.layers import Linear
from engine.models.loader import open_model
from engine.quantization.at_load import quantize
from engine.quantization.scheme import Scheme
from tests.rigs.engine.bare_model import GPT2, LLAMA, bare_model

torch.set_num_threads(1)
CPU = torch.device("cpu")
WIDE = LLAMA | {"hidden_size": 64, "intermediate_size": 96}
INT8 = Scheme(layout="load", kind="int8", extent="channel")


def int8_layer(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A linear layer with this weight in 8 bits."""
    linear = Linear(weight.shape[1], {"x": weight.shape[0]}, bias=bias is not None).requires_grad_(False)
    linear.weight.copy_(weight)
    if bias is not None:
        linear.bias.copy_(bias)
    linear.scheme = INT8
    place(linear, quantize(weight, INT8), torch.float32)
    return linear


@pytest.mark.parametrize("rows", [1, 3, 16, 65])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_near_that_of_the_weights(rows: int, biased: bool) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(70, 128) * torch.rand(70, 1), torch.randn(rows, 128)
    weight[3] = 0.0
    bias = torch.randn(70) if biased else None
    linear = int8_layer(weight, bias)
    assert linear.scales is not None
    step = weight.abs().amax(1, keepdim=True) / 127
    assert torch.all(
        (linear.weight * linear.scales.float()[:, None] - weight).abs() <= 0.51 * step + 0.004 * weight.abs()
    )
    found = product(x, linear)
    expected = torch.nn.functional.linear(x, weight, bias)
    assert found.dtype == torch.float32
    assert (found - expected).norm() / expected.norm() < 0.015


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    linear, x = int8_layer(torch.randn(70, 128)), torch.randn(67, 128)
    together = product(x, linear)
    alone = torch.cat([product(row[None], linear) for row in x])
    assert torch.equal(together, alone)


def test_an_engine_with_int8_weights_answers_like_one_without(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "cpu", "num_blocks": 64, "threads": 1, "load_format": "dummy"}
    exact, rounded = (LLM(bare_model(tmp_path, WIDE), **settings, weights=weights) for weights in ("auto", "int8"))
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0)
    prompts = [[(7 * i + j) % 96 for j in range(20)] for i in range(8)]
    pairs = zip(*(llm.generate(prompts, params, show_progress=False) for llm in (exact, rounded)), strict=True)
    both = [(one.tokens[0], other.tokens[0]) for one, other in pairs]
    same = [(one, other) for one, other in both if one.id == other.id]
    assert len(same) >= 6, both
    assert all(one.logprob == pytest.approx(other.logprob, abs=0.1) for one, other in same)
    assert exact.engine.layout.fingerprint != rounded.engine.layout.fingerprint, "pods of both kinds would mix their KV"
    others = {name: getattr(exact.engine.layout, name) for name in ("revision", "weights")}
    assert dataclasses.replace(rounded.engine.layout, **others) == exact.engine.layout


def test_a_layer_that_the_int8_product_cannot_read_is_dequantised(tmp_path: Path) -> None:
    """torch's product reads 16 numbers of a row at a time, without a check."""
    odd = open_model(bare_model(tmp_path, WIDE | {"intermediate_size": 72}), "dummy", form="int8")
    model = odd.load(64, CPU, torch.float32)
    assert isinstance(model, Decoder)
    mlp = model.layer_list[0].mlp
    assert (mlp.gate_up.weight.dtype, mlp.down.weight.dtype) == (torch.int8, torch.float32)
    assert model.layer_list[0].mlp.down.weight.unique(dim=None).numel() <= 255 * mlp.down.out_features


def test_a_model_without_native_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights int8 are not supported for this model: .* transformers") as e:
        open_model(bare_model(tmp_path, GPT2), "dummy", form="int8")
    assert e.value.field == "weights"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights_give_the_same_products(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    if not can_pack(dtype):
        pytest.skip("this torch has no packed products")
    config = WIDE | {"tie_word_embeddings": tied, "attention_bias": True}
    plain, packed = (open_model(bare_model(tmp_path, config), "dummy").load(64, CPU, dtype) for _ in range(2))
    assert isinstance(plain, Decoder)
    assert isinstance(packed, Decoder)
    packed.pack(keep_head=False)
    assert packed.layer_list[0].mlp.down.weight.numel() == 0, "both forms of a weight are in memory"
    assert packed.head.weight.numel() == (96 * 64 if tied else 0)
    torch.manual_seed(0)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    pairs = [(plain.head, packed.head)]
    for one, other in zip(plain.layer_list, packed.layer_list, strict=True):
        pairs += [(one.attention.qkv, other.attention.qkv), (one.mlp.gate_up, other.mlp.gate_up)]
        pairs += [(one.attention.out, other.attention.out)]
    pairs += [(plain.layer_list[-1].attention.kv, packed.layer_list[-1].attention.kv)]
    for rows in (1, 2, 5, 16, 65):
        x = torch.randn(rows, 64, dtype=dtype)
        for one, other in pairs:
            expected, found = (product(x, linear) for linear in (one, other))
            assert found.dtype == dtype
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
