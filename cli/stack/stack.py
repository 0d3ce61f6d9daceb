"""The processes of a stack on one machine (Valkey, pods, gateway) with their ports and flags.

A Stack only describes processes and reserves ports, until close(). `baton up` runs the processes under the supervisor.
Tests start and kill them directly.
"""

from __future__ import annotations

import functools
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from cli import probes
from cli.gpus import Gpu, grouped, joined, shared_out, visible_gpus
from cli.stack.process import ChildProcess, PortLease
from cli.stack.supervisor import Probe, ServiceSpec
from common.errors import ConfigError
from common.model.directory import default_served_name, expected_model_path
from common.settings.configs import DEFAULT_PORT, DEFAULT_SECRET, UpConfig
from common.telemetry import memory_usage
from common.types import Role

# (start stage, stop stage). The store starts first and stops last. The gateway stops before the pods, so that running
# requests can end.
STORE, POD, GATEWAY = (0, 2), (1, 1), (1, 0)
#: Share of the free memory for the host tiers of all pods on GPUs.
HOST_SHARE = 0.5
#: Bytes per pod. Page-locking more memory delays the start too long.
MOST_HOST_CACHE = 32 << 30
#: Ports tried, from the default port on.
PORTS_TRIED = 65
# Settings of one pod or gateway; in the environment of `baton up` they would apply to all processes.
_OF_ONE = (
    *("ROLE", "NAME", "HOST", "PORT", "ADVERTISE", "METRICS_PORT", "GRPC_PORT", "PODS", "CONFIG", "LOG_DIR"),
    *("TENSOR_PARALLEL_NODES", "TENSOR_PARALLEL_MASTER"),
)


