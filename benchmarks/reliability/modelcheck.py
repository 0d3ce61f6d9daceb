"""Explores every state of a KV transfer within bounds, and checks that the explorer finds seeded bugs.

    python benchmarks/reliability/modelcheck.py --out benchmarks/results/modelcheck.json

The real transfer tables, state machines and block pools of a prefill pod and a decode pod run in a model. Its network
loses, delays, doubles and reorders messages, and each pod restarts once; tests/modelcheck/world.py lists everything.
Then the explorer runs once for each seeded bug: a product file without one line (tests/modelcheck/seeded_bugs.py). The
exit status is 1 if an invariant is violated or a bug is not found. Metrics:

- states, transitions: of all explorations without a seeded bug.
- violations: explorations without a seeded bug that violate an invariant, or that did not visit every state.
- seeded_bugs, seeded_bugs_found: bugs, and the number of them for which the explorer finds the expected violation.
- more_bugs, more_bugs_found: the same for further bugs.
- seconds: the whole time, on one core.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support import report
from tests.modelcheck.explorer import explore
from tests.modelcheck.product import load
from tests.modelcheck.seeded_bugs import MORE_BUGS, SEEDED_BUGS
from tests.modelcheck.world import FULL, World


def main() -> int:
    parser = report.arguments(__doc__)
    parser.add_argument("--schedules", action="store_true", help="print a shortest schedule to each seeded bug")
    args = parser.parse_args()
    began, rows, violations = time.perf_counter(), [], 0
    for name, bounds in FULL.items():
        result = explore(World(load(), bounds))
        violations += result.violation is not None or not result.complete
        figures = {key: value for key, value in dataclasses.asdict(result).items() if key != "violation"}
        rows.append(
            {"name": name, "bounds": dataclasses.asdict(bounds)} | figures | {"seconds": round(result.seconds, 1)}
        )
        print(
            f"{name:<40}{result.states:>9} states{result.transitions:>10} transitions{result.seconds:>7.1f} s",
            flush=True,
        )
        if result.violation is not None:
            print(result.violation)
    found = dict.fromkeys(SEEDED_BUGS | MORE_BUGS, False)
    for name, bug in (SEEDED_BUGS | MORE_BUGS).items():
        result = bug.explore()
        violation, found[name] = result.violation, bug.is_found(result)
        steps = 0 if violation is None else len(violation.schedule)
        print(
            f"{name:<40}{'found' if found[name] else 'NOT FOUND'} after {steps} steps: {bug.removal.line}", flush=True
        )
        if args.schedules or (violation is not None and not found[name]):
            print(violation)
    metrics = {
        "states": sum(row["states"] for row in rows),
        "transitions": sum(row["transitions"] for row in rows),
        "violations": violations,
        "seeded_bugs": len(SEEDED_BUGS),
        "seeded_bugs_found": sum(found[name] for name in SEEDED_BUGS),
        "more_bugs": len(MORE_BUGS),
        "more_bugs_found": sum(found[name] for name in MORE_BUGS),
        "seconds": round(time.perf_counter() - began, 1),
    }
    report.show(metrics)
    report.write(args.out, "modelcheck", metrics, rows=rows, bugs=found)
    return int(bool(violations) or not all(found.values()))


if __name__ == "__main__":
    sys.exit(main())
