"""Redis clients of any topology, Lua scripts that run by their digest, and calls of a Redis that may be away."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hiredis
import redis.asyncio as redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, NoScriptError, RedisClusterException, RedisError, TimeoutError

from common.errors import ConfigError, IndexUnavailable, describe, first_line, timed_out
from common.redis.url import RedisUrl, TlsOptions

#: Errors of a server that is down or misbehaves. asyncio's TimeoutError is included: it is an OSError.
REDIS_FAILURES = (RedisError, RedisClusterException, OSError)

RedisArg = str | bytes | int
RedisClient = redis.Redis | RedisCluster


#: Patterns of a server's errors, and their meaning. The first pattern that matches counts. redis-py drops the first
#: word of some errors (NOAUTH, LOADING), so a pattern also matches the text behind that word.
_SERVER_ERRORS = (
    ("wrongpass|invalid username", "wrong password or user"),
    ("noauth|authentication required", "password missing"),
    ("without any password configured", "password given, but the server has none"),
    ("noperm|no permissions", "no permission for this command"),
    ("loading the dataset|^loading", "loading its data"),
    ("readonly|read only replica", "read-only replica"),
    ("masterdown|link with master", "replica without its primary"),
    ("clusterdown|cluster is down", "cluster down"),
    ("no master found|no slave found", "no primary known to the sentinels"),
    ("misconf|unable to persist", "no writes, because saving to disk fails"),
    ("^oom|maxmemory", "memory full"),
    ("^busy|busy running a script", "busy with a script"),
    ("max number of clients", "too many clients"),
    ("certificate_verify_failed", "TLS: certificate not trusted"),
    ("wrong_version_number|record layer failure", "TLS: the server does not use TLS"),
    (r"\[ssl|ssl:", "TLS failed"),
)
#: redis-py's text of a failed connection: "Error 111 connecting to 127.0.0.1:6379. Connect call failed ...".
_CONNECTING = re.compile(r"Error (?P<what>.*?) connecting to (?P<where>\S+?)\.(?:\s|$)")
_NUMBER = re.compile(r"^(\d+)$|\[Errno (\d+)\]|\((\d+), '")


@describe.register(RedisError)
@describe.register(RedisClusterException)
def _(error: RedisError | RedisClusterException, *, limit_s: float | None = None) -> str:
    text = first_line(error)
    if isinstance(error, TimeoutError):
        return timed_out(limit_s)
    lower = text.lower()
    for marks, words in _SERVER_ERRORS:
        if re.search(marks, lower):
            return f"{words} ({text.rstrip('.')})"
    connecting = _CONNECTING.search(text)
    where = f" ({connecting['where']})" if connecting else ""
    if number := _NUMBER.search(connecting["what"] if connecting else text):
        code = int(next(filter(None, number.groups())))
        if code in errno.errorcode:
            return f"{os.strerror(code).lower()}{where}"
    if "closed by server" in lower:
        return "connection closed by the server"
    return text or "connection failed"


class CircuitBreaker:
    """Decides whether to call a dependency. The caller reports how each call ended.

    closed --- failures in a row ---> open --- one call per probe_s succeeds ---> closed
    """

    def __init__(self, *, failures: int = 3, probe_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._probe_s, self._clock = failures, probe_s, clock
        self._failures, self._next_probe = 0, 0.0
        self.cause = ""  #: Why the last call failed, in words; "" if it succeeded.

    @property
    def open(self) -> bool:
        """The last calls failed; the dependency counts as down."""
        return self._failures >= self._limit

    def allow_call(self) -> bool:
        """Returns whether to call now. While open, it is True once per probe_s: this call is the probe."""
        if self.open:
            now = self._clock()
            if now < self._next_probe:
                return False
            self._next_probe = now + self._probe_s
        return True

    def record_success(self) -> None:
        """Reports that a call succeeded."""
        self._failures, self.cause = 0, ""

    def record_failure(self, cause: str) -> None:
        """Reports that a call failed, and why."""
        self._failures += 1
        self.cause = cause
        if self._failures == self._limit:
            self._next_probe = self._clock() + self._probe_s


class LuaScript:
    """A Lua script. It runs by its digest and is loaded when the server does not know it."""

    def __init__(self, *names: str, directory: Path) -> None:
        """Joins the files `names` of `directory`, in order: files with shared functions come first."""
        self._text = "".join((directory / f"{name}.lua").read_text("utf-8") for name in names)
        self._sha = hashlib.sha1(self._text.encode(), usedforsecurity=False).hexdigest()

    def pack_command(self, keys: Sequence[str], args: Sequence[RedisArg]) -> bytes:
        """Packs the EVALSHA command; it fails with NoScriptError on a server that does not know the script."""
        command = ("EVALSHA", self._sha, len(keys), *keys, *args)
        packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]  # the stub only has tuples of one
        return packed

    async def run(self, client: RedisClient, keys: Sequence[str], args: Sequence[RedisArg]) -> Any:
        """Runs the script and returns its answer, with bytes not decoded. A cancel during the call ends the task."""
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        try:
            return await self._run(client, keys, args)
        finally:
            if task.cancelling() > cancels:  # redis-py's asyncio.wait_for can lose a cancel before Python 3.12
                raise asyncio.CancelledError

    async def _run(self, client: RedisClient, keys: Sequence[str], args: Sequence[RedisArg]) -> Any:
        try:
            return await client.evalsha(self._sha, len(keys), *keys, *args)
        except NoScriptError:
            return await client.eval(self._text, len(keys), *keys, *args)


class ScriptRunner:
    """Runs Lua scripts in a Redis that may be away: few at a time, with a time limit, behind a circuit breaker."""

    def __init__(self, url: str | None, *, timeout_s: float, max_calls: int = 8) -> None:
        """`url`: None for no Redis. `timeout_s`: limit of a call. `max_calls`: calls at the same time; others wait."""
        self._client: RedisClient | None = None if url is None else connect_redis(url, timeout_s=max(1.0, timeout_s))
        self._timeout_s = timeout_s
        self._breaker = CircuitBreaker()
        self._slots = asyncio.Semaphore(max_calls)

    @property
    def has_redis(self) -> bool:
        """There is a Redis, which may be away."""
        return self._client is not None

    async def close(self) -> None:
        """Closes the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def run(self, script: LuaScript, keys: Sequence[str], args: Sequence[RedisArg]) -> Any:
        """Runs a script and returns its answer. Raises IndexUnavailable without an answer within the time limit."""
        if self._client is None:
            raise IndexUnavailable("there is no Redis")
        async with self._slots:
            if not self._breaker.allow_call():
                raise IndexUnavailable(f"Redis did not answer the last calls: {self._breaker.cause}")
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await script.run(self._client, keys, args)
            except REDIS_FAILURES as e:
                self._breaker.record_failure(cause := describe(e, limit_s=self._timeout_s))
                raise IndexUnavailable(f"Redis does not answer: {cause}") from e
            self._breaker.record_success()
            return answer


