"""What `transformers` says, and that every end-to-end test leaves the cluster at rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e.oracle import Oracle


@pytest.fixture(scope="session")
def oracle(smollm2_dir: Path) -> Oracle:
    torch.set_num_threads(1)
    return Oracle(smollm2_dir)


@pytest.fixture(autouse=True)
def _at_rest(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test no pod holds a block, and every count adds up."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").check_idle()
