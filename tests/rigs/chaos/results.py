"""The result file of chaos runs. Each run adds its seeds, and the metrics cover all seeds of the file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.support import report
from tests.rigs.chaos.schedule import PROCESSES

PACKAGES = ("torch", "grpcio", "nixl-cu12", "nixl-cu13", "redis")


def metrics(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the metrics of all rows. A row is that of one seed (`SeedResult.row`)."""
    total, deaths = Counter[str](), Counter[str]()
    for row in rows:
        total.update({key: row[key] for key in ("accepted", "completed", "failed", "wrong", "hang", "retried")})
        total.update(
            {key: row[key] for key in ("requests", "aborted", "refused", "leaks", "crashes", "lies", "faults")}
        )
        total.update({"seeds": 1, "seconds": round(row["seconds"])})
        deaths.update(row["deaths"])
    return {
        "seeds": total["seeds"],
        "wrong_answers": total["wrong"],
        "hangs": total["hang"],
        "leaks": total["leaks"],
        "completed_share": round(total["completed"] / total["accepted"], 6) if total["accepted"] else None,
        **{key: total[key] for key in ("crashes", "lies", "requests", "accepted", "completed", "failed")},
        **{key: total[key] for key in ("refused", "aborted", "retried", "faults", "seconds")},
        "deaths": {name: deaths[name] for name in PROCESSES},
    }


def append(out: Path, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Adds rows to the file and returns the metrics of all rows. A row replaces an older row of its seed."""
    known = {row["seed"]: row for row in json.loads(out.read_text())["rows"]} if out.exists() else {}
    commit = report.commit()
    known |= {row["seed"]: {**row, "commit": commit} for row in rows}
    merged = [known[seed] for seed in sorted(known)]
    found = metrics(merged)
    report.write(out, "chaos", found, *PACKAGES, rows=merged)
    return found
