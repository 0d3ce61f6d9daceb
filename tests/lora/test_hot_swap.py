"""Adapters are exchanged under one name while requests run: each answer is of the one adapter that it asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.support.adapter_swaps import swap_under_load
from cli.demo.adapter import write_random_adapter
from engine.llm import LLM
from tests.rigs.engine.bare_model import bare_model


@pytest.mark.parametrize(
    ("max_adapters", "requests"), [(1, 90), (2, 90), pytest.param(1, 1000, marks=pytest.mark.long)]
)
def test_no_answer_is_mixed_or_stale(max_adapters: int, requests: int, tmp_path: Path) -> None:
    model = bare_model(tmp_path / "model")
    adapters = [write_random_adapter(model, tmp_path / f"adapter-{seed}", rank=4, seed=seed) for seed in range(2)]
    options = {"device": "cpu", "block_size": 4, "num_blocks": 200, "threads": 1, "overlap": True}
    llm = LLM(model, load_format="dummy", max_adapters=max_adapters, **options)
    wrong, swaps = swap_under_load(llm.engine, adapters, requests)
    assert wrong == 0
    assert swaps > 10
    llm.engine.close()
