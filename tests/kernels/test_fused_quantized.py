"""The decoder with fused kernels and quantised weights gives the results of plain torch with the same weights."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from engine.models import decoder
from engine.models.decoder import Decoder
from engine.models.fused_quantized import QuantizedFusedOps
from engine.models.spec import parse_spec
from engine.models.weights.random_weights import randomize
from engine.quantization.scheme import Quantization, Rule, Scheme
from tests.kernels.test_fused_model import BASE, STEPS, Rig
from tests.rigs.engine.paged import error

SCHEMES = {
    "int4": Scheme(layout="awq", kind="int4", extent="group", group_size=32, symmetric=False),
    "int8": Scheme(layout="plain", kind="int8", extent="channel"),
    "fp8": Scheme(layout="plain", kind="fp8", extent="block"),
}
CONFIG = BASE | {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 2,
}


@pytest.mark.parametrize(("name", "experts"), [*((name, False) for name in SCHEMES), ("int4", True)])
@torch.inference_mode()
def test_fused_equals_plain(name: str, experts: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer computes keys and values with a weight of its own."""
    spec = parse_spec(CONFIG | (EXPERTS if experts else {}))
    quantization = Quantization(name, "config.json", (Rule(r"model\.layers\.", SCHEMES[name]),))
    fused, plain = (
        Decoder(spec, 64, device, torch.float32, fused=fused, quantization=quantization) for fused in (True, False)
    )
    for model in (fused, plain):
        randomize(model, 3)
    assert isinstance(fused._ops, QuantizedFusedOps)
    assert fused.layer_list[0].attention.out.prepared is not None
    for (_, kept), (_, dequantised) in zip(fused.experts(), plain.experts(), strict=True):
        assert (kept.gate_up.dtype, dequantised.gate_up.dtype) == (torch.uint8, torch.float32)
    rig = Rig(spec, torch.float32, device, (fused, plain))
    monkeypatch.setattr(decoder, "MIN_TOKENS_PER_ROW", 1)
    for step in STEPS:
        want = rig.call(1, step)()
        assert error(rig.call(0, step)(), want.double()) < 2e-5
