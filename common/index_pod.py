"""Pod side of the prefix index: publishes what the pod's block pool holds, fenced by the pod's generation.

                 +--------- refused, lease lost, Redis away: back-off ---------+
                 v                                                             |
start -> register -> snapshot -> { heartbeat every 3 s | batch every 30 ms | snapshot after overflow or gap }
stop  -> leave

Invariants: only the task talks to Redis, one command at a time, so no change is in flight while sizes are compared;
`_held` is what the pod's set contains; a failure of unknown outcome is followed by a registration and a snapshot, whose
number makes a late batch a duplicate. The engine only touches `_pending`, under a lock that is never held while the
pool's is taken (the pool calls stored() and evicted() under its own).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from redis.exceptions import RedisError

from common.index_records import PodLoad, PodRecord
from common.index_store import (
    INFO_TTL_S,
    LEASE_MS,
    OWN_TTL_S,
    PODS_TTL_S,
    PREFIX_BYTES,
    SCOPES_KEY,
    Arg,
    Keys,
    Script,
    connect,
)

_log = logging.getLogger(__name__)

BATCH_S = 0.03
HEARTBEAT_S = 3.0
SLICE = 5_000  # entries per command: one takes Redis about 2 ms
MAX_PENDING = 200_000
_TIMEOUT_S = 1.0
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 5.0


class _Lost(Exception):
    """The registration does not hold (any more)."""


class PodIndex:
    """Keeps one pod's entries current; owned by the pod's event loop. url None: does nothing.

    snapshot: hashes of all blocks that the pool holds now; called on the loop. load: how busy the pod is.
    """

    def __init__(
        self,
        url: str | None,
        record: PodRecord,
        snapshot: Callable[[], list[bytes]],
        load: Callable[[], PodLoad],
    ) -> None:
        self._record = record
        self._snapshot = snapshot
        self._load = load
        self._client = None if url is None else connect(url, timeout_s=_TIMEOUT_S)
        self._keys = Keys(record.scope)
        self._register_script = Script("register")
        self._heartbeat_script = Script("heartbeat")
        self._apply_script = Script("apply")
        self._slice_script = Script("snapshot_slice")
        self._commit_script = Script("snapshot_commit")
        self._leave_script = Script("leave")

        self._lock = threading.Lock()
        self._pending: dict[bytes, bool] = {}  # first bytes of a hash -> stored (True) or evicted: the last word wins
        self._stale = True  # a snapshot is due; changes before it need not be kept
        self._loop: asyncio.AbstractEventLoop | None = None  # while changes are accepted

        self._wake = asyncio.Event()
        self._stopping = False
        self._beat_due = 0.0
        self._task: asyncio.Task[None] | None = None
        self._held: set[bytes] = set()
        self._number = 0
        self._connected = False

    @property
    def connected(self) -> bool:
        """Registered, with a snapshot in place."""
        return self._connected

    def stored(self, hashes: Sequence[bytes]) -> None:
        """Blocks that are complete from now on. Any thread, O(n), never blocks on Redis."""
        self._enqueue(hashes, True)

    def evicted(self, hashes: Sequence[bytes]) -> None:
        """Blocks that are gone; call it before they are reused. Any thread, O(n), never blocks on Redis."""
        self._enqueue(hashes, False)

    def _enqueue(self, hashes: Sequence[bytes], held: bool) -> None:
        with self._lock:
            if self._loop is None or self._stale or not hashes:
                return
            wake = not self._pending
            for h in hashes:
                self._pending[h[:PREFIX_BYTES]] = held
            if len(self._pending) > MAX_PENDING:
                self._pending.clear()
                self._stale = wake = True
            if wake:
                self._loop.call_soon_threadsafe(self._wake.set)

    def announce(self) -> None:
        """Publishes the load (draining, for one) now instead of at the next heartbeat. On the event loop."""
        self._beat_due = 0.0
        self._wake.set()

    async def start(self) -> None:
        """Starts publishing in the background; returns at once, whether Redis is there or not."""
        if self._client is None:
            return
        with self._lock:
            self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(), name="prefix-index")

    async def stop(self) -> None:
        """Leaves the index, so that no gateway routes here; at most about 3 s. Idempotent."""
        task, self._task = self._task, None
        if task is None or self._client is None:
            return
        with self._lock:
            self._loop = None
            self._pending.clear()
        self._stopping = True
        self._wake.set()
        # A command under way ends first: after leave, a late one would find no lease, but a late register would.
        await asyncio.wait([task], timeout=_TIMEOUT_S)
        task.cancel()
        await asyncio.wait([task])
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._leave()
        except (RedisError, OSError) as e:
            _log.warning("could not leave the prefix index, the lease will expire: %r", e)
        finally:
            await self._client.aclose()

    async def _run(self) -> None:
        backoff = _MIN_BACKOFF_S
        while not self._stopping:
            try:
                await self._register()
                await self._send_snapshot()
                self._connected, backoff = True, _MIN_BACKOFF_S
                _log.info("in the prefix index with %d blocks", len(self._held))
                await self._publish()
            except (_Lost, RedisError, OSError) as e:
                if self._connected or backoff == _MIN_BACKOFF_S:
                    _log.warning("not in the prefix index, trying again: %s: %s", type(e).__name__, e)
            except Exception:
                _log.exception("prefix index: unexpected error, trying again")
            self._connected = False
            with self._lock:
                self._stale = True
                self._pending.clear()
            await self._sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_S)

    async def _sleep(self, seconds: float) -> None:
        """Sleeps, but not past stop()."""
        deadline = time.monotonic() + seconds
        while not self._stopping and (left := deadline - time.monotonic()) > 0:
            self._wake.clear()
            try:
                async with asyncio.timeout(left):
                    await self._wake.wait()
            except TimeoutError:
                return

    async def _publish(self) -> None:
        """Heartbeats and batches until stop() or an error."""
        while not self._stopping:
            self._wake.clear()
            if time.monotonic() >= self._beat_due:
                self._beat_due = time.monotonic() + HEARTBEAT_S
                await self._heartbeat()
            if self._stale:
                await self._send_snapshot()
            elif self._pending:
                await self._send_batch()
            if not self._pending and not self._stale:
                try:
                    async with asyncio.timeout(max(0.0, self._beat_due - time.monotonic())):
                        await self._wake.wait()
                except TimeoutError:
                    continue
            await asyncio.sleep(BATCH_S)

    async def _register(self) -> None:
        assert self._client is not None
        r, keys = self._record, self._keys
        self._beat_due = time.monotonic() + HEARTBEAT_S
        names = (
            *(keys.pods, keys.info(r.pod), keys.lease(r.pod), keys.load(r.pod)),
            *(keys.resv(r.pod), keys.resv_tokens(r.pod)),
        )
        args: list[Arg] = [keys.prefix, r.pod, r.generation, LEASE_MS, INFO_TTL_S, PODS_TTL_S, self._load().to_json()]
        args += r.to_fields()
        if not await self._register_script.run(self._client, names, args):
            raise await self._lost("a newer process registered under this name")
        await self._client.hset(SCOPES_KEY, r.scope, r.model)

    async def _heartbeat(self) -> None:
        assert self._client is not None
        r, keys = self._record, self._keys
        names = (
            *(keys.pods, keys.info(r.pod), keys.lease(r.pod), keys.load(r.pod)),
            *(keys.own(r.pod, r.generation), keys.seq(r.pod, r.generation)),
        )
        args = (r.pod, r.generation, LEASE_MS, self._load().to_json(), OWN_TTL_S, INFO_TTL_S, PODS_TTL_S)
        size = await self._heartbeat_script.run(self._client, names, args)
        if size < 0:
            raise await self._lost("the index has forgotten this pod")
        await self._client.hset(SCOPES_KEY, r.scope, r.model)
        if size != len(self._held):
            _log.warning("the prefix index holds %d blocks instead of %d: sending a snapshot", size, len(self._held))
            self._stale = True

    async def _lost(self, what: str) -> _Lost:
        """Why the registration does not hold, with the one who took it over, if someone did."""
        assert self._client is not None
        r = self._record
        known = _texts(await self._client.hgetall(self._keys.info(r.pod)))
        generation = known.get("generation", "")
        if generation.isdecimal() and int(generation) > r.generation:
            return _Lost(f"pod {r.pod} at {r.address} was replaced by {known.get('address')} under the same name")
        return _Lost(what)

    async def _send_batch(self) -> None:
        assert self._client is not None
        with self._lock:
            changes = dict(islice(self._pending.items(), SLICE))
            for h in changes:
                del self._pending[h]
        # Only the net effect travels: a block stored and evicted since the last batch is no change at all.
        stored = [h for h, held in changes.items() if held and h not in self._held]
        evicted = [h for h, held in changes.items() if not held and h in self._held]
        if not stored and not evicted:
            return
        self._number += 1
        r, keys = self._record, self._keys
        names = (keys.lease(r.pod), keys.own(r.pod, r.generation), keys.seq(r.pod, r.generation))
        args = (r.generation, self._number, OWN_TTL_S, b"".join(stored), b"".join(evicted))
        match await self._apply_script.run(self._client, names, args):
            case b"ok" | b"duplicate":
                self._held.update(stored)
                self._held.difference_update(evicted)
            case b"gap":
                self._stale = True
            case answer:
                raise await self._lost(f"a batch was answered {answer!r}")

    async def _send_snapshot(self) -> None:
        assert self._client is not None
        # What changes between these lines and the pool's answer is in both, which is harmless: the last word wins.
        with self._lock:
            self._pending.clear()
            self._stale = False
        held = {h[:PREFIX_BYTES] for h in self._snapshot()}
        self._number += 1
        r, keys = self._record, self._keys
        lease, shadow = keys.lease(r.pod), keys.shadow(r.pod, r.generation, self._number)
        entries = iter(held)
        while part := b"".join(islice(entries, SLICE)):
            answer = await self._slice_script.run(self._client, (lease, shadow), (r.generation, OWN_TTL_S, part))
            if answer != b"ok":
                raise _Lost(f"a snapshot was answered {answer!r}")
        names = (lease, shadow, keys.own(r.pod, r.generation), keys.seq(r.pod, r.generation))
        answer = await self._commit_script.run(self._client, names, (r.generation, self._number, OWN_TTL_S, len(held)))
        if answer != b"ok":
            raise _Lost(f"a snapshot was answered {answer!r}")
        self._held = held

    async def _leave(self) -> None:
        assert self._client is not None
        r, keys = self._record, self._keys
        names = (
            *(keys.pods, keys.info(r.pod), keys.lease(r.pod), keys.load(r.pod)),
            *(keys.own(r.pod, r.generation), keys.seq(r.pod, r.generation)),
            *(keys.resv(r.pod), keys.resv_tokens(r.pod)),
        )
        # The scope goes with its last pod; should another one register just now, its next heartbeat enters it again.
        if await self._leave_script.run(self._client, names, (r.pod, r.generation)) == 0:
            await self._client.hdel(SCOPES_KEY, r.scope)


def _texts(raw: Mapping[str | bytes, str | bytes]) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in raw.items()}


def _text(raw: str | bytes) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw


async def read_holder(url: str, scope: str, pod: str) -> PodRecord | None:
    """The record of the pod that holds the lease of a name; None without one, and when Redis is away for 1 s."""
    keys = Keys(scope)
    client = connect(url, timeout_s=_TIMEOUT_S)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            lease, info = await client.get(keys.lease(pod)), _texts(await client.hgetall(keys.info(pod)))
        record = PodRecord.from_fields(info) if lease else None
        return record if record is not None and lease == str(record.generation).encode() else None
    except (RedisError, OSError, KeyError, ValueError) as e:
        _log.warning("who holds the name %s cannot be told: %r", pod, e)
        return None
    finally:
        await client.aclose()


async def mint_generation(url: str | None, scope: str, pod: str) -> int:
    """A generation for a starting pod: max(now in ms, the last one + 1); the clock alone when Redis is away for 1 s."""
    now_ms = int(time.time() * 1000)
    if url is None:
        return now_ms
    keys = Keys(scope)
    client = connect(url, timeout_s=_TIMEOUT_S)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            names = (keys.pods, keys.gen(pod))
            return int(await Script("mint").run(client, names, (pod, now_ms, PODS_TTL_S)))
    except (RedisError, OSError) as e:
        _log.warning("generation minted from the clock alone, the prefix index does not answer: %r", e)
        return now_ms
    finally:
        await client.aclose()
