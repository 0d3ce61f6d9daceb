"""Selects Triton's interpreter if there is no CUDA device. This must happen before the kernels are imported."""

import importlib.util
import os
import zlib

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    if importlib.util.find_spec("triton"):
        from tests.rigs.engine.quick_interpreter import quicken

        quicken()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def gen(device: torch.device, request: pytest.FixtureRequest) -> torch.Generator:
    """A generator with a seed per test, the same in every run."""
    return torch.Generator(device).manual_seed(zlib.crc32(request.node.name.encode()))
