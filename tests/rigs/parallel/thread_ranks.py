"""Tensor-parallel ranks as threads of this process: real channels and gloo, without the start of processes."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from common.errors import Unavailable
from common.process.rank_channel import RankChannel
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv.kv_pool import KVPool
from engine.parallel.rank import Rank
from engine.parallel.rank_group import ENGINE_KINDS, RankGroup
from kv_transfer.backend.interface import Backend
from kv_transfer.backend.loopback import LoopbackBackend, LoopbackFabric
from kv_transfer.backend.sharded import RankBackendServer
from pod.rank import TRANSFER_CHANNEL, pool_memory


class ThreadRanks:
    """Starts groups of thread ranks. With `make_backend`, the ranks have transfer agents too."""

    def __init__(self, make_backend: Callable[[], Backend] | None = None) -> None:
        self._make_backend = make_backend
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []  #: Of the ranks that have failed.
        self.channels: list[list[RankChannel]] = []  #: Of each rank, in the order of their start.

    def start(self, config: EngineConfig) -> RankGroup:
        """Has the meaning of `RankGroup.start`."""
        kinds = [*ENGINE_KINDS, *([TRANSFER_CHANNEL] if self._make_backend else [])]
        group, secret = RankGroup(config.tensor_parallel_size, kinds), secrets.token_hex(8)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            for rank in range(1, config.tensor_parallel_size):
                self.threads.append(self._start_thread(partial(self._run, rank, port, secret, kinds)))
            group._watch({}, {})
            group._accept_ranks(listener, secret.encode(), time.monotonic() + 60.0)
        return group

    def _run(self, rank: int, port: int, secret: str, kinds: list[str]) -> None:
        opened = [RankChannel.connect("127.0.0.1", port, secret.encode(), "rank 0", kind, rank=rank) for kind in kinds]
        self.channels.append(opened)
        pools: list[KVPool] = []
        if self._make_backend is not None:
            server = RankBackendServer(opened[-1], self._make_backend, lambda: pool_memory(pools[-1]))
            self._start_thread(server.run)
        Rank(rank, opened[: len(ENGINE_KINDS)], pools.append).run()

    def _start_thread(self, run: Callable[[], object]) -> threading.Thread:
        """Runs a part of a rank on a thread, which may outlive its test: an error on it would fail another test."""

        def guarded() -> None:
            try:
                run()
            except Unavailable:
                pass  # rank 0 has ended
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=guarded, name="rank", daemon=True)
        thread.start()
        return thread

    def join(self) -> None:
        """Waits until the ranks have ended, and raises the error of the first rank that has failed."""
        for thread in self.threads:
            thread.join(60.0)
            assert not thread.is_alive()
        if self.errors:
            raise self.errors[0]


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
