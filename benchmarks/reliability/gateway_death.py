"""Measures how soon pods free everything that the requests of a killed gateway held.

    python benchmarks/reliability/gateway_death.py --kills 20 --out benchmarks/results/gateway_death.json

It runs Valkey, a prefill pod, a decode pod and a gateway with a tiny random model. Clients stream long answers. Once
the pods hold blocks for all of them, the gateway gets SIGKILL. Then the pods are asked for their blocks until none is
leased or quarantined. The gateway starts again before the next turn.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.reliability.restarts import first_answer, tiny_model
from benchmarks.support import report
from cli.demo.model import demo_model
from tests.rigs.stack.cluster import Cluster

METRICS = """
Metrics:

- kills: number of kills of the gateway.
- freed_s_p50, freed_s_max: from the end of the gateway's process to pods without leased and quarantined blocks. One
  question to both pods takes about 0.02 s.
- held_blocks_min: fewest leased blocks of the pods just before a kill.
"""
STREAMS = 8
PROMPT_TOKENS, OUTPUT_TOKENS = 96, 900
LIMIT_S = 30.0  #: Time limit of each wait.


def stream(cluster: Cluster, seed: int, started: threading.Barrier) -> None:
    """Reads an answer until the gateway dies, and meets `started` after the first token."""
    rng, url = random.Random(seed), urlsplit(cluster.base_url)
    prompt = [rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=LIMIT_S)
    try:
        connection.request("POST", f"{url.path}/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.readline()
        started.wait(LIMIT_S)
        while answer.readline():
            pass
    except (OSError, http.client.HTTPException):
        pass  # the gateway died
    finally:
        connection.close()


def held_blocks(cluster: Cluster) -> int:
    """Returns the leased and quarantined blocks of all pods."""
    counts = [cluster.info(pod).blocks for pod in cluster.pods]
    return sum(count.leased + count.quarantined for count in counts)


def kill_once(cluster: Cluster, turn: int) -> tuple[int, float]:
    """Kills the gateway under load and starts it again. Returns the blocks held before, and the seconds to none."""
    started = threading.Barrier(STREAMS + 1)
    clients = [
        threading.Thread(target=stream, args=(cluster, turn * STREAMS + number, started)) for number in range(STREAMS)
    ]
    for client in clients:
        client.start()
    started.wait(LIMIT_S)
    before = held_blocks(cluster)
    cluster.kill("gateway")
    killed = time.monotonic()
    while held_blocks(cluster):
        if time.monotonic() - killed > LIMIT_S:
            raise RuntimeError(f"the pods hold blocks {LIMIT_S:.0f} s after the gateway's death")
    seconds = time.monotonic() - killed
    for client in clients:
        client.join(LIMIT_S)
    cluster.start("gateway")
    cluster.wait_ready("gateway")
    return before, seconds


def main() -> None:
    parser = report.arguments(__doc__, METRICS)
    parser.add_argument("--kills", type=int, default=20)
    args = parser.parse_args()
    rng, rows = random.Random(1), []
    with tempfile.TemporaryDirectory(prefix="baton-gateway-death-") as tmp:
        model = tiny_model(demo_model(), Path(tmp) / "tiny")
        with Cluster(
            model, Path(tmp) / "logs", load_format="dummy", local_prefill="off", kv_memory="64M", max_seqs=32
        ) as cluster:
            for turn in range(args.kills):
                first_answer(cluster, rng)
                before, seconds = kill_once(cluster, turn)
                rows.append({"held_blocks": before, "freed_s": round(seconds, 3)})
                print(f"{turn + 1:4} {before:4} blocks held, freed after {seconds:.3f} s", flush=True)
            cluster.check_idle()
    freed = [float(row["freed_s"]) for row in rows]
    metrics = {
        "kills": len(rows),
        "freed_s_p50": statistics.median(freed),
        "freed_s_max": max(freed),
        "held_blocks_min": min(int(row["held_blocks"]) for row in rows),
    }
    report.show(metrics)
    report.write(args.out, "gateway_death", metrics, "torch", "grpcio", "nixl-cu13", rows=rows)


if __name__ == "__main__":
    main()