class _SentinelRedis(redis.Redis):
    """A client of a primary that also closes the connections to its sentinels."""

    def __init__(self, url: RedisUrl, sentinels: dict[str, Any], servers: dict[str, Any]) -> None:
        self._sentinel = Sentinel(url.nodes, sentinel_kwargs=sentinels)  # type: ignore[no-untyped-call]
        pool = SentinelConnectionPool(url.service, self._sentinel, **servers)  # type: ignore[no-untyped-call]
        super().__init__(connection_pool=pool)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(True)
        for client in self._sentinel.sentinels:
            await client.aclose()


def connect_redis(url: str, *, timeout_s: float, no_read_timeout: bool = False) -> RedisClient:
    """Returns a client for a URL (common/redis/url.py) with limits for connecting and reading. Raises ConfigError.

    With no_read_timeout only connecting has the limit. The client repeats a command once over a new connection when a
    pooled one is closed, so every script must be safe to run twice.
    """
    parts = RedisUrl.parse(url)
    read_s, retry = None if no_read_timeout else timeout_s, Retry(NoBackoff(), 1, supported_errors=(ConnectionError,))
    waits: dict[str, Any] = {
        "socket_connect_timeout": timeout_s,
        "socket_timeout": read_s,
        "retry": retry,
        "protocol": 2,
    }
    login: dict[str, Any] = {"username": parts.username, "password": parts.password}
    tls: dict[str, Any] = {} if parts.tls is None else _tls_options(parts.tls)
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


def _tls_options(tls: TlsOptions) -> dict[str, Any]:
    options = asdict(tls)
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if options[name] is not None and not Path(options[name]).is_file():
            raise ConfigError(f"redis: {name}: no such file: {options[name]}", field="redis")
    return {"ssl": True, **options}
