"""Whether the load generator can be believed: what it measures, against a server that knows when it sent what.

The generator (`baton loadtest`'s own runner, client and progress line) and a timing server (timing_server.py) run on a
core each. 500 requests leave 10 ms apart, each for 400 tokens at 20 a second; what is counted is the time in which all
500 streams run: 10,000 tokens a second. Two rows: streams that are `apart` (each has its own beat), and all `in step`,
as the tokens of one engine step come, which is harder: 500 events in one moment.

- timing_error_p99_ms: of the worse row: from the server's send() of a token to the time that the generator gives to it.
- gap_error_p99_ms: measured less real time between two tokens, without the sign. send_error_p99_ms: how late requests
  left. ttft_error_p99_ms: measured less real time to the first token (the server's: from having read the request).
- cpu_share: of the generator's core while all streams run and 500 are opened.

    python benchmarks/loadgen.py --out benchmarks/results/loadgen.json
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support import report
from cli.commands.loadtest import run_sync
from common.process.tether import tether_command
from loadtest import progress
from loadtest.config import LoadConfig
from loadtest.run import LoadRun
from loadtest.slo import percentile

SUPPORT = Path(__file__).resolve().parent / "support"
STREAMS, RATE, TOKENS = 500, 20.0, 400
STARTS_PER_S = 100


@dataclass(frozen=True)
class Cores:
    """One for each of the two processes; the same where there is only one."""

    generator: int
    server: int

    @classmethod
    def of_this_process(cls) -> Cores:
        cores = sorted(os.sched_getaffinity(0))
        return cls(cores[0], cores[-1])


@contextlib.contextmanager
def timing_server(core: int, *, beat: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """Its port, and what it tells at its end, which is there when the block is left."""
    argv = [sys.executable, str(SUPPORT / "timing_server.py"), "--rate", str(RATE), *(["--beat"] if beat else [])]
    told: dict[str, Any] = {}
    with subprocess.Popen(tether_command(argv), stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        os.sched_setaffinity(server.pid, {core})
        try:
            yield orjson.loads(server.stdout.readline())["port"], told
            server.send_signal(signal.SIGTERM)
            told.update(orjson.loads(server.stdout.read()))
        finally:
            server.kill()


def measure(cores: Cores, streams: int, tokens: int, *, beat: bool) -> dict[str, Any]:
    """One row."""
    load = min(os.getloadavg()[0], 99.0)
    with timing_server(cores.server, beat=beat) as (port, told):
        flags = {"url": f"http://127.0.0.1:{port}", "rate": str(STARTS_PER_S), "arrivals": "constant"}
        flags |= {"requests": str(streams), "output_tokens": str(tokens), "input_tokens": "64"}
        run = run_sync(LoadConfig.of(flags), watch=lambda run: progress.show(run, sys.stderr))
    return {"mode": "in step" if beat else "apart", **errors(run, told), "load_average": round(load, 2)}


def errors(run: LoadRun, told: dict[str, Any]) -> dict[str, Any]:
    """What the generator's times are off by, in ms."""
    failed = [r for r in run.records if not r.ok]
    assert not failed, f"{len(failed)} streams failed: {failed[0].error} {failed[0].message}"
    begin, end = max(r.event_times[0] for r in run.records), min(r.ended_s for r in run.records)
    stamps, gaps, firsts = [], [], []
    for record in run.records:
        real = told[record.request_id]["sent"]
        assert len(real) == len(record.event_times), "a token is missing"
        inside = [(seen, sent) for seen, sent in zip(record.event_times, real, strict=True) if begin <= sent < end]
        stamps += [1e3 * (seen - sent) for seen, sent in inside]
        gaps += [1e3 * abs((b[0] - a[0]) - (b[1] - a[1])) for a, b in pairwise(inside)]
        first = real[0] - told[record.request_id]["read_at"]
        firsts.append(1e3 * abs((record.event_times[0] - record.sent_s) - first))
    lags = [1e3 * r.lag_s for r in run.records]
    return {
        "streams": len(run.records),
        "tokens": len(stamps),
        "tokens_per_s": round(len(stamps) / (end - begin)),
        "timing_error_p50_ms": round(percentile(stamps, 0.5), 4),
        "timing_error_p99_ms": round(percentile(stamps, 0.99), 4),
        "timing_error_p999_ms": round(percentile(stamps, 0.999), 4),
        "timing_error_max_ms": round(max(stamps), 4),
        "gap_error_p99_ms": round(percentile(gaps, 0.99), 4),
        "ttft_error_p99_ms": round(percentile(firsts, 0.99), 4),
        "send_error_p99_ms": round(percentile(lags, 0.99), 4),
        "cpu_share": round(run.cpu_s / (run.ended - run.began), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each stream, at 20 a second")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cores = Cores.of_this_process()
    os.sched_setaffinity(0, {cores.generator})
    rows = []
    for beat in (False, True):
        time.sleep(1.0)
        rows.append(measure(cores, args.streams, args.tokens, beat=beat))
        print(rows[-1], flush=True)
    worst = {name: max(row[name] for row in rows) for name in rows[0] if name.endswith("_ms") or name == "cpu_share"}
    metrics = {"timing_error_p99_ms": worst.pop("timing_error_p99_ms"), "streams": args.streams, **worst}
    metrics["tokens_per_s"] = min(row["tokens_per_s"] for row in rows)
    report.write(args.out, "loadgen", metrics, "uvloop", "httptools", "orjson", rows=rows)


if __name__ == "__main__":
    main()
