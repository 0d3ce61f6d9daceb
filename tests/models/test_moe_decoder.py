"""Our decoder with experts against transformers, on tiny random models of all native families with experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from engine.models.spec import UNSHARDED, Shard
from tests.rigs.engine.tiny_models import MOE_CASES, Rig, assert_logits, save_reference

torch.set_num_threads(1)


@pytest.mark.parametrize("name", MOE_CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    assert_logits(save_reference(tmp_path, MOE_CASES[name]), Rig(tmp_path))


@pytest.mark.parametrize("name", ["qwen3-moe", "glm4-moe", "olmoe"])
def test_a_checkpoint_may_have_the_experts_of_a_layer_in_one_tensor(name: str, tmp_path: Path) -> None:
    """transformers saves them so with save_original_format=False. Every rank reads its part."""
    save_reference(tmp_path / "each", MOE_CASES[name])
    save_reference(tmp_path / "stacked", MOE_CASES[name], save_original_format=False)
    with safe_open(tmp_path / "stacked" / "model.safetensors", "pt") as file:
        assert "model.layers.2.mlp.experts.gate_up_proj" in file.keys()  # noqa: SIM118 - safe_open is not a mapping
    for shard in UNSHARDED, Shard(1, 2), Shard(1, 2, whole_experts=True):
        each, stacked = (
            Rig(tmp_path / form, shard=shard, all_reduce=lambda _part: None).model.state_dict()
            for form in ("each", "stacked")
        )
        assert each.keys() == stacked.keys()
        assert all(torch.equal(each[key], stacked[key]) for key in each)
