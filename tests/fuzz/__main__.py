"""Fuzzes Baton: python -m tests.fuzz [--inputs N] [--seed N] [--jobs N] [TARGET ...], or --replay TARGET FILE ...

A crash is an error that is not documented, also one that is only logged, the end of the process, or an input that takes
more than a second of processor time. The exit status is 1 after a crash. Its input is in --out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from tests.fuzz.fuzzer import TargetReport, counts_of, fuzz, save, summary
from tests.fuzz.targets import TARGETS, target_entry
from tests.fuzz.worker import Crash, replay, work


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help=f"{', '.join(TARGETS)}; default: all")
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs of all targets together")
    parser.add_argument("--seed", default="1", help="number from which the inputs follow")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="the run ends after this time at the latest"
    )
    parser.add_argument("--out", type=Path, default=Path(".run/fuzz"), help="folder of saved inputs and report.json")
    parser.add_argument("--replay", metavar="TARGET", choices=TARGETS, help="runs the files as inputs of this target")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--box", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def show(report: TargetReport) -> None:
    rate = report.inputs / max(report.seconds, 1e-9)
    print(
        f"{report.name:<16}{report.inputs:>9} inputs {len(report.outcomes):>5} outcomes {rate:>8.0f}/s"
        f"  slowest {report.slowest_s * 1e3:>4.0f} ms  {len(report.crashes)} crashes",
        flush=True,
    )
    for kind, count in report.kinds.items():
        print(f"    {count:>6} {kind}", flush=True)


def main() -> int:
    args = arguments()
    if args.worker:
        work(
            target_entry(args.worker).make(),
            seed=args.seed,
            inputs=args.inputs,
            first=args.first,
            box=args.box,
            out=args.out,
        )
        return 0
    if args.replay:
        outcomes = replay(TARGETS[args.replay].make(), [Path(name).read_bytes() for name in args.targets])
        for name, outcome in zip(args.targets, outcomes, strict=True):
            print(f"{name}: {outcome.text if isinstance(outcome, Crash) else outcome}")
        return int(any(isinstance(outcome, Crash) for outcome in outcomes))
    if unknown := set(args.targets) - TARGETS.keys():
        sys.exit(f"unknown target {min(unknown)}; known: {', '.join(TARGETS)}")
    counts = counts_of(args.targets or TARGETS, args.inputs)
    reports = fuzz(counts, seed=int(args.seed), jobs=args.jobs, most_s=60 * args.minutes, on_report=show)
    saved = [path for report in reports for path in save(report.crashes, report.name, args.out)]
    result = {"seed": int(args.seed), **summary(reports)}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "report.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"{result['inputs']} inputs, {result['crashes']} crashes", *saved, sep="\n")
    return int(result["crashes"] > 0)


if __name__ == "__main__":
    sys.exit(main())
