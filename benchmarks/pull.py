"""What pulling cached KV blocks from another pod costs: pushed by the holder, or read by the puller.

    python benchmarks/pull.py --out benchmarks/results/pull-cpu.json

Two processes that run what pods run for transfers (TransferNode, gRPC between them), host memory, scattered blocks of
which no two are neighbours. A pull is measured at the puller from asking to blocks that may be published, so the calls
between the pods are in it; median of --repeats pulls after a first one that connects. By transport:

- push_ms_N, read_ms_N: N blocks of SmolLM2's size in float32 (720 KiB, 16 tokens), default transport (CMA).
- push_gb_s, read_gb_s: of the largest pull. first_push_ms, first_read_ms: with handshake, connection and probe.
- rows has TCP, and blocks of 64 KiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report
from common.auth import Signer
from common.kv_layout import KVLayout
from common.lifecycle import die_with_parent, host_boot_id
from common.pb import transfer_pb2, transfer_pb2_grpc
from common.rpc import RpcServer
from common.types import Role
from common.wire import PROTOCOL_VERSION, layout_to_pb, role_to_pb
from kv_transfer.memory import PoolMemory, host_memory
from kv_transfer.messages import Holder, Wanted
from kv_transfer.nixl_backend import NixlBackend
from kv_transfer.node import TransferNode

SECRET = b"one benchmark"
LAYOUTS = {  # by the KiB of a block
    720: KVLayout("smollm2-shape", "r0", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32"),
    64: KVLayout("small", "r0", num_layers=4, num_kv_heads=2, head_dim=64, block_size=16, dtype="float32"),
}
COUNTS = (1, 8, 64, 256)
TRANSPORTS = {"default": {}, "tcp": {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}}


@dataclass(eq=False)
class Blocks:
    """A hold that nobody else looks at."""

    blocks: Sequence[int]

    def release(self, blocks: Sequence[int] | None = None) -> None:
        """Nothing is reused here."""


@dataclass
class Side:
    """One pod's transfers."""

    node: TransferNode
    server: RpcServer
    memory: PoolMemory
    address: str = ""
    places: list[int] = field(default_factory=list)

    def lend(self, hashes: Sequence[bytes], first: int) -> Blocks | None:
        """Whoever asks for a chain of n hashes gets the first n places."""
        return Blocks(self.places[first : len(hashes)])

    async def stop(self) -> None:
        await self.node.stop(1.0)
        await self.server.stop(0)


async def begin(name: str, role: Role, layout: KVLayout) -> Side:
    """Starts a side whose scattered blocks are the same for all."""
    count = 2 * max(COUNTS) + 8
    memory, generation = host_memory(count, layout.block_bytes), time.time_ns() // 1_000_000
    info = transfer_pb2.InfoResponse(
        protocol_version=PROTOCOL_VERSION,
        pod=name,
        generation=generation,
        role=role_to_pb(role),
        layout=layout_to_pb(layout),
        fingerprint=layout.fingerprint,
        num_blocks=count,
        pid=os.getpid(),
        boot_id=host_boot_id(),
    )
    server = RpcServer("127.0.0.1", 0)
    node = TransferNode(
        backend=NixlBackend(),
        memory=memory,
        info=lambda: info,
        signer=Signer(SECRET, name, generation),
        address=lambda: side.address,
        lend=lambda hashes, first: side.lend(hashes, first),  # noqa: PLW0108 - side comes after the node
    )
    side = Side(node, server, memory)
    side.places = random.Random(1).sample(range(0, count, 2), max(COUNTS))
    for block in side.places:
        memory.write_block(block, block.to_bytes(4, "big") * (layout.block_bytes // 4))
    server.add(transfer_pb2_grpc.add_TransferServicer_to_server, node.servicer, "baton.v1.Transfer")
    await node.start()
    side.address = f"127.0.0.1:{await server.start()}"
    return side


async def hold(layout: KVLayout) -> None:
    """The child: lends until its input ends."""
    die_with_parent()
    side = await begin("holder", Role.DECODE, layout)
    sys.stdout.write(json.dumps({"address": side.address}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await side.stop()


async def pull(side: Side, holder: Holder, count: int, *, read: bool) -> float:
    """Seconds of one pull of `count` blocks; their content is checked."""
    places = [block + 1 for block in side.places[:count]]
    wanted = Wanted(
        request_id="r",
        hashes=[i.to_bytes(16, "big") for i in range(1, count + 1)],
        first_block=0,
        blocks=places,
        hold=Blocks(places),
        timeout_s=60.0,
    )
    began = time.perf_counter()
    got = await side.node.pull(holder, wanted, read=read)
    seconds = time.perf_counter() - began
    assert got.blocks == count, got
    for mine, theirs in ((places[0], side.places[0]), (places[-1], side.places[count - 1])):
        assert side.memory.read_block(mine)[:4] == theirs.to_bytes(4, "big"), "other bytes arrived"
    return seconds


async def measure(kib: int, repeats: int) -> list[dict[str, Any]]:
    """One process pair; rows of every count and both ways."""
    layout, rows = LAYOUTS[kib], []
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--hold", str(kib)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    address = json.loads(await child.stdout.readline())["address"]
    side, holder = await begin("puller", Role.PREFILL, layout), Holder("holder", 0, address)
    try:
        for mode in ("push", "read"):
            first_s = await pull(side, holder, 1, read=mode == "read")
            for count in COUNTS:
                seconds = [await pull(side, holder, count, read=mode == "read") for _ in range(repeats)]
                median = statistics.median(seconds)
                rows.append(
                    {
                        "mode": mode,
                        "block_kib": kib,
                        "blocks": count,
                        "first_ms": round(first_s * 1e3, 2),
                        "median_ms": round(median * 1e3, 3),
                        "p90_ms": round(sorted(seconds)[int(0.9 * (len(seconds) - 1))] * 1e3, 3),
                        "gb_s": round(count * layout.block_bytes / median / 1e9, 3),
                    }
                )
    finally:
        child.stdin.close()
        await child.wait()
        await side.stop()
    return rows


def of_transport(name: str, repeats: int) -> list[dict[str, Any]]:
    """Rows of one transport: UCX reads its settings when its process starts, so in a process of their own."""
    argv = [sys.executable, __file__, "--rows", "--repeats", str(repeats)]
    done = subprocess.run(argv, env={**os.environ, **TRANSPORTS[name]}, stdout=subprocess.PIPE, text=True, check=True)
    return [{"transport": name, **row} for row in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--hold", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rows", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.hold:
        asyncio.run(hold(LAYOUTS[args.hold]))
        return
    if args.rows:
        print(json.dumps([row for kib in LAYOUTS for row in asyncio.run(measure(kib, args.repeats))]))
        return
    rows = [row for name in TRANSPORTS for row in of_transport(name, args.repeats)]
    for row in rows:
        print(json.dumps(row))
    main_rows = [row for row in rows if row["transport"] == "default" and row["block_kib"] == 720]
    metrics: dict[str, float] = {}
    for row in main_rows:
        metrics[f"{row['mode']}_ms_{row['blocks']}"] = row["median_ms"]
        metrics[f"{row['mode']}_gb_s"] = row["gb_s"]
        metrics[f"first_{row['mode']}_ms"] = row["first_ms"]
    report.write(args.out, "pull-cpu", metrics, "nixl-cu13", "grpcio", rows=rows)


if __name__ == "__main__":
    main()
