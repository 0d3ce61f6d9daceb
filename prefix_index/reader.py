"""Gateway side of the prefix index: which pods live, what they hold, what is booked on them.

Everything here is a hint with a short deadline: a call not answered in time raises IndexUnavailable, after a few in a
row the breaker answers so at once, and one call per second tries again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from redis.exceptions import NoScriptError

from common.errors import IndexUnavailable
from common.redis.breaker import CircuitBreaker
from common.redis.client import REDIS_FAILURES, LuaScript, RedisArg, RedisClient, connect_redis
from common.types import PodLoad
from prefix_index.lookup_cache import LookupCache
from prefix_index.pipelined_connection import PipelinedConnections
from prefix_index.records import BookingCandidate, BookingResult, PodRecord, PodStatus, PrefixHits
from prefix_index.store import (
    LUA_DIR,
    SCOPES_KEY,
    IndexKeys,
    pack_hashes,
    pack_sampled_positions,
    sampling_interval,
    unpack_slots,
)

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_NOTHING = PrefixHits()

POLL_TIMEOUT_S = 0.5
MAX_EXACT_PODS = 16  # up to so many, a look-up names its pods and is exact for each of them
GATEWAY_TTL_MS = 3_000  # of silence after which a gateway is gone
ONLY_GATEWAY_S = 2.0  # that the last poll found no other gateway; one that comes sees this one at once
BOOKING_TTL_S = 30.0  # the same for all gateways: the age of a booking follows from its end
MAX_CONCURRENT_CALLS = (
    8  # at a time: a burst must not open a connection per request, and more would only queue in Redis
)


@dataclass(slots=True)
class _ScopeState:
    """What the last poll said: who the pods are, and which one a slot belongs to while the slots have this epoch."""

    epoch: bytes = b""
    version: bytes = b""  # of the records
    records: dict[tuple[str, int], PodRecord | None] = field(default_factory=dict)  # None: it cannot be read
    statuses: dict[tuple[str, int], tuple[bytes, PodStatus]] = field(default_factory=dict)  # by load as it was read
    owners: dict[int, tuple[str, int]] = field(default_factory=dict)
    every: int = 1  # one block in so many has a posting
    gateways: int = 0  # that use it, this one included
    asked: float = 0.0


class IndexReader:
    """Reads and books; one per gateway. url None: every call raises IndexUnavailable. books: False for one that only
    reads, of which gateways need not know. clock: of kept answers.
    """

    def __init__(
        self,
        url: str | None,
        *,
        books: bool = True,
        timeout_s: float = 0.02,
        breaker: CircuitBreaker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = None if url is None else connect_redis(url, timeout_s=max(1.0, timeout_s))
        self._lines = None if url is None else PipelinedConnections(url)
        self._timeout_s = timeout_s
        self._breaker = breaker or CircuitBreaker()
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        self._books = books
        self._name = secrets.token_hex(8)
        self._pods = LuaScript("pods", directory=LUA_DIR)
        self._present = LuaScript("present", directory=LUA_DIR)
        self._lookup = LuaScript("lookup", directory=LUA_DIR)
        self._reserve = LuaScript("reserve", directory=LUA_DIR)
        self._unbook = LuaScript("unbook", directory=LUA_DIR)
        self._scopes: dict[str, _ScopeState] = {}
        self._clock = clock
        self._cache = LookupCache(clock)

    @property
    def available(self) -> bool:
        """The index answered lately (it counts as away after three failures in a row)."""
        return self._client is not None and not self._breaker.open

    async def close(self) -> None:
        """Closes the connections."""
        if self._lines is not None:
            await self._lines.close()
        if self._client is not None:
            await self._client.aclose()

    async def pods(self) -> list[PodStatus]:
        """The live pods of all scopes, in two round trips. Raises IndexUnavailable.

        Meant for a background poll, so it may take POLL_TIMEOUT_S.
        """
        return await self._call_with_timeout(self._read_pods, max(self._timeout_s, POLL_TIMEOUT_S))

    async def _read_pods(self, client: RedisClient) -> list[PodStatus]:
        names = [scope.decode() if isinstance(scope, bytes) else scope for scope in await client.hkeys(SCOPES_KEY)]
        before = [self._scopes.get(name, _ScopeState()) for name in names]
        asked = self._clock()
        calls = [
            self._pods.run(client, (keys.pods, keys.slots), (keys.prefix, known.version))
            for keys, known in zip(map(IndexKeys, names), before, strict=True)
        ]
        present = [
            self._present.run(client, (IndexKeys(name).gateways,), (self._name, GATEWAY_TTL_MS))
            for name in names
            if self._books
        ]
        answers = await asyncio.gather(*calls, *present)
        scopes: dict[str, _ScopeState] = {}
        found: list[PodStatus] = []
        beside = answers[len(names) :] if self._books else [0] * len(names)
        lines = zip(names, before, answers[: len(names)], beside, strict=True)
        for name, known, (epoch, version, rows), gateways in lines:
            scope = _ScopeState(epoch, version, gateways=gateways, asked=asked)
            for pod, generation, slot, load, info in rows:
                owner = (pod.decode(), int(generation))
                if not info and owner not in known.records:  # it was not alive when this version was read
                    scope.version = b""
                    continue
                record = scope.records[owner] = known.records[owner] if not info else _record(*owner, info)
                if record is None:
                    continue
                scope.every = sampling_interval(record.block_size)
                raw, status = known.statuses.get(owner, (None, None))
                if status is None or raw != load or status.record is not record:
                    status = PodStatus(record, _load(*owner, load))
                scope.statuses[owner] = load, status
                found.append(status)
                if slot:
                    scope.owners[int(slot)] = owner
            scopes[name] = scope
        self._scopes = scopes
        if self._lines is not None:
            self._lines.close_other_scopes(scopes.keys())
        return found

    def is_only_gateway(self, scope: str) -> bool:
        """No other gateway used the scope when it was polled, a moment ago: nobody else books there."""
        known = self._scopes.get(scope)
        return known is not None and known.gateways == 1 and self._clock() - known.asked < ONLY_GATEWAY_S

    async def lookup(self, scope: str, hashes: Sequence[bytes], pods: Sequence[tuple[str, int]]) -> dict[str, int]:
        """Blocks of the chain `hashes` (16 bytes each) that each (pod, generation) holds in any tier, from its start.

        0 for a pod that is gone or of another generation. Raises IndexUnavailable. Otherwise as lookup_tiers.
        """
        matched = await self._match(scope, hashes, pods)
        return {owner[0]: matched[owner].total_blocks if owner in matched else 0 for owner in pods}

    async def lookup_tiers(
        self, scope: str, hashes: Sequence[bytes], pods: Sequence[tuple[str, int]]
    ) -> dict[str, PrefixHits]:
        """What each (pod, generation) holds of the chain, from its start, in one round trip. Raises IndexUnavailable.

        Exact for up to NAMED_PODS pods. Of more, the best ones are exact, unless too many are equally good; the others
        are said to hold up to the last sampled block that they hold, in any tier: about 64 tokens too little.
        An answer may be CACHE_S old; what was booked since then is not.
        """
        matched = await self._match(scope, hashes, pods)
        return {owner[0]: matched.get(owner, _NOTHING) for owner in pods}

    async def _match(
        self, scope: str, hashes: Sequence[bytes], pods: Sequence[tuple[str, int]]
    ) -> Mapping[tuple[str, int], PrefixHits]:
        """By pod and generation; pods without anything may be missing, others may be in it."""
        if not pods or not hashes:
            return {}
        matched = self._cache.get(scope, hashes[-1], pods)
        if matched is None:
            asked = self._clock()
            matched = await self._call_with_timeout(
                lambda client: self._lookup_in_redis(client, scope, hashes, pods), self._timeout_s
            )
            self._cache.put(scope, hashes[-1], len(hashes), pods, matched, asked)
        return matched

    async def _lookup_in_redis(
        self, client: RedisClient, scope: str, hashes: Sequence[bytes], pods: Sequence[tuple[str, int]]
    ) -> dict[tuple[str, int], PrefixHits]:
        few = len(pods) <= MAX_EXACT_PODS
        if scope not in self._scopes and not few:
            await self._read_pods(client)
        known = self._scopes.get(scope, _ScopeState())
        keys, chain = IndexKeys(scope), pack_hashes(hashes)
        args: list[RedisArg] = [keys.prefix, chain]
        args += [b"", *(x for pod in pods for x in pod)] if few else [pack_sampled_positions(chain, known.every)]
        epoch, levels, rows = await self._run(client, scope, self._lookup, (keys.postings, keys.slots), args)
        if few:
            return {
                pod: PrefixHits(*held) for pod, held in zip(pods, zip(rows[::2], rows[1::2], strict=True), strict=True)
            }
        matched: dict[tuple[str, int], PrefixHits] = {}
        if epoch == known.epoch:  # else the numbers belong to others than the last poll said
            for blocks, slots in zip(levels[::2], levels[1::2], strict=True):
                owners = filter(None, map(known.owners.get, unpack_slots(slots)))
                matched.update(dict.fromkeys(owners, PrefixHits(blocks, blocks)))
        for owner, device, blocks in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
            name, _, generation = owner.decode().rpartition(":")
            matched[name, int(generation)] = PrefixHits(device, blocks)
        return matched

    async def book(
        self, scope: str, request_id: str, groups: Sequence[Sequence[BookingCandidate]]
    ) -> list[BookingResult]:
        """Books a request on the cheapest pod of each group until unbook, or for BOOKING_S. Atomic among gateways.

        No group is empty; of equals the first is chosen; booking again replaces. One round trip. Raises
        IndexUnavailable.
        """
        args: list[RedisArg] = [IndexKeys(scope).prefix, request_id, int(BOOKING_TTL_S * 1000)]
        for group in groups:
            args.append(len(group))
            for c in group:
                args += (
                    c.pod,
                    f"{c.cost_s:.9f}",
                    f"{c.cost_per_unit_s:.12f}",
                    c.units,
                    int(min(c.age_s, BOOKING_TTL_S) * 1000),
                )
        keys = (IndexKeys(scope).pods,)
        answers = await self._call_with_timeout(
            lambda client: self._run(client, scope, self._reserve, keys, args), self._timeout_s
        )
        reserved = [BookingResult(chosen, tuple(booked)) for chosen, *booked in answers]
        for group, answer in zip(groups, reserved, strict=True):
            self._cache.invalidate_pod(group[answer.chosen].pod)
        return reserved

    async def unbook(self, scope: str, pod: str, request_id: str) -> None:
        """Ends a booking; harmless when there is none. Raises IndexUnavailable (the booking then expires)."""
        keys = IndexKeys(scope)
        names = (keys.bookings(pod), keys.booking_units(pod))
        self._cache.invalidate_pod(pod)
        await self._call_with_timeout(
            lambda client: self._run(client, scope, self._unbook, names, (request_id,)), self._timeout_s
        )

    async def _run(
        self, client: RedisClient, scope: str, script: LuaScript, keys: Sequence[str], args: Sequence[RedisArg]
    ) -> Any:
        """The script's answer, over the scope's line if there is one. All of these bear repeating."""
        line = None if self._lines is None else self._lines.get(scope)
        if line is not None:
            try:
                return await line.call(script.pack_command(keys, args))
            except NoScriptError:
                pass  # the client brings it
            except REDIS_FAILURES:
                line.close()  # the client finds out what is wrong
        return await script.run(client, keys, args)

    async def _call_with_timeout(self, call: Callable[[RedisClient], Awaitable[_T]], timeout_s: float) -> _T:
        if self._client is None or self._lines is None:
            raise IndexUnavailable("no prefix index is configured")
        # Waiting for a slot is not the index's fault, so its time starts after it; the breaker ends the wait when the
        # calls before this one failed.
        async with self._slots:
            if not self._breaker.allow_call():
                raise IndexUnavailable("the prefix index is away")
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await call(self._client)
            except REDIS_FAILURES as e:
                self._breaker.record_failure()
                self._lines.close_all()
                raise IndexUnavailable(f"the prefix index does not answer: {type(e).__name__}: {e}") from e
            self._breaker.record_success()
            return answer


def _record(pod: str, generation: int, info: Sequence[bytes]) -> PodRecord | None:
    """None, and a line in the log, for a pod whose record this version cannot read."""
    values = [part.decode() for part in info]
    try:
        return PodRecord.from_fields(dict(zip(values[::2], values[1::2], strict=True)))
    except (KeyError, ValueError) as e:
        _log.warning("pod %s of generation %d left out: its record is unreadable: %r", pod, generation, e)
        return None


def _load(pod: str, generation: int, load: bytes) -> PodLoad:
    try:
        return PodLoad.from_json(load.decode()) if load else PodLoad()
    except (ValueError, TypeError) as e:
        _log.warning("pod %s of generation %d counts as idle: its load is unreadable: %r", pod, generation, e)
        return PodLoad()
