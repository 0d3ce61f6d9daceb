"""Our decoder with gated delta layers against transformers, on tiny random models of all families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.kv_layout import KVLayout
from engine.attention.base import StepShape
from engine.attention.torch_backend import TorchAttention
from engine.kv.groups.state_pool import StatePool, StateRow, StepStates
from engine.kv.kv_pool import KVPool
from engine.models.base import ForwardContext
from engine.models.decoder import Decoder
from engine.models.loader import model_support
from engine.models.spec import HybridModelSpec, parse_spec, read_config
from engine.models.weights.load import load_weights
from tests.rigs.engine.hybrid_models import HYBRID_CASES, TINY_HYBRID, save_hybrid

torch.set_num_threads(1)
CPU, BLOCK, TOKENS = torch.device("cpu"), 4, 160


@pytest.mark.parametrize("name", HYBRID_CASES)
def test_logits_equal_transformers_in_steps_of_mixed_sizes(name: str, tmp_path: Path) -> None:
    """One sequence in steps below, at and above a chunk of the rule."""
    reference = save_hybrid(tmp_path, name)
    spec = parse_spec(*read_config(tmp_path))
    assert isinstance(spec, HybridModelSpec)
    layout = KVLayout("tiny", "0", spec.kv_layers, spec.num_kv_heads, spec.head_dim, BLOCK, "float32")
    kv, states = KVPool(layout, TOKENS // BLOCK, CPU), StatePool(spec.states, 1, CPU, torch.float32)
    backend = TorchAttention(kv.layers(), spec.num_heads, spec.windows, kv.dummy_block)
    model = Decoder(spec, 256, CPU, torch.float32)
    load_weights(model, tmp_path, spec)
    prompt = torch.randint(0, 160, (150,), generator=torch.Generator().manual_seed(3))
    got, start = [], 0
    with torch.inference_mode():
        for count in (70, 1, 2, 64, 1, 12):
            metadata = backend.prepare(StepShape([start], [count], [range(TOKENS // BLOCK)]))
            step = StepStates(states.layers, [StateRow(count, 0)])
            context = ForwardContext(kv.layers(), backend, metadata, states=step)
            tokens, positions = prompt[start : start + count], torch.arange(start, start + count)
            got.append(model.logits(model.forward(tokens, positions, context)))
            start += count
        want = reference(prompt[None]).logits[0]
    torch.testing.assert_close(torch.cat(got), want, atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layer_types": ["full_attention"] * 3}, "num_hidden_layers"),
        ({"layer_types": ["mamba"] * 4}, "'mamba', which is not supported"),
        ({"layer_types": ["linear_attention"] * 4}, "without a layer of full_attention"),
        ({"linear_num_value_heads": 3}, "not a multiple of linear_num_key_heads 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes: dict[str, Any], problem: str) -> None:
    config = TINY_HYBRID | {"architectures": ["Qwen3_5ForCausalLM"]} | changes
    with pytest.raises(ConfigError, match=problem):
        parse_spec(config)


def test_the_command_names_the_state(tmp_path: Path) -> None:
    config = TINY_HYBRID | HYBRID_CASES["qwen3.5-moe"]
    whole = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    support = model_support(tmp_path)
    assert support.how == "native"
    assert "2 of them with a recurrent state" in support.text
    assert support.details["kv_numbers_per_token"] == 2 * 2 * 2 * 16
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": 3}))
    with pytest.raises(ConfigError, match="text_config of Qwen3_5MoeForConditionalGeneration is 3"):
        read_config(tmp_path)
