"""The setting `weights`: an unquantised checkpoint is quantised while it loads, one layer at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from engine.models.decoder import Decoder
from engine.models.loader import open_model
from engine.models.spec import UNSHARDED, Shard
from engine.models.weights.files import OpenFiles
from engine.quantization.at_load import quantize
from engine.quantization.scheme import Scheme
from engine.quantization.weight import QuantizedWeight
from tests.rigs.engine.bare_model import LLAMA, bare_model
from tests.rigs.pods.harness import tiny_llama

torch.set_num_threads(1)
CPU = torch.device("cpu")
WIDE = LLAMA | {"hidden_size": 64, "intermediate_size": 96, "attention_bias": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def load(directory: Path, form: str, how: str = "auto", shard: Shard = UNSHARDED) -> Decoder:
    model = open_model(directory, how, form=form).load(64, CPU, torch.float32, shard, lambda x: None)
    assert isinstance(model, Decoder)
    return model


def weight_of(linear: Any) -> torch.Tensor:
    """Returns the weight of a layer, as it multiplies."""
    return linear.weight if linear.scales is None else linear.weight * linear.scales.float()[:, None]


@pytest.mark.parametrize(("form", "step"), [("fp8", 1 / 8), ("int8", 1 / 127)])
def test_every_weight_is_within_half_a_step(form: str, step: float, tmp_path: Path) -> None:
    """A step of e4m3 is relative to the number, one of int8 to the largest number of the output."""
    tiny_llama(tmp_path)
    plain, rounded = load(tmp_path, "auto"), load(tmp_path, form)
    for (_, one), (_, other) in zip(plain.linears(), rounded.linears(), strict=True):
        if one is plain.head:
            assert torch.equal(one.weight, other.weight), "the head keeps its numbers"
            continue
        size = one.weight.abs().amax(1, keepdim=True)
        size = torch.maximum(one.weight.abs(), size / 2**13) if form == "fp8" else size
        assert ((weight_of(other) - one.weight).abs() <= 0.51 * step * size + 0.004 * one.weight.abs()).all()
        assert (weight_of(other) != one.weight).any()
        assert (other.rounding is not None) == (form == "fp8")


def test_a_layer_is_quantised_before_the_next_one_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a load is bounded: no more than one layer is there in both forms."""
    tiny_llama(tmp_path)
    events: list[str] = []
    read, place = OpenFiles.read, Decoder.place

    def noted_read(self: Any, name: str) -> torch.Tensor:
        events.append("read")
        return read(self, name)

    def noted_place(self: Any, linear: Any, weight: QuantizedWeight) -> None:
        events.append("place")
        place(self, linear, weight)

    monkeypatch.setattr(OpenFiles, "read", noted_read)
    monkeypatch.setattr(Decoder, "place", noted_place)
    load(tmp_path, "fp8")
    assert events == ([*["read"] * 3, "place", "read", "place", *["read"] * 2, "place", "read", "place"] * 2)


@pytest.mark.parametrize("how", ["auto", "dummy"])
@pytest.mark.parametrize("form", ["fp8", "int8", "awq", "fp8-block"])
def test_ranks_have_the_numbers_of_one_process(form: str, how: str, tmp_path: Path) -> None:
    if form in ("fp8", "int8"):
        tiny_llama(tmp_path) if how == "auto" else bare_model(tmp_path, WIDE)
    else:
        block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        bare_model(tmp_path, WIDE | {"quantization_config": AWQ if form == "awq" else block})
        form, how = "auto", "dummy"
    whole, parts = load(tmp_path, form, how), [load(tmp_path, form, how, Shard(rank, 2)) for rank in range(2)]
    for index, layer in enumerate(whole.layer_list):
        ranks = [part.layer_list[index] for part in parts]
        down = torch.cat([weight_of(rank.mlp.down) for rank in ranks], 1)
        torch.testing.assert_close(down, weight_of(layer.mlp.down))
        gates = [weight_of(rank.mlp.gate_up).chunk(2) for rank in ranks]
        found = torch.cat([part[half] for half in range(2) for part in gates])
        torch.testing.assert_close(found, weight_of(layer.mlp.gate_up))


def test_random_weights_of_a_quantised_model_follow_the_seed(tmp_path: Path) -> None:
    bare_model(tmp_path, WIDE | {"quantization_config": AWQ})
    sources = [open_model(tmp_path, "dummy", seed) for seed in (0, 0, 1)]
    states = [source.load(64, CPU, torch.float32).logits(torch.ones(1, 64)) for source in sources]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    assert len({source.revision(CPU) for source in sources}) == 2


def test_a_layer_that_groups_do_not_divide_is_refused(tmp_path: Path) -> None:
    bare_model(tmp_path, WIDE | {"quantization_config": AWQ, "intermediate_size": 72})
    with pytest.raises(ConfigError, match="72 inputs of a layer are not whole groups of 32"):
        open_model(tmp_path, "dummy").load(64, CPU, torch.float32)


def test_zeros_and_tiny_numbers_stay_finite() -> None:
    weight = torch.zeros(3, 64)
    weight[1] = 1e-38
    weight[2, 0] = 3e38
    for kind, extent in (
        ("fp8", "channel"),
        ("fp8", "block"),
        ("fp8", "tensor"),
        ("int8", "channel"),
        ("int4", "group"),
    ):
        scheme = Scheme(layout="load", kind=kind, extent=extent, group_size=32)  # type: ignore[arg-type]
        found = quantize(weight, scheme).dequantize(torch.float32)
        assert found.isfinite().all()
        assert not found[0].any()
