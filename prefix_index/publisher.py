"""Pod side of the prefix index: publishes the blocks of the pod's caches under the pod's generation, which it mints.

                 +------ refused, lease lost or Redis down: back-off ----------+
                 v                                                             |
start -> register -> snapshot -> { heartbeat every 3 s | batch every 30 ms | snapshot after overflow or gap }
stop  -> leave

Invariants: Only the background task talks to Redis, one command at a time, so no change is in flight while it compares
set sizes. `_held` equals the pod's sets. `_posted` contains every sampled block that may have a posting under the
pod's slot. A command of unknown outcome is followed by a registration and a snapshot; its number makes a late batch
a duplicate. The engine's threads only use `_changes`. The pool calls stored() and evicted() under its own lock, so the
lock of `_changes` is never held while the pool's lock is taken.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import islice

from common.errors import describe
from common.redis.client import REDIS_FAILURES, LuaScript, RedisArg, connect_redis
from common.types import PodLoad, Role
from prefix_index.store import (
    HELD_TTL_S,
    HOT_TTL_S,
    INFO_TTL_S,
    LEASE_MS,
    LUA_DIR,
    PODS_TTL_S,
    SCOPES_KEY,
    STORED_HASH_BYTES,
    CacheTier,
    IndexKeys,
    PodRecord,
    sampling_interval,
)

BATCH_S = 0.03
HEARTBEAT_S = 3.0
ADAPTERS_S = 0.5  #: A heartbeat follows within this time after the adapters on the device have changed.
HOT_S = 30.0  #: Seconds between two lists of hot prefixes.
MAX_BATCH_BLOCKS = 1_000  #: Blocks per command. It delays look-ups by 1 to 3 ms; 5,000 give no higher throughput.
MAX_PENDING = 200_000
SWEEP_S = 10  #: Seconds between two checks for slots without a live pod.
SWEEP_POSTINGS = 1_000  #: Postings that one heartbeat checks while postings of freed slots remain.
_COMMAND_S = 3.0  #: Under a burst from all pods a command waits in Redis; a shorter limit only causes more snapshots.
_LEAVE_S, _NAME_TIMEOUT_S = 1.0, 1.0
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 5.0

_log = logging.getLogger(__name__)


def _decode_hash(raw: Mapping[str | bytes, str | bytes]) -> dict[str, str]:
    """Returns a Redis hash with text in place of bytes."""
    return {_text(name): _text(value) for name, value in raw.items()}


def _text(raw: str | bytes) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw


async def read_name_owner(url: str, scope: str, pod: str) -> PodRecord | None:
    """Returns the record of the pod that holds a name's lease; None without one, or if Redis takes over 1 s."""
    keys, client = IndexKeys(scope), connect_redis(url, timeout_s=_NAME_TIMEOUT_S)
    try:
        async with aclosing(client), asyncio.timeout(_NAME_TIMEOUT_S):
            lease, info = await client.get(keys.lease(pod)), _decode_hash(await client.hgetall(keys.info(pod)))
        record = PodRecord.from_fields(info) if lease else None
        return record if record is not None and lease == str(record.generation).encode() else None
    except (*REDIS_FAILURES, KeyError, ValueError) as e:
        _log.warning("cannot read the owner of the pod name %s: %s", pod, describe(e, limit_s=_NAME_TIMEOUT_S))
        return None


async def mint_generation(url: str | None, scope: str, pod: str) -> int:
    """Returns the generation of a starting pod: max(now in ms, last + 1), or now without an answer in 1 s."""
    now_ms = int(time.time() * 1000)
    if url is None:
        return now_ms
    keys, client = IndexKeys(scope), connect_redis(url, timeout_s=_NAME_TIMEOUT_S)
    try:
        async with aclosing(client), asyncio.timeout(_NAME_TIMEOUT_S):
            names = (keys.pods, keys.generation(pod))
            return int(await LuaScript("mint", directory=LUA_DIR).run(client, names, (pod, now_ms, PODS_TTL_S)))
    except REDIS_FAILURES as e:
        cause = describe(e, limit_s=_NAME_TIMEOUT_S)
        _log.warning("the prefix index does not answer, the generation comes from the clock alone: %s", cause)
        return now_ms


