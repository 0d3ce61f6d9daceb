"""Chaos and soak runs on a stack of processes: `make chaos SEEDS=1-5` and `make soak MINUTES=30`.

    .venv/bin/python -m tests.chaos --seeds 17                    one seed, as it failed
    .venv/bin/python -m tests.chaos --seeds 1-20 --out FILE       adds the seeds to the result file
    .venv/bin/python -m tests.chaos --schedule --seeds 17         only prints the faults
    .venv/bin/python -m tests.chaos --model windows --seeds 1-3   seeds with pages per KV group; or `states`
    .venv/bin/python -m tests.chaos --soak-minutes 30 --out FILE  steady load with rare faults

The exit code is 1 after a wrong answer, a hang, a leak, a crash, or a refusal by a gateway that said that it was ready.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from tests.rigs.chaos.catalogue import ModelKind, catalogue, write_model
from tests.rigs.chaos.results import append
from tests.rigs.chaos.schedule import schedule
from tests.rigs.chaos.seeds import SeedRunner
from tests.rigs.chaos.soak import report_soak, soak
from tests.rigs.chaos.stack import ChaosStack

SECONDS = 20.0  #: Default length of a seed's load.
SHOWN = ("seeds", "wrong_answers", "hangs", "leaks", "completed_share")  #: Metrics that are printed after each seed.


def _seeds(text: str) -> list[int]:
    """Parses `17`, `1-20` and lists of them with commas."""
    ranges = [part.partition("-") for part in text.split(",")]
    return [seed for first, _, last in ranges for seed in range(int(first), int(last or first) + 1)]


def _say(text: str) -> None:
    print(text, flush=True)


async def chaos(seeds: Sequence[int], seconds: float, directory: Path, out: Path | None, kind: ModelKind) -> int:
    """Runs the seeds on one stack. Returns the exit code."""
    (directory / "oracle").mkdir(parents=True)
    write_model(directory / "oracle", kind)
    cases = await asyncio.to_thread(catalogue, directory / "oracle")
    good, rows = True, list[dict[str, Any]]()
    async with ChaosStack.running(directory, kind) as stack:
        runner = await SeedRunner.warmed_up(stack, cases, _say)
        for seed in seeds:
            result = await runner.run(seed, seconds)
            good = good and result.good
            rows.append(result.row())
            if out is not None:
                total = append(out, rows[-1:])
                _say(f"  all seeds of {out.name}: { {key: total[key] for key in SHOWN} }")
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=_seeds, default=[1], help="a number, a range a-b, or a list with commas")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of a seed's load")
    parser.add_argument("--schedule", action="store_true", help="print the faults of the seeds and stop")
    parser.add_argument("--soak-minutes", type=float, help="run the soak instead of seeds")
    kinds = tuple(ModelKind)
    parser.add_argument("--model", type=ModelKind, choices=kinds, default=ModelKind.PLAIN, help="kind of the model")
    parser.add_argument("--out", type=Path, help="result file; chaos adds to it")
    parser.add_argument("--logs", type=Path, help="directory of the logs; default: a new one in .run/chaos")
    args = parser.parse_args()
    if args.schedule:
        for seed in args.seeds:
            print(f"seed {seed}", *schedule(seed, args.seconds), sep="\n  ")
        return 0
    now = datetime.datetime.now(datetime.UTC)
    directory = (args.logs or Path(".run/chaos") / f"{now:%Y%m%d-%H%M%S}").absolute()
    if args.soak_minutes is not None:
        return report_soak(uvloop.run(soak(args.soak_minutes, directory, _say)), args.out)
    return uvloop.run(chaos(args.seeds, args.seconds, directory, args.out, args.model))


if __name__ == "__main__":
    sys.exit(main())
