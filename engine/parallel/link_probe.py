"""Checks the links between ranks on this machine: `python -m engine.parallel.link_probe [DEVICE ...]`.

Each rank is a process with a device like `cuda:0`; without devices, two ranks run on the CPU. The ranks sum vectors
with the collectives of a tensor-parallel engine. The last line of output is a JSON object (ranks, device, small_us,
gigabytes_per_s, direct). Exit code 1 and a line on stderr report a failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import torch

from common.errors import BatonError, InternalError, describe
from common.process.tether import tether_command
from engine.device import make_current
from engine.parallel.collectives import Collectives, join_store, open_store

HOST = "127.0.0.1"
SMALL = 16 << 10  # Bytes of the all-reduce of one token of an 8B model in bfloat16.
LARGE = {"cpu": 4 << 20, "cuda": 256 << 20}
ROUNDS = 20
DEADLINE_S = 60.0  # Below the deadline of `baton doctor`.
POLL_S = 0.01
REASON_S = 2.0  # Time for a rank that ends to say why, after rank 0 has failed.


def probe(devices: list[str]) -> dict[str, Any]:
    """Starts the other ranks and returns the result of rank 0. Raises InternalError if the links do not work."""
    store, port = open_store(HOST)
    command = [sys.executable, "-P", "-m", "engine.parallel.link_probe", "--rank"]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    children = [
        subprocess.Popen(tether_command([*command, str(rank), str(port), *devices]), text=True, **options)
        for rank in range(1, len(devices))
    ]
    found: Future[dict[str, Any]] = Future()

    def sum_on_rank_0() -> None:
        try:
            found.set_result(sum_vectors(0, devices, store))
        except BaseException as error:
            found.set_exception(error)

    # On a thread: rank 0 would wait for a rank that has ended.
    threading.Thread(target=sum_on_rank_0, daemon=True).start()
    until = time.monotonic() + DEADLINE_S
    try:
        while not (found.done() and all(child.poll() == 0 for child in children)):
            for rank, child in enumerate(children, 1):
                if child.poll():
                    _, error = child.communicate(timeout=DEADLINE_S)
                    reason = error.strip().rpartition("\n")[2] or f"exit code {child.returncode}"
                    raise InternalError(f"rank {rank} on {devices[rank]} failed: {reason}")
            failure = found.exception() if found.done() else None
            if failure is not None:
                until = min(until, time.monotonic() + REASON_S)
            if time.monotonic() > until:
                reason = f"no sum within {DEADLINE_S:g} s" if failure is None else describe(failure)
                raise InternalError(f"the ranks cannot sum a vector: {reason}") from failure
            time.sleep(POLL_S)
    finally:
        for child in children:
            child.kill()
            child.wait()
            assert child.stderr is not None
            child.stderr.close()
    return found.result()


@torch.inference_mode()
def sum_vectors(rank: int, devices: list[str], store: Any) -> dict[str, Any]:
    """Sums vectors of all ranks, checks the sums and times them."""
    device, size = torch.device(devices[rank]), len(devices)
    torch.set_num_threads(1)
    make_current(device)
    collectives = Collectives(store, rank, size, device, HOST)
    seconds: dict[int, float] = {}
    for nbytes in (SMALL, LARGE[device.type]):
        mine = torch.full((nbytes // 4,), float(rank + 1), device=device)
        collectives.all_reduce(mine)
        expected = size * (size + 1) / 2
        if not bool((mine == expected).all()):
            raise InternalError(f"a sum of {size} ranks is wrong: {float(mine.min())}, expected {expected}")
        mine.zero_()
        _synchronize(device)
        began = time.perf_counter()
        for _ in range(ROUNDS):
            collectives.all_reduce(mine)
        _synchronize(device)
        seconds[nbytes] = (time.perf_counter() - began) / ROUNDS
    others = [other for other in devices if other != devices[rank]]
    on_gpus = device.type == "cuda"
    return {
        "ranks": size,
        "device": device.type,
        "small_us": 1e6 * seconds[SMALL],
        "gigabytes_per_s": LARGE[device.type] / seconds[LARGE[device.type]] / 1e9,
        "direct": on_gpus and all(torch.cuda.can_device_access_peer(device, torch.device(other)) for other in others),
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argv: list[str]) -> int:
    """Runs the probe, or one of its ranks. Returns the exit code."""
    try:
        if argv[:1] == ["--rank"]:
            rank, port, *devices = argv[1:]
            sum_vectors(int(rank), devices, join_store(HOST, int(port)))
        else:
            sys.stdout.write(f"{json.dumps(probe(argv or ['cpu', 'cpu']))}\n")
    except (BatonError, RuntimeError) as error:
        sys.stderr.write(f"{describe(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread of torch may still wait for another rank
