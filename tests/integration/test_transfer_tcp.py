"""The tests of transfers and of services over NIXL, over UCX's TCP transport, where writes complete asynchronously.

UCX reads its settings once per process, so they run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("tests", ["test_transfer_node.py", "test_transfer_processes.py", "test_services_nixl.py"])
def test_over_tcp(tests: str) -> None:
    env = {**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    here = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "not loopback", str(here / tests)],
        env=env,
        cwd=here.parent.parent,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
