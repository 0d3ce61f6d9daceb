"""The commands that look at what is there: this machine, running pods, one server."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from common import config_kinds as kinds
from common.cli.options import Redis, opt
from common.errors import ConfigError, Unavailable


def doctor(
    redis: Redis = None,
    pods: Annotated[
        list[str] | None, opt("Running pods to ask, beside those in --redis; may be repeated.", metavar="HOST:PORT,..")
    ] = None,
) -> None:
    """Says what this machine offers and what is missing.

    With --redis or --pods also how running pods exchange KV.
    """
    from common import doctor as examination

    given = ",".join(pods or ())
    try:
        asked = kinds.tuple_of(kinds.ADDRESS).parse(given)
    except ValueError as e:
        expected = kinds.tuple_of(kinds.ADDRESS).expected
        raise ConfigError(f"--pods: {given!r} will not do; expected {expected}", field="pods") from e
    raise typer.Exit(asyncio.run(examination.report(redis, asked)))


def probe(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="http://HOST:PORT/PATH, grpc://HOST:PORT or grpc://HOST:PORT/SERVICE.")
    ],
    timeout_s: Annotated[float, typer.Option(min=0.1, metavar="N", help="Seconds to wait for the answer.")] = 3.0,
) -> None:
    """Asks a server whether it is well: exit code 0 if so, else 1.

    A health check for containers.
    """
    from common import probes

    try:
        trouble = asyncio.run(probes.trouble(url, timeout_s))
    except ValueError as e:
        raise ConfigError(
            f"url: {e} will not do; expected http://HOST:PORT/PATH or grpc://HOST:PORT", field="url"
        ) from e
    if trouble is not None:
        raise Unavailable(f"{url} does not say that it is well: {trouble}")
