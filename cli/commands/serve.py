"""`baton serve`: runs one pod."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import typer

from cli import service
from cli.options import Config, load, takes_settings
from common.settings.configs import PodConfig
from common.types import Role


@takes_settings(PodConfig)
def serve(flags: dict[str, Any], config: Config = None) -> None:
    """Runs one pod: --role prefill, decode or both."""
    service.run(load(PodConfig, config, flags), _serve)


async def _serve(settings: PodConfig) -> None:
    settings = _resolved(settings)
    if settings.role is Role.PREFILL:
        from prefill_service import servicer as prefill

        await prefill.serve(settings)
    else:
        from decode_service import servicer as decode

        await decode.serve(settings)


def _resolved(settings: PodConfig) -> PodConfig:
    """The settings with the model's directory and served name filled in. Raises ConfigError."""
    from cli.demo.model import prepared
    from common.model.directory import SMOLLM2, default_served_name

    known_as = settings.served_name or default_served_name(settings.model)
    weights = settings.load_format == "auto"
    say = functools.partial(typer.echo, err=True)
    model = prepared(settings.model, tokenizer=False, weights=weights, say=say)
    if settings.speculation == "draft_model" and settings.speculation_model == SMOLLM2:
        prepared(SMOLLM2, say=say)
    return dataclasses.replace(settings, model=str(model), served_name=known_as)
