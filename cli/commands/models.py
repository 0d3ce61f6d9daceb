"""`baton models`: says how Baton would serve a model, from its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cli import exits
from cli.options import opt


def models(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="Model directories, or models of the hub.")],
    as_json: Annotated[bool, opt("Prints a JSON object for each model.", "--json")] = False,
) -> None:
    """Says whether models are served natively, through transformers, or not at all and why.

    Reads no weights; of a model of the hub it downloads the other files. The exit code is 1 if a model is not served.
    """
    from common.model.directory import resolve_model
    from engine.models.loader import model_support

    refused = False
    for model in models:
        path = Path(model)
        support = model_support(path if path.is_dir() else resolve_model(model, tokenizer=False, weights=False))
        refused |= support.how == "no"
        if as_json:
            typer.echo(json.dumps({"model": model, **support.details}))
        else:
            typer.echo(f"{model}: {support.text}")
    if refused:
        raise typer.Exit(exits.FAILED)
