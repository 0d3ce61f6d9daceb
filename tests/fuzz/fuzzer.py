"""Distributes inputs over worker processes, watches them, and reports crashes with their inputs.

A worker that ends or hangs is a crash; another worker continues after its input.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.targets import TARGETS
from tests.fuzz.worker import HANG_S, Crash, Mailbox

START_S = 600.0  #: Time in which a worker must run its first input.
MAX_RESTARTS = 20  #: Of the workers of one slice.
SLICE_INPUTS = 50_000  #: Inputs of one worker; each worker begins with the seeds.
_POLL_S = 0.05


@dataclass(slots=True)
class TargetReport:
    """What a target did with its inputs."""

    name: str
    inputs: int = 0
    crashes: list[Crash] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0  #: Sum over workers.
    slowest_s: float = 0.0

    @property
    def kinds(self) -> Counter[str]:
        """Number of crashes by kind."""
        return Counter(crash.kind for crash in self.crashes)


class _Slice:
    """A part of a target's inputs, and the worker that runs it."""

    def __init__(self, name: str, seed: int, number: int, inputs: int, folder: Path, hang_s: float) -> None:
        self.name, self._inputs, self._hang_s = name, inputs, hang_s
        self._seed = f"{seed} {name} {number}"
        self._box, self._out = (folder / f"{name}-{number}.{end}" for end in ("box", "out"))
        self._mailbox = Mailbox(self._box)
        self._restarts = 0
        self._ended: list[Crash] = []  # inputs that ended a worker
        self.failed = ""  # why the slice was given up
        self._errors = self._out.with_suffix(".err")
        self._process = self._start(0)

    def _start(self, first: int) -> subprocess.Popen[bytes]:
        self._mailbox.clear(first)
        self._started = time.monotonic()
        numbers = ["--inputs", str(self._inputs), "--first", str(first), "--seed", self._seed]
        files = ["--box", str(self._box), "--out", str(self._out)]
        argv = [sys.executable, "-m", "tests.fuzz", "--worker", self.name, *numbers, *files]
        with self._errors.open("wb") as errors:
            return subprocess.Popen(argv, stdout=errors, stderr=errors)

    def poll(self) -> bool:
        """Returns whether the slice has ended. Restarts a worker that ended early or hangs."""
        code = self._process.poll()
        if code == 0:
            return True
        started, done, data = self._mailbox.read()
        if code is None:
            waited = time.monotonic() - (started or self._started)
            if waited < (self._hang_s if started else START_S):
                return False
            self._process.kill()
            self._process.wait()
        if not started or self._restarts == MAX_RESTARTS:
            said = self._errors.read_text(errors="replace")[-2000:]
            self.failed = f"the worker of {self.name} ended with code {code}:\n{said}"
            return True
        what = f"no end after {self._hang_s:g} s" if code is None else f"the process ended with code {code}"
        self._ended.append(Crash("hang" if code is None else f"process end {code}", what, data))
        self._restarts += 1
        self._process = self._start(done + 1)
        return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def add_to(self, report: TargetReport) -> None:
        """Adds what the workers of this slice reported."""
        report.inputs += self._mailbox.read()[1]
        report.crashes += self._ended
        for line in self._out.read_text().splitlines() if self._out.exists() else ():
            entry = json.loads(line)
            if "kind" in entry:
                report.crashes.append(Crash(entry["kind"], entry["text"], bytes.fromhex(entry["data"])))
            else:
                report.outcomes.update(entry["outcomes"])
                report.seconds += entry["seconds"]
                report.slowest_s = max(report.slowest_s, entry["slowest_s"])
        if self.failed:
            report.crashes.append(Crash("worker", self.failed, b""))


def fuzz(
    counts: Mapping[str, int],
    *,
    seed: int,
    jobs: int,
    hang_s: float = HANG_S,
    most_s: float = math.inf,
    on_report: Callable[[TargetReport], None] = lambda _: None,
) -> list[TargetReport]:
    """Runs `counts` inputs of each target in `jobs` processes at a time. Returns one report per target.

    It ends after `most_s` seconds; then the reports have fewer inputs.
    """
    until = time.monotonic() + most_s
    reports = {name: TargetReport(name) for name in counts}
    waiting = [
        (name, number, min(SLICE_INPUTS, count - number * SLICE_INPUTS))
        for name, count in counts.items()
        for number in range(-(-count // SLICE_INPUTS))
    ]
    left = Counter(name for name, _, _ in waiting)
    running: list[_Slice] = []
    with tempfile.TemporaryDirectory(prefix="baton-fuzz-") as folder:
        try:
            while (waiting or running) and time.monotonic() < until:
                while waiting and len(running) < jobs:
                    name, number, inputs = waiting.pop(0)
                    running.append(_Slice(name, seed, number, inputs, Path(folder), hang_s))
                time.sleep(_POLL_S)
                for part in [part for part in running if part.poll()]:
                    running.remove(part)
                    report = reports[part.name]
                    part.add_to(report)
                    left[report.name] -= 1
                    if not left[report.name]:
                        on_report(report)
        finally:
            for part in running:
                part.kill()
                part.add_to(reports[part.name])
    return list(reports.values())


def summary(reports: Sequence[TargetReport]) -> dict[str, Any]:
    """Returns the content of report.json: the inputs and crashes of all targets, and of each."""
    return {
        "inputs": sum(report.inputs for report in reports),
        "crashes": sum(len(report.crashes) for report in reports),
        "targets": {
            report.name: {"inputs": report.inputs, "outcomes": len(report.outcomes), "crashes": report.kinds}
            for report in reports
        },
    }


def counts_of(names: Iterable[str], inputs: int) -> dict[str, int]:
    """Returns the inputs of each target, at least `inputs` in total, by their shares."""
    shares = {name: TARGETS[name].share for name in names}
    return {name: -(-inputs * share // sum(shares.values())) for name, share in shares.items()}


def save(crashes: Iterable[Crash], name: str, folder: Path) -> list[Path]:
    """Writes the first input of each kind, and its traceback beside it. Returns the paths of the inputs."""
    saved: dict[str, Path] = {}
    for crash in crashes:
        if crash.kind not in saved:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{name}-{hashlib.blake2b(crash.data, digest_size=4).hexdigest()}.input"
            path.write_bytes(crash.data)
            path.with_suffix(".txt").write_text(f"{crash.kind}\n\n{crash.text}")
            saved[crash.kind] = path
    return list(saved.values())
