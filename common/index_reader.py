"""Gateway side of the prefix index: which pods live, what they hold, what is booked on them.

Everything here is a hint with a short deadline: a call not answered in time raises IndexUnavailable, after a few in a
row the breaker answers so at once, and one call per second tries again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import redis.asyncio as redis
from redis.exceptions import RedisError

from common.breaker import Breaker
from common.errors import IndexUnavailable
from common.index_records import PodLoad, PodRecord, PodStatus
from common.index_store import SCOPES_KEY, Keys, Script, connect, pack

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

POLL_TIMEOUT_S = 0.25
MAX_CALLS = 8  # at a time: a burst must not open a connection per request, and more would only queue in Redis


class IndexReader:
    """Reads and books; one per gateway. url None: every call raises IndexUnavailable."""

    def __init__(self, url: str | None, *, timeout_s: float = 0.02, breaker: Breaker | None = None) -> None:
        self._client = None if url is None else connect(url, timeout_s=max(1.0, timeout_s))
        self._timeout_s = timeout_s
        self._breaker = breaker or Breaker()
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self._pods = Script("pods")
        self._lookup = Script("lookup")
        self._book = Script("book")
        self._unbook = Script("unbook")

    @property
    def available(self) -> bool:
        """The index answered lately (it counts as away after three failures in a row)."""
        return self._client is not None and not self._breaker.open

    async def close(self) -> None:
        """Closes the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def pods(self) -> list[PodStatus]:
        """The live pods of all scopes, in two round trips. Raises IndexUnavailable.

        Meant for a background poll, so it may take POLL_TIMEOUT_S.
        """
        return await self._bounded(self._read_pods, max(self._timeout_s, POLL_TIMEOUT_S))

    async def _read_pods(self, client: redis.Redis) -> list[PodStatus]:
        scopes = await client.hkeys(SCOPES_KEY)
        if not scopes:
            return []
        keys = [Keys(scope.decode() if isinstance(scope, bytes) else scope) for scope in scopes]
        answers = await self._pods.run_each(client, [((k.pods,), (k.prefix,)) for k in keys])
        return [status for answer in answers for row in answer if (status := _status(*row)) is not None]

    async def lookup(self, scope: str, hashes: Sequence[bytes], pods: Sequence[tuple[str, int]]) -> dict[str, int]:
        """Blocks of the chain `hashes` (16 bytes each) that each (pod, generation) holds, from its start.

        One round trip for all pods; 0 for a pod that is gone or of another generation. Raises IndexUnavailable.
        """
        if not pods or not hashes:
            return {pod: 0 for pod, _ in pods}
        keys = Keys(scope)
        args = [keys.prefix, pack(hashes), *(x for pod, generation in pods for x in (pod, generation))]
        matched = await self._bounded(lambda client: self._lookup.run(client, (keys.pods,), args), self._timeout_s)
        return {pod: int(n) for (pod, _), n in zip(pods, matched, strict=True)}

    async def book(self, scope: str, pod: str, request_id: str, tokens: int, ttl_s: float) -> int:
        """Books uncached prompt tokens on a pod until unbook, or for ttl_s seconds. Atomic among gateways.

        Returns the tokens now booked on that pod, these included. Booking again replaces. Raises IndexUnavailable.
        """
        keys = Keys(scope)
        names = (keys.resv(pod), keys.resv_tokens(pod))
        args = (request_id, tokens, max(1, int(ttl_s * 1000)))
        return int(await self._bounded(lambda client: self._book.run(client, names, args), self._timeout_s))

    async def unbook(self, scope: str, pod: str, request_id: str) -> None:
        """Ends a booking; harmless when there is none. Raises IndexUnavailable (the booking then expires)."""
        keys = Keys(scope)
        names = (keys.resv(pod), keys.resv_tokens(pod))
        await self._bounded(lambda client: self._unbook.run(client, names, (request_id,)), self._timeout_s)

    async def _bounded(self, call: Callable[[redis.Redis], Awaitable[_T]], timeout_s: float) -> _T:
        if self._client is None:
            raise IndexUnavailable("no prefix index is configured")
        # Waiting for a slot is not the index's fault, so its time starts after it; the breaker ends the wait when the
        # calls before this one failed.
        async with self._slots:
            if not self._breaker.allow():
                raise IndexUnavailable("the prefix index is away")
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await call(self._client)
            except (RedisError, OSError) as e:  # asyncio's TimeoutError is an OSError
                self._breaker.failure()
                raise IndexUnavailable(f"the prefix index does not answer: {type(e).__name__}: {e}") from e
            self._breaker.success()
            return answer


def _status(pod: bytes, generation: bytes, load: bytes, booked: int, info: Sequence[bytes]) -> PodStatus | None:
    """One row of the pods script; None (and a line in the log) for a pod whose record this version cannot read."""
    values = [part.decode() for part in info]
    try:
        record = PodRecord.from_fields(dict(zip(values[::2], values[1::2], strict=True)))
        return PodStatus(record, PodLoad.from_json(load.decode()) if load else PodLoad(), booked)
    except (KeyError, ValueError, TypeError) as e:
        _log.warning("pod %s of generation %s left out: its record is unreadable: %r", pod, generation, e)
        return None
