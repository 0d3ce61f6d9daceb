"""The probe of a connection: random bytes go to the peer's probe block, and the peer confirms them.

write a random block --> Probe call with its digest --> intact: rate and transport are known
                                                    '-> another pod overwrote it: again
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from common.errors import TransferFailed, Unavailable
from common.pb import transfer_pb2
from kv_transfer.backend.interface import TCP_OR_UNKNOWN
from kv_transfer.memory import MemoryKind, PoolMemory
from kv_transfer.peers.connection import HANDSHAKE_S, PeerConnection
from kv_transfer.peers.rpc_client import PeerRpcClient
from kv_transfer.transfer_thread import TransferThread

PROBE_WRITE_S = 10.0  #: Time limit of a write. UCX connects lazily: the first write can take seconds.
PROBE_CALL_S = 5.0  #: Time limit of the Probe call of a connection that passed before.
PROBE_TRIES = 8
#: Max bytes of the write that measures the rate. On a GPU it takes long enough that the time between polls is little.
PROBE_BURST_BYTES: dict[MemoryKind, int] = {"DRAM": 8 << 20, "VRAM": 256 << 20}
PROBE_BURST_BLOCKS = 128
NONCE_BYTES = 16
RANDOM_BYTES = 64 << 10  #: A probe block repeats these random bytes.


@dataclass(eq=False)
class ConnectionProbe:
    """Probes a connection, when it is called. Owned by the event loop."""

    thread: TransferThread
    rpc: PeerRpcClient
    memory: PoolMemory
    info: Callable[[], transfer_pb2.InfoResponse]
    clock: Callable[[], float]
    allow_tcp: bool  #: KV in GPU memory may travel over TCP or an unknown transport.

    def __post_init__(self) -> None:
        self._lock = asyncio.Lock()  #: Guards this pod's probe block.

    async def __call__(self, connection: PeerConnection, *, keep_alive: bool = False) -> None:
        """Writes random blocks until the peer confirms one. Raises TransferFailed, Unavailable, DeadlineExceeded.

        The first probe of a connection measures rate and transport. A `keep_alive` probe is one block. Its first write
        has no time limit, because a write that is on its way cannot be recalled; the caller stops waiting.

        Several pods may share the peer's probe block, so a mismatch is retried. One probe at a time uses this pod's
        probe block. The first write is outside the lock, so a peer that accepts no writes does not delay the others.
        """
        memory, info = self.memory, self.info()
        most = 1 if keep_alive else min(PROBE_BURST_BLOCKS, PROBE_BURST_BYTES[memory.kind] // memory.block_bytes)
        burst = max(1, most)
        await self._time_probe_writes(connection, 1, None if keep_alive else PROBE_WRITE_S)
        for attempt in range(PROBE_TRIES):
            if attempt:
                await asyncio.sleep(random.uniform(0.02, 0.1) * attempt)
            async with self._lock:
                nonce = os.urandom(NONCE_BYTES)
                data = _probe_block(nonce, memory.block_bytes)
                await self.thread.run(partial(memory.write_block, memory.probe_block, data))
                seconds = await self._time_probe_writes(connection, burst, PROBE_WRITE_S)
            # Without the lock: a peer that does not answer must not delay the probes of the others.
            request = transfer_pb2.ProbeRequest(
                pod=info.pod,
                generation=info.generation,
                nonce=nonce,
                digest=probe_digest(nonce, data[: connection.memory.block_bytes]),
                keep_alive=keep_alive,
            )
            to, response = (connection.address, connection.pod), transfer_pb2.ProbeResponse
            limit_s = PROBE_CALL_S if keep_alive else HANDSHAKE_S
            answer = await self.rpc.call(*to, "Probe", request, response, limit_s)
            if answer.intact:
                break
        else:
            raise TransferFailed(f"the probe block did not arrive intact on {connection.pod} in {PROBE_TRIES} tries")
        if not keep_alive:
            await self._measure(connection, burst * memory.counted_bytes / max(seconds, 1e-9) / 1e9)
        connection.block_at = self.clock()

    async def _measure(self, connection: PeerConnection, gb_s: float) -> None:
        """Sets rate and transport of a connection. Raises TransferFailed for a transport that is not allowed."""
        transport_of = partial(self.thread.backend.transport, connection.agent, same_host=connection.same_host)
        transport = await self.thread.run(transport_of)
        connection.gb_s = gb_s
        connection.transport, connection.transport_source = transport.name, transport.source
        if self.memory.kind == "VRAM" and transport.name in TCP_OR_UNKNOWN and not self.allow_tcp:
            by = "TCP" if transport.name == "tcp" else "an unknown transport"
            raise TransferFailed(f"KV in GPU memory would travel to {connection.pod} over {by}; allow_tcp permits that")

    async def _time_probe_writes(self, connection: PeerConnection, count: int, limit_s: float | None) -> float:
        """Times one write of `count` copies of the probe block, in seconds. Raises TransferFailed, Unavailable."""
        ended: Future[float] = Future()
        mine, theirs = [self.memory.probe_block] * count, [connection.probe_block] * count

        def post() -> None:
            started = self.clock()
            connection.in_flight += 1

            def on_ended(error: str | None) -> None:
                connection.in_flight -= 1
                if ended.cancelled():
                    return
                if error is None:
                    ended.set_result(self.clock() - started)
                else:
                    ended.set_exception(TransferFailed(f"the probe of {connection.pod} failed: {error}"))

            self.thread.write(connection.agent, mine, theirs, b"", on_ended)

        self.thread.submit(post)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(ended), limit_s)
        except TimeoutError as e:
            raise Unavailable(f"a probe write to {connection.pod} did not end within {limit_s:g} s") from e


def _probe_block(nonce: bytes, block_bytes: int) -> bytes:
    """Returns a block that begins with the nonce and repeats RANDOM_BYTES random bytes."""
    piece = os.urandom(min(block_bytes, RANDOM_BYTES))
    return (nonce + piece * (1 + block_bytes // len(piece)))[:block_bytes]


def probe_digest(nonce: bytes, block: bytes) -> bytes:
    """Returns BLAKE2b-128 of a probe block, keyed with the nonce at its start."""
    return hashlib.blake2b(block, digest_size=16, key=nonce).digest()
