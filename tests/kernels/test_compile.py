"""All kernels compile for the supported cards on a machine without a GPU, within each card's shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels import card


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", card.SHARED_BYTES)
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the other tests compile the kernels")
def test_kernels_compile(capability: int) -> None:
    root = Path(__file__).resolve().parents[2]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = Path(__file__).with_name("compile_for_card.py")
    done = subprocess.run(
        [sys.executable, program, str(capability)],
        env=env | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
