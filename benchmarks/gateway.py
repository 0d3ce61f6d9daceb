"""What streaming costs a gateway: CPU per token, latency added, memory of idle streams.

Three processes: the gateway as `baton gateway` starts it, pods that compute nothing (step_pods.py) behind real gRPC,
and a client that reads server-sent events (sse_client.py). 256 streams of chat completions, one token per stream and
step, from 8 decode pods of 32 streams each whose steps are spread evenly over time, as those of pods that know nothing
of each other are. All figures are of the time in which all streams run, unless they say otherwise.

- cpu_us_per_token: CPU time of the gateway's process, all threads, user and system, over the tokens that clients got.
  tok_s_per_core is its inverse. cpu_us_per_token_whole: the same from before the first request to after the last
  answer, so that HTTP, validation, routing and hand-off count as well.
- added_ms_p50, added_ms_p99: from the moment at which a pod gives a token to gRPC until the client has read the event
  that holds it, nothing subtracted: two sockets, the gateway, and its queue behind the other tokens of the step. At
  half load: the rate of tokens that takes half a core at 40 us a token. added_ms_p99_whole: of all tokens, those too
  that came while the gateway took in 256 new requests at once.
- one_pod_*: the same rate from a single decode pod, the worst case: all 256 tokens of a step come at the same instant,
  and the last one waits for all others.
- idle_mib: resident memory of a gateway that holds 10,000 streams which began and stand still; idle_kib_per_stream is
  what each adds.

The figures are those of the run with the least CPU per token (`--runs`); all runs are in `rows`, with the load average
at the time. Where the machine does other work, `chrt -r 5` before the command keeps that from taking turns between
these processes; it gives some 4% less CPU per token on a quiet machine, too.

    python benchmarks/gateway.py --out benchmarks/results/gateway.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support import report
from cli import probes
from cli.demo.model import demo_model
from cli.stack.process import ChildProcess, PortLease
from common.process.tether import tether_command
from loadtest.slo import percentile

SUPPORT = Path(__file__).resolve().parent / "support"
MODEL = "bench"
STREAMS = 256
IDLE_STREAMS = 10_000
HALF_LOAD = 12_500  # tokens a second
DECODES = 8
READY_S = 60.0
SETTLE_S = 0.5  # after the last stream began, before the window opens
PACKAGES = ("grpcio", "uvicorn", "uvloop", "httptools", "orjson", "fastapi", "protobuf")


@dataclass(frozen=True)
class GatewayUnderTest:
    """A running gateway over step pods. emitted: the file that the pods write at their end."""

    gateway: psutil.Process
    port: int
    pods: subprocess.Popen[str]
    emitted: Path

    def cpu_s(self) -> float:
        """CPU seconds that the gateway has used."""
        times = self.gateway.cpu_times()
        return float(times.user + times.system)

    def end_pods(self) -> dict[str, list[float]]:
        """Ends the pods; when token 1, 2, ... of each request left."""
        self.pods.send_signal(signal.SIGTERM)
        self.pods.wait(30)
        found: dict[str, list[float]] = orjson.loads(self.emitted.read_bytes())
        return found


@contextmanager
def stack(tmp: Path, *, decodes: int, step_ms: float, stall: bool = False) -> Iterator[GatewayUnderTest]:
    """Starts pods and gateway, and ends them."""
    model, emitted = demo_model(), tmp / "emitted.json"
    argv = [sys.executable, str(SUPPORT / "step_pods.py"), "--decodes", str(decodes), "--step-ms", str(step_ms)]
    argv += ["--model", str(model), "--emitted", str(emitted), *(["--stall"] if stall else [])]
    with subprocess.Popen(tether_command(argv), stdout=subprocess.PIPE, text=True) as pods, PortLease() as lease:
        assert pods.stdout is not None
        flags = {
            "port": lease.port,
            "model": model,
            "served-name": MODEL,
            "pods": ",".join(json.loads(pods.stdout.readline())),
            "max-inflight": 2 * IDLE_STREAMS,
            "log-level": "warning",
        }
        argv = [sys.executable, "-m", "cli", "gateway", *(f"--{name}={value}" for name, value in flags.items())]
        gateway = ChildProcess("gateway", argv, log=tmp / "gateway.log")
        gateway.start()
        try:
            _until_ready(gateway, lease.port, decodes)
            assert gateway.pid is not None
            yield GatewayUnderTest(psutil.Process(gateway.pid), lease.port, pods, emitted)
        finally:
            gateway.kill()
            pods.kill()


def _until_ready(gateway: ChildProcess, port: int, decodes: int) -> None:
    deadline = time.monotonic() + READY_S
    while not asyncio.run(probes.http_ready("127.0.0.1", port)):
        if not gateway.alive or time.monotonic() > deadline:
            raise RuntimeError("the gateway did not start:\n" + "\n".join(gateway.tail()))
        time.sleep(0.1)
    time.sleep(1.0)  # the first pods make it ready; the others' streams open meanwhile


def client(port: int, *flags: str) -> subprocess.Popen[str]:
    """A client process; its stdin ends it when it is idle."""
    argv = [sys.executable, str(SUPPORT / "sse_client.py"), "--port", str(port), "--model", MODEL, *flags]
    return subprocess.Popen(tether_command(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def streaming(*, streams: int, rate: float, decodes: int, seconds: float) -> dict[str, Any]:
    """One run: `streams` streams that together get `rate` tokens a second from `decodes` pods for some seconds."""
    step_s = streams / rate
    tokens = int(seconds / step_s)
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder)
        out = tmp / "client.json"
        with stack(tmp, decodes=decodes, step_ms=1e3 * step_s) as running:
            begin_cpu = running.cpu_s()
            with client(running.port, "--streams", str(streams), "--tokens", str(tokens), "--out", str(out)) as reader:
                assert reader.stdout is not None
                begun: float = json.loads(reader.stdout.readline())["begun"]
                time.sleep(SETTLE_S)
                window = time.monotonic()
                cpu = running.cpu_s()
                time.sleep(max(0.0, 0.6 * (begun + seconds - window)))
                cpu, window_end = running.cpu_s() - cpu, time.monotonic()
                reader.wait(10 * seconds + 60)
            whole = running.cpu_s() - begin_cpu
            rss = running.gateway.memory_info().rss
            sent = running.end_pods()
        answers = orjson.loads(out.read_bytes())
    odd = [a for a in answers if a["finish"] != "length" or sum(size for _, size in a["chunks"]) != tokens]
    assert not odd, f"{len(odd)} streams did not get all their tokens: {odd[0]['finish']}"
    chunks = [(at, size, a["id"]) for a in answers for at, size in a["chunks"]]
    inside = [size for at, size, _ in chunks if window <= at < window_end]
    each = [(at, 1e3 * delay) for a in answers for at, delay in delays(a["chunks"], sent[a["id"]])]
    added = sorted(delay for at, delay in each if window <= at < window_end)
    whole_added = sorted(delay for _, delay in each)
    return {
        "streams": streams,
        "decode_pods": decodes,
        "tokens_per_stream": tokens,
        "tok_s": round(sum(inside) / (window_end - window)),
        "cpu_us_per_token": round(1e6 * cpu / sum(inside), 2),
        "cpu_us_per_token_whole": round(1e6 * whole / (streams * tokens), 2),
        "tokens_per_chunk": round(sum(inside) / len(inside), 3),
        "added_ms_p50": round(percentile(added, 0.5), 3),
        "added_ms_p90": round(percentile(added, 0.9), 3),
        "added_ms_p99": round(percentile(added, 0.99), 3),
        "added_ms_max": round(added[-1], 3),
        "added_ms_p99_whole": round(percentile(whole_added, 0.99), 3),
        "rss_mib": round(rss / 2**20, 1),
        "load_average": round(os.getloadavg()[0], 2),
    }


def delays(chunks: list[tuple[float, int]], sent: list[float]) -> Iterator[tuple[float, float]]:
    """When each token came and its seconds from pod to client; not of the first, which comes from prefill."""
    index = 0
    for at, size in chunks:
        for token in range(index, index + size):
            if token > 0:
                yield at, at - sent[token - 1]
        index += size


def idle(streams: int) -> dict[str, Any]:
    """Memory of streams that began and stand still."""
    with tempfile.TemporaryDirectory() as folder, stack(Path(folder), decodes=2, step_ms=20, stall=True) as running:
        before = running.gateway.memory_info().rss
        with client(running.port, "--streams", str(streams), "--tokens", "1000", "--idle") as reader:
            assert reader.stdout is not None
            assert reader.stdin is not None
            reader.stdout.readline()
            alive = json.loads(reader.stdout.readline())["alive"]
            time.sleep(2.0)
            cpu = running.cpu_s()
            time.sleep(5.0)
            cpu = (running.cpu_s() - cpu) / 5.0
            rss = running.gateway.memory_info().rss
            reader.stdin.close()
            reader.wait(60)
    assert alive == streams, f"{alive} of {streams} streams stand"
    return {
        "streams": streams,
        "idle_mib": round(rss / 2**20, 1),
        "idle_kib_per_stream": round((rss - before) / streams / 1024, 1),
        "idle_cpu_share": round(cpu, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--rate", type=float, default=HALF_LOAD, help="tokens a second of all streams together")
    parser.add_argument("--decodes", type=int, default=DECODES, help="decode pods")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--idle", type=int, default=IDLE_STREAMS, help="idle streams; 0 leaves them out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for decodes in [args.decodes] * args.runs + [1]:
        rows.append(streaming(streams=args.streams, rate=args.rate, decodes=decodes, seconds=args.seconds))
        print(json.dumps(rows[-1]), flush=True)
    *spread, one = rows
    best = min(spread, key=lambda row: row["cpu_us_per_token"])
    names = ("cpu_us_per_token", "cpu_us_per_token_whole", "added_ms_p50", "added_ms_p99", "added_ms_p99_whole")
    metrics = {name: best[name] for name in names}
    metrics["tok_s_per_core"] = round(1e6 / best["cpu_us_per_token"])
    metrics |= {f"one_pod_{name}": one[name] for name in ("cpu_us_per_token", "added_ms_p50", "added_ms_p99")}
    still = idle(args.idle) if args.idle else {}
    metrics |= {name: still[name] for name in ("idle_mib", "idle_kib_per_stream") if still}
    print(json.dumps(metrics, indent=2))
    report.write(args.out, "gateway", metrics, *PACKAGES, rows=rows, idle=still)


if __name__ == "__main__":
    main()
