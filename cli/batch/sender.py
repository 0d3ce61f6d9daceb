"""Sends the requests of a batch to a gateway, several at a time, with retries of temporary failures.

The back-off is exponential with jitter, and at least the answer's Retry-After. A refused API key ends the run, because
all other requests would fail too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import orjson

from cli.batch.records import TEMPORARY, Request, Result
from common.errors import BatonError, ConfigError, Unavailable

BACKOFF_S = (0.5, 30.0)
MAX_RETRY_AFTER_S = 300.0
#: Codes of status 429 that retries in this run cannot change.
NO_RETRY_CODES = frozenset({"insufficient_quota"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """How to send the requests."""

    url: str  # Of the gateway, with or without /v1.
    api_key: str | None = None
    concurrency: int = 64
    retries: int = 10  # Per request.
    timeout_s: float = 600.0  # Per try.


async def send_all(
    sending: Sending,
    requests: Iterator[Request],
    done: Callable[[Request, Result], None],
    retried: Callable[[str], None],
) -> None:
    """Sends all requests; calls `done` with each result as it arrives, and `retried` with the reason of each retry.

    Raises Unavailable if the gateway refuses the API key, ConfigError for an invalid URL or key, and errors of `done`.
    """
    headers = {"content-type": "application/json", "x-request-timeout": f"{sending.timeout_s:g}"}
    if sending.api_key:
        if not (sending.api_key.isascii() and sending.api_key.isprintable()):
            raise ConfigError("--api-key: an API key must be printable ASCII", field="api_key")
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
    """The gateway's URL without /v1. Raises ConfigError."""
    try:
        base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as e:
        raise ConfigError(f"--url: {url!r} is not a URL: {e}", field="url") from e
    if base.scheme not in ("http", "https") or not base.host:
        raise ConfigError(f"--url: {url!r} is not like http://HOST:PORT", field="url")
    return base


async def _result(
    client: httpx.AsyncClient, sending: Sending, request: Request, retried: Callable[[str], None]
) -> Result:
    pause_s = BACKOFF_S[0]
    for retries_left in range(sending.retries, -1, -1):
        result, retry_after_s = await _try(client, request)
        if result.status in (401, 403) and result.code == "invalid_api_key":
            raise Unavailable("the gateway refuses the API key; pass another one with --api-key")
        temporary = result.status in TEMPORARY or not result.status
        if not temporary or result.code in NO_RETRY_CODES or not retries_left:
            return result
        retried(result.reason)
        await asyncio.sleep(max(min(retry_after_s, MAX_RETRY_AFTER_S), pause_s * random.uniform(0.5, 1.0)))
        pause_s = min(BACKOFF_S[1], 2 * pause_s)
    raise AssertionError("the last try returns")


async def _try(client: httpx.AsyncClient, request: Request) -> tuple[Result, float]:
    """Sends a request once: the result, and the seconds of Retry-After."""
    try:
        answer = await client.post(request.url, content=request.body)
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        detail = f": {e}" if str(e) else ""
        return Result(error=f"no answer from {client.base_url}: {type(e).__name__}{detail}"), 0.0
    try:
        body = orjson.loads(answer.content)
    except orjson.JSONDecodeError:
        body = answer.text
    retry_after = answer.headers.get("retry-after", "")
    retry_after_s = float(retry_after) if retry_after.isascii() and retry_after.isdecimal() else 0.0
    return Result(answer.status_code, answer.headers.get("x-request-id", ""), body), retry_after_s