class PendingChanges:
    """Changes of a pod's caches that are not in the index yet: the last state of at most `limit` blocks. Starts stale.

    Invariant: while not stale, the index plus these changes equals the caches. Stale means that changes were dropped
    (too many, or no publisher ran), so only a snapshot makes the index right. For all threads.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()  # never held while another lock is taken
        #: Per tier: stored part of a block hash -> whether the cache holds the block now.
        self._changes: dict[CacheTier, dict[bytes, bool]] = {tier: {} for tier in CacheTier}
        self.stale = True  #: The index needs a snapshot.

    def __len__(self) -> int:
        return sum(map(len, self._changes.values()))

    def record(self, tier: CacheTier, hashes: Sequence[bytes], held: bool) -> bool:
        """Records for each block whether the cache holds it, O(n). Returns whether the publisher must wake up."""
        with self._lock:
            if self.stale or not hashes:
                return False
            first = not len(self)
            changes = self._changes[tier]
            for h in hashes:
                changes[h[:STORED_HASH_BYTES]] = held
            full = len(self) > self._limit
            if full:
                self._drop()
            return first or full

    def mark_stale(self) -> None:
        """Drops all changes until the next snapshot, because the content of the index is unknown."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        self.stale = True
        for changes in self._changes.values():
            changes.clear()

    def begin_snapshot(self) -> None:
        """Drops all changes and starts to keep new ones. Call it before reading the caches for a snapshot."""
        with self._lock:
            self._drop()
            self.stale = False

    def take_batch(self, max_blocks: int) -> dict[CacheTier, dict[bytes, bool]]:
        """Removes and returns the changes of at most `max_blocks` blocks, oldest first."""
        taken: dict[CacheTier, dict[bytes, bool]] = {}
        with self._lock:
            for tier, changes in self._changes.items():
                taken[tier] = dict(islice(changes.items(), max_blocks))
                max_blocks -= len(taken[tier])
                for h in taken[tier]:
                    del changes[h]
        return taken


class _RegistrationLost(Exception):
    """The pod is not registered: it was refused, replaced or forgotten."""


