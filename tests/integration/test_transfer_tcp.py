"""Repeats the NIXL tests of transfers, services and ownership over UCX's TCP transport, where writes complete later.

UCX reads its settings once per process, so the tests run in a separate process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = {
    "transfers": [f"test_transfer_{name}.py" for name in ("node", "ends", "faults", "notes", "processes")],
    "services": ["test_services_nixl.py", "test_ownership_wire.py", "test_transfer_pull.py"],
}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", TESTS)
def test_over_tcp(group: str) -> None:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-k", "nixl or wire or processes"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(HERE / name) for name in TESTS[group])],
        env={**ours, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    # A crash of native code says its cause first, before the stacks.
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[:3000]
