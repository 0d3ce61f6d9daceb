"""`baton gateway`: the server for clients."""

from __future__ import annotations

import functools
import re
from typing import Annotated, Any

import typer

from cli import service
from cli.options import Config, load, opt, takes_settings
from common.settings.configs import GatewayConfig


@takes_settings(GatewayConfig)
def gateway(
    flags: dict[str, Any],
    config: Config = None,
    model: Annotated[
        list[str] | None,
        opt("smollm2 or a model directory; several as NAME=DIR, repeated; default: smollm2.", metavar="[NAME=]DIR"),
    ] = None,
) -> None:
    """Runs the gateway: OpenAI REST and gRPC for clients."""
    if model:
        several = len(model) > 1 or re.match(r"[^/=]+=", model[0])
        flags |= {"models": model} if several else {"model": model[0]}
    service.run(load(GatewayConfig, config, flags), _serve)


async def _serve(settings: GatewayConfig) -> None:
    from cli.demo.model import demo_model
    from common.model.directory import SMOLLM2
    from gateway.server import serve

    if SMOLLM2 in settings.served_models().values():
        demo_model(functools.partial(typer.echo, err=True))
    await serve(settings)
