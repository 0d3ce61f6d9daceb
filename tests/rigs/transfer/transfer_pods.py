"""Pods for transfer tests: a node, its gRPC server, a small pool, and pins that fail on misuse."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from common.auth import CallGuard, Signer
from common.errors import BatonError
from common.kv_layout import KVLayout
from common.pb import transfer_pb2, transfer_pb2_grpc
from common.rpc import RpcServer
from common.types import KvTarget, Role
from common.wire import layout_to_pb, role_to_pb
from kv_transfer.backend.interface import Backend
from kv_transfer.backend.loopback import LoopbackBackend, LoopbackFabric
from kv_transfer.backend.nixl import NixlBackend
from kv_transfer.backend.staged import StagedBackend
from kv_transfer.backend.staging.agent import StagingOptions
from kv_transfer.backend.staging.copiers import make_copier
from kv_transfer.memory import MemoryKind, PoolMemory, host_pool
from kv_transfer.messages import Commit
from kv_transfer.node import TransferNode
from kv_transfer.peers.pair_prober import PAIR_PROBE_S
from tests.rigs.transfer.faulty_backend import FaultyBackend, WriteFaultPlan
from tests.rigs.waiting import Clock, until

LAYOUT = KVLayout("test", "r1", num_layers=2, num_kv_heads=2, head_dim=32, block_size=16, dtype="float32")
SECRET = b"the cluster's secret"
NUM_BLOCKS = 128
STAGING_BLOCKS = 64  # Room for three writers with windows of 16 blocks


@dataclass(eq=False)
class FakePin:
    """A pin that records releases. Releasing a foreign block fails the test."""

    blocks: list[int]
    left: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.left = set(self.blocks)

    def release(self, blocks: Sequence[int] | None = None) -> None:
        gone = set(self.blocks) if blocks is None else set(blocks)
        assert gone <= set(self.blocks)
        self.left -= gone

    @property
    def free(self) -> bool:
        return not self.left


@dataclass(eq=False)
class Incoming:
    """One expected transfer and its outcome."""

    target: KvTarget
    pin: FakePin
    ready: list[Commit] = field(default_factory=list)
    failed: list[BatonError] = field(default_factory=list)
    pin_was_free: list[bool] = field(default_factory=list)

    @property
    def committed(self) -> list[Commit]:
        """The commits that arrived, without checksums."""
        return [replace(commit, checksums=()) for commit in self.ready]

    @property
    def over(self) -> bool:
        assert len(self.ready) + len(self.failed) <= 1
        return bool(self.ready or self.failed)


@dataclass(eq=False)
class Pod:
    name: str
    generation: int
    node: TransferNode
    server: RpcServer
    memory: PoolMemory
    backend: FaultyBackend
    layout: KVLayout
    agent: str
    clock: Clock = field(default_factory=Clock)  # clock of `backend`: delayed writes are due by it
    address: str = ""
    cache: dict[bytes, int] = field(default_factory=dict)
    lent: list[FakePin] = field(default_factory=list)

    def lend(self, hashes: Sequence[bytes], first: int) -> FakePin | None:
        blocks = [self.cache[h] for h in itertools.takewhile(self.cache.__contains__, hashes)][first:]
        if not blocks:
            return None
        self.lent.append(FakePin(blocks))
        return self.lent[-1]

    def release_late_writes(self) -> None:
        """Makes delayed writes due now. Later writes are not delayed."""
        self.backend.on_write = lambda _p, _l, _r: WriteFaultPlan()
        self.clock.ahead_s += 3600.0

    def fill(self, seed: int | str) -> None:
        rng = random.Random(seed)
        for block in range(NUM_BLOCKS):
            self.memory.write_block(block, rng.randbytes(self.memory.block_bytes))

    def digest(self, blocks: Sequence[int]) -> list[bytes]:
        return [hashlib.blake2b(self.memory.read_block(block)).digest() for block in blocks]

    def reserve(self, request_id: str, first: int, blocks: Sequence[int], deadline_s: float = 30.0) -> Incoming:
        pin = FakePin(list(blocks))

        def on_ready(commit: Commit) -> None:
            incoming.pin_was_free.append(pin.free)
            incoming.ready.append(commit)

        failed: list[BatonError] = []
        target = self.node.expect_transfer(
            request_id=request_id,
            first_block=first,
            blocks=blocks,
            pin=pin,
            deadline_s=deadline_s,
            on_ready=on_ready,
            on_failed=failed.append,
        )
        incoming = Incoming(target, pin, failed=failed)
        return incoming

    async def stop(self, grace_s: float = 1.0) -> None:
        await self.node.stop(grace_s)
        await self.server.stop(0)

    async def crash(self) -> None:
        """Ends the server and the thread without a message to other pods. A loopback agent dies too."""
        await self.server.stop(0)
        await self.node.stop(0)


class Cluster:
    """Starts pods on one backend kind and stops them all.

    Kinds: loopback, nixl, through host memory staged, staged-shm, staged-nixl and staged-nixl-shm, and with a choice
    between the two auto and auto-shm.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fabric = LoopbackFabric()
        self.pods: list[Pod] = []
        self.generation = time.time_ns() // 1_000_000
        self.pair_probe_s = PAIR_PROBE_S  # Of pods that are started from now on

    def backend(self) -> Backend:
        if self.kind.startswith(("staged", "auto")):
            return StagedBackend(self._direct(), self._direct, make_copier, self._staging())
        return self._direct()

    def _direct(self) -> Backend:
        return NixlBackend() if "nixl" in self.kind else LoopbackBackend(self.fabric)

    def _staging(self) -> StagingOptions:
        """Returns a small area, so that a transfer has many pieces and waits for slots."""
        directory = "/dev/shm" if "shm" in self.kind else None
        return StagingOptions(STAGING_BLOCKS * LAYOUT.block_bytes, directory, always=self.kind.startswith("staged"))

    async def start(
        self,
        name: str,
        role: Role,
        *,
        layout: KVLayout = LAYOUT,
        secret: bytes = SECRET,
        checksums: bool = True,
        allow_tcp: bool = False,
        port: int = 0,
        kind: MemoryKind = "DRAM",
    ) -> Pod:
        self.generation += 1
        generation = self.generation
        memory = replace(host_pool(NUM_BLOCKS, layout.block_bytes), kind=kind)
        clock = Clock()
        backend = FaultyBackend(self.backend(), clock)
        signer = Signer(secret, role.value, name, generation)
        server = RpcServer("127.0.0.1", port, interceptors=(CallGuard(signer),))
        info = transfer_pb2.InfoResponse(
            protocol_version=1,
            pod=name,
            generation=generation,
            role=role_to_pb(role),
            layout=layout_to_pb(layout),
            fingerprint=layout.fingerprint,
            num_blocks=NUM_BLOCKS,
        )
        node = TransferNode(
            backend=backend,
            memory=memory,
            info=lambda: info,
            signer=signer,
            address=lambda: pod.address,
            lend=lambda hashes, first: pod.lend(hashes, first),
            checksums=checksums,
            allow_tcp=allow_tcp,
            pair_probe_s=self.pair_probe_s,
        )
        pod = Pod(name, generation, node, server, memory, backend, layout, f"{role.value}-{name}-{generation}", clock)
        server.add_servicer(transfer_pb2_grpc.add_TransferServicer_to_server, node.servicer, "baton.v1.Transfer")
        await node.start()
        pod.address = f"127.0.0.1:{await server.start()}"
        self.pods.append(pod)
        return pod

    async def pair(self, *, checksums: bool = True, prefill_port: int = 0, decode_port: int = 0) -> tuple[Pod, Pod]:
        prefill = await self.start("prefill-0", Role.PREFILL, checksums=checksums, port=prefill_port)
        decode = await self.start("decode-0", Role.DECODE, checksums=checksums, port=decode_port)
        prefill.fill(1)
        decode.fill(2)
        return prefill, decode

    async def stop(self) -> None:
        for pod in self.pods:
            await pod.stop()


