"""benchmarks/engine.py runs on a CPU with a tiny model and writes all its metrics."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.support.shapes import SHAPES

ROOT = Path(__file__).parents[2]
HANDED = ("handed_ms", "busy_ms", "launch_ms")


def test_the_whole_benchmark_with_a_tiny_model(tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "engine.py"), "--shape", "tiny", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--engine", "threads=1", "--out", str(out)], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    tiny = SHAPES["tiny"]
    points = {f"decode_ms_{rows}x{context}": context for rows, context in tiny.decode}
    expected = {*points, *(f"ttft_ms_{length}" for length in tiny.ttft)}
    expected |= {f"{name}_{length}" for name in HANDED for length in tiny.handed}
    expected |= {f"ttft_{max(tiny.ttft)}_over_limit", "offline_out_tok_s", "sampling_ratio", "copy_gb_s"}
    assert result["metrics"].keys() == expected
    assert all(value > 0 for value in result["metrics"].values())
    for row in result["rows"]:
        assert row["name"] in done.stdout
        if row["name"] in points:
            assert abs(row["context"] - points[row["name"]]) <= 1
