"""`baton keys`: creates, lists and revokes API keys in a file or in Redis. A new key is printed once only."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import Redis, opt
from common.errors import ConfigError
from common.settings import kinds

if TYPE_CHECKING:  # only imported when a command runs
    from gateway.admission.api_keys import ApiKey

keys = typer.Typer(help="Creates, lists and revokes API keys, in a file or in Redis.", add_completion=False)
KeyStore = Annotated[
    str | None,
    opt("File of API keys (JSON if it ends in .json, else TOML), or redis; default: $BATON_API_KEYS.", metavar="FILE"),
]


def _max_option(what: str, *, never: str = "any number") -> Any:
    """A limit; 0, the default, means no limit."""
    return typer.Option(min=0, metavar="N", show_default=False, help=f"{what} (default 0: {never}).")


@keys.command("create")
def keys_create(
    tenant: Annotated[str, typer.Argument(help="Tenant of the key: letters, digits, dots, dashes, underscores.")],
    api_keys: KeyStore = None,
    redis: Redis = None,
    requests_per_minute: Annotated[int, _max_option("Max requests a minute")] = 0,
    tokens_per_minute: Annotated[int, _max_option("Max tokens a minute, in and out")] = 0,
    tokens_per_day: Annotated[int, _max_option("Max tokens a day (UTC), in and out")] = 0,
    concurrent: Annotated[int, _max_option("Max requests at once")] = 0,
    weight: Annotated[float, typer.Option(metavar="X", help="Weight of the tenant under load, above 0.")] = 1.0,
    priority: Annotated[
        int, typer.Option(metavar="N", help="Priority of its requests; also the highest that they may set.")
    ] = 0,
    cache_priority: Annotated[
        int, typer.Option(min=-1, max=2, metavar="N", help="The same for the cached blocks of its requests (-1 to 2).")
    ] = 0,
    model: Annotated[
        list[str] | None, opt("A model that it may use; may be repeated; default: all.", metavar="NAME")
    ] = None,
    isolated: Annotated[bool, opt("The tenant shares no prefix cache, also with --share-cache.", "--isolated")] = False,
    admin: Annotated[bool, opt("May reset caches and see the timelines of all requests.", "--admin")] = False,
    days: Annotated[int, _max_option("Days until it expires", never="never")] = 0,
    note: Annotated[str, opt("Purpose of the key.", metavar="TEXT")] = "",
) -> None:
    """Creates a key and prints it; it cannot be printed again."""
    fields = {k: v for k, v in locals().items() if k not in ("tenant", "api_keys", "redis", "model", "days")}
    from gateway.admission.api_keys import create_key

    try:
        kinds.NAME.parse(tenant)
    except ValueError as e:
        raise ConfigError(f"tenant: invalid value {tenant!r}: expected {kinds.NAME.expected}", field="tenant") from e
    if days:
        fields["expires"] = datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)
    key, record = create_key(tenant, models=tuple(model or ()), **fields)
    source, _ = _use(api_keys, redis, lambda store: store.add(record))
    typer.echo(key)
    typer.echo(f"key {record.id} of {tenant} is stored in {source}; the key is printed only now", err=True)


@keys.command("list")
def keys_list(api_keys: KeyStore = None, redis: Redis = None) -> None:
    """Lists the keys by id. The secret part is not stored."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("id", "tenant", "created", "expires", "limits", "allows", "note"):
        table.add_column(column, overflow="fold")
    _, records = _use(api_keys, redis, lambda store: store.read())
    for record in sorted(records, key=lambda record: (record.tenant, record.created)):
        expires = "never" if record.expires is None else f"{record.expires:%Y-%m-%d}"
        expires += " (expired)" if record.expired(datetime.now(UTC)) else ""
        allows = [
            "admin" if record.admin else "",
            f"priority {record.priority}" if record.priority else "",
            f"cache priority {record.cache_priority}" if record.cache_priority else "",
            f"weight {record.weight:g}" if record.weight != 1 else "",
            "own cache" if record.isolated else "",
            " ".join(record.models) or "all models",
        ]
        row = [record.id, record.tenant, f"{record.created:%Y-%m-%d}", expires, _limits(record)]
        table.add_row(*row, ", ".join(filter(None, allows)), record.note)
    Console().print(table)


@keys.command("revoke")
def keys_revoke(
    key_id: Annotated[str, typer.Argument(help="The key's middle part, as in `baton keys list`.")],
    api_keys: KeyStore = None,
    redis: Redis = None,
) -> None:
    """Revokes a key; running gateways refuse it within about a second."""
    source, removed = _use(api_keys, redis, lambda store: store.remove(key_id))
    if not removed:
        raise ConfigError(f"no key {key_id} in {source}", field="id")
    typer.echo(f"key {key_id} is revoked")


def _use(api_keys: str | None, redis: str | None, call: Callable[[Any], Any]) -> tuple[str, Any]:
    """Passes the KeyFile or RedisKeyStore that the options name to `call`; returns its name and the result of `call`.

    BATON_API_KEYS and BATON_REDIS replace missing options.
    """
    from gateway.admission.key_store import REDIS_SOURCE, KeyFile, RedisKeyStore

    source, url = api_keys or os.environ.get("BATON_API_KEYS"), redis or os.environ.get("BATON_REDIS")
    if not source:
        raise ConfigError("--api-keys: missing: expected a file, or redis", field="api_keys")
    if source != REDIS_SOURCE:
        return source, call(KeyFile(Path(source)))
    if url is None:
        raise ConfigError("--api-keys: redis needs --redis URL", field="api_keys")

    async def use() -> Any:
        store = RedisKeyStore(url)
        try:
            return await call(store)
        finally:
            await store.close()

    return source, asyncio.run(use())


def _limits(record: ApiKey) -> str:
    names = ("requests/min", "tokens/min", "tokens/day", "at once")
    values = (record.requests_per_minute, record.tokens_per_minute, record.tokens_per_day, record.concurrent)
    return ", ".join(f"{value} {name}" for name, value in zip(names, values, strict=True) if value) or "none"
