"""`baton worker`: this machine's devices for a pod of another machine."""

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
        str | None, opt("Devices of all machines that compute the pod's model together (default 2).", metavar="N")
    ] = None,
    tensor_parallel_nodes: Annotated[
        str | None, opt("Machines that these are on, in equal numbers (default 2).", metavar="N")
    ] = None,
    tensor_parallel_node: Annotated[
        str | None, opt("Which of the machines this is, from 1 on (default 1); 0 is the pod's.", metavar="I")
    ] = None,
    tensor_parallel_master: Annotated[
        str | None, opt("Where the pod waits for it; required.", metavar="HOST:PORT")
    ] = None,
    host: Host = None,
    port: Annotated[str | None, opt("Port of gRPC health; default: any free one.", metavar="N")] = None,
    transport: Annotated[str | None, opt("nixl (the default) or loopback, as of the pod.", metavar="NAME")] = None,
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
