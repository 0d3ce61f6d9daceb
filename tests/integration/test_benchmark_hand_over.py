"""The benchmarks of the hand-over run on a CPU with a tiny model and write all their metrics."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.online.disaggregated import earlier, metrics_of, replay

ROOT = Path(__file__).parents[2]
PD = {
    "r2_ttft_p50",
    "r2_itl_p99",
    "r5_ttft_p50_over_fcfs",
    "r5_ttft_p99_over_fcfs",
    "r5_itl_p99",
    "r5_itl_p999",
    "r5_gap12_p50",
    "r5_gap12_p99",
    "r8_ttft_p50_over_fcfs",
    "r8_ttft_p99_over_fcfs",
    "r8_itl_p99",
    "r07_15000_ttft_p50",
    "r07_15000_itl_p99",
}


def run(script: str, out: Path, *flags: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--shape", "tiny", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--out", str(out), *flags], capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result: dict[str, Any] = json.loads(out.read_text())
    assert all(name in done.stdout for name in result["metrics"])
    return result


@pytest.mark.long
def test_one_pair(tmp_path: Path) -> None:
    result = run("handoff.py", tmp_path / "handoff.json")
    names = {"handover_ms_40", "handover_ms_90", "exposed_ms_60", "payload_gb_s", "payload_gb_s_8mib"}
    assert result["metrics"].keys() == names | {"decode_step_ratio_while_receiving"}
    assert all(value >= 0 for value in result["metrics"].values())
    assert {row["transport"] for row in result["idle"]} == {"cma"}
    assert all(row["blocks"] == -(-row["prompt"] // 16) for row in result["idle"])
    assert [row["notes"] for row in result["ends"]] == [True, False]
    parts = {"noticed", "posted", "written", "committed", "awaited"}
    assert all(row["exposed_parts"].keys() == parts for row in (*result["idle"], *result["ends"]))
    assert all(0 < row["exposed_parts"]["noticed"] < row["exposed"]["max"] for row in result["ends"])


@pytest.mark.long
def test_online_and_a_later_run_that_adds(tmp_path: Path) -> None:
    out = tmp_path / "online.json"
    result = run("online/disaggregated.py", out, "--modes", "pd")
    assert result["metrics"].keys() == PD
    assert all(row["ttft"]["count"] == row["requests"] for row in result["rows"])
    assert not any(row["failed"] for row in result["rows"])
    assert all(row["pods_said"].keys() >= {"exposed", "exposed_noticed"} for row in result["rows"])
    assert all("ttft_p99_over_computed" in row for row in result["rows"])
    later = [row | {"mode": "agg"} for row in result["rows"]]
    assert metrics_of([*earlier(out, later), *later]).keys() == PD | {f"agg_{name}" for name in PD}
    assert [row["name"] for row in earlier(out, result["rows"][1:])] == ["r2"]


@pytest.mark.long
def test_pulls_between_processes_and_between_pods(tmp_path: Path) -> None:
    """The script itself checks that a pulled prefix is cached before the prompt is computed."""
    result = run("pull.py", tmp_path / "pull.json", "--only", "bare", "pods", "--repeats", "1", "--pod-repeats", "1")
    names = {f"push_ms_{count}" for count in (1, 8, 64, 256)} | {"push_gb_s", "first_push_ms"}
    names |= {f"ttft_{way}_ms_{n}" for way in ("computed", "push", "cached") for n in (64, 512)}
    assert result["metrics"].keys() == names
    assert all(value > 0 for value in result["metrics"].values())
    assert {(row["transport"], row["carried_by"]) for row in result["rows"]} == {("default", "cma"), ("tcp", "tcp")}
    (connection,) = result["pods"]["connections"]
    assert connection.startswith("holder connected to puller")
    assert "over cma" in connection


def test_first_come_first_served() -> None:
    assert replay([0.0, 1.0, 1.5], [2.0] * 3, servers=1) == [2.0, 3.0, 4.5]
    assert replay([0.0, 1.0, 1.5], [2.0] * 3, servers=2) == [2.0, 2.0, 2.5]
    assert replay([0.0, 1.0, 1.5], [2.0, 0.5, 1.0], servers=1) == [2.0, 1.5, 2.0]
