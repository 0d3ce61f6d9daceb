"""Tensor-parallel ranks as threads of this process: real channels and gloo, without the start of processes."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from common.errors import Unavailable
from common.process.rank_channel import RankChannel
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv.kv_pool import KVPool
from engine.parallel.rank import Rank
from engine.parallel.rank_group import ENGINE_CHANNEL, HOST_CHANNEL, RankGroup
from kv_transfer.backend.interface import Backend
from kv_transfer.backend.loopback import LoopbackBackend, LoopbackFabric
from kv_transfer.backend.sharded import RankBackendServer
from pod.rank import TRANSFER_CHANNEL, pool_memory


class ThreadRanks:
    """Starts groups of thread ranks. With `make_backend`, the ranks have transfer agents too."""

    def __init__(self, make_backend: Callable[[], Backend] | None = None) -> None:
        self._make_backend = make_backend
        self.threads: list[threading.Thread] = []
        self.channels: list[list[RankChannel]] = []  #: Of each rank, in the order of their start.

    def start(self, config: EngineConfig) -> RankGroup:
        """Has the meaning of `RankGroup.start`."""
        kinds = [ENGINE_CHANNEL, HOST_CHANNEL] + ([TRANSFER_CHANNEL] if self._make_backend else [])
        group, secret = RankGroup(config.tensor_parallel_size, kinds), secrets.token_hex(8)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            for rank in range(1, config.tensor_parallel_size):
                thread = threading.Thread(target=self._run, args=(rank, port, secret, kinds), daemon=True)
                thread.start()
                self.threads.append(thread)
            group._watch({}, {})
            group._accept_ranks(listener, secret.encode(), time.monotonic() + 60.0)
        return group

    def _run(self, rank: int, port: int, secret: str, kinds: list[str]) -> None:
        opened = [RankChannel.connect("127.0.0.1", port, secret.encode(), "rank 0", kind, rank=rank) for kind in kinds]
        self.channels.append(opened)
        pools: list[KVPool] = []
        if self._make_backend is not None:
            server = RankBackendServer(opened[2], self._make_backend, lambda: pool_memory(pools[-1]))
            threading.Thread(target=_quietly, args=(server.run,), daemon=True).start()
        _quietly(Rank(rank, opened[0], opened[1], pools.append).run)

    def join(self) -> None:
        """Waits until the ranks have ended."""
        for thread in self.threads:
            thread.join(60.0)
            assert not thread.is_alive()


def _quietly(run: Callable[[], object]) -> None:
    """Runs a rank. The end of rank 0 ends it."""
    with suppress(Unavailable):
        run()


@contextmanager
def thread_ranks(fabric: LoopbackFabric | None = None) -> Iterator[ThreadRanks]:
    """Engines and pods that are made in this context have thread ranks. Pods use the fabric."""
    ranks = ThreadRanks(None if fabric is None else lambda: LoopbackBackend(fabric))

    def start_for_pod(_config: Any, engine: EngineConfig) -> RankGroup:
        return ranks.start(engine)

    defaults = Engine.__init__.__kwdefaults__
    assert defaults is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pod.runtime.start_ranks", start_for_pod)
        patch.setitem(defaults, "start_ranks", ranks.start)
        if fabric is not None:
            patch.setattr("pod.rank.make_backend", lambda *_: LoopbackBackend(fabric))
        yield ranks
