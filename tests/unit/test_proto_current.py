"""The committed gRPC stubs are current: `make proto` changes nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_generated_stubs_are_current(tmp_path: Path) -> None:
    made = subprocess.run(
        ["make", "--no-print-directory", "proto", f"PB={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    fresh = {p.name: p.read_text() for p in tmp_path.iterdir()}
    committed = {p.name: p.read_text() for p in (ROOT / "common" / "pb").glob("*_pb2*.py*")}
    assert fresh.keys() == committed.keys()
    assert [name for name in fresh if fresh[name] != committed[name]] == []
