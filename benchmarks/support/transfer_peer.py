"""The transfer code of one pod (TransferNode, NIXL and gRPC) over a pool of its own, and a second process with another.

The two processes have different GPUs if there are two.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from cli.gpus import assign_gpus, visible_gpus
from common.auth import CallGuard, Signer
from common.kv_layout import KVLayout
from common.pb import transfer_pb2, transfer_pb2_grpc
from common.process.lifecycle import host_boot_id
from common.process.tether import tether_command
from common.rpc import RpcServer
from common.types import Role
from common.wire import PROTOCOL_VERSION, layout_to_pb, role_to_pb
from kv_transfer.backend.nixl import NixlBackend
from kv_transfer.memory import PoolMemory, device_pool, host_pool
from kv_transfer.node import TransferNode


@dataclass(eq=False)
class FreePin:
    """Pinned blocks without an owner."""

    blocks: Sequence[int]

    def release(self, blocks: Sequence[int] | None = None) -> None:
        """Does nothing: a benchmark reuses blocks itself."""


@dataclass(frozen=True, slots=True)
class TransferPeer:
    name: str
    address: str
    node: TransferNode
    memory: PoolMemory


@asynccontextmanager
async def transfer_peer(
    role: Role, layout: KVLayout, num_blocks: int, device: str, **options: Any
) -> AsyncIterator[TransferPeer]:
    """Runs a transfer node with its pool and its server. options: of TransferNode."""
    make_pool = host_pool if device == "cpu" else device_pool
    memory, generation = make_pool(num_blocks, layout.block_bytes), time.time_ns() // 1_000_000
    info = transfer_pb2.InfoResponse(
        protocol_version=PROTOCOL_VERSION,
        pod=f"bench-{role.value}-{os.getpid()}",
        generation=generation,
        role=role_to_pb(role),
        layout=layout_to_pb(layout),
        fingerprint=layout.fingerprint,
        num_blocks=num_blocks,
        pid=os.getpid(),
        boot_id=host_boot_id(),
    )
    signer = Signer(b"one benchmark", role.value, info.pod, generation)
    server, address = RpcServer("127.0.0.1", 0, interceptors=(CallGuard(signer),)), ""
    node = TransferNode(
        backend=NixlBackend(),
        memory=memory,
        info=lambda: info,
        signer=signer,
        address=lambda: address,
        **options,
    )
    server.add_servicer(transfer_pb2_grpc.add_TransferServicer_to_server, node.servicer, "baton.v1.Transfer")
    await node.start()
    address = f"127.0.0.1:{await server.start()}"
    try:
        yield TransferPeer(info.pod, address, node, memory)
    finally:
        await node.stop(1.0)
        await server.stop(0)


@functools.cache
def _other_env(device: str) -> dict[str, str]:
    """Gives this process its GPU. Returns the environment of the other process."""
    own, other = assign_gpus(2, () if device == "cpu" else visible_gpus())
    if own is None or other is None:
        return dict(os.environ)
    os.environ["CUDA_VISIBLE_DEVICES"] = own[0].id
    return {**os.environ, "CUDA_VISIBLE_DEVICES": other[0].id}


Ask = Callable[[object], Awaitable[Any]]  # Sends a question to the other process. Returns its answer.


@asynccontextmanager
async def other_process(script: str, *flags: str, device: str) -> AsyncIterator[tuple[Any, Ask]]:
    """Runs a script that calls `answer_lines`. Yields its greeting, and the function that asks it."""
    argv = tether_command([sys.executable, script, "--device", device, *flags])
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*argv, env=_other_env(device), stdin=pipe, stdout=pipe)
    assert child.stdin is not None
    assert child.stdout is not None
    stdin, stdout = child.stdin, child.stdout

    async def read() -> Any:
        if not (line := await stdout.readline()):
            raise SystemExit("the other process has ended")
        return json.loads(line)

    async def ask(question: object) -> Any:
        stdin.write(json.dumps(question).encode() + b"\n")
        return await read()

    try:
        yield await read(), ask
        stdin.close()
        await asyncio.wait_for(child.wait(), 30.0)
    finally:
        if child.returncode is None:
            child.kill()


async def answer_lines(greeting: object, answer: Callable[[Any], object] = lambda _: None) -> None:
    """Prints the greeting as JSON, then the answer to each line of JSON from stdin, until stdin ends."""
    print(json.dumps(greeting), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(answer(json.loads(line))), flush=True)
