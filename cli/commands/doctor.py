"""`baton doctor`: checks of this machine and of running pods."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from cli.options import Redis, opt
from common.errors import ConfigError
from common.settings import kinds


def doctor(
    redis: Redis = None,
    pods: Annotated[
        list[str] | None,
        opt("Running pods to check, besides those in --redis; may be repeated.", metavar="HOST:PORT,.."),
    ] = None,
) -> None:
    """Checks this machine for the requirements of Baton.

    With --redis or --pods also how running pods exchange KV.
    """
    from cli.doctor import report

    given = ",".join(pods or ())
    try:
        addresses = kinds.tuple_of(kinds.ADDRESS).parse(given)
    except ValueError as e:
        expected = kinds.tuple_of(kinds.ADDRESS).expected
        raise ConfigError(f"--pods: invalid value {given!r}: expected {expected}", field="pods") from e
    raise typer.Exit(asyncio.run(report.report(redis, addresses)))
