"""All kernels compile for Hopper on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the other tests compile the kernels")
def test_kernels_compile_for_hopper() -> None:
    root = Path(__file__).resolve().parents[2]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = Path(__file__).with_name("compile_for_hopper.py")
    done = subprocess.run(
        [sys.executable, program], env=env | {"PYTHONPATH": str(root)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
