"""`baton doctor`: checks of this machine and of running pods."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from cli.options import Redis, opt
from common.settings.configs import GatewayConfig
from common.settings.table import FLAG, declared


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

    addresses = declared(GatewayConfig)["pods"].parse(",".join(pods or ()), FLAG)
    raise typer.Exit(asyncio.run(report.report(redis, addresses)))
