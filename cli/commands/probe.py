"""`baton probe`: the health check of one server."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from common.errors import ConfigError, Unavailable


def probe(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="http://HOST:PORT/PATH, grpc://HOST:PORT or grpc://HOST:PORT/SERVICE.")
    ],
    timeout_s: Annotated[float, typer.Option(min=0.1, metavar="N", help="Seconds to wait for the answer.")] = 3.0,
) -> None:
    """Checks the health of a server: exit code 0 if it is well, else 1.

    For health checks of containers.
    """
    from cli import probes

    try:
        trouble = asyncio.run(probes.trouble(url, timeout_s))
    except ValueError as e:
        raise ConfigError(f"url: {e}: expected http://HOST:PORT/PATH or grpc://HOST:PORT", field="url") from e
    if trouble is not None:
        raise Unavailable(f"{url} is not healthy: {trouble}")
