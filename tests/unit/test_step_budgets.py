"""EngineConfig: the device, and the limits of a step on a CPU and on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.device import make_current
from engine.llm import for_throughput

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("given", "cpu", "gpu"),
    [
        ({}, (256, None, 64), (2048, 8192, 256)),
        ({"chunk_tokens": 512, "max_seqs": 8}, (512, None, 8), (512, None, 8)),
        ({"prompt_step_tokens": 4096}, (256, 4096, 64), (2048, 4096, 256)),
        ({"chunk_tokens": 1024, "prompt_step_tokens": 2048}, (1024, 2048, 64), (1024, 2048, 256)),
    ],
)
def test_limits(given, cpu, gpu):
    config = EngineConfig(model_dir=Path("nowhere"), **given)
    assert config.resolve_limits(CPU) == cpu
    assert config.resolve_limits(GPU) == gpu


def test_a_library_takes_long_steps_on_a_gpu_unless_chunk_tokens_is_set(monkeypatch):
    monkeypatch.setattr(EngineConfig, "resolve_device", lambda self: GPU)
    plain = for_throughput(EngineConfig(model_dir=Path("nowhere")))
    assert plain.resolve_limits(GPU) == (8192, 8192, 256)
    explicit = EngineConfig(model_dir=Path("nowhere"), chunk_tokens=512)
    assert for_throughput(explicit) is explicit
    monkeypatch.setattr(EngineConfig, "resolve_device", lambda self: CPU)
    config = EngineConfig(model_dir=Path("nowhere"))
    assert for_throughput(config) is config


def test_a_gpu_device_always_has_an_index(monkeypatch):
    """It is compared with the devices of tensors, which have an index."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, index in (("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)):
        assert EngineConfig(model_dir=Path("nowhere"), device=name).resolve_device() == torch.device("cuda", index)
    assert EngineConfig(model_dir=Path("nowhere"), device="cpu").resolve_device() == CPU
    with pytest.raises(ConfigError, match="'cuda:2' does not exist on this machine"):
        EngineConfig(model_dir=Path("nowhere"), device="cuda:2").resolve_device()
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    make_current(torch.device("cuda", 1))
    make_current(CPU)
    assert current == [torch.device("cuda", 1)]
