"""Measures what a new user meets first: the start of `baton up`, the formats of tool calls, the cost of a token.

    python benchmarks/first_hour.py --base DIR --out benchmarks/results/first_hour.json

DIR is another checkout. Its gateway is compared with this one; without --base this part is left out. Two quiet cores
and a converted demo model (`make demo`) are needed; the formats, which come last, need no quiet machine.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support import report
from benchmarks.support.report import ROOT
from cli.demo.model import demo_model
from tests.rigs.tool_formats import FORMATS, IDS

METRICS = """
Metrics:

- start_to_token_s: from the command `baton up` to the first streamed token of a chat, the median of --starts runs.
  A client asks again every 20 ms until it is answered.
- ready_to_token_s: the part of it after the command has said that the model is served.
- tool_formats: formats of tool calls that were checked.
- transcripts: generated answers of all formats, --transcripts of each, which a parser reads cut at every position. A
  streamed answer gives the same calls and text as the whole one.
- fuzz_inputs: damaged answers of all formats, --fuzz of each. None raises, and pieces give the same as the whole.
- cpu_us_per_token_ratio: cpu_us_per_token of benchmarks/gateway.py in this checkout over that in --base. The two run in
  turn, --rounds times; each side counts with its least figure, because other processes only add to it.
"""

START_LIMIT_S = 120.0
MODEL = demo_model()
QUESTION = {
    "model": MODEL.name,
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 8,
    "temperature": 0,
    "stream": True,
}


def main() -> None:
    parser = report.arguments(__doc__, METRICS)
    parser.add_argument("--base", type=Path, help="the other checkout")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transcripts", type=int, default=200, help="per format")
    parser.add_argument("--fuzz", type=int, default=100_000, help="mutated answers per format")
    args = parser.parse_args()
    metrics: dict[str, object] = {}
    rows: dict[str, Any] = {}
    if args.starts:
        rows["starts"] = [start() for _ in range(args.starts)]
        for name in ("start_to_token_s", "ready_to_token_s"):
            metrics[name] = round(statistics.median(row[name] for row in rows["starts"]), 2)
        report.show(metrics)
    if args.base is not None:
        rows["gateway"] = [
            {"tree": tree, "cpu_us_per_token": gateway_cost(path)}
            for _ in range(args.rounds)
            for tree, path in (("base", args.base.resolve()), ("this", ROOT))
        ]
        least = {
            tree: min(row["cpu_us_per_token"] for row in rows["gateway"] if row["tree"] == tree)
            for tree in ("base", "this")
        }
        metrics["cpu_us_per_token_ratio"] = round(least["this"] / least["base"], 4)
    if args.fuzz:
        check_formats(args.transcripts, args.fuzz)
        rows["formats"] = IDS  # a format with two forms is there twice
        metrics["tool_formats"] = len({tool_format.name for tool_format in FORMATS})
        metrics["transcripts"] = args.transcripts * len(rows["formats"])
        metrics["fuzz_inputs"] = args.fuzz * len(rows["formats"])
    report.show(metrics)
    report.write(args.out, "first_hour", metrics, "llguidance", "transformers", "torch", rows=rows)


def start() -> dict[str, float]:
    """Starts a stack and asks for one answer. Returns the seconds to its first token."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder, socket.socket() as lease:
        lease.bind(("127.0.0.1", 0))
        port = lease.getsockname()[1]
        lease.close()
        log = Path(folder) / "up.log"
        began = time.monotonic()
        with up(log, "--port", str(port), "--model", str(MODEL), "--log-dir", folder) as process:
            told_at = first_at = None
            while first_at is None:
                if process.poll() is not None or time.monotonic() > began + START_LIMIT_S:
                    raise RuntimeError(f"baton up gave no token: {log.read_text()[-2000:]}")
                first_at = first_token_at(port)
                if told_at is None and "is served on" in log.read_text():
                    told_at = time.monotonic()
                if first_at is None:
                    time.sleep(0.02)
            told_at = first_at if told_at is None else min(told_at, first_at)
    return {"start_to_token_s": round(first_at - began, 3), "ready_to_token_s": round(first_at - told_at, 3)}


def check_formats(transcripts: int, fuzz: int) -> None:
    """Runs the tests of tool formats with these numbers of answers per format. Raises CalledProcessError."""
    env = {**os.environ, "BATON_TRANSCRIPTS": str(transcripts), "BATON_TOOL_FUZZ": str(fuzz)}
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "tests/unit/test_tool_parsers.py",
        "-n",
        str(os.cpu_count()),
        "--timeout",
        "0",
    ]
    subprocess.run([*argv, "-k", "cut_at_every_position or damaged_answers"], cwd=ROOT, env=env, check=True)


@contextmanager
def up(log: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `baton up` for the block."""
    with log.open("wb") as out:
        argv = [sys.executable, "-P", "-m", "cli", "up", *flags]
        process = subprocess.Popen(argv, stdout=out, stderr=out, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def first_token_at(port: int) -> float | None:
    """Returns when the first token of a streamed answer arrived, None if no answer came."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_LIMIT_S)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(QUESTION), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            return None
        for line in response:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                return time.monotonic()
    except OSError:
        pass
    finally:
        connection.close()
    return None


def gateway_cost(tree: Path) -> float:
    """Runs a tree's benchmarks/gateway.py once. Returns its cpu_us_per_token."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        out = Path(folder) / "gateway.json"
        argv = [sys.executable, "benchmarks/gateway.py", "--runs", "1", "--idle", "0", "--out", str(out)]
        subprocess.run(
            argv, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=True, stdout=subprocess.DEVNULL
        )
        return float(json.loads(out.read_text())["metrics"]["cpu_us_per_token"])


if __name__ == "__main__":
    main()
