"""Transfer agents of a pod and its ranks; and the process of a further rank of a tensor-parallel pod.

    python -m pod.rank RANK HOST:PORT SETTINGS       (see rank_command; BATON_SECRET has the group's secret)

The main thread of that process runs the engine's rank loop, a second thread the agent. It ends when either ends.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import InternalError, Unavailable
from common.kv_layout import KVLayout
from common.logs import setup_logs
from common.process.rank_channel import MEMBER_ROLES, RankChannel
from common.settings.pod import PodConfig, WorkerConfig
from common.tls import TlsFiles
from engine.config import EngineConfig
from engine.kv.kv_pool import KVPool
from engine.parallel.rank import EXIT_ABANDONED, EXIT_FAILED, Rank, exit_with, join, serve
from engine.parallel.rank_group import ENGINE_KINDS, JOIN_NODES_S, JOIN_S, RankGroup
from kv_transfer.backend.interface import Backend
from kv_transfer.backend.loopback import LoopbackBackend, LoopbackFabric
from kv_transfer.backend.nixl import NixlBackend
from kv_transfer.backend.sharded import RankBackendClient, RankBackendServer, ShardedBackend
from kv_transfer.backend.staged import StagedBackend
from kv_transfer.backend.staging.agent import StagingOptions
from kv_transfer.backend.staging.copiers import make_copier
from kv_transfer.memory import PoolMemory

_log = logging.getLogger(__name__)

TRANSFER_CHANNEL = "transfers"  # Kind of the channel of a rank's agent

BackendFactory = Callable[[PodConfig], Backend]


def make_backend(transport: str, net_devices: str | None) -> Backend:
    """Returns the backend of one process. Loopback has a fabric of its own, so only an aggregated pod can use it."""
    return NixlBackend(net_devices) if transport == "nixl" else LoopbackBackend(LoopbackFabric())


def start_ranks(config: PodConfig, engine: EngineConfig) -> RankGroup:
    """Starts the other ranks of a pod, each with an agent. Ranks on other machines need the cluster's secret."""
    return RankGroup.start(
        engine,
        secret=config.secret if engine.tensor_parallel_nodes > 1 else None,
        command=functools.partial(rank_command, config),
        kinds=(*ENGINE_KINDS, TRANSFER_CHANNEL),
        tls=TlsFiles.of_directory(_group_tls_dir(config), config.role.value),
    )


def _group_tls_dir(config: PodConfig | WorkerConfig) -> str | None:
    """The certificates for the channels of a group; none for a group of one machine, which uses the loopback."""
    return config.tls_dir if config.tensor_parallel_nodes > 1 else None


def rank_command(config: PodConfig | WorkerConfig, rank: int, master: str, ready_fd: int | None = None) -> list[str]:
    """Returns the command line of a rank of a pod. ready_fd gets a byte once the rank is ready."""
    names = ("transport", "net_devices", "log_level", "log_format")
    settings = {
        "ready_fd": ready_fd,
        "tls_dir": _group_tls_dir(config),
        **{name: getattr(config, name) for name in names},
    }
    return [sys.executable, "-P", "-m", "pod.rank", str(rank), master, json.dumps(settings)]


def pod_backend(config: PodConfig, members: RankGroup | None, layout: KVLayout) -> Backend:
    """Returns the backend of a pod: this process's agent and the other ranks' agents."""
    own = make_backend(config.transport, config.net_devices)
    if members is None:
        return ShardedBackend(_staged(own, config), [], layout)
    channels = enumerate(members.channels(TRANSFER_CHANNEL), 1)
    return ShardedBackend(own, [RankBackendClient(rank, channel) for rank, channel in channels], layout)


def _staged(direct: Backend, config: PodConfig) -> Backend:
    """Returns a backend that writes to a peer through host memory if `direct` cannot reach the peer."""
    if config.staging == "off" or config.transport != "nixl":
        return direct
    options = StagingOptions(config.staging_memory, config.staging_dir, always=config.staging == "on")
    return StagedBackend(direct, lambda: NixlBackend(config.net_devices), make_copier, options)


def pool_memory(kv: KVPool) -> PoolMemory:
    """Returns the engine's KV pool for registration with a transfer agent."""
    return PoolMemory(
        base=kv.data_ptr,
        block_bytes=kv.block_bytes,
        total_blocks=len(kv.data),
        device=kv.data.device.index or 0,
        kind="VRAM" if kv.data.device.type == "cuda" else "DRAM",
        probe_block=kv.probe_block,
        read_block=kv.read_block,
        write_block=kv.write_block,
        tensor=kv.data if kv.data.device.type == "cuda" else None,
        all_ranks_bytes=kv.layout.all_ranks_bytes,
    )


@dataclass
class _RankPool:
    """The newest KV pool of the rank; the last pool that the engine makes is the final one."""

    ready_fd: int | None  # Gets one byte with the first pool, when the rank has all that it needs
    kv: KVPool | None = None

    def made(self, kv: KVPool) -> None:
        if self.kv is None and self.ready_fd is not None:
            os.write(self.ready_fd, b"1")
        self.kv = kv

    def memory(self) -> PoolMemory:
        if self.kv is None:
            raise InternalError("this rank has no pool yet")
        return pool_memory(self.kv)


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
    tls = TlsFiles.of_directory(settings["tls_dir"], *MEMBER_ROLES)
    kinds = *ENGINE_KINDS, TRANSFER_CHANNEL
    *channels, transfers = (join(rank, master, kind, limit, tls) for kind in kinds)
    exit_with(channels[0])
    pool = _RankPool(settings["ready_fd"])
    make = functools.partial(make_backend, settings["transport"], settings["net_devices"])
    threading.Thread(target=_run_transfer_backend, args=(transfers, make, pool), name="agent", daemon=True).start()
    return serve(Rank(rank, channels, pool.made))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)
