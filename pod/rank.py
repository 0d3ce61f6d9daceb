"""Process of a further rank of a tensor-parallel pod: the engine's rank loop, and a transfer agent.

    python -m pod.rank RANK HOST:PORT SETTINGS       (see rank_command; BATON_SECRET has the group's secret)

The main thread runs the rank's loop, a second thread the agent. The process ends when either ends.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import threading
from collections.abc import Callable

from common.errors import InternalError, Unavailable
from common.logs import setup_logs
from common.process.rank_channel import RankChannel
from engine.kv.kv_pool import KVPool
from engine.parallel.rank import EXIT_ABANDONED, EXIT_FAILED, Rank, exit_with, join, serve
from engine.parallel.rank_group import ENGINE_CHANNEL, JOIN_NODES_S, JOIN_S
from kv_transfer.backend.interface import Backend
from kv_transfer.backend.rank_backend import RankBackendServer
from kv_transfer.memory import PoolMemory
from pod.transfer_backend import TRANSFER_CHANNEL, make_backend, pool_memory

_log = logging.getLogger(__name__)


class _RankPool:
    """The newest KV pool of the rank; the last pool that the engine makes is the final one.

    ready_fd: gets one byte with the first pool, when the rank has all that it needs.
    """

    def __init__(self, ready_fd: int | None) -> None:
        self._ready_fd = ready_fd
        self._kv: KVPool | None = None

    def made(self, kv: KVPool) -> None:
        if self._kv is None and self._ready_fd is not None:
            os.write(self._ready_fd, b"1")
        self._kv = kv

    def memory(self) -> PoolMemory:
        if self._kv is None:
            raise InternalError("this rank has no pool yet")
        return pool_memory(self._kv)


def _run_transfer_backend(channel: RankChannel, make: Callable[[], Backend], pool: _RankPool) -> None:
    """Runs the agent's thread. Ends the process if the agent fails."""
    code = EXIT_ABANDONED
    try:
        RankBackendServer(channel, make, pool.memory).run()
        return  # rank 0 sent stop, to the main thread too
    except Unavailable as error:
        _log.info("%s", error.message)
    except Exception:
        _log.exception("the transfer agent of this rank failed")
        code = EXIT_FAILED
    os._exit(code)


def main(argv: list[str]) -> int:
    rank, master, settings = int(argv[0]), argv[1], json.loads(argv[2])
    setup_logs(settings["log_level"], settings["log_format"])
    limit = JOIN_S if settings["ready_fd"] is None else JOIN_NODES_S  # the pod of another machine may start later
    engine, transfers = (join(rank, master, kind, limit) for kind in (ENGINE_CHANNEL, TRANSFER_CHANNEL))
    exit_with(engine)
    pool = _RankPool(settings["ready_fd"])
    make = functools.partial(make_backend, settings["transport"], settings["net_devices"])
    threading.Thread(target=_run_transfer_backend, args=(transfers, make, pool), name="agent", daemon=True).start()
    return serve(Rank(rank, engine, pool.made))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)
