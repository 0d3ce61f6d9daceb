"""Transfer backend of a pod: one agent, or one agent per rank; and the KV pool as transfers see it."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable

from common.settings.configs import PodConfig, WorkerConfig
from engine.config import EngineConfig
from engine.kv.kv_pool import KVPool
from engine.parallel.rank_group import ENGINE_CHANNEL, RankGroup
from kv_transfer.backend.interface import Backend
from kv_transfer.backend.loopback import LoopbackBackend, LoopbackFabric
from kv_transfer.backend.nixl import NixlBackend
from kv_transfer.backend.rank_backend import RankBackendClient
from kv_transfer.backend.sharded import ShardedBackend
from kv_transfer.memory import PoolMemory

TRANSFER_CHANNEL = "transfers"  # Kind of a rank's second channel

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
        kinds=(ENGINE_CHANNEL, TRANSFER_CHANNEL),
    )


def rank_command(config: PodConfig | WorkerConfig, rank: int, master: str, ready_fd: int | None = None) -> list[str]:
    """Returns the command line of a rank of a pod (pod/rank.py). ready_fd gets a byte once the rank is ready."""
    settings = {
        "ready_fd": ready_fd,
        "transport": config.transport,
        "net_devices": config.net_devices,
        "log_level": config.log_level,
        "log_format": config.log_format,
    }
    return [sys.executable, "-P", "-m", "pod.rank", str(rank), master, json.dumps(settings)]


def pod_backend(config: PodConfig, members: RankGroup | None) -> Backend:
    """Returns the backend of a pod: this process's agent and the other ranks' agents."""
    own = make_backend(config.transport, config.net_devices)
    if members is None:
        return own
    return ShardedBackend(
        own, [RankBackendClient(rank, c) for rank, c in enumerate(members.channels(TRANSFER_CHANNEL), 1)]
    )


def pool_memory(kv: KVPool) -> PoolMemory:
    """Returns the engine's KV pool for registration with a transfer agent."""
    return PoolMemory(
        base=kv.data_ptr,
        block_bytes=kv.block_bytes,
        total_blocks=kv.num_blocks + 2,
        device=kv.data.device.index or 0,
        kind="VRAM" if kv.data.device.type == "cuda" else "DRAM",
        probe_block=kv.probe_block,
        read_block=kv.read_block,
        write_block=kv.write_block,
    )
