"""Explores every state of the transfer of KV within bounds, and seeds bugs that the explorer has to find.

    python benchmarks/reliability/modelcheck.py --out benchmarks/results/modelcheck.json

The real tables, state machines and block pools of a prefill pod and a decode pod run on a network that loses, delays,
duplicates and reorders, with one restart of each pod: tests/modelcheck/world.py says what is covered. Then each seeded
bug removes one line of the product (tests/modelcheck/seeded_bugs.py). The exit status is 1 if an invariant is violated
or a bug is not found. --schedules prints a shortest schedule for each bug. Metrics:

- states, transitions: of all explorations without a removed line; each covers its bounds completely.
- violations: explorations without a removed line that violate an invariant.
- seeded_bugs, seeded_bugs_found: bugs, and those of which the explorer names the violated invariant.
- seconds: whole time on one core.
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
