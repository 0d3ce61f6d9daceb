"""The host tier of a tensor-parallel engine: every rank copies its own part of a block to its own host memory.

    rank 0: HostCopier -> MirroredHostPool <-- channel "host" --> rank r: RankHostTier, on its own thread

A copy has ended when it has ended on all ranks. Rank r runs behind rank 0, so a copy names the number of engine
messages that rank 0 had sent before: rank r copies after it has handled those. A step in progress never needs a copy,
so that wait ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np
import torch

from common.errors import InternalError, Unavailable, describe
from common.process.rank_channel import RankChannel, RankMessage
from engine.device import make_current
from engine.kv.kv_pool import KVPool
from engine.kv.tiers.host_copier import HostKVPool, checksum
from engine.parallel.rank_group import HOST_CHANNEL, RankGroup

_log = logging.getLogger(__name__)
COPY_S = 60.0  # Longest time of one copy on a rank.


class MirroredHostPool(HostKVPool):
    """Rank 0's host memory. The other ranks make the same copies at the same time."""

    def __init__(self, pool: KVPool, num_host_blocks: int, rank_group: RankGroup, *, checksums: bool) -> None:
        rank_group.call("host", num_host_blocks=num_host_blocks, checksums=checksums)
        super().__init__(pool, num_host_blocks)
        self._rank_group = rank_group
        self._damaged = 0
        self._open_copies = 0

    def save(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        self._send("save", blocks, host_blocks)
        super().save(blocks, host_blocks)

    def load(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        self._send("load", blocks, host_blocks)
        super().load(host_blocks, blocks)

    def wait(self) -> None:
        super().wait()
        while self._open_copies:
            self._open_copies -= 1
            for channel in self._rank_group.channels(HOST_CHANNEL):
                message = channel.receive(COPY_S)
                if message.kind != "copied":
                    raise InternalError(f"{channel.name}: the host tier failed: {message.fields.get('error')}")
                self._damaged += message.fields["damaged"]

    def damaged_elsewhere(self) -> int:
        damaged, self._damaged = self._damaged, 0
        return damaged

    def _send(self, kind: str, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        pairs, after = np.array([blocks, host_blocks], dtype=np.int32).tobytes(), self._rank_group.num_sent
        self._open_copies += 1
        for channel in self._rank_group.channels(HOST_CHANNEL):
            channel.send(kind, pairs, after=after)


class RankHostTier:
    """The host memory of another rank, and the thread that makes its copies."""

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel
        self._handled = 0  # Engine messages that this rank has handled.
        self._changed = threading.Condition()
        self._memory: HostKVPool | None = None
        self._sums: dict[int, int] | None = None  # CRC-32 of each host block in use; None without checksums.

    def open(self, pool: KVPool, num_host_blocks: int, *, checksums: bool) -> None:
        """Allocates the memory and starts the thread. ConfigError if the memory cannot be page-locked."""
        self._memory, self._sums = HostKVPool(pool, num_host_blocks), {} if checksums else None
        threading.Thread(target=self._run, name="host-tier", daemon=True).start()

    def on_handled(self) -> None:
        """Counts an engine message that the main thread has handled."""
        with self._changed:
            self._handled += 1
            self._changed.notify()

    def _run(self) -> None:
        assert self._memory is not None
        make_current(self._memory.pool.data.device)
        try:
            while (message := self._channel.receive()).kind != "stop":
                self._channel.send("copied", damaged=self._copy(self._memory, message))
        except Unavailable:
            _log.info("rank 0 has ended")
        except Exception as error:
            _log.exception("the host tier of this rank failed")
            self._channel.send("failed", error=describe(error))
        self._memory.close()

    def _copy(self, memory: HostKVPool, message: RankMessage) -> int:
        """Makes one copy. Returns the number of blocks that came back from the host with a wrong checksum."""
        blocks, host_blocks = np.frombuffer(message.payload, dtype=np.int32).reshape(2, -1).tolist()
        with self._changed:
            if not self._changed.wait_for(lambda: self._handled >= message.fields["after"], COPY_S):
                raise InternalError(f"this rank is {message.fields['after'] - self._handled} messages late")
        if memory.pool.data.device.type == "cuda":
            torch.cuda.default_stream().synchronize()  # the messages have been launched
        if message.kind == "save":
            memory.save(blocks, host_blocks)
            memory.wait()
            if self._sums is not None:
                self._sums |= {host: memory.checksum(host) for host in host_blocks}
            return 0
        memory.load(host_blocks, blocks)
        memory.wait()
        sums = self._sums
        if sums is None:
            return 0
        return sum(checksum(memory.pool, block) != sums[host] for block, host in zip(blocks, host_blocks, strict=True))
