"""Gateway side of the prefix index: the live pods, the blocks that they hold, and bookings.

Every answer is a hint with a short deadline. A call without an answer in time raises IndexUnavailable. After three
failures in a row the circuit breaker raises it at once, and one call per second probes the index.
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

from common.errors import IndexUnavailable, describe
from common.redis.client import REDIS_FAILURES, CircuitBreaker, LuaScript, RedisArg, RedisClient, connect_redis
from common.types import PodLoad
from prefix_index.lookup_cache import LookupCache
from prefix_index.pipelined_connection import PipelinedConnections
from prefix_index.store import (
    LUA_DIR,
    SCOPES_KEY,
    BookingCandidate,
    BookingResult,
    IndexKeys,
    PodRecord,
    PodStatus,
    PrefixHits,
    pack_hashes,
    pack_sampled_positions,
    sampling_interval,
    unpack_slots,
)

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_NOTHING = PrefixHits()

POLL_TIMEOUT_S = 0.5
MAX_EXACT_PODS = 16  #: A look-up for at most this many pods names them and is exact for each.
GATEWAY_TTL_MS = 3_000  #: A gateway without a poll for this time is gone.
ONLY_GATEWAY_S = 2.0  #: Max age of a poll that shows this gateway alone in a scope: a new one sees this one at once.
BOOKING_TTL_S = 30.0  #: Equal on all gateways, because scripts compute the age of a booking from its end.
MAX_CONCURRENT_CALLS = 8  #: A burst must not open a connection per request; more calls would only queue in Redis.


@dataclass(slots=True)
class _ScopeState:
    """The last poll of one scope. Pods are identified by (name, generation)."""

    epoch: bytes = b""  #: Epoch of the slots; a new epoch gives every slot a new meaning.
    version: bytes = b""  #: Version of the records; the next poll reads them only if it changed.
    records: dict[tuple[str, int], PodRecord | None] = field(default_factory=dict)  #: None: the record is unreadable.
    statuses: dict[tuple[str, int], tuple[bytes, PodStatus]] = field(default_factory=dict)  #: And raw loads.
    owners: dict[int, tuple[str, int]] = field(default_factory=dict)  #: Slot -> pod.
    sampling: int = 1  #: One block in this many has a posting.
    gateways: int = 0  #: Gateways that use the scope, including this one.
    asked_at: float = 0.0


class IndexReader:
    """Look-ups and bookings; one per gateway. With url None every call raises IndexUnavailable."""

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
        self._connections = None if url is None else PipelinedConnections(url)
        self._timeout_s = timeout_s
        self._breaker = breaker or CircuitBreaker()
        self._call_limit = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        self._books = books  #: False for a reader that never books, which other gateways need not know of.
        self._name = secrets.token_hex(8)
        scripts = (LuaScript(name, directory=LUA_DIR) for name in ("pods", "present", "lookup", "book", "unbook"))
        self._pods, self._present, self._lookup, self._book, self._unbook = scripts
        self._scopes: dict[str, _ScopeState] = {}
        self._clock = clock  #: Measures the age of cached answers.
        self._cache = LookupCache(clock)

    @property
    def available(self) -> bool:
        """False without an index, and after three failed calls in a row until a call succeeds."""
        return self._client is not None and not self._breaker.open

    async def close(self) -> None:
        """Closes the connections."""
        if self._connections is not None:
            await self._connections.close()
        if self._client is not None:
            await self._client.aclose()

    async def pods(self) -> list[PodStatus]:
        """Returns the live pods of all scopes, in two round trips and POLL_TIMEOUT_S. Raises IndexUnavailable."""
        return await self._call(self._read_pods, min_timeout_s=POLL_TIMEOUT_S)

    async def _read_pods(self, client: RedisClient) -> list[PodStatus]:
        names = [scope.decode() if isinstance(scope, bytes) else scope for scope in await client.hkeys(SCOPES_KEY)]
        before = [self._scopes.get(name, _ScopeState()) for name in names]
        asked_at = self._clock()
        calls = [
            self._pods.run(client, (keys.pods, keys.slots), (keys.prefix, known.version))
            for keys, known in zip(map(IndexKeys, names), before, strict=True)
        ]
        booked = names if self._books else []
        present = [
            self._present.run(client, (IndexKeys(name).gateways,), (self._name, GATEWAY_TTL_MS)) for name in booked
        ]
        answers = await asyncio.gather(*calls, *present)
        scopes: dict[str, _ScopeState] = {}
        found: list[PodStatus] = []
        gateway_counts = answers[len(names) :] if self._books else [0] * len(names)
        polled = zip(names, before, answers[: len(names)], gateway_counts, strict=True)
        for name, known, (epoch, version, rows), gateways in polled:
            scope = _ScopeState(epoch, version, gateways=gateways, asked_at=asked_at)
            for pod, generation, slot, load, info in rows:
                owner = (pod.decode(errors="replace"), int(generation))
                if not info and owner not in known.records:  # the pod was not alive when its version was read
                    scope.version = b""
                    continue
                record = scope.records[owner] = known.records[owner] if not info else _record(*owner, info)
                if record is None:
                    continue
                scope.sampling = sampling_interval(record.block_size)
                raw, status = known.statuses.get(owner, (None, None))
                if status is None or raw != load or status.record is not record:
                    status = PodStatus(record, _load(*owner, load))
                scope.statuses[owner] = load, status
                found.append(status)
                if slot:
                    scope.owners[int(slot)] = owner
            scopes[name] = scope
        self._scopes = scopes
        if self._connections is not None:
            self._connections.close_other_scopes(scopes.keys())
        return found

    def is_only_gateway(self, scope: str) -> bool:
        """Returns whether no other gateway books in the scope, by a poll at most ONLY_GATEWAY_S ago."""
        state = self._scopes.get(scope)
        return state is not None and state.gateways == 1 and self._clock() - state.asked_at < ONLY_GATEWAY_S

    async def hot_prefixes(self, scope: str, pods: Sequence[str]) -> list[bytes | None]:
        """Returns what each pod published as its most used prefixes (pod/warm_up.py). Raises IndexUnavailable."""
        names = [IndexKeys(scope).hot_prefixes(pod) for pod in pods]
        answers: list[Any] = await self._call(lambda client: client.mget(names), min_timeout_s=POLL_TIMEOUT_S)
        return [raw if isinstance(raw, bytes) else None for raw in answers]

    async def lookup(self, scope: str, hashes: Sequence[bytes], pods: Sequence[tuple[str, int]]) -> dict[str, int]:
        """Returns how many leading blocks of `hashes` (16 bytes each) each (pod, generation) holds in any tier.

        0 for a pod that is gone or has another generation. Raises IndexUnavailable. Otherwise as lookup_tiers.
        """
        matched = await self._match(scope, hashes, pods)
        return {owner[0]: matched[owner].total_blocks if owner in matched else 0 for owner in pods}

    async def lookup_tiers(
        self, scope: str, hashes: Sequence[bytes], pods: Sequence[tuple[str, int]]
    ) -> dict[str, PrefixHits]:
        """Looks up the leading blocks of `hashes` per (pod, generation) in one round trip. Raises IndexUnavailable.

        Exact for up to MAX_EXACT_PODS pods. With more pods, only the best ones are exact, and none if too many are
        equally good. The others count up to their last sampled block in any tier, about 64 tokens too few.
        An answer may be CACHE_S (lookup_cache.py) old, but not for pods with a booking since then.
        """
        matched = await self._match(scope, hashes, pods)
        return {owner[0]: matched.get(owner, _NOTHING) for owner in pods}

    async def _match(
        self, scope: str, hashes: Sequence[bytes], pods: Sequence[tuple[str, int]]
    ) -> Mapping[tuple[str, int], PrefixHits]:
        """Returns the hits by pod and generation. Pods without hits may be missing, other pods may be included."""
        if not pods or not hashes:
            return {}
        matched = self._cache.get(scope, hashes[-1], pods)
        if matched is None:
            asked_at = self._clock()
            matched = await self._call(lambda client: self._lookup_in_redis(client, scope, hashes, pods))
            self._cache.put(scope, hashes[-1], len(hashes), pods, matched, asked_at)
        return matched

    async def _lookup_in_redis(
        self, client: RedisClient, scope: str, hashes: Sequence[bytes], pods: Sequence[tuple[str, int]]
    ) -> dict[tuple[str, int], PrefixHits]:
        few = len(pods) <= MAX_EXACT_PODS
        if scope not in self._scopes and not few:
            await self._read_pods(client)
        state = self._scopes.get(scope, _ScopeState())
        keys, chain = IndexKeys(scope), pack_hashes(hashes)
        args: list[RedisArg] = [keys.prefix, chain]
        args += [b"", *(x for pod in pods for x in pod)] if few else [pack_sampled_positions(chain, state.sampling)]
        epoch, levels, rows = await self._run(client, scope, self._lookup, (keys.postings, keys.slots), args)
        if few:
            return {pod: PrefixHits(*rows[3 * i : 3 * i + 3]) for i, pod in enumerate(pods)}
        matched: dict[tuple[str, int], PrefixHits] = {}
        if epoch == state.epoch:  # otherwise the slots belong to other pods than at the last poll
            for blocks, slots in zip(levels[::2], levels[1::2], strict=True):
                owners = filter(None, map(state.owners.get, unpack_slots(slots)))
                matched.update(dict.fromkeys(owners, PrefixHits(blocks, blocks)))
        for i in range(0, len(rows), 4):
            name, _, generation = rows[i].decode().rpartition(":")
            matched[name, int(generation)] = PrefixHits(*rows[i + 1 : i + 4])
        return matched

    async def book(
        self, scope: str, request_id: str, groups: Sequence[Sequence[BookingCandidate]]
    ) -> list[BookingResult]:
        """Books a request on the cheapest pod of each group until `unbook`, at most for BOOKING_TTL_S.

        Atomic among gateways, in one round trip. Groups must not be empty. The first of equally cheap pods is chosen.
        A second booking of the request replaces the first. Raises IndexUnavailable.
        """
        args: list[RedisArg] = [IndexKeys(scope).prefix, request_id, int(BOOKING_TTL_S * 1000)]
        for group in groups:
            args.append(len(group))
            for c in group:
                age_ms = int(min(c.age_s, BOOKING_TTL_S) * 1000)
                args += (c.pod, f"{c.cost_s:.9f}", f"{c.cost_per_unit_s:.12f}", c.units, age_ms)
        keys = (IndexKeys(scope).pods,)
        answers = await self._call(lambda client: self._run(client, scope, self._book, keys, args))
        results = [BookingResult(chosen, tuple(booked)) for chosen, *booked in answers]
        for group, answer in zip(groups, results, strict=True):
            self._cache.invalidate_pod(group[answer.chosen].pod)
        return results

    async def unbook(self, scope: str, pod: str, request_id: str) -> None:
        """Ends a booking, if there is one. Raises IndexUnavailable; the booking then expires."""
        keys = IndexKeys(scope)
        names = (keys.bookings(pod), keys.booking_units(pod))
        self._cache.invalidate_pod(pod)
        await self._call(lambda client: self._run(client, scope, self._unbook, names, (request_id,)))

    async def _run(
        self, client: RedisClient, scope: str, script: LuaScript, keys: Sequence[str], args: Sequence[RedisArg]
    ) -> Any:
        """Returns the script's answer, over the scope's pipelined connection if open. All scripts may run twice."""
        connection = None if self._connections is None else self._connections.get(scope)
        if connection is not None:
            try:
                return await connection.call(script.pack_command(keys, args))
            except NoScriptError:
                pass  # the client loads the script
            except REDIS_FAILURES:
                connection.close()  # the client repeats the call and reports the cause
        return await script.run(client, keys, args)

    async def _call(self, call: Callable[[RedisClient], Awaitable[_T]], *, min_timeout_s: float = 0.0) -> _T:
        if self._client is None or self._connections is None:
            raise IndexUnavailable("no prefix index is configured")
        # The time limit starts after the wait for a turn, which is no fault of the index. When earlier calls fail, the
        # breaker ends the wait.
        async with self._call_limit:
            if not self._breaker.allow_call():
                raise IndexUnavailable(f"the prefix index did not answer the last calls: {self._breaker.cause}")
            limit_s = max(self._timeout_s, min_timeout_s)
            try:
                async with asyncio.timeout(limit_s):
                    answer = await call(self._client)
            except REDIS_FAILURES as e:
                cause = describe(e, limit_s=limit_s)
                self._breaker.record_failure(cause)
                self._connections.close_all()
                raise IndexUnavailable(f"the prefix index does not answer: {cause}") from e
            self._breaker.record_success()
            return answer


def _record(pod: str, generation: int, info: Sequence[bytes]) -> PodRecord | None:
    """Returns the record of a pod; None, with a warning in the log, if it is unreadable."""
    try:
        values = [part.decode() for part in info]
        return PodRecord.from_fields(dict(zip(values[::2], values[1::2], strict=True)))
    except (KeyError, ValueError) as e:
        _log.warning("pod %s of generation %d left out: its record is unreadable: %s", pod, generation, describe(e))
        return None


def _load(pod: str, generation: int, load: bytes) -> PodLoad:
    try:
        return PodLoad.from_json(load.decode()) if load else PodLoad()
    except (ValueError, TypeError, RecursionError) as e:
        _log.warning("pod %s of generation %d counts as idle: its load is unreadable: %s", pod, generation, describe(e))
        return PodLoad()
