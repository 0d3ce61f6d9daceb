"""Measures the accuracy of the load generator against a server that records when it sent each token.

The generator (runner, client and progress line of `baton loadtest`) and the server (support/timing_server.py) run on
one core each. 500 requests are sent 10 ms apart, each for 400 tokens at 20 tokens per second. Only the time in which
all 500 streams run counts: 10,000 tokens per second. There are two rows: `apart`, with a schedule for each stream, and
`in step`, with the tokens of all streams at the same moments, as an engine step sends them. The metrics are:

- timing_error_p99_ms: from the server's send() of a token to the time that the generator records; the worse row.
- gap_error_p99_ms: absolute error of the time between two tokens. send_error_p99_ms: delay of sending a request.
  ttft_error_p99_ms: absolute error of the time to the first token (the server's starts when it has read the request).
- cpu_share: share of the generator's core while all streams run and while they are opened.

    python benchmarks/loadgen.py --out benchmarks/results/loadgen.json
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support import report
from benchmarks.support.local_stack import said, start_script
from benchmarks.support.report import ms, percentiles_ms
from cli.commands.loadtest import run_sync
from loadtest.config import LoadConfig
from loadtest.run import LoadRun, show_progress

STREAMS, RATE, TOKENS = 500, 20.0, 400
STARTS_PER_S = 100


@contextlib.contextmanager
def timing_server(core: int, *, beat: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """Runs a timing server. Yields its port and a dict that has its recorded times after the block."""
    times: dict[str, Any] = {}
    with start_script("timing_server.py", "--rate", RATE, *(["--beat"] if beat else [])) as server:
        os.sched_setaffinity(server.pid, {core})
        try:
            yield said(server)["port"], times
            server.send_signal(signal.SIGTERM)
            times |= orjson.loads(server.communicate()[0])
        finally:
            server.kill()


def measure(server_core: int, streams: int, tokens: int, *, beat: bool) -> dict[str, Any]:
    load = min(os.getloadavg()[0], 99.0)
    with timing_server(server_core, beat=beat) as (port, times):
        flags = {"url": f"http://127.0.0.1:{port}", "rate": str(STARTS_PER_S), "arrivals": "constant"}
        flags |= {"requests": str(streams), "output_tokens": str(tokens), "input_tokens": "64"}
        run = run_sync(LoadConfig.of(flags), watch=lambda run: show_progress(run, sys.stderr))
    return {"mode": "in step" if beat else "apart", **errors(run, times), "load_average": round(load, 2)}


def errors(run: LoadRun, times: dict[str, Any]) -> dict[str, Any]:
    """Returns the errors of the generator's times in ms. times: from the server, by request id."""
    failed = [r for r in run.records if not r.ok]
    assert not failed, f"{len(failed)} streams failed: {failed[0].error} {failed[0].message}"
    begin, end = max(r.event_times[0] for r in run.records), min(r.ended_s for r in run.records)
    stamps, gaps, firsts = [], [], []
    for record in run.records:
        real = times[record.request_id]["sent"]
        assert len(real) == len(record.event_times), "a token is missing"
        inside = [(seen, sent) for seen, sent in zip(record.event_times, real, strict=True) if begin <= sent < end]
        stamps += [seen - sent for seen, sent in inside]
        gaps += [abs((b[0] - a[0]) - (b[1] - a[1])) for a, b in pairwise(inside)]
        first = real[0] - times[record.request_id]["read_at"]
        firsts.append(abs((record.event_times[0] - record.sent_s) - first))
    return {
        "streams": len(run.records),
        "tokens": len(stamps),
        "tokens_per_s": round(len(stamps) / (end - begin)),
        **{f"timing_error_{name}_ms": value for name, value in percentiles_ms(stamps, "p50", "p99", "p999").items()},
        "timing_error_max_ms": ms(max(stamps)),
        "gap_error_p99_ms": percentiles_ms(gaps, "p99")["p99"],
        "ttft_error_p99_ms": percentiles_ms(firsts, "p99")["p99"],
        "send_error_p99_ms": percentiles_ms([r.lag_s for r in run.records], "p99")["p99"],
        "cpu_share": round(run.cpu_s / (run.ended - run.began), 3),
    }


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of each stream, at 20 per second")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})  # the generator; both processes have the same core if there is only one
    rows = []
    for beat in (False, True):
        time.sleep(1.0)
        rows.append(measure(cores[-1], args.streams, args.tokens, beat=beat))
        print(rows[-1], flush=True)
    worst = {name: max(row[name] for row in rows) for name in rows[0] if name.endswith("_ms") or name == "cpu_share"}
    metrics = {"timing_error_p99_ms": worst.pop("timing_error_p99_ms"), "streams": args.streams, **worst}
    metrics["tokens_per_s"] = min(row["tokens_per_s"] for row in rows)
    report.write(args.out, "loadgen", metrics, "uvloop", "httptools", "orjson", rows=rows)


if __name__ == "__main__":
    main()
