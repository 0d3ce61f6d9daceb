"""Our decoder with experts against transformers, on tiny random models of all native families with experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from engine.models.spec import UNSHARDED, Shard
from tests.rigs.engine.tiny_models import MOE_CASES, Rig, save_reference

torch.set_num_threads(1)


@pytest.mark.parametrize("name", MOE_CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """Whole prompts in one step, then the same prompts in steps of mixed sizes, down to single tokens."""
    reference = save_reference(tmp_path, MOE_CASES[name])
    rig = Rig(tmp_path)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 160, (n,), generator=generator).tolist() for n in (1, 4, 30, 70)]
    blocks = [[1], [5], list(range(24, 40)), [63, 62, 61, 60, *range(44, 60)]]
    with torch.inference_mode():
        expected = [reference(torch.tensor([p])).logits[0] for p in prompts]
    for got, want in zip(rig.logits(prompts, [0] * 4, blocks), expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    done = [0, 0, 0, 0]
    for sizes in ([1, 1, 9, 40], [0, 2, 1, 5], [0, 1, 19, 1], [0, 0, 1, 23], [0, 0, 0, 1]):
        rows = [r for r in range(4) if sizes[r]]
        pieces = [prompts[r][done[r] : done[r] + sizes[r]] for r in rows]
        result = rig.logits(pieces, [done[r] for r in rows], [blocks[r] for r in rows])
        for r, got in zip(rows, result, strict=True):
            want = expected[r][done[r] : done[r] + sizes[r]]
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
            done[r] += sizes[r]
    assert done == [1, 4, 30, 70]


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
