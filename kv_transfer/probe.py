"""Checks that NIXL moves bytes on this machine: `python -m kv_transfer.probe` writes blocks into a second process.

`python -m kv_transfer.probe SOURCE TARGET` writes between two memories, each `cpu` or a GPU as in CUDA_VISIBLE_DEVICES.
The last line of output is a JSON object (mebibytes, gigabytes_per_s, transport and source). Exit code 1 and a line on
stderr report a failure. UCX_TLS and other UCX settings choose the transport, as for a pod.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import secrets
import subprocess
import sys
import time
from typing import Any

from common.errors import BatonError, TransferFailed, describe
from kv_transfer.backend.interface import WriteState
from kv_transfer.backend.nixl import NixlBackend
from kv_transfer.memory import PeerMemory, PoolMemory, device_pool, host_pool

HOST = "cpu"
BLOCK_BYTES = 1 << 20  #: A block of an 8B model; doubled on a GPU.
NUM_BLOCKS = 64
GPU_ROUNDS = 16  #: A single write of all blocks is too short to be timed well.
DEADLINE_S = 60.0


def send(source: str = HOST, target: str = HOST) -> dict[str, Any]:
    """Writes every block to a child that runs `receive`. Returns the result once the digests agree, else raises."""
    memory = _pool(source)
    rounds = 1 if HOST in (source, target) else GPU_ROUNDS
    data = [secrets.token_bytes(memory.block_bytes) for _ in range(NUM_BLOCKS)]
    for block, content in enumerate(data):
        memory.write_block(block, content)
    backend = NixlBackend()
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "kv_transfer.probe", "receive", target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            backend.start(f"probe-send-{os.getpid()}", memory)
            hello = json.loads(child.stdout.readline() or "null")
            if hello is None:
                raise TransferFailed("the receiving process ended before it was ready")
            peer = hello["name"]
            backend.connect(peer, base64.b64decode(hello["metadata"]), PeerMemory(**hello["memory"]))
            _write(backend, peer, range(1))  # UCX connects lazily
            _write(backend, peer, range(1, NUM_BLOCKS))
            seconds = sum(_write(backend, peer, range(1, NUM_BLOCKS)) for _ in range(rounds)) / rounds
            child.stdin.close()
            digest = child.stdout.readline().strip()
            transport = backend.transport(peer, same_host=True)
        finally:
            child.kill()
            backend.close()
    if digest != hashlib.blake2b(b"".join(data)).hexdigest():
        raise TransferFailed("the received bytes differ from the sent bytes")
    return {
        "mebibytes": NUM_BLOCKS * memory.block_bytes >> 20,
        "gigabytes_per_s": (NUM_BLOCKS - 1) * memory.block_bytes / seconds / 1e9,
        "transport": transport.name,
        "source": transport.source,
    }


def _pool(where: str) -> PoolMemory:
    """Builds blocks in host memory or on a GPU, which becomes the only visible GPU of this process."""
    if where == HOST:
        return host_pool(NUM_BLOCKS, BLOCK_BYTES)
    os.environ["CUDA_VISIBLE_DEVICES"] = where
    try:
        return device_pool(NUM_BLOCKS, 2 * BLOCK_BYTES)
    except (ImportError, RuntimeError) as e:
        raise TransferFailed(f"GPU {where} has no memory for the test: {describe(e)}") from e


def receive(where: str = HOST) -> None:
    """Prints its metadata, makes progress until stdin closes, then prints a digest of the blocks."""
    memory = _pool(where)
    backend = NixlBackend()
    name = f"probe-receive-{os.getpid()}"
    backend.start(name, memory)
    described = {field.name: getattr(memory, field.name) for field in dataclasses.fields(PeerMemory)}
    try:
        metadata = base64.b64encode(backend.metadata()).decode()
        _say(json.dumps({"name": name, "metadata": metadata, "memory": described}))
        os.set_blocking(sys.stdin.fileno(), False)
        deadline = time.monotonic() + DEADLINE_S
        while not _closed(sys.stdin.fileno()) and time.monotonic() < deadline:
            backend.notifications()
            time.sleep(0.0005)
        _say(hashlib.blake2b(b"".join(map(memory.read_block, range(NUM_BLOCKS)))).hexdigest())
    finally:
        backend.close()


def _closed(descriptor: int) -> bool:
    try:
        return os.read(descriptor, 1) == b""
    except BlockingIOError:
        return False


def _write(backend: NixlBackend, peer: str, blocks: range) -> float:
    """Returns the seconds of one write. Raises TransferFailed."""
    began, these = time.perf_counter(), list(blocks)
    handle = backend.write(peer, these, these, b"")
    deadline = time.monotonic() + DEADLINE_S
    while (state := backend.poll(handle)) is WriteState.PENDING:
        if time.monotonic() > deadline:
            raise TransferFailed(f"a write did not end within {DEADLINE_S:.0f} s")
        time.sleep(0)
    if state is WriteState.FAILED:
        raise TransferFailed(backend.error(handle))
    backend.release(handle)
    return time.perf_counter() - began


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    """Runs the probe with these command-line arguments. Returns the exit code."""
    try:
        if argv[:1] == ["receive"]:
            receive(*argv[1:])
        else:
            _say(json.dumps(send(*argv)))
    except BatonError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
