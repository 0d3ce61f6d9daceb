"""Fixtures of several test directories, and the distribution of test files over the workers of `make test`.

Each file runs in one of two workers. A module fixture therefore exists once, a session fixture once per worker. Tests
of other files run at the same time on the same cores.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as engine/__init__.py does, before anything here imports torch
if not Path("/dev/nvidiactl").exists():  # kernels run in Triton's interpreter, chosen before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

import engine  # noqa: F401 - before torch: it sets how OpenMP waits
from engine.schedule.sequence import Sequence

if TYPE_CHECKING:
    from tests.rigs.stack.cluster import Cluster


Sequence.CHECKS = True
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background jobs so, and children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time, however slow the machine; `--hypothesis-profile=search` looks for new ones.
_any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeat", _any_speed, derandomize=True)
settings.register_profile("search", _any_speed)
settings.load_profile("repeat")

RUNNING: pytest.StashKey[Cluster] = pytest.StashKey()
# Test files that use the fixture `cluster`; one worker runs them all, so that each kind of cluster starts once.
CLUSTER = (
    "tests/e2e/test_tokens.py",
    "tests/e2e/test_children.py",
    "tests/e2e/test_api.py",
    "tests/e2e/test_structured.py",
    "tests/e2e/test_parameters.py",
    "tests/e2e/test_tools.py",
    "tests/e2e/test_traces.py",
    "tests/chaos/test_kill.py",
    "tests/chaos/test_soak.py",
    "tests/chaos/test_abort_storm_processes.py",
)
#: Then files that take long, so that none of them is the last one: the workers end together.
FIRST = (
    *CLUSTER,
    "tests/e2e/",
    "tests/chaos/",
    "tests/fuzz/",
    "tests/integration/test_transfer",
    "tests/integration/test_tensor_parallel",
    "tests/parallel/",
    "tests/integration/",
    "tests/kernels/",
    "tests/unit/test_tool_parsers.py",
    "tests/unit/test_grammar",
    "tests/unit/test_import_tiers.py",
)
SHORT_CHAOS = "tests/chaos/test_seeds.py"  # two short seeds; `make chaos` runs whole ones


@pytest.hookimpl(tryfirst=True)  # before pytest brings the tests of one cluster together
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks chaos as long, but not its short seeds. The slowest files start first: both workers end together."""
    for item in items:
        if item.nodeid.startswith("tests/chaos/") and not item.nodeid.startswith(SHORT_CHAOS):
            item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: next((i for i, path in enumerate(FIRST) if item.nodeid.startswith(path)), len(FIRST)))


@pytest.hookimpl(trylast=True)  # after the test's own fixtures
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stops the cluster after the last consecutive test that uses one: idle pods use memory and CPU time."""
    if RUNNING in item.session.stash and (nextitem is None or not nextitem.nodeid.startswith(CLUSTER)):
        item.session.stash[RUNNING].close()
        del item.session.stash[RUNNING]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Assigns whole files to workers."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "cluster" if nodeid.startswith(CLUSTER) else super()._split_scope(nodeid)

    return Files(config, log)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The converted SmolLM2-135M-Instruct; the first use on a machine converts it (about 40 s)."""
    from cli.demo.model import demo_model

    return demo_model()


@pytest.fixture
def unused_tcp_port() -> Iterator[int]:
    """A port that a server can bind with SO_REUSEADDR and that the kernel assigns to no other process."""
    from cli.stack.supervisor import PortLease

    with PortLease() as lease:
        yield lease.port


@pytest.fixture(scope="session", params=["1P+1D", pytest.param("2P+2D", marks=pytest.mark.long)])
def cluster(
    request: pytest.FixtureRequest, smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Prefill and decode pods with SmolLM2, NIXL and Valkey, shared by all tests that use the fixture.

    A test that kills a pod must restart it. CLUSTER lists the files that use this fixture.
    """
    from tests.rigs.stack.cluster import BLOCK, CHUNK, MAX_MODEL_LEN, SPANS, Cluster

    pods, log_dir = int(request.param[0]), tmp_path_factory.mktemp("cluster")
    with Cluster(
        smollm2_dir,
        log_dir,
        prefill=pods,
        decode=pods,
        chunk_tokens=CHUNK,
        block_size=BLOCK,
        kv_memory="768M",
        threads=1,
        local_prefill="off",  # these tests look at the hand-off; costs would decide by the machine's speed
        pod_flags={"max-model-len": str(MAX_MODEL_LEN)},
        traces=f"file:{log_dir}/{SPANS}",
        trace_sample=0,  # only requests whose client asks for it
        # BATON_MAX_TTFT_S is 0 because a test may queue minutes of work at once.
        env={"OTEL_BSP_SCHEDULE_DELAY": "200", "BATON_MAX_TTFT_S": "0", "BATON_CHECKSUMS": "true"},
    ) as running:
        request.session.stash[RUNNING] = running
        yield running
