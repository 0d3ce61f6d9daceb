"""A Valkey in cluster mode, in which a script that leaves its slot fails, with publishing pods and a reader."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from cli.stack.valkey import EmbeddedValkey
from common.block_hash import hash_blocks
from common.redis.client import connect_redis
from common.types import PodLoad, Role
from prefix_index.publisher import IndexPublisher
from prefix_index.reader import IndexReader
from prefix_index.store import BookingCandidate, IndexKeys, PodRecord, PodStatus
from tests.rigs.waiting import until

SCOPE = "00112233"
FINGERPRINT = SCOPE * 4
RECORD = PodRecord("decode-0", 1_000, "127.0.0.1:5", Role.DECODE, "smol", SCOPE, FINGERPRINT, 16, 2048, 99)


def chain(seed: int, length: int) -> list[bytes]:
    rng = random.Random(seed)
    tokens = [rng.randrange(50_000) for _ in range(16 * length)]
    return hash_blocks(tokens, fingerprint=FINGERPRINT, block_size=16)


class FakePool:
    """A block pool that reports changes to its publisher under a lock, like the real one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.hashes: set[bytes] = set()
        self.index: IndexPublisher | None = None

    def store(self, hashes: list[bytes]) -> None:
        with self.lock:
            self.hashes.update(hashes)
            if self.index is not None:
                self.index.stored(hashes)

    def evict(self, hashes: list[bytes]) -> None:
        with self.lock:
            self.hashes.difference_update(hashes)
            if self.index is not None:
                self.index.evicted(hashes)

    def snapshot(self) -> list[bytes]:
        with self.lock:
            return list(self.hashes)


class Rig:
    """One Valkey, a client and a reader; `pod` adds pods."""

    def __init__(self, valkey: EmbeddedValkey, url: str) -> None:
        self.valkey = valkey
        self.url = url
        self.raw: Any = connect_redis(url, timeout_s=5.0)
        self._readers = [IndexReader(url, timeout_s=5.0)]
        self.reader = self._readers[0]

    async def __aenter__(self) -> Rig:
        await self.wipe()
        return self

    async def __aexit__(self, *_: object) -> None:
        for reader in self._readers:
            await reader.close()
        await self.raw.aclose()

    @asynccontextmanager
    async def pod(
        self, record: PodRecord = RECORD, hashes: list[bytes] | None = None, load: PodLoad | None = None
    ) -> AsyncIterator[FakePool]:
        pool = FakePool()
        pool.store(hashes or [])
        pool.index = IndexPublisher(self.url, record, pool.snapshot, lambda: load or PodLoad(free_blocks=7))
        await pool.index.start()
        try:
            await until(lambda: pool.index is not None and pool.index.registered)
            yield pool
        finally:
            await pool.index.stop()

    async def members(self, record: PodRecord = RECORD) -> set[bytes]:
        found: set[bytes] = await self.raw.smembers(IndexKeys(record.scope).held_blocks(record.pod, record.generation))
        return found

    async def shows(self, hashes: set[bytes], record: PodRecord = RECORD) -> None:
        """Waits until the pod's set is exactly these hashes."""
        want = {h[:8] for h in hashes}

        async def same() -> bool:
            return await self.members(record) == want

        await until(same)

    def fresh(self, clock: Callable[[], float] = time.monotonic) -> IndexReader:
        """A new reader with an empty cache, whose age is measured by this clock."""
        self._readers.append(IndexReader(self.url, timeout_s=5.0, clock=clock))
        return self._readers[-1]

    async def postings(self, scope: str = SCOPE) -> set[bytes]:
        return set(await self.raw.hkeys(IndexKeys(scope).postings))

    async def live(self) -> dict[str, PodStatus]:
        return {s.record.pod: s for s in await self.reader.pods()}

    async def wipe(self) -> None:
        await self.raw.flushall()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        assert self.valkey.pid is not None
        os.kill(self.valkey.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.valkey.pid, signal.SIGCONT)


async def book(reader: IndexReader, pod: str, request: str, tokens: int) -> int:
    """Books tokens on the pod and returns all booked tokens, including these."""
    (answer,) = await reader.book(SCOPE, request, [[BookingCandidate(pod, 0.0, 1.0, tokens, 60.0)]])
    return answer.booked[0] + tokens


@asynccontextmanager
async def one_node_cluster(directory: Path) -> AsyncIterator[tuple[EmbeddedValkey, str]]:
    """A Valkey that owns all cluster slots, and its URL."""
    with socket.socket() as bus:
        bus.bind(("127.0.0.1", 0))
        bus_port = bus.getsockname()[1]
    valkey = EmbeddedValkey(0, directory, ["--cluster-enabled", "yes", "--cluster-port", str(bus_port)], password="")
    url = await valkey.start()
    try:
        async with connect_redis(url, timeout_s=5.0) as client:

            async def up() -> bool:
                return "cluster_state:ok" in str(await client.execute_command("CLUSTER", "INFO"))

            await client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            await until(up)
        yield valkey, url
    finally:
        await valkey.stop()
