"""`baton worker`: adds this machine's devices to a pod of another machine."""

from __future__ import annotations

from typing import Annotated

from cli import service
from cli.options import (
    Config,
    Cpus,
    DrainS,
    Host,
    LogFormat,
    Logs,
    NetDevices,
    load,
    opt,
)
from common.settings.configs import WorkerConfig


def worker(
    config: Config = None,
    tensor_parallel_size: Annotated[
        str | None, opt("Devices of the pod on all machines together (default 2).", metavar="N")
    ] = None,
    tensor_parallel_nodes: Annotated[
        str | None, opt("Machines of the pod, with equally many devices (default 2).", metavar="N")
    ] = None,
    tensor_parallel_node: Annotated[
        str | None, opt("Number of this machine, from 1 (default 1); 0 is the pod's machine.", metavar="I")
    ] = None,
    tensor_parallel_master: Annotated[
        str | None, opt("Address where the pod waits for workers; required.", metavar="HOST:PORT")
    ] = None,
    host: Host = None,
    port: Annotated[str | None, opt("Port of gRPC health; default: any free one.", metavar="N")] = None,
    transport: Annotated[str | None, opt("nixl (the default) or loopback; as for the pod.", metavar="NAME")] = None,
    net_devices: NetDevices = None,
    cpus: Cpus = None,
    drain_s: DrainS = None,
    log_level: Logs = None,
    log_format: LogFormat = None,
) -> None:
    """Adds this machine's devices to a pod of another machine.

    For tensor parallelism over several machines.
    """
    flags = {k: v for k, v in locals().items() if k != "config"}
    service.run(load(WorkerConfig, config, flags), _serve)


async def _serve(settings: WorkerConfig) -> None:
    from pod.worker import serve

    await serve(settings)
