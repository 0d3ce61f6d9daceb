"""`baton planner`: sets the number and the roles of the pods by their load."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from cli.commands.checks import TlsDir
from cli.options import Redis, opt
from common.errors import ConfigError
from common.settings.process import DEFAULT_SECRET
from common.types import Role

if TYPE_CHECKING:  # only imported when the command runs
    from fleet.decision import FleetLimits

LEASE_GRACE_S = 20.0  #: Longest time of one decision, beyond the period. Then another planner may act.


def planner(
    redis: Redis = None,
    served_name: Annotated[
        str | None, opt("Model whose pods are planned; default: the only one.", metavar="NAME")
    ] = None,
    scale: Annotated[
        str,
        typer.Option(metavar="HOW", help="print (log only), roles (change roles), or k8s (start and stop pods too)."),
    ] = "print",
    prefill_workload: Annotated[
        str, typer.Option(metavar="NAME", help="Deployment of the prefill pods (k8s).")
    ] = "baton-prefill",
    decode_workload: Annotated[
        str, typer.Option(metavar="NAME", help="Deployment of the decode pods (k8s).")
    ] = "baton-decode",
    itl: Annotated[
        float, typer.Option(min=0.001, metavar="N", help="Longest mean time between tokens, in seconds.")
    ] = 0.05,
    min_prefill: Annotated[int, typer.Option(min=1, metavar="N", help="Least number of prefill pods.")] = 1,
    max_prefill: Annotated[int, typer.Option(min=1, metavar="N", help="Most prefill pods.")] = 16,
    min_decode: Annotated[int, typer.Option(min=1, metavar="N", help="Least number of decode pods.")] = 1,
    max_decode: Annotated[int, typer.Option(min=1, metavar="N", help="Most decode pods.")] = 16,
    max_pods: Annotated[int, typer.Option(min=2, metavar="N", help="Most pods together.")] = 32,
    start_s: Annotated[float, typer.Option(min=1, metavar="N", help="Seconds until a new pod serves.")] = 30.0,
    season_s: Annotated[
        float, typer.Option(min=0, metavar="N", help="Season of the load in seconds, like 86400; 0: none.")
    ] = 0.0,
    period_s: Annotated[float, typer.Option(min=1, max=30, metavar="N", help="Seconds between decisions.")] = 5.0,
    drain_s: Annotated[
        float, typer.Option(min=0.1, max=3600, metavar="N", help="Max seconds for prompts before a role changes.")
    ] = 30.0,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="Prometheus port; 0: off.")] = 0,
    metrics_host: Annotated[str, typer.Option(metavar="HOST", help="Address of the Prometheus port.")] = "127.0.0.1",
    tls_dir: TlsDir = None,
) -> None:
    """Sets number and roles of the pods by their load.

    It reads what gateways and pods publish in Redis, and explains each decision in one log line. `baton plan` is
    another command: it searches the setup for a recorded trace. $BATON_SECRET is that of the cluster.
    """
    from fleet.decision import FleetLimits

    if scale not in ("print", "roles", "k8s"):
        raise ConfigError(f"--scale: invalid value {scale!r}: expected print, roles or k8s", field="scale")
    for name, low, high in (("prefill", min_prefill, max_prefill), ("decode", min_decode, max_decode)):
        if low > high:
            raise ConfigError(f"--min-{name}: {low} is above --max-{name} {high}", field=f"min_{name}")
    if min_prefill + min_decode > max_pods:
        raise ConfigError(f"--max-pods: {max_pods} is below the least numbers of both roles together", field="max_pods")
    if not (url := redis or os.environ.get("BATON_REDIS")):
        raise ConfigError("--redis: missing: the planner reads pods and gateways there", field="redis")
    limits = FleetLimits(
        itl_s=itl,
        min_prefill=min_prefill,
        max_prefill=max_prefill,
        min_decode=min_decode,
        max_decode=max_decode,
        max_pods=max_pods,
        start_s=start_s,
        season_s=season_s,
        scales=scale != "roles",
    )
    workloads = {Role.PREFILL: prefill_workload, Role.DECODE: decode_workload}
    tls = tls_dir or os.environ.get("BATON_TLS_DIR") or None
    asyncio.run(_run(url, served_name, scale, workloads, limits, period_s, drain_s, (metrics_host, metrics_port), tls))


async def _run(
    url: str,
    served_name: str | None,
    scale: str,
    workloads: dict[Role, str],
    limits: FleetLimits,
    period_s: float,
    drain_s: float,
    metrics_at: tuple[str, int],
    tls_dir: str | None,
) -> None:
    from common.auth import OPERATOR
    from common.logs import setup_logs
    from common.tls import TlsFiles
    from fleet.demand import FleetReader
    from fleet.lease import PlannerLease
    from fleet.planner import FleetPlanner, PlannerMetrics
    from fleet.scale import KubernetesScale, PrintOnly
    from prefix_index.demand import DemandReader
    from prefix_index.reader import IndexReader

    setup_logs("info", "auto")
    adapter = KubernetesScale.in_cluster(workloads) if scale == "k8s" else PrintOnly()
    index, demand = IndexReader(url, books=False), DemandReader(url)
    metrics = PlannerMetrics()
    secret = os.environ.get("BATON_SECRET") or DEFAULT_SECRET
    name = f"planner {socket.gethostname()} {os.getpid()}"
    lease = None if scale == "print" else PlannerLease(url, served_name, name, 3 * period_s + LEASE_GRACE_S)
    planner = FleetPlanner(
        limits,
        FleetReader(index, demand, served_name),
        adapter,
        metrics,
        secret=secret,
        tls=TlsFiles.of_directory(tls_dir, OPERATOR),
        drain_s=drain_s,
        acts=scale != "print",
        lease=lease,
    )
    host, port = metrics_at
    server = metrics.base.start_metrics_server(port, host) if port else None
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    task = asyncio.ensure_future(planner.run(period_s))
    try:
        await stopped.wait()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if server is not None:
            server.stop()
        if lease is not None:
            await lease.close()
        await demand.close()
        await index.close()