class IndexPublisher:
    """Publishes one pod's blocks and load; owned by the pod's event loop. With url None it does nothing.

    `snapshot`, `host_snapshot` and `disk_snapshot` return the hashes of all blocks in a cache, `load` the pod's load.
    All are called on the event loop.
    """

    def __init__(
        self,
        url: str | None,
        record: PodRecord,
        snapshot: Callable[[], list[bytes]],
        load: Callable[[], PodLoad],
        *,
        host_snapshot: Callable[[], list[bytes]] = list,
        disk_snapshot: Callable[[], list[bytes]] = list,
        hot_prefixes: Callable[[], bytes] = bytes,
    ) -> None:
        self._record = record
        self._snapshots = {
            CacheTier.DEVICE: snapshot,
            CacheTier.HOST: host_snapshot,
            CacheTier.DISK: disk_snapshot,
        }
        self._load, self._hot_prefixes = load, hot_prefixes
        self._hot_due = 0.0
        self._client = None if url is None else connect_redis(url, timeout_s=_COMMAND_S)
        self._keys = IndexKeys(record.scope)
        self._register_script = LuaScript("register", directory=LUA_DIR)
        self._heartbeat_script = LuaScript("heartbeat", directory=LUA_DIR)
        self._apply_script = LuaScript("postings", "apply", directory=LUA_DIR)
        self._slice_script = LuaScript("postings", "snapshot_slice", directory=LUA_DIR)
        self._commit_script = LuaScript("snapshot_commit", directory=LUA_DIR)
        self._leave_script = LuaScript("leave", directory=LUA_DIR)
        self._sweep_script = LuaScript("sweep", directory=LUA_DIR)
        self._changes = PendingChanges(MAX_PENDING)
        self._loop: asyncio.AbstractEventLoop | None = None  # while changes are accepted
        self._wake = asyncio.Event()
        self._stopping = False
        self._beat_due = self._adapters_due = 0.0
        self._adapter_copies = 0  #: Of the published load.
        self._task: asyncio.Task[None] | None = None
        self._held: dict[CacheTier, set[bytes]] = {tier: set() for tier in CacheTier}
        self._batch_number = 0
        self._slot = 0
        self._sampled_bytes = bytes(
            range(0, 256, sampling_interval(record.block_size))
        )  #: First bytes of sampled hashes.
        self._posted: set[bytes] = set()
        self.registered = False  #: The pod is registered and its snapshot is complete.
        self._sending = False  # a batch or a snapshot is in flight
        self._record_changed = False  # the record differs from the registered one

    @property
    def up_to_date(self) -> bool:
        """The index contains all changes up to now. On the event loop."""
        return self.registered and not (self._sending or self._changes or self._changes.stale)

    def stored(self, hashes: Sequence[bytes], tier: CacheTier = CacheTier.DEVICE) -> None:
        """Records that the cache now holds these complete blocks. Any thread, O(n), never waits for Redis."""
        self._queue_change(tier, hashes, True)

    def evicted(self, hashes: Sequence[bytes], tier: CacheTier = CacheTier.DEVICE) -> None:
        """Records that the cache dropped these blocks; call before reuse. Any thread, O(n), never waits for Redis."""
        self._queue_change(tier, hashes, False)

    def _queue_change(self, tier: CacheTier, hashes: Sequence[bytes], held: bool) -> None:
        loop = self._loop
        if loop is not None and self._changes.record(tier, hashes, held):
            try:
                loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:
                _log.debug("the event loop is closed: a change is not published")

    def publish_load(self) -> None:
        """Publishes the load now, before the next heartbeat, for example when the pod drains. On the event loop."""
        self._beat_due = 0.0
        self._wake.set()

    def set_role(self, role: Role) -> None:
        """Registers the pod with another role, under the same generation. Its blocks stay. On the event loop."""
        self._record = replace(self._record, role=role)
        self._record_changed = True
        self._wake.set()

    async def start(self) -> None:
        """Starts the background task. Returns at once, also if Redis is down."""
        if self._client is None:
            return
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(), name="prefix-index")

    async def stop(self) -> None:
        """Leaves the index, so that gateways send no more requests. Takes at most about 3 s. Idempotent."""
        task, self._task = self._task, None
        if task is None or self._client is None:
            return
        self._loop = None
        self._stopping = True
        self._wake.set()
        # The running command ends first: after `leave`, a late batch finds no lease, a late `register` makes one.
        await asyncio.wait([task], timeout=_LEAVE_S)
        task.cancel()
        await asyncio.wait([task])
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._leave()
        except REDIS_FAILURES as e:
            _log.warning("could not leave the prefix index, the lease will expire: %s", describe(e, limit_s=_LEAVE_S))
        finally:
            await self._client.aclose()

    async def _run(self) -> None:
        backoff = _MIN_BACKOFF_S
        while not self._stopping:
            try:
                await self._register()
                await self._send_snapshot()
                self.registered, backoff = True, _MIN_BACKOFF_S
                _log.info("registered in the prefix index with %d blocks", sum(map(len, self._held.values())))
                await self._publish()
            except (_RegistrationLost, *REDIS_FAILURES) as e:
                if self.registered or backoff == _MIN_BACKOFF_S:
                    _log.warning("not registered in the prefix index, retrying: %s", describe(e, limit_s=_COMMAND_S))
            except Exception:
                _log.exception("prefix index: unexpected error, retrying")
            self.registered = self._sending = False
            self._changes.mark_stale()
            await self._sleep(backoff * random.uniform(0.5, 1.5))  # spreads the pods over time
            backoff = min(2 * backoff, _MAX_BACKOFF_S)

    async def _sleep(self, seconds: float) -> None:
        """Sleeps for `seconds` or until stop() is called."""
        deadline = time.monotonic() + seconds
        while not self._stopping and (left := deadline - time.monotonic()) > 0:
            self._wake.clear()
            try:
                async with asyncio.timeout(left):
                    await self._wake.wait()
            except TimeoutError:
                return

    async def _publish(self) -> None:
        """Sends heartbeats and batches until stop() or an error."""
        while not self._stopping:
            self._wake.clear()
            if self._record_changed:
                await self._register()
            if self._is_load_due():
                self._beat_due = time.monotonic() + HEARTBEAT_S
                await self._heartbeat()
            if self._changes.stale or self._changes:
                self._sending = True
                await (self._send_snapshot() if self._changes.stale else self._send_batch())
                self._sending = False
            if not self._changes and not self._changes.stale:
                try:
                    due = min(self._beat_due, self._adapters_due)
                    async with asyncio.timeout(max(0.0, due - time.monotonic())):
                        await self._wake.wait()
                except TimeoutError:
                    continue
            if self._changes.stale or len(self._changes) < MAX_BATCH_BLOCKS:
                await asyncio.sleep(BATCH_S)

    def _is_load_due(self) -> bool:
        """Returns whether the load must be published now, because of its period or of another list of adapters."""
        now = time.monotonic()
        if now >= self._beat_due:
            return True
        if now < self._adapters_due:
            return False
        self._adapters_due = now + ADAPTERS_S
        return self._load().adapter_copies != self._adapter_copies

    def _load_json(self) -> str:
        """Returns the load for the index, and remembers its list of adapters."""
        load = self._load()
        self._adapter_copies = load.adapter_copies
        return load.to_json()

    async def _register(self) -> None:
        assert self._client is not None
        r, keys, self._record_changed = self._record, self._keys, False
        self._beat_due = time.monotonic() + HEARTBEAT_S
        names = (
            *(keys.pods, keys.info(r.pod), keys.lease(r.pod), keys.load(r.pod)),
            *(keys.bookings(r.pod), keys.booking_units(r.pod), keys.slots, keys.sweep),
        )
        args: list[RedisArg] = [
            keys.prefix,
            r.pod,
            r.generation,
            LEASE_MS,
            INFO_TTL_S,
            PODS_TTL_S,
            self._load_json(),
        ]
        args += r.to_fields()
        slot = int(await self._register_script.run(self._client, names, args))
        if not slot:
            raise await self._registration_lost("a newer process is registered under this name")
        if slot != self._slot:
            self._slot, self._posted = slot, set()
        await self._client.hset(SCOPES_KEY, r.scope, r.model)

    async def _heartbeat(self) -> None:
        assert self._client is not None
        r, keys = self._record, self._keys
        names = (
            *(keys.pods, keys.info(r.pod), keys.lease(r.pod), keys.load(r.pod)),
            *(*self._held_keys(), keys.batch_number(r.pod, r.generation), keys.postings, keys.slots, keys.sweep),
        )
        args = (r.pod, r.generation, self._slot, LEASE_MS, self._load_json(), HELD_TTL_S, INFO_TTL_S, PODS_TTL_S)
        sizes = await self._heartbeat_script.run(self._client, names, args)
        if sizes == [-1]:
            raise await self._registration_lost("the index has forgotten this pod")
        await self._client.hset(SCOPES_KEY, r.scope, r.model)
        if time.monotonic() >= self._hot_due and (hot := self._hot_prefixes()):
            self._hot_due = time.monotonic() + HOT_S
            await self._client.set(keys.hot_prefixes(r.pod), hot, ex=HOT_TTL_S)
        held_sizes = list(map(len, self._held.values()))
        if sizes != held_sizes:
            _log.warning("the prefix index holds %s blocks instead of %s: sending a snapshot", sizes, held_sizes)
            self._changes.mark_stale()
        await self._sweep_script.run(
            self._client, (keys.slots, keys.sweep, keys.postings, keys.pods), (keys.prefix, SWEEP_S, SWEEP_POSTINGS)
        )

    async def _registration_lost(self, what: str) -> _RegistrationLost:
        """Returns why the pod is not registered; names the pod that took over the name, if any."""
        assert self._client is not None
        r = self._record
        current = _decode_hash(await self._client.hgetall(self._keys.info(r.pod)))
        generation = current.get("generation", "")
        if generation.isdecimal() and int(generation) > r.generation:
            what = f"pod {r.pod} at {r.address} was replaced by {current.get('address')} under the same name"
        return _RegistrationLost(what)

    async def _send_batch(self) -> None:
        # Only net changes are sent: a block that was stored and evicted since the last batch is none.
        changes, held = self._changes.take_batch(MAX_BATCH_BLOCKS), self._held
        stored = {t: [h for h, on in states.items() if on and h not in held[t]] for t, states in changes.items()}
        evicted = {t: [h for h, on in states.items() if not on and h in held[t]] for t, states in changes.items()}
        if any(stored.values()) or any(evicted.values()):
            await self._apply(stored, evicted)

    async def _apply(self, stored: dict[CacheTier, list[bytes]], evicted: dict[CacheTier, list[bytes]]) -> None:
        assert self._client is not None
        self._batch_number += 1
        r, keys = self._record, self._keys
        names = (
            *(keys.lease(r.pod), keys.batch_number(r.pod, r.generation)),
            *(*self._held_keys(), keys.postings, keys.slots),
        )
        packed = [b"".join(change[tier]) for tier in CacheTier for change in (stored, evicted)]
        for hashes in stored.values():
            self._posted.update(self._sampled(hashes))
        args = (r.generation, self._batch_number, HELD_TTL_S, *self._posting_args(), *packed)
        match await self._apply_script.run(self._client, names, args):
            case b"ok" | b"duplicate":
                for tier, held in self._held.items():
                    held.difference_update(evicted[tier])
                    held.update(stored[tier])
                gone = (h for hashes in evicted.values() for h in self._sampled(hashes))
                self._posted.difference_update([h for h in gone if not self._holds(h)])
            case b"gap":
                self._changes.mark_stale()
            case answer:
                raise await self._registration_lost(f"a batch was answered {answer!r}")

    async def _send_snapshot(self) -> None:
        assert self._client is not None
        # A change between this line and the snapshots is in both. That is harmless: the change is applied later.
        self._changes.begin_snapshot()
        snapshot = {tier: {h[:STORED_HASH_BYTES] for h in take()} for tier, take in self._snapshots.items()}
        self._batch_number += 1
        r, keys, number = self._record, self._keys, self._batch_number
        lease, names = keys.lease(r.pod), [keys.lease(r.pod), keys.batch_number(r.pod, r.generation)]
        for tier, held in snapshot.items():
            shadow = keys.shadow(r.pod, r.generation, number, tier)
            names += [shadow, keys.held_blocks(r.pod, r.generation, tier)]
            for part in _batches(held):
                self._posted.update(self._sampled(part))
                args: tuple[RedisArg, ...] = (r.generation, HELD_TTL_S, *self._posting_args(), b"".join(part))
                answer = await self._slice_script.run(self._client, (lease, shadow, keys.postings), args)
                if answer != b"ok":
                    raise _RegistrationLost(f"a snapshot was answered {answer!r}")
        args = (r.generation, number, HELD_TTL_S, *map(len, snapshot.values()))
        answer = await self._commit_script.run(self._client, [*names, keys.slots], args)
        if answer != b"ok":
            raise _RegistrationLost(f"a snapshot was answered {answer!r}")
        self._held = snapshot
        nothing: dict[CacheTier, list[bytes]] = {tier: [] for tier in CacheTier}
        for part in _batches([h for h in self._posted if not self._holds(h)]):
            await self._apply(nothing, {**nothing, CacheTier.DEVICE: part})

    def _held_keys(self) -> list[str]:
        return [self._keys.held_blocks(self._record.pod, self._record.generation, tier) for tier in CacheTier]

    def _holds(self, h: bytes) -> bool:
        return any(h in held for held in self._held.values())

    def _sampled(self, hashes: Iterable[bytes]) -> list[bytes]:
        """Returns the hashes that have postings."""
        return [h for h in hashes if h[0] in self._sampled_bytes]

    def _posting_args(self) -> tuple[RedisArg, RedisArg]:
        return self._slot.to_bytes(2, "little"), sampling_interval(self._record.block_size)

    async def _leave(self) -> None:
        assert self._client is not None
        r, keys = self._record, self._keys
        names = (
            *(keys.pods, keys.info(r.pod), keys.lease(r.pod), keys.load(r.pod)),
            *(*self._held_keys(), keys.batch_number(r.pod, r.generation)),
            *(keys.bookings(r.pod), keys.booking_units(r.pod), keys.postings, keys.slots, keys.sweep),
        )
        # The last pod removes the scope. If another pod registers at this moment, its next heartbeat adds it again.
        if await self._leave_script.run(self._client, names, (r.pod, r.generation, self._slot)) == 0:
            await self._client.hdel(SCOPES_KEY, r.scope)


def _batches(hashes: Collection[bytes]) -> Iterable[list[bytes]]:
    entries = iter(hashes)
    while part := list(islice(entries, MAX_BATCH_BLOCKS)):
        yield part
