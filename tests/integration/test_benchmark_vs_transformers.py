"""benchmarks/vs_transformers.py runs on a CPU with a tiny model and records which times are measured and scaled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import vs_transformers

TINY = ["--shape", "tiny", "--device", "cpu", "--threads", "1", "--prompt", "8", "--output", "4", "--batch", "3"]
TINY += ["--requests", "10", "--longest", "18", "--rows", "4", "--repeats", "1"]


@pytest.mark.parametrize("measured", [3, 2])
def test_all_rows_and_what_was_scaled(measured: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "vs.json"
    vs_transformers.main([*TINY, "--out", str(out), "--static-batches", str(0 if measured == 3 else measured)])
    result = json.loads(out.read_text())
    assert result["metrics"].keys() == {"ratio_batch1", "ratio_batch3", "ratio_continuous10"}
    assert (result["static_batches"], result["static_batches_measured"]) == (3, measured)
    assert result["static_scaled"] == (measured < 3)
    for row in result["rows"]:
        assert result["metrics"][f"ratio_{row['name']}"] == pytest.approx(row["theirs_s"] / row["ours_s"], abs=1e-3)
    mixed = result["rows"][-1]
    if measured == 3:
        assert mixed["theirs_s"] == mixed["theirs_measured_s"]
    else:
        assert mixed["theirs_s"] > mixed["theirs_measured_s"]
    assert 10 * 16 <= mixed["tokens"] <= 10 * 18
    shown = capsys.readouterr().out
    assert ("the rest scaled by steps" in shown) == (measured < 3)
    assert all(name in shown for name in ("batch1", "batch3", "continuous10"))
