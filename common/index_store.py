"""Keys, scripts and connections of the prefix index: what its pod side and its gateway side share.

All keys of a scope carry the hash tag {scope}, so that every script runs on one slot of a Redis Cluster. `kv:scopes` is
the one key outside and never touched together with others. Feature level: Redis / Valkey 7.2.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any

import hiredis
import redis.asyncio as redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, NoScriptError, RedisClusterException, RedisError

from common.errors import ConfigError
from common.index_records import Tier
from common.index_url import IndexUrl, Tls

SCOPES_KEY = "kv:scopes"  # HASH scope -> model, by which gateways find scopes
PREFIX_BYTES = 8  # of each 16-byte block hash; what sets and chains are made of
SAMPLED_TOKENS = 128

LEASE_MS = 10_000
OWN_TTL_S = 60
INFO_TTL_S = 3_600
PODS_TTL_S = 86_400

# A server that is away, or does not do what it should; asyncio's TimeoutError is an OSError.
FAILURES = (RedisError, RedisClusterException, OSError)

Arg = str | bytes | int
Client = redis.Redis | RedisCluster


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

    def generation(self, pod: str) -> str:
        return f"{self.prefix}gen:{pod}"

    def info(self, pod: str) -> str:
        return f"{self.prefix}info:{pod}"

    def lease(self, pod: str) -> str:
        return f"{self.prefix}lease:{pod}"

    def load(self, pod: str) -> str:
        return f"{self.prefix}load:{pod}"

    def held_blocks(self, pod: str, generation: int, tier: Tier = Tier.DEVICE) -> str:
        return f"{self.prefix}{'own' if tier is Tier.DEVICE else 'host'}:{pod}:{generation}"

    def shadow(self, pod: str, generation: int, number: int, tier: Tier = Tier.DEVICE) -> str:
        return f"{self.held_blocks(pod, generation, tier)}:{number}"

    @property
    def postings(self) -> str:
        return f"{self.prefix}where"

    @property
    def slots(self) -> str:
        return f"{self.prefix}slots"

    @property
    def sweep(self) -> str:
        return f"{self.prefix}sweep"

    @property
    def gateways(self) -> str:
        return f"{self.prefix}gateways"

    def batch_number(self, pod: str, generation: int) -> str:
        return f"{self.prefix}seq:{pod}:{generation}"

    def bookings(self, pod: str) -> str:
        return f"{self.prefix}resv:{pod}"

    def booking_units(self, pod: str) -> str:
        return f"{self.prefix}resv_tokens:{pod}"


class Script:
    """A Lua script, run by its digest and loaded when the server does not know it (yet, or again)."""

    def __init__(self, *names: str, directory: Path = Path(__file__).parent / "lua") -> None:
        """names: files whose texts follow each other, functions first."""
        self._text = "".join((directory / f"{name}.lua").read_text("utf-8") for name in names)
        self._sha = hashlib.sha1(self._text.encode(), usedforsecurity=False).hexdigest()

    def pack_command(self, keys: Sequence[str], args: Sequence[Arg]) -> bytes:
        """The command that runs it where the server knows it."""
        command = ("EVALSHA", self._sha, len(keys), *keys, *args)
        packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]  # whose stub knows tuples of one
        return packed

    async def run(self, client: Client, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        """The script's answer, bytes undecoded.

        A task that is cancelled meanwhile ends: redis-py connects and sends by asyncio.wait_for, which before Python
        3.12 forgets a cancel that comes with its end.
        """
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        try:
            answer = await self._run(client, keys, args)
        except Exception as e:
            if task.cancelling() > cancels:
                raise asyncio.CancelledError from e
            raise
        if task.cancelling() > cancels:
            raise asyncio.CancelledError
        return answer

    async def _run(self, client: Client, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        try:
            return await client.evalsha(self._sha, len(keys), *keys, *args)
        except NoScriptError:
            return await client.eval(self._text, len(keys), *keys, *args)


class _SentinelRedis(redis.Redis):
    """Closes the connections to the sentinels with its own."""

    def __init__(self, url: IndexUrl, sentinels: dict[str, Any], servers: dict[str, Any]) -> None:
        self._sentinel = Sentinel(url.nodes, sentinel_kwargs=sentinels)  # type: ignore[no-untyped-call]
        pool = SentinelConnectionPool(url.service, self._sentinel, **servers)  # type: ignore[no-untyped-call]
        super().__init__(connection_pool=pool)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(True)
        for client in self._sentinel.sentinels:
            await client.aclose()


def connect(url: str, *, timeout_s: float, patient: bool = False) -> Client:
    """A client for an IndexUrl whose every wait is bounded by timeout_s; patient: only that for a connection is.

    Raises ConfigError.

    It tries once more over a new connection when a pooled one turns out to be closed; all scripts bear repeating.
    """
    parts = IndexUrl.parse(url)
    waits: dict[str, Any] = {"socket_connect_timeout": timeout_s, "protocol": 2}
    waits["socket_timeout"] = None if patient else timeout_s
    waits["retry"] = Retry(NoBackoff(), 1, supported_errors=(ConnectionError,))
    login: dict[str, Any] = {"username": parts.username, "password": parts.password}
    tls: dict[str, Any] = {} if parts.tls is None else {"ssl": True, **_tls_options(parts.tls)}
    if parts.cluster:
        nodes = [ClusterNode(host, port) for host, port in parts.nodes]
        return RedisCluster(startup_nodes=nodes, require_full_coverage=False, **waits, **login, **tls)
    if parts.service:
        sentinels = {**waits, **tls, "username": parts.sentinel_username, "password": parts.sentinel_password}
        return _SentinelRedis(parts, sentinels, {**waits, **login, **tls, "db": parts.db})
    if parts.path:
        return redis.Redis(unix_socket_path=parts.path, db=parts.db, **waits, **login)
    ((host, port),) = parts.nodes
    return redis.Redis(host=host, port=port, db=parts.db, **waits, **login, **tls)


def _tls_options(tls: Tls) -> dict[str, Any]:
    for name, path in (("ssl_ca_certs", tls.ca), ("ssl_certfile", tls.certificate), ("ssl_keyfile", tls.key)):
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"redis: {name}: there is no file {path}", field="redis")
    return {
        "ssl_ca_certs": tls.ca,
        "ssl_certfile": tls.certificate,
        "ssl_keyfile": tls.key,
        "ssl_cert_reqs": "required" if tls.verify else "none",
        "ssl_check_hostname": tls.check_hostname,
    }


def pack(hashes: Iterable[bytes]) -> bytes:
    """A chain of 16-byte block hashes as scripts take it: the first 8 bytes of each."""
    return memoryview(b"".join(hashes)).cast("Q")[::2].tobytes()


def sampling(block_size: int) -> int:
    """One block in so many has a posting, chosen by its hash: one in about SAMPLED_TOKENS tokens of a prompt."""
    return max(1, SAMPLED_TOKENS // block_size)


def sampled_positions(packed: bytes, every: int) -> bytes:
    """Positions (from 1) of a packed chain's sampled blocks, 4 bytes each, little-endian."""
    chosen = packed[::PREFIX_BYTES].translate(_chooser(every))
    numbers = array("I", compress(range(1, len(chosen) + 1), chosen))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


@cache
def _chooser(every: int) -> bytes:
    """A table that turns the first byte of a hash into 1 where the block is sampled, else 0."""
    return bytes(value % every == 0 for value in range(256))


def unpack_slots(posting: bytes) -> Sequence[int]:
    """The slots in a posting, 2 bytes each, little-endian."""
    slots = array("H", posting)
    if sys.byteorder == "big":
        slots.byteswap()
    return slots
