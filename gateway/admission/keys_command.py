"""`baton keys`: makes, lists and takes back API keys in a file or in Redis. A new key is shown once and never again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from common import config_kinds as kinds
from common.errors import ConfigError
from gateway.admission.key_ring import IN_REDIS
from gateway.admission.key_store import KeyFile, KeyHash
from gateway.admission.keys import ApiKey, mint

_T = TypeVar("_T")


class _Store:
    """The one place that the command works on."""

    def __init__(self, source: str | None, redis: str | None) -> None:
        if not source:
            raise ConfigError("--api-keys: missing; expected a file, or redis", field="api_keys")
        if source == IN_REDIS and redis is None:
            raise ConfigError("--api-keys: redis needs --redis, where the keys are", field="api_keys")
        self.name = source
        self._redis = redis if source == IN_REDIS else None

    def read(self) -> list[ApiKey]:
        if self._redis is not None:
            return self._ask(lambda store: store.read())
        return KeyFile(Path(self.name)).read()

    def add(self, record: ApiKey) -> None:
        if self._redis is not None:
            self._ask(lambda store: store.add(record))
        else:
            KeyFile(Path(self.name)).add(record)

    def remove(self, key_id: str) -> bool:
        if self._redis is not None:
            return self._ask(lambda store: store.remove(key_id))
        return KeyFile(Path(self.name)).remove(key_id)

    def _ask(self, call: Callable[[KeyHash], Awaitable[_T]]) -> _T:
        assert self._redis is not None
        url = self._redis

        async def work() -> _T:
            store = KeyHash(url)
            try:
                return await call(store)
            finally:
                await store.close()

        return asyncio.run(work())


def create(console: Console, source: str | None, redis: str | None, *, tenant: str, days: int, **fields: Any) -> int:
    """Makes a key, shows it, keeps its record. days: until it expires; 0: never. Raises ConfigError, Unavailable."""
    store = _Store(source, redis)
    try:
        kinds.NAME.parse(tenant)
    except ValueError as e:
        raise ConfigError(f"tenant: {tenant!r} will not do; expected {kinds.NAME.expected}", field="tenant") from e
    if days:
        fields["expires"] = datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)
    key, record = mint(tenant, **fields)
    store.add(record)
    console.print(key, markup=False, highlight=False, soft_wrap=True)
    Console(stderr=True).print(
        f"key {record.id} of {tenant} is in {store.name}; it is shown only now", markup=False, highlight=False
    )
    return 0


def show(console: Console, source: str | None, redis: str | None) -> int:
    """All keys of the place, without what only their owners have."""
    table = Table(box=None, pad_edge=False)
    for column in ("id", "tenant", "created", "expires", "limits", "allows", "note"):
        table.add_column(column, overflow="fold")
    for record in sorted(_Store(source, redis).read(), key=lambda record: (record.tenant, record.created)):
        expires = "never" if record.expires is None else f"{record.expires:%Y-%m-%d}"
        expires += " (over)" if record.expired(datetime.now(UTC)) else ""
        allows = [
            "admin" if record.admin else "",
            f"priority {record.priority}" if record.priority else "",
            f"weight {record.weight:g}" if record.weight != 1 else "",
            "own cache" if record.isolated else "",
            " ".join(record.models) or "all models",
        ]
        row = [record.id, record.tenant, f"{record.created:%Y-%m-%d}", expires, _limits(record)]
        table.add_row(*row, ", ".join(filter(None, allows)), record.note)
    console.print(table)
    return 0


def _limits(record: ApiKey) -> str:
    named = {
        "requests/min": record.requests_per_minute,
        "tokens/min": record.tokens_per_minute,
        "tokens/day": record.tokens_per_day,
        "at once": record.concurrent,
    }
    return ", ".join(f"{value} {name}" for name, value in named.items() if value) or "none"


def revoke(console: Console, source: str | None, redis: str | None, *, key_id: str) -> int:
    """Takes a key back. Running gateways know it a second later. Raises ConfigError when there is none."""
    store = _Store(source, redis)
    if not store.remove(key_id):
        raise ConfigError(f"there is no key {key_id} in {store.name}", field="id")
    console.print(f"key {key_id} is revoked", highlight=False)
    return 0
