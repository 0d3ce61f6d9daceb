"""`baton up`: a stack on this machine."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from cli.options import Config, load, opt, takes_settings
from common.settings.configs import UpConfig


@takes_settings(UpConfig)
def up(
    flags: dict[str, Any],
    config: Config = None,
    once: Annotated[str | None, opt("Answer this prompt, show its time line, and stop.", metavar="PROMPT")] = None,
) -> None:
    """Runs a stack on this machine, until Ctrl-C.

    It consists of Valkey (or --redis), prefill and decode pods, and a gateway.
    """
    settings = load(UpConfig, config, flags)
    from cli.stack.up import run

    raise typer.Exit(asyncio.run(run(settings, once=once)))
