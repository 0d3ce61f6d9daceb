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
    str | None,
    opt("File of API keys (JSON if it ends in .json, else TOML), or redis; default: $BATON_API_KEYS.", metavar="FILE"),
]


def _most(what: str, *, never: str = "any number") -> Any:
    """An option whose 0, the default, is no limit."""
    return typer.Option(min=0, metavar="N", show_default=False, help=f"{what} (default 0: {never}).")


@keys.command("create")
def keys_create(
    tenant: Annotated[str, typer.Argument(help="Whose key it is: letters, digits, dots, dashes, underscores.")],
    api_keys: KeyStore = None,
    redis: Redis = None,
    requests_per_minute: Annotated[int, _most("Most requests a minute")] = 0,
    tokens_per_minute: Annotated[int, _most("Most tokens a minute, in and out")] = 0,
    tokens_per_day: Annotated[int, _most("Most tokens a day (UTC), in and out")] = 0,
    concurrent: Annotated[int, _most("Most requests at once")] = 0,
    weight: Annotated[
        float, typer.Option(metavar="X", help="The tenant's part when there is too little for all, above 0.")
    ] = 1.0,
    priority: Annotated[
        int, typer.Option(metavar="N", help="Of its requests; also the most that they may ask for.")
    ] = 0,
    model: Annotated[list[str] | None, opt("A model that it may use, repeated; default: all.", metavar="NAME")] = None,
    isolated: Annotated[
        bool, typer.Option("--isolated", help="The tenant shares no prefix cache with others.")
    ] = False,
    admin: Annotated[bool, typer.Option("--admin", help="May empty caches and see all requests' timelines.")] = False,
    days: Annotated[int, _most("Days until it expires", never="never")] = 0,
    note: Annotated[str, opt("What it is for.", metavar="TEXT")] = "",
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
