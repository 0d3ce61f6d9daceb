"""`baton pull`: downloads a model of the hub into the cache, for a later start without the network."""

from __future__ import annotations

import functools
import os
import signal
from typing import Annotated

import typer

from cli.options import opt
from common.errors import ConfigError


def pull(
    models: Annotated[
        list[str], typer.Argument(metavar="OWNER/NAME[@REVISION]", help="Models of the hub, or smollm2.")
    ],
    tokenizer_only: Annotated[
        bool, opt("No weights: only the files that a gateway needs.", "--tokenizer-only")
    ] = False,
) -> None:
    """Downloads models of the hub, and prints their directories.

    Only missing files are downloaded. HF_HOME names the cache, HF_TOKEN the token, HF_ENDPOINT a mirror.
    """
    from cli.demo.model import prepared
    from common.model.directory import SMOLLM2
    from common.model.hub import hub_name, remove_partial_files

    # A download thread ends only with its file, so the process ends without its threads.
    def end(number: int, _frame: object) -> None:
        remove_partial_files()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    for model in models:
        if model != SMOLLM2 and hub_name(model) is None:
            expected = f"expected OWNER/NAME[@REVISION], like Qwen/Qwen3-0.6B, or {SMOLLM2}"
            raise ConfigError(f"{model!r} is not the name of a model of the hub: {expected}", field="model")
    say = functools.partial(typer.echo, err=True)
    for model in models:
        typer.echo(prepared(model, tokenizer=False, weights=not tokenizer_only, say=say))
