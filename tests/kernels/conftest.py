"""Without a CUDA device the kernels run in Triton's interpreter, which must be chosen before they are imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def gen(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(torch.seed() % 2**31)
