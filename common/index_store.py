"""Keys, scripts and connections of the prefix index: what its pod side and its gateway side share.

All keys of a scope carry the hash tag {scope}, so that every script runs on one slot of a Redis Cluster. `kv:scopes` is
the one key outside and never touched together with others. Feature level: Redis / Valkey 7.2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, NoScriptError

from common.errors import ConfigError

SCOPES_KEY = "kv:scopes"  # HASH scope -> model, by which gateways find scopes
PREFIX_BYTES = 8  # of each 16-byte block hash; what sets and chains are made of

LEASE_MS = 10_000
OWN_TTL_S = 60
INFO_TTL_S = 3_600
PODS_TTL_S = 86_400

Arg = str | bytes | int


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of one scope's keys."""

    scope: str

    @property
    def prefix(self) -> str:
        return f"kv:{{{self.scope}}}:"

    @property
    def pods(self) -> str:
        return f"{self.prefix}pods"

    def gen(self, pod: str) -> str:
        return f"{self.prefix}gen:{pod}"

    def info(self, pod: str) -> str:
        return f"{self.prefix}info:{pod}"

    def lease(self, pod: str) -> str:
        return f"{self.prefix}lease:{pod}"

    def load(self, pod: str) -> str:
        return f"{self.prefix}load:{pod}"

    def own(self, pod: str, generation: int) -> str:
        return f"{self.prefix}own:{pod}:{generation}"

    def shadow(self, pod: str, generation: int, number: int) -> str:
        return f"{self.prefix}own:{pod}:{generation}:{number}"

    def seq(self, pod: str, generation: int) -> str:
        return f"{self.prefix}seq:{pod}:{generation}"

    def resv(self, pod: str) -> str:
        return f"{self.prefix}resv:{pod}"

    def resv_tokens(self, pod: str) -> str:
        return f"{self.prefix}resv_tokens:{pod}"


class Script:
    """A Lua script of common/lua, run by its digest and loaded when the server does not know it (yet, or again)."""

    def __init__(self, name: str) -> None:
        self._text = (Path(__file__).parent / "lua" / f"{name}.lua").read_text(encoding="utf-8")
        self._sha = hashlib.sha1(self._text.encode(), usedforsecurity=False).hexdigest()

    async def run(self, client: redis.Redis, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        """The script's answer, bytes undecoded."""
        try:
            return await client.evalsha(self._sha, len(keys), *keys, *args)
        except NoScriptError:
            return await client.eval(self._text, len(keys), *keys, *args)

    async def run_each(self, client: redis.Redis, calls: Sequence[tuple[Sequence[str], Sequence[Arg]]]) -> list[Any]:
        """The answers of several calls in one round trip; the scopes of a cluster are on different nodes."""
        for attempt in (0, 1):
            async with client.pipeline(transaction=False) as pipe:
                for keys, args in calls:
                    pipe.evalsha(self._sha, len(keys), *keys, *args)
                try:
                    return list(await pipe.execute())
                except NoScriptError:
                    if attempt:
                        raise
            await client.script_load(self._text)
        raise AssertionError("unreachable")


def connect(url: str, *, timeout_s: float) -> redis.Redis:
    """A client whose every wait is bounded by timeout_s. Raises ConfigError.

    It tries once more over a new connection when a pooled one turns out to be closed; all scripts bear repeating.
    """
    try:
        return redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 1, supported_errors=(ConnectionError,)),
            protocol=2,
        )
    except ValueError as e:
        raise ConfigError(f"redis: {e}", field="redis") from e


def pack(hashes: Sequence[bytes]) -> bytes:
    """A chain of block hashes as scripts take it: the first 8 bytes of each."""
    return b"".join([h[:PREFIX_BYTES] for h in hashes])