@dataclass(frozen=True)
class Stack:
    """The processes, in display order; the gateway is last."""

    specs: tuple[ServiceSpec, ...]
    base_url: str
    grpc_address: str
    redis: str
    #: Served name.
    model: str
    secret: str
    log_dir: Path
    _leases: tuple[PortLease, ...] = field(repr=False)

    @classmethod
    def plan(
        cls,
        config: UpConfig,
        model_dir: Path,
        log_dir: Path,
        *,
        pod_flags: Mapping[str, str] | None = None,
        env: Mapping[str, str] = os.environ,
        gpus: Sequence[Gpu] | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Self:
        """Reserves ports and describes the processes. The directories need not exist yet.

        Args:
            pod_flags: Further `baton serve` flags, for every pod.
            gpus: GPUs for the pods; None: those visible in `env`.
            say: Gets a message if the gateway has another port than the default one.

        Raises ConfigError if a port is in use, the GPU does not exist, or there is neither a Redis URL nor Valkey.
        """
        usable = _usable(config, env, gpus)
        places = shared_out(config.prefill + config.decode, usable)
        leases: list[PortLease] = []

        def lease(port: int = 0, field: str = "port") -> PortLease:
            leases.append(PortLease(port, field=field))
            return leases[-1]

        try:
            http = lease(config.port) if config.port is not None else _default_port(leases, say)
            grpc = lease(config.grpc_port, "grpc_port")
            secret = config.secret if config.secret != DEFAULT_SECRET else secrets.token_hex(16)
            child_env = _child_env(env, secret)
            model = config.served_name or default_served_name(config.model)
            specs: list[ServiceSpec] = []
            if config.redis is None:
                store = lease()
                specs.append(_valkey(store, log_dir))
                redis = f"redis://{store.address}/0"
            else:
                redis = config.redis
            shared = {"model": str(model_dir), "served-name": model, "redis": redis, "log-level": config.log_level}
            shared |= {"drain-s": str(config.drain_s), "log-format": config.log_format, "traces": config.traces or ""}
            pods = {
                **shared,
                "device": config.device.partition(":")[0],  # each pod sees only its own GPUs
                "dtype": config.dtype,
                "kv-dtype": config.kv_dtype,
                "load-format": config.load_format,
                "weights-seed": str(config.weights_seed),
                "max-model-len": str(config.max_model_len),
                "chunk-tokens": str(config.chunk_tokens),
                "speculation": config.speculation,
                **_draft(config.speculation_model),
                "speculation-tokens": str(config.speculation_tokens),
                "speculation-accept": config.speculation_accept,
                "local-prefill": config.local_prefill,
                "pull": config.pull,
                "block-size": str(config.block_size),
                "kv-memory": str(config.kv_memory),
                "host-cache": str(_host_cache(config, on_gpus=bool(usable))),
                "threads": str(config.threads or _threads_each(_processes(config))),
                "tensor-parallel-size": str(config.tensor_parallel_size),
                **(pod_flags or {}),
            }
            names = [(r, n) for r, count in _roles(config).items() for n in range(count)]
            for (role, number), place in zip(names, places, strict=True):
                port = lease()
                name = f"{role}-{number}"
                # An index may be shared with other stacks: pods keep their default names, which contain the port.
                given = {"name": name} if config.redis is None else {}
                on_gpu, gpu_env = _on(place, usable, config)
                argv = _baton("serve", {"role": role.value, **given, "port": str(port.port), **on_gpu, **pods})
                argv += ["--allow-tcp"] if config.allow_tcp else []
                probe = functools.partial(probes.grpc_ready, port.address)
                specs.append(_spec(name, argv, role, port.address, probe, log_dir, {**child_env, **gpu_env}, POD))
            flags = {"host": config.host, "port": str(http.port), "grpc-port": str(grpc.port), **shared}
            flags |= {"tool-parser": config.tool_parser, "reasoning-parser": config.reasoning_parser}
            flags |= {"api-keys": ",".join(config.api_keys), "trace-sample": str(config.trace_sample)}
            reach = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
            probe = functools.partial(probes.http_ready, reach, http.port)
            argv = _baton("gateway", flags)
            where = f"{config.host}:{http.port}"
            specs.append(_spec("gateway", argv, "gateway", where, probe, log_dir, child_env, GATEWAY))
        except BaseException:
            for held in leases:
                held.close()
            raise
        return cls(
            specs=tuple(specs),
            base_url=f"http://{reach}:{http.port}/v1",
            grpc_address=f"{reach}:{grpc.port}",
            redis=redis,
            model=model,
            secret=secret,
            log_dir=log_dir,
            _leases=tuple(leases),
        )

    def close(self) -> None:
        """Frees the ports. Call it after the processes have ended. Idempotent."""
        for lease in self._leases:
            lease.close()


def _host_cache(config: UpConfig, *, on_gpus: bool) -> int:
    """Bytes of each pod's host tier."""
    if config.host_cache is not None:
        return config.host_cache
    if not on_gpus or config.tensor_parallel_size > 1:
        return 0
    part = int(memory_usage().free * HOST_SHARE) // (config.prefill + config.decode)
    return min(part, MOST_HOST_CACHE)


def _roles(config: UpConfig) -> dict[Role, int]:
    return {Role.PREFILL: config.prefill, Role.DECODE: config.decode}


def _usable(config: UpConfig, env: Mapping[str, str], gpus: Sequence[Gpu] | None) -> Sequence[Gpu]:
    """The GPUs that the setting `device` selects, in groups of tensor_parallel_size.

    Raises ConfigError if they do not exist.
    """
    kind, _, number = config.device.partition(":")
    if kind == "cpu":
        return ()
    visible = visible_gpus(env) if gpus is None else gpus
    if not number:
        return grouped(visible, config.tensor_parallel_size)
    if int(number) >= len(visible):
        raise ConfigError(
            f"device: {config.device} does not exist here, {len(visible)} GPUs are visible", field="device"
        )
    return grouped((visible[int(number)],), config.tensor_parallel_size)


def _on(place: tuple[Gpu, int] | None, gpus: Sequence[Gpu], config: UpConfig) -> tuple[dict[str, str], dict[str, str]]:
    """Flags and environment of a pod that shares its GPU with others."""
    gpu, sharing = place or (None, config.prefill + config.decode)
    flags = {"gpu-memory-utilization": f"{config.gpu_memory_utilization / sharing:.4f}"}
    if gpu is None:
        return flags, {}
    if gpu.cpus:
        flags["cpus"] = gpu.cpus
    if config.net_devices:
        size, nics = config.tensor_parallel_size, config.net_devices
        first = gpus.index(gpu) * size
        flags["net-devices"] = joined(nics[at % len(nics)] for at in range(first, first + size))
    return flags, {"CUDA_VISIBLE_DEVICES": gpu.id}


def _baton(command: str, flags: Mapping[str, str]) -> list[str]:
    return [sys.executable, "-P", "-m", "cli", command, *(f"--{name}={value}" for name, value in flags.items())]


def _valkey(port: PortLease, log_dir: Path) -> ServiceSpec:
    from cli.stack.valkey import valkey_binary

    argv = [
        *(str(valkey_binary()), "--port", str(port.port), "--bind", "127.0.0.1", "--dir", str(log_dir)),
        *("--save", "", "--appendonly", "no", "--daemonize", "no", "--maxmemory-policy", "noeviction"),
    ]
    probe = functools.partial(probes.redis_ready, "127.0.0.1", port.port)
    return _spec("valkey", argv, "store", port.address, probe, log_dir, None, STORE)


def _spec(
    name: str,
    argv: Sequence[str],
    role: str,
    address: str,
    probe: Probe,
    log_dir: Path,
    env: Mapping[str, str] | None,
    stages: tuple[int, int],
) -> ServiceSpec:
    process = ChildProcess(name, argv, log=log_dir / f"{name}.log", env=env)
    start, stop = stages
    return ServiceSpec(process=process, role=role, address=address, probe=probe, start_stage=start, stop_stage=stop)


def _draft(model: str | None) -> dict[str, str]:
    return {} if model is None else {"speculation-model": str(expected_model_path(model))}


def _default_port(leases: list[PortLease], say: Callable[[str], None]) -> PortLease:
    """A lease of the default port, or of the next free one if it is in use."""
    for port in range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED):
        try:
            leases.append(PortLease(port))
        except ConfigError:
            continue
        if port != DEFAULT_PORT:
            say(f"port {DEFAULT_PORT} is in use, using {port}")
        return leases[-1]
    raise ConfigError(f"port: {DEFAULT_PORT} to {DEFAULT_PORT + PORTS_TRIED - 1} are in use", field="port")


def _processes(config: UpConfig) -> int:
    """Number of computing processes: the ranks of all pods."""
    return (config.prefill + config.decode) * config.tensor_parallel_size


def _threads_each(processes: int) -> int:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // processes)


def _child_env(env: Mapping[str, str], secret: str) -> dict[str, str]:
    """The environment without settings of one process, plus the secret, which `ps` does not show in the environment."""
    drop = {f"BATON_{name}" for name in _OF_ONE}
    return {k: v for k, v in env.items() if k not in drop} | {"BATON_SECRET": secret, "PYTHONUNBUFFERED": "1"}
