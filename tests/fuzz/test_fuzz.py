"""A short run of every fuzz target has no crash, and the fuzzer finds crashes of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.fuzzer import counts_of, fuzz, save
from tests.fuzz.targets import TARGETS, target_entry
from tests.fuzz.worker import Crash, replay

SHORT_RUN = 5_000  #: Inputs of all targets: about a second for each.
LONG_RUN = 15_000


@pytest.mark.parametrize("inputs", [SHORT_RUN, pytest.param(LONG_RUN, marks=pytest.mark.long)], ids=["short", "longer"])
@pytest.mark.parametrize("name", TARGETS)
def test_a_short_run_has_no_crash(name: str, inputs: int, smollm2_dir: Path, tmp_path: Path) -> None:
    count = counts_of(TARGETS, inputs)[name]
    [report] = fuzz({name: count}, seed=1, jobs=1)
    paths = save(report.crashes, name, tmp_path)
    assert not report.crashes, "\n".join(path.with_suffix(".txt").read_text() for path in paths)
    assert report.inputs == count
    assert len(report.outcomes) >= 2


def test_every_kind_of_crash_is_found_and_its_input_saved(tmp_path: Path) -> None:
    [report] = fuzz({"broken:Broken": 20}, seed=1, jobs=1, hang_s=12.0)
    assert report.inputs == 20
    found = {crash.data: crash.kind.split(" at ")[0] for crash in report.crashes}
    assert found == {
        b"raise": "LookupError",
        b"log": "AssertionError",
        b"exit": "process end 3",
        b"slow": "slow",
        b"hang": "hang",
    }
    assert {path.read_bytes() for path in save(report.crashes, "broken", tmp_path)} == found.keys()


def test_a_saved_input_can_be_run_again() -> None:
    fine, crash = replay(target_entry("broken:Broken").make(), [b"-1", b"raise"])
    assert fine == "-1"
    assert isinstance(crash, Crash)
    assert "LookupError: by run" in crash.text
