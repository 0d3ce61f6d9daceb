"""A pod in a separate process, driven by JSON lines on stdin: python -m ...transfer_child ROLE NAME PORT.

TRANSFER_HOST is the address that it listens at. TRANSFER_PROBE_S is the period of probes. With TRANSFER_STAGING_DIR all
KV goes through host memory, shared in that directory ("none": not shared).
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import time
from typing import Any

from common.auth import CallGuard, Signer
from common.errors import BatonError
from common.pb import transfer_pb2, transfer_pb2_grpc, types_pb2
from common.process.lifecycle import host_boot_id
from common.process.tether import die_with_parent
from common.rpc import RpcServer
from common.types import Role
from common.wire import kv_target_from_pb, kv_target_to_pb, layout_to_pb, role_to_pb
from kv_transfer.backend.interface import Backend
from kv_transfer.backend.nixl import NixlBackend
from kv_transfer.backend.staged import StagedBackend
from kv_transfer.backend.staging.agent import StagingOptions
from kv_transfer.backend.staging.copiers import make_copier
from kv_transfer.memory import host_pool
from kv_transfer.node import TransferNode
from kv_transfer.peers.pair_prober import PAIR_PROBE_S
from tests.rigs.transfer.faulty_backend import FaultyBackend, WriteFaultPlan
from tests.rigs.transfer.transfer_pods import LAYOUT, NUM_BLOCKS, SECRET, STAGING_BLOCKS, FakePin, Incoming, Pod


async def main(role: Role, name: str, port: int) -> None:
    generation = time.time_ns() // 1_000_000
    memory = host_pool(NUM_BLOCKS, LAYOUT.block_bytes)
    backend = FaultyBackend(make_backend())
    host = os.environ.get("TRANSFER_HOST", "127.0.0.1")
    signer = Signer(SECRET, role.value, name, generation)
    server = RpcServer(host, port, interceptors=(CallGuard(signer),))
    info = transfer_pb2.InfoResponse(
        protocol_version=1,
        pod=name,
        generation=generation,
        role=role_to_pb(role),
        layout=layout_to_pb(LAYOUT),
        fingerprint=LAYOUT.fingerprint,
        num_blocks=NUM_BLOCKS,
        pid=os.getpid(),
        boot_id=host_boot_id(),
    )
    node = TransferNode(
        backend=backend,
        memory=memory,
        info=lambda: info,
        signer=signer,
        address=lambda: pod.address,
        checksums=True,
        pair_probe_s=float(os.environ.get("TRANSFER_PROBE_S", PAIR_PROBE_S)),
    )
    pod = Pod(name, generation, node, server, memory, backend, LAYOUT, f"{role.value}-{name}-{generation}")
    server.add_servicer(transfer_pb2_grpc.add_TransferServicer_to_server, node.servicer, "baton.v1.Transfer")
    await node.start()
    pod.address = f"{host}:{await server.start()}"
    pod.fill(os.environ.get("TRANSFER_SEED", 9))
    incoming: dict[str, Incoming] = {}
    sending: dict[str, asyncio.Task[str]] = {}
    say({"address": pod.address, "generation": generation, "pid": os.getpid()})
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        order: dict[str, Any] = json.loads(line)
        match order["op"]:
            case "reserve":
                incoming[order["id"]] = got = pod.reserve(order["id"], 0, order["blocks"], order["deadline_s"])
                target = base64.b64encode(kv_target_to_pb(got.target).SerializeToString()).decode()
                say({"target": target, "digests": [d.hex() for d in pod.digest(order["blocks"])]})
            case "send":
                target = kv_target_from_pb(types_pb2.KvTarget.FromString(base64.b64decode(order["target"])))
                # so that a pending write belongs to the transfer, not to the probe
                await node.connect(target.address, target.pod)
                backend.on_write = lambda _p, _l, _r, d=order["delay_s"]: WriteFaultPlan(delay_s=d)
                blocks = target.blocks
                transfer = node.start_transfer(target, order["id"], len(blocks), 60.0)
                transfer.push(0, blocks, FakePin(list(blocks)))
                transfer.finish([1], [None])
                sending[order["id"]] = asyncio.create_task(outcome(transfer.done()))
                say({})
            case "pairs":
                pairs = node.pair_stats()
                say({p.pod: {"transport": p.transport, "age_s": p.block_age_s, "trouble": p.trouble} for p in pairs})
            case "digest":
                say({"digests": [d.hex() for d in pod.digest(order["blocks"])]})
            case "state":
                stats = node.stats()
                say(
                    {
                        "ready": [i for i, got in incoming.items() if got.ready],
                        "failed": [i for i, got in incoming.items() if got.failed],
                        "held": {i: sorted(got.pin.left) for i, got in incoming.items()},
                        "pending": stats.pending_writes,
                        "sent": {i: task.result() for i, task in sending.items() if task.done()},
                    }
                )


def make_backend() -> Backend:
    directory = os.environ.get("TRANSFER_STAGING_DIR")
    if directory is None:
        return NixlBackend()
    shared = None if directory == "none" else directory
    options = StagingOptions(STAGING_BLOCKS * LAYOUT.block_bytes, shared, always=True)
    return StagedBackend(NixlBackend(), NixlBackend, make_copier, options)


async def outcome(done: Any) -> str:
    try:
        await done
    except BatonError as e:
        return e.kind
    return "done"


def say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main(Role(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
