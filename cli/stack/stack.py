"""The processes of a stack on one machine (Valkey, pods, gateway) with their ports and flags.

A Stack only describes processes and reserves ports, until close(). `baton up` runs the processes under the supervisor.
Tests start and kill them directly.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from cli import probes
from cli.gpus import Gpu, assign_gpus, grouped, joined, visible_gpus
from cli.stack.certificates import CA_DAYS, Authority, make_private_directory
from cli.stack.supervisor import ChildProcess, PortLease, Probe, ServiceSpec
from cli.stack.valkey import valkey_command, valkey_url
from common.errors import ConfigError
from common.model.directory import default_served_name, expected_model_path
from common.settings.gateway import DEFAULT_PORT, GatewayConfig
from common.settings.kinds import host_port
from common.settings.pod import PodConfig
from common.settings.process import DEFAULT_SECRET
from common.settings.table import ENVIRONMENT, Settings, command_line, declared, spelt
from common.settings.up import UpConfig
from common.tls import TlsFiles

Env = Mapping[str, str] | None
Stages = tuple[int, int]
# (start stage, stop stage). All start at once: the store answers before the others have loaded their code, and the
# gateway waits for the pods by itself. The gateway stops before the pods, so that running requests can end.
STORE, POD, GATEWAY = (0, 2), (0, 1), (0, 0)
HOST_SHARE = 0.5  # Share of the free memory for the host tiers of all pods on GPUs.
MOST_HOST_CACHE = 32 << 30  # Bytes per pod. Page-locking more memory delays the start too long.
PRIVATE_DIR = "private"  # Part of the log directory, for keys and passwords; removed when the stack ends.
PORTS_TRIED = 65  # Ports tried, from the default port on.


@dataclass(frozen=True)
class Stack:
    """The processes, in display order; the gateway is last."""

    specs: tuple[ServiceSpec, ...]
    base_url: str
    grpc_address: str
    redis: str
    model: str  # Served name.
    secret: str
    log_dir: Path
    tls: TlsFiles  # Certificates of the gateway, for calls to pods.
    needs_key: bool  # Clients must send an API key.
    _leases: contextlib.ExitStack = field(repr=False)

    @classmethod
    def plan(
        cls,
        config: UpConfig,
        model_dir: Path,
        log_dir: Path,
        *,
        pod_flags: Mapping[str, str] | None = None,
        env: Mapping[str, str] = os.environ,
        gpus: Sequence[Gpu] | None = None,  # None: those visible in `env`
        say: Callable[[str], None] = lambda _: None,
    ) -> Self:
        """Reserves ports, makes certificates and passwords in log_dir/private, and describes the processes.

        pod_flags are further `baton serve` flags, for every pod. `say` gets a message if the gateway has another port
        than the default one. Raises ConfigError if a port is in use, the GPU does not exist, there is neither a Redis
        URL nor Valkey, or config.tls_dir cannot be used.
        """
        usable = _usable(config, env, gpus)
        places = assign_gpus(config.num_pods, usable)
        secret = config.secret if config.secret != DEFAULT_SECRET else secrets.token_hex(16)
        private = log_dir.absolute() / PRIVATE_DIR
        model = config.served_name or default_served_name(config.model)
        specs: list[ServiceSpec] = []

        def add(name: str, argv: list[str], role: str, address: str, probe: Probe, env: Env, stages: Stages) -> None:
            process = ChildProcess(name, argv, log=log_dir / f"{name}.log", env=env)
            start, stop = stages
            specs.append(ServiceSpec(process, role, address, probe, start_stage=start, stop_stage=stop))

        with contextlib.ExitStack() as leases:

            def lease(port: int = 0, field: str = "port") -> PortLease:
                return leases.enter_context(PortLease(port, field=field))

            http = lease(config.port) if config.port is not None else leases.enter_context(_default_port(say))
            grpc = lease(config.grpc_port, "grpc_port")
            leases.callback(_remove, private)
            make_private_directory(private)
            authority = Authority.create()

            def certificates(name: str, role: str) -> tuple[str, TlsFiles]:
                """The `tls_dir` of a process, and its files."""
                directory = private / name if config.tls_dir is None else Path(config.tls_dir).absolute() / role
                if config.tls_dir is None:
                    authority.issue(directory, role, name, CA_DAYS)
                files = TlsFiles.of_directory(directory, role)
                assert files is not None
                return str(directory), files

            redis = config.redis
            if redis is None:
                store, password = lease(), secrets.token_hex(16)
                redis = valkey_url(store.port, password)
                probe = functools.partial(probes.redis_ready, "127.0.0.1", store.port, password)
                command = valkey_command(store.port, private, password)
                add("valkey", command, "store", store.address, probe, None, STORE)
            child_env = _child_env(env, secret, redis)
            shared = {"model": model_dir, "served_name": model}
            pods = {
                **_shared_with(PodConfig, config),
                **shared,
                "device": config.device.partition(":")[0],  # each pod sees only its own GPUs
                "speculation_model": config.speculation_model and expected_model_path(str(config.speculation_model)),
                "host_cache": _host_cache(config, on_gpus=bool(usable)),
                "threads": config.threads or _threads_each(config),
            }
            extra = {name.replace("-", "_"): value for name, value in (pod_flags or {}).items()}
            names = [(role, number) for role, count in config.pods.items() for number in range(count)]
            for (role, number), place in zip(names, places, strict=True):
                port, name = lease(), f"{role}-{number}"
                # An index may be shared with other stacks: pods keep their default names, which contain the port.
                own = {"role": role, "port": port.port, **({"name": name} if config.redis is None else {})}
                on_gpu, gpu_env = _gpu_settings(place, usable, config)
                tls_dir, tls = certificates(name, extra.get("role", role.value))
                argv = _baton("serve", {**pods, **own, **on_gpu, "tls_dir": tls_dir, **extra})
                probe = functools.partial(probes.grpc_ready, port.address, tls)
                add(name, argv, role, port.address, probe, {**child_env, **gpu_env}, POD)
            reach = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
            probe = functools.partial(probes.http_ready, reach, http.port)
            tls_dir, tls = certificates("gateway", "gateway")
            own = {"host": config.host, "port": http.port, "grpc_port": grpc.port, "tls_dir": tls_dir}
            argv = _baton("gateway", {**_shared_with(GatewayConfig, config), **shared, **own})
            keys = {spelt("api_key", ENVIRONMENT): ",".join(config.api_key)} if config.api_key else {}
            listens = host_port(config.host, http.port)
            add("gateway", argv, "gateway", listens, probe, {**child_env, **keys}, GATEWAY)
            return cls(
                specs=tuple(specs),
                base_url=f"http://{host_port(reach, http.port)}/v1",
                grpc_address=host_port(reach, grpc.port),
                redis=redis,
                model=model,
                secret=secret,
                log_dir=log_dir,
                tls=tls,
                needs_key=bool(config.api_key or config.api_keys),
                _leases=leases.pop_all(),
            )

    @property
    def origin(self) -> str:
        """The address of the gateway without a path."""
        return self.base_url.removesuffix("/v1")

    def close(self) -> None:
        """Frees the ports and removes keys and passwords. Call it after the processes have ended. Idempotent."""
        self._leases.close()


def _host_cache(config: UpConfig, *, on_gpus: bool) -> int:
    """Bytes of each rank's host tier. Pods refuse one with KV groups."""
    if config.host_cache is not None:
        return config.host_cache
    if not on_gpus or not config.prefix_cache or config.kv_groups or config.tensor_parallel_size > 1:
        return 0
    from common.telemetry import memory_usage

    return min(MOST_HOST_CACHE, int(memory_usage().free * HOST_SHARE) // config.num_pods)


def _usable(config: UpConfig, env: Mapping[str, str], gpus: Sequence[Gpu] | None) -> Sequence[Gpu]:
    """The GPUs of the setting `device`, in groups of tensor_parallel_size. Raises ConfigError if they do not exist."""
    kind, _, number = config.device.partition(":")
    if kind == "cpu":
        return ()
    visible = visible_gpus(env) if gpus is None else gpus
    if not number:
        return grouped(visible, config.tensor_parallel_size)
    if int(number) >= len(visible):
        there = f"{len(visible)} GPUs are visible"
        raise ConfigError(f"device: {config.device} does not exist here, {there}", field="device")
    return grouped((visible[int(number)],), config.tensor_parallel_size)


def _gpu_settings(
    place: tuple[Gpu, int] | None, gpus: Sequence[Gpu], config: UpConfig
) -> tuple[dict[str, object], dict[str, str]]:
    """Settings and environment of a pod that shares its GPU with others."""
    gpu, sharing = place or (None, config.num_pods)
    settings: dict[str, object] = {"gpu_memory_utilization": f"{config.gpu_memory_utilization / sharing:.4f}"}
    if gpu is None:
        return settings, {}
    if gpu.cpus:
        settings["cpus"] = gpu.cpus
    if config.net_devices:
        size, nics = config.tensor_parallel_size, config.net_devices
        first = gpus.index(gpu) * size
        settings["net_devices"] = joined(nics[at % len(nics)] for at in range(first, first + size))
    return settings, {"CUDA_VISIBLE_DEVICES": gpu.id}


def _shared_with(cls: type[Settings], config: UpConfig) -> dict[str, object]:
    """The settings of a stack that apply as they are to each of its processes with settings of this class.

    The URL of Redis is not among them: it may have a password, and command lines are public.
    """
    mine, theirs = declared(UpConfig), [s for s in declared(cls).values() if s.flag and not s.per_process]
    names = [s.name for s in theirs if s.name in mine and s.kind.shape is mine[s.name].kind.shape]
    return {name: getattr(config, name) for name in names if name != "redis"}


def _baton(command: str, settings: Mapping[str, object]) -> list[str]:
    flags = command_line(Settings.of_command[command], settings)
    return [sys.executable, "-P", "-m", "cli", command, *flags]


def _default_port(say: Callable[[str], None]) -> PortLease:
    """A lease of the default port, or of the next free one if it is in use."""
    for port in range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED):
        with contextlib.suppress(ConfigError):
            lease = PortLease(port)
            if port != DEFAULT_PORT:
                say(f"port {DEFAULT_PORT} is in use, using {port}")
            return lease
    raise ConfigError(f"port: {DEFAULT_PORT} to {DEFAULT_PORT + PORTS_TRIED - 1} are in use", field="port")


def _threads_each(config: UpConfig) -> int:
    """The threads of each computing process: a rank of a pod."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // (config.num_pods * config.tensor_parallel_size))


def _remove(private: Path) -> None:
    """Removes the private directory, and the log directory around it if no process has written a log."""
    shutil.rmtree(private, ignore_errors=True)
    with contextlib.suppress(OSError):
        private.parent.rmdir()


def _child_env(env: Mapping[str, str], secret: str, redis: str) -> dict[str, str]:
    """The environment without settings of one process, plus secrets, which `ps` does not show in the environment."""
    per_process = [s.name for cls in Settings.of_command.values() for s in declared(cls).values() if s.per_process]
    drop = {"BATON_CONFIG", *(spelt(name, ENVIRONMENT) for name in per_process)}
    own = {"BATON_SECRET": secret, "BATON_REDIS": redis, "PYTHONUNBUFFERED": "1"}
    return {k: v for k, v in env.items() if k not in drop} | own
