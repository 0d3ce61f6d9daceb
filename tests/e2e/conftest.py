"""Session-wide oracle and clusters; real processes, real NIXL, a real Valkey, SmolLM2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e.cluster import Cluster
from tests.e2e.oracle import Oracle
from tests.e2e.shape import BLOCK, CHUNK, MAX_MODEL_LEN


@pytest.fixture(scope="session")
def oracle(smollm2_dir: Path) -> Oracle:
    torch.set_num_threads(2)
    return Oracle(smollm2_dir)


@pytest.fixture(scope="module", params=["1P+1D", "2P+2D"])
def cluster(
    request: pytest.FixtureRequest, smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """One prefill and one decode pod, then two of each; chunk 256, block 16."""
    pods = int(request.param[0])
    with Cluster(
        smollm2_dir,
        tmp_path_factory.mktemp("cluster"),
        prefill=pods,
        decode=pods,
        chunk_tokens=CHUNK,
        block_size=BLOCK,
        kv_memory="768M",
        threads=2,
        pod_flags={"max-model-len": str(MAX_MODEL_LEN)},
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def _at_rest(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test no pod holds a block, and every count adds up."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").check_idle()
