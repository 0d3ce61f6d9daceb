"""A pod as a separate process, from `baton serve` to its end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.pods.harness import tiny_llama


@pytest.mark.parametrize("role", ["prefill", pytest.param("decode", marks=pytest.mark.long)])
def test_sigterm_ends_an_idle_pod_with_0_and_loses_no_log(tmp_path: Path, role: str) -> None:
    command = [sys.executable, "-m", "cli", "serve", "--role", role, "--served-name", "tiny"]
    command += ["--model", str(tiny_llama(tmp_path)), "--kv-memory", "16M", "--block-size", "4", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as pod:
        try:
            assert pod.stderr is not None
            assert any("serves tiny" in line for line in pod.stderr)
            pod.send_signal(signal.SIGTERM)
            _, rest = pod.communicate(timeout=200)
        finally:
            pod.kill()
    assert pod.returncode == 0
    assert "draining: SIGTERM" in rest
    assert "has stopped" in rest.splitlines()[-1]
