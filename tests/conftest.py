"""Fixtures that several directories of tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as engine/__init__.py does, before anything here imports torch

import engine  # noqa: F401 - before torch: it sets how OpenMP waits


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The converted SmolLM2-135M-Instruct; converted now (about 40 s) when this machine has not done it yet."""
    from engine.gguf_import import cached_dir, convert

    return convert(cached_dir())
