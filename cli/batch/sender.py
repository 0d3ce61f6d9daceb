"""Sends the requests of a batch to a gateway: so many at a time, again when that may help, each until it has a result.

Back-off is exponential with jitter, and never shorter than what Retry-After asks for. An API key that is refused ends
the run: no other request would fare better.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import orjson

from cli.batch.records import PASSING, Request, Result
from common.errors import BatonError, ConfigError, Unavailable

BACKOFF_S = (0.5, 30.0)
MAX_RETRY_AFTER_S = 300.0
HOPELESS = frozenset({"insufficient_quota"})  # codes of a 429 that no retry of this run will change


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """Where and how. url: of the gateway, with or without /v1. retries: of one request. timeout_s: for each try."""

    url: str
    api_key: str | None = None
    concurrency: int = 64
    retries: int = 10
    timeout_s: float = 600.0


async def send_all(
    sending: Sending,
    requests: Iterator[Request],
    done: Callable[[Request, Result], None],
    retried: Callable[[str], None],
) -> None:
    """Calls `done` with every request's result as it comes, `retried` with why one is sent again.

    Raises Unavailable when the gateway refuses the API key, ConfigError for a URL or key that cannot be one, and what
    `done` raises.
    """
    headers = {"content-type": "application/json", "x-request-timeout": f"{sending.timeout_s:g}"}
    if sending.api_key:
        if not (sending.api_key.isascii() and sending.api_key.isprintable()):
            raise ConfigError("--api-key: an API key is printable ASCII", field="api_key")
        headers["authorization"] = f"Bearer {sending.api_key}"
    base = base_url(sending.url)
    limits = httpx.Limits(max_connections=sending.concurrency, max_keepalive_connections=sending.concurrency)
    timeout = httpx.Timeout(sending.timeout_s + 10.0, connect=10.0)
    async with httpx.AsyncClient(base_url=base, headers=headers, limits=limits, timeout=timeout) as client:

        async def work() -> None:
            for request in requests:  # all workers take from one iterator
                done(request, await _result(client, sending, request, retried))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(sending.concurrency):
                    group.create_task(work())
        except* BatonError as e:
            raise e.exceptions[0] from e


def base_url(url: str) -> httpx.URL:
    """Of the gateway, without /v1. Raises ConfigError."""
    try:
        base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as e:
        raise ConfigError(f"--url: {url!r} is no URL: {e}", field="url") from e
    if base.scheme not in ("http", "https") or not base.host:
        raise ConfigError(f"--url: {url!r} is not like http://HOST:PORT", field="url")
    return base


async def _result(
    client: httpx.AsyncClient, sending: Sending, request: Request, retried: Callable[[str], None]
) -> Result:
    pause_s = BACKOFF_S[0]
    for left in range(sending.retries, -1, -1):
        result, wanted_s = await _try(client, request)
        if result.status in (401, 403) and result.code == "invalid_api_key":
            raise Unavailable("the gateway refuses the API key; give another with --api-key")
        passing = result.status in PASSING or not result.status
        if not passing or result.code in HOPELESS or not left:
            return result
        retried(result.reason)
        await asyncio.sleep(max(min(wanted_s, MAX_RETRY_AFTER_S), pause_s * random.uniform(0.5, 1.0)))
        pause_s = min(BACKOFF_S[1], 2 * pause_s)
    raise AssertionError("the last try returns")


async def _try(client: httpx.AsyncClient, request: Request) -> tuple[Result, float]:
    """The result, and the seconds that the gateway asks to wait before another try."""
    try:
        answer = await client.post(request.url, content=request.body)
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        told = f": {e}" if str(e) else ""
        return Result(error=f"no answer from {client.base_url}: {type(e).__name__}{told}"), 0.0
    try:
        body = orjson.loads(answer.content)
    except orjson.JSONDecodeError:
        body = answer.text
    wanted = answer.headers.get("retry-after", "")
    wanted_s = float(wanted) if wanted.isascii() and wanted.isdecimal() else 0.0
    return Result(answer.status_code, answer.headers.get("x-request-id", ""), body), wanted_s
