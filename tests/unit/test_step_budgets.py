"""Tokens of a step by what is given, on either kind of device; nothing is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.llm import for_throughput

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("given", "cpu", "gpu"),
    [
        ({}, (256, None, 64), (2048, 8192, 256)),
        ({"token_budget": 512, "max_seqs": 8}, (512, None, 8), (512, None, 8)),
        ({"prompt_budget": 4096}, (256, 4096, 64), (2048, 4096, 256)),
        ({"token_budget": 1024, "prompt_budget": 2048}, (1024, 2048, 64), (1024, 2048, 256)),
    ],
)
def test_limits(given, cpu, gpu):
    config = EngineConfig(model_dir=Path("nowhere"), **given)
    assert config.resolve_limits(CPU) == cpu
    assert config.resolve_limits(GPU) == gpu


def test_a_library_takes_long_steps_on_a_gpu_unless_it_is_told(monkeypatch):
    monkeypatch.setattr(EngineConfig, "resolve_device", lambda self: GPU)
    plain = for_throughput(EngineConfig(model_dir=Path("nowhere")))
    assert plain.resolve_limits(GPU) == (8192, 8192, 256)
    told = EngineConfig(model_dir=Path("nowhere"), token_budget=512)
    assert for_throughput(told) is told
    monkeypatch.setattr(EngineConfig, "resolve_device", lambda self: CPU)
    config = EngineConfig(model_dir=Path("nowhere"))
    assert for_throughput(config) is config
