"""The `transformers` reference, and a check that each end-to-end test leaves the cluster idle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.rigs.stack.oracle import Oracle


@pytest.fixture(scope="session")
def oracle(smollm2_dir: Path) -> Oracle:
    torch.set_num_threads(1)
    return Oracle(smollm2_dir)


@pytest.fixture(autouse=True)
def _at_rest(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test, no pod has a leased block and all block counts add up."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").check_idle()