def chunks(rng: random.Random, first: int, total: int) -> list[tuple[int, int]]:
    """Random pushes (first, count) that cover logical blocks first..total."""
    pieces = []
    while first < total:
        count = rng.randint(1, min(9, total - first))
        pieces.append((first, count))
        first += count
    return pieces


async def hand_over(
    prefill: Pod,
    decode: Pod,
    seed: int,
    *,
    num_blocks: int = 40,
    first: int = 0,
    target_blocks: list[int] | None = None,
) -> None:
    """One whole transfer with random pushes between random blocks, checked byte by byte."""
    rng = random.Random(seed)
    source = rng.sample(range(NUM_BLOCKS), num_blocks)
    target_blocks = target_blocks or rng.sample(range(NUM_BLOCKS), num_blocks)
    incoming = decode.reserve(f"r{seed}", first, target_blocks[first:])
    transfer = prefill.node.start_transfer(incoming.target, f"r{seed}", num_blocks, 30.0)
    pins = []
    for start, count in chunks(rng, 0, num_blocks):
        pins.append(FakePin(source[start : start + count]))
        transfer.push(start, source[start : start + count], pins[-1])
        if rng.random() < 0.5:
            await asyncio.sleep(0.001)
    transfer.finish([7], [None])
    report = await transfer.done()
    await until(lambda: incoming.over)
    assert incoming.committed == [Commit((7,), (None,))]
    assert incoming.pin_was_free == [True]
    assert all(pin.free for pin in pins)
    assert report.blocks == num_blocks - first
    assert report.bytes == report.blocks * LAYOUT.block_bytes
    assert decode.digest(target_blocks[first:]) == prefill.digest(source[first:])
    decode.node.release(incoming.target.transfer_id)
