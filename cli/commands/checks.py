"""`baton doctor`: checks of this machine and of running pods. `baton probe`: the health check of one server."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import Redis, opt
from common.errors import ConfigError, Unavailable
from common.settings.gateway import GatewayConfig
from common.settings.table import FLAG, declared

if TYPE_CHECKING:  # only imported when a command runs
    from common.tls import TlsFiles

TlsDir = Annotated[
    str | None, opt("Certificates for gRPC, as for a service; default: $BATON_TLS_DIR, else no TLS.", metavar="DIR")
]


def doctor(
    redis: Redis = None,
    pods: Annotated[
        list[str] | None,
        opt("Running pods to check, besides those in --redis; may be repeated.", metavar="HOST:PORT,.."),
    ] = None,
    tls_dir: TlsDir = None,
    measure: Annotated[
        Path | None,
        opt("Only measures this machine's GPU (without one its CPUs) for `baton plan fit --gpu FILE`.", metavar="FILE"),
    ] = None,
) -> None:
    """Checks this machine for the requirements of Baton.

    With --redis or --pods also how running pods exchange KV. With --measure it only measures the rates of copies,
    products and attention, which takes some seconds.
    """
    from cli.doctor import measure_card, report

    if measure is not None:
        typer.echo(asyncio.run(measure_card(measure)))
        return
    addresses = declared(GatewayConfig)["pods"].parse(",".join(pods or ()), FLAG)
    raise typer.Exit(asyncio.run(report(redis, addresses, own_certificates(tls_dir))))


def own_certificates(tls_dir: str | None) -> TlsFiles | None:
    """The certificates in --tls-dir or $BATON_TLS_DIR, of any role; None without either."""
    if not (directory := tls_dir or os.environ.get("BATON_TLS_DIR")):
        return None
    from common.tls import ROLES, TlsFiles

    return TlsFiles.of_directory(directory, *ROLES)


def probe(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="http[s]://HOST:PORT[/PATH] (default /ready), or grpc://HOST:PORT[/SERVICE]."
        ),
    ],
    tls_dir: TlsDir = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, metavar="N", help="Seconds to wait for the answer.")] = 3.0,
) -> None:
    """Checks the health of a server: exit code 0 if it is well, else 1.

    For health checks of containers.
    """
    from cli import probes

    try:
        trouble = asyncio.run(probes.trouble(url, timeout_s, own_certificates(tls_dir)))
    except ValueError as e:
        raise ConfigError(f"url: {e}: expected http[s]://HOST:PORT[/PATH] or grpc://HOST:PORT", field="url") from e
    if trouble is not None:
        raise Unavailable(f"{url} is not healthy: {trouble}")
