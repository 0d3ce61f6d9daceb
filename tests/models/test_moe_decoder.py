"""Our decoder with experts against transformers, on tiny random models of all native families with experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
