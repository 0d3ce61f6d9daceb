"""Default fixtures: a gateway over fake pods, and a tiny model for real pods. Files may override them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from cli.stack.supervisor import PortLease
from cli.stack.valkey import EmbeddedValkey
from common import rpc
from common.grammar import prover
from common.pb import inference_pb2_grpc
from gateway.dispatch import attempt
from gateway.pods import pod as gateway_pod
from prefix_index import publisher
from tests.rigs.gateway.gateway_rig import Rig, rig
from tests.rigs.index.index_rig import Rig as IndexRig
from tests.rigs.index.index_rig import one_node_cluster
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster

if TYPE_CHECKING:
    from engine.llm import LLM

PROOF_LIMITS = {  #: The time limits of a proof, by their places.
    "common.grammar.prover.WALL_S": prover.WALL_S,
    "common.grammar.prover.PATIENCE_S": prover.PATIENCE_S,
    "gateway.text.chat_format.PATIENCE_S": prover.PATIENCE_S,
}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer time limits: fake pods share the gateway's event loop on a busy machine and may answer late.

    Proofs of grammars have time, too.
    """
    monkeypatch.setattr(gateway_pod, "INFO_TIMEOUT_S", 10.0)
    monkeypatch.setattr(attempt, "RESERVE_TIMEOUT_S", 30.0)
    for place in PROOF_LIMITS:
        monkeypatch.setattr(place, 60.0)


@pytest.fixture
def hurried_proofs(_patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs of grammars have the time limits of a gateway."""
    for place, limit_s in PROOF_LIMITS.items():
        monkeypatch.setattr(place, limit_s)


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    """One prefill and one decode pod."""
    async with fake_cluster() as c:
        yield c


@pytest_asyncio.fixture
async def gw(cluster: FakeCluster, smollm2_dir: Path) -> AsyncIterator[Rig]:
    """A gateway with REST and gRPC; waits after the test until it is idle."""
    with PortLease() as port:
        async with rig(cluster, smollm2_dir, grpc_port=port.port) as r:
            yield r
            await r.settled()


@pytest_asyncio.fixture
async def stub(gw: Rig) -> AsyncIterator[inference_pb2_grpc.InferenceAsyncStub]:
    """A gRPC client of the gateway."""
    async with rpc.open_channel(f"127.0.0.1:{gw.server.grpc_port}") as channel:
        made: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        yield made


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers (tests/rigs/pods/harness.py); tests must not write to it."""
    from tests.rigs.pods.harness import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def llm(model_dir: Path) -> LLM:
    """An engine without pods, which gives the expected tokens."""
    from tests.rigs.pods.harness import oracle

    return oracle(model_dir)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[EmbeddedValkey, str]]:
    async with one_node_cluster(tmp_path_factory.mktemp("valkey")) as started:
        yield started


@pytest_asyncio.fixture(name="rig")
async def index_rig(redis_cluster: tuple[EmbeddedValkey, str]) -> AsyncIterator[IndexRig]:
    """An empty prefix index."""
    async with IndexRig(*redis_cluster) as running:
        yield running


@pytest.fixture
def quick_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short intervals, so that pods return to an index quickly."""
    monkeypatch.setattr(publisher, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(publisher, "_MAX_BACKOFF_S", 0.2)
