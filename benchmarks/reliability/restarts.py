"""Measures how soon a pod takes part in an answer after it was killed and started again at the same address.

    python benchmarks/reliability/restarts.py --restarts 100 --out benchmarks/results/restarts.json

It runs Valkey, a prefill pod, a decode pod and a gateway with a tiny random model. It kills a pod with SIGKILL, starts
it again and waits for its health check. Then a client sends requests to the gateway, one after another, until one is
answered. Every answer needs a hand-off from the prefill pod to the decode pod. Every prompt is new, so no cache helps.
"""

from __future__ import annotations

import http.client
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support import report
from cli.demo.model import demo_model
from common.errors import describe
from tests.rigs.stack.cluster import Cluster

METRICS = """
Metrics:

- restarts: number of restarts. The pods of --kill take turns.
- first_hand_off_s_p50, first_hand_off_s_max: from the passed health check of the restarted pod to the first answer.
- failed_requests: requests in that time that ended with an error.
- other_restarts: other processes that ended or have another generation.
- idle_s, burst_requests, burst_failed: with --idle-s, the pause before a burst, and all and failed requests of it.
"""
PROMPT_TOKENS, OUTPUT_TOKENS = 96, 2
REQUEST_LIMIT_S = 30.0  #: Time limit of a request, and of all requests after one restart.
BURST = 32  #: Requests of a burst.


def tiny_model(source: Path, directory: Path) -> Path:
    """Writes a model directory with the tokenizer of `source` and a small random Llama."""
    directory.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            shutil.copy(file, directory)
    config = json.loads((source / "config.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def ask(cluster: Cluster, rng: random.Random) -> str:
    """Sends a request with a new prompt. Returns the error, or "" if it was answered."""
    url = urlsplit(cluster.base_url)
    prompt = [rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=REQUEST_LIMIT_S)
    try:
        connection.request("POST", f"{url.path}/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        return "" if answer.status == 200 else text
    except (OSError, http.client.HTTPException) as error:
        return describe(error, limit_s=REQUEST_LIMIT_S)
    finally:
        connection.close()


def first_answer(cluster: Cluster, rng: random.Random) -> tuple[float, list[str]]:
    """Sends requests until one is answered. Returns the seconds, and the errors before the answer."""
    began, errors = time.monotonic(), list[str]()
    while error := ask(cluster, rng):
        errors.append(error)
        if time.monotonic() - began > REQUEST_LIMIT_S:
            raise RuntimeError(f"no answer within {REQUEST_LIMIT_S:.0f} s: {errors[-1]}")
        time.sleep(0.02)
    return time.monotonic() - began, errors


def lives(cluster: Cluster) -> dict[str, tuple[int | None, int]]:
    """Returns the pid and the generation of each process; generation 0 for a process that is no pod."""
    names = [*cluster.pods, "gateway", "valkey"]
    return {name: (cluster.pid(name), cluster.info(name).generation if name in cluster.pods else 0) for name in names}


def restarts(cluster: Cluster, pods: list[str], count: int, rng: random.Random) -> Iterator[Mapping[str, object]]:
    """Restarts the pods in turn, `count` times in all. Yields a row for each restart."""
    for number in range(count):
        pod, before = pods[number % len(pods)], lives(cluster)
        cluster.kill(pod)
        cluster.start(pod)
        began = time.monotonic()
        cluster.wait_ready(pod)
        ready_s = time.monotonic() - began
        seconds, errors = first_answer(cluster, rng)
        after = lives(cluster)
        others = [name for name, life in after.items() if name != pod and (life != before[name] or life[0] is None)]
        row = {"pod": pod, "ready_s": round(ready_s, 3), "first_hand_off_s": round(seconds, 4)}
        print(
            f"{number + 1:4} {pod:10} ready after {ready_s:5.2f} s, first hand-off after {seconds:6.3f} s", flush=True
        )
        yield {**row, "errors": errors, "other_restarts": others}


def burst(cluster: Cluster, idle_s: float) -> list[str]:
    """Waits `idle_s` seconds and then sends BURST requests at once. Returns the errors."""
    time.sleep(idle_s)
    with ThreadPoolExecutor(BURST) as pool:
        return [error for error in pool.map(lambda seed: ask(cluster, random.Random(seed)), range(BURST)) if error]


def main() -> None:
    parser = report.arguments(__doc__, METRICS)
    parser.add_argument("--restarts", type=int, default=100)
    parser.add_argument("--kill", default="decode-0,prefill-0", help="names of the pods that are killed in turn")
    parser.add_argument("--idle-s", type=float, default=0.0, help="pause before a burst at the end; 0: no burst")
    parser.add_argument("--transport", choices=("default", "tcp"), default="default", help="UCX_TLS of the pods")
    args = parser.parse_args()
    env = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"} if args.transport == "tcp" else {}
    rng = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="baton-restarts-") as tmp:
        model = tiny_model(demo_model(), Path(tmp) / "tiny")
        settings: dict[str, Any] = {"load_format": "dummy", "local_prefill": "off", "kv_memory": "64M"}
        with Cluster(model, Path(tmp) / "logs", env=env, **settings) as cluster:
            first_answer(cluster, rng)
            rows = list(restarts(cluster, args.kill.split(","), args.restarts, rng))
            failed = burst(cluster, args.idle_s) if args.idle_s else []
    seconds = [float(str(row["first_hand_off_s"])) for row in rows]
    metrics: dict[str, object] = {
        "restarts": len(rows),
        "first_hand_off_s_p50": round(statistics.median(seconds), 4),
        "first_hand_off_s_max": max(seconds),
        "failed_requests": sum(len(row["errors"]) for row in rows),  # type: ignore[arg-type]
        "other_restarts": sum(len(row["other_restarts"]) for row in rows),  # type: ignore[arg-type]
    }
    if args.idle_s:
        metrics |= {"idle_s": args.idle_s, "burst_requests": BURST, "burst_failed": len(failed)}
    report.show(metrics)
    report.write(args.out, "restarts", metrics, "torch", "grpcio", "nixl-cu13", transport=args.transport, rows=rows)


if __name__ == "__main__":
    main()
