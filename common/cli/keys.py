"""`baton keys`: API keys in a file or in Redis."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from common.cli.options import Redis, opt

keys = typer.Typer(help="Makes, lists and takes back API keys, in a file or in Redis.", add_completion=False)
KeyStore = Annotated[
    str | None, opt("File of API keys (.toml or .json), or redis; default: $BATON_API_KEYS.", metavar="FILE|redis")
]


@keys.command("create")
def keys_create(
    tenant: Annotated[str, typer.Argument(help="Whose key it is: letters, digits, dots, dashes, underscores.")],
    api_keys: KeyStore = None,
    redis: Redis = None,
    requests_per_minute: Annotated[int, typer.Option(min=0, help="Most requests a minute (default: any).")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(min=0, help="Most tokens a minute, in and out.")] = 0,
    tokens_per_day: Annotated[int, typer.Option(min=0, help="Most tokens a day (UTC), in and out.")] = 0,
    concurrent: Annotated[int, typer.Option(min=0, help="Most requests at once.")] = 0,
    weight: Annotated[float, typer.Option(help="The tenant's part when there is too little for all.")] = 1.0,
    priority: Annotated[int, typer.Option(help="Of its requests; also the most that they may ask for.")] = 0,
    model: Annotated[list[str] | None, opt("A model that it may use, repeated; default: all.", metavar="NAME")] = None,
    isolated: Annotated[
        bool, typer.Option("--isolated", help="The tenant shares no prefix cache with others.")
    ] = False,
    admin: Annotated[bool, typer.Option("--admin", help="May empty caches and see all requests' timelines.")] = False,
    days: Annotated[int, typer.Option(min=0, help="Days until it expires (default: never).")] = 0,
    note: Annotated[str, typer.Option(help="What it is for.")] = "",
) -> None:
    """Makes a key and shows it; it cannot be shown again."""
    fields = {k: v for k, v in locals().items() if k not in ("api_keys", "redis", "model")}
    raise typer.Exit(_keys_command("create", api_keys, redis, models=tuple(model or ()), **fields))


@keys.command("list")
def keys_list(api_keys: KeyStore = None, redis: Redis = None) -> None:
    """Lists keys by id; what clients send is not kept anywhere."""
    raise typer.Exit(_keys_command("show", api_keys, redis))


@keys.command("revoke")
def keys_revoke(
    key_id: Annotated[str, typer.Argument(help="The key's id, as in its middle or in `baton keys list`.")],
    api_keys: KeyStore = None,
    redis: Redis = None,
) -> None:
    """Takes a key back; running gateways refuse it a second later."""
    raise typer.Exit(_keys_command("revoke", api_keys, redis, key_id=key_id))


def _keys_command(name: str, api_keys: str | None, redis: str | None, **values: Any) -> int:
    from rich.console import Console

    # Like the services, keys are above this package.
    commands = importlib.import_module("gateway.admission.keys_command")
    source, url = api_keys or os.environ.get("BATON_API_KEYS"), redis or os.environ.get("BATON_REDIS")
    run: Callable[..., int] = {"create": commands.create, "show": commands.show, "revoke": commands.revoke}[name]
    return run(Console(), source, url, **values)
