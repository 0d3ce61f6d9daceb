"""Idempotency keys: requests of one tenant with the same key get the same answer.

    first request ------------------> computes the answer, and claims the key in Redis
    retry while the answer runs ----> reads the running answer from its first item; the limits are charged once
    retry while the answer is kept -> reads the kept answer
    retry at another gateway, or
    after the answer was dropped ---> computes the answer again; seed and ids come from tenant and key
    another body -------------------> IdempotencyConflict

A claim says to which body a key belongs. Gateways with the same Redis share the claims. While Redis is away, a gateway
knows only its own keys. Then another gateway answers another body with the same key, instead of refusing it.

If an answer fails before a part of it was sent, its key is forgotten. The client may correct the body and keep the key.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from common.errors import (
    BatonError,
    IdempotencyConflict,
    IndexUnavailable,
    InternalError,
    InvalidRequest,
    Unavailable,
)
from common.redis.client import LuaScript, ScriptRunner
from gateway.admission.api_keys import Caller
from gateway.serving.request import AnswerIdentity
from gateway.serving.shared_answer import AnswerReader, SharedAnswer
from gateway.telemetry.metrics import GatewayMetrics

IDEMPOTENCY_KEY = "idempotency-key"  #: Name of the header and of the gRPC metadata.
MAX_KEY_CHARS = 255
ENTRY_BYTES = 1024  #: Counted memory of a key without its answer.
ANSWER_SHARE = 4  #: An answer larger than max_bytes divided by this number is not kept.
STOP_S = 1.0  #: `stop` waits at most this long for the tasks that it cancels.
_LUA = Path(__file__).parent / "lua"

A = TypeVar("A", bound=SharedAnswer[Any])

_log = logging.getLogger(__name__)


def parse_key(value: str | bytes) -> str:
    """Returns a client's idempotency key as text. Raises InvalidRequest for a key that is too long or not printable."""
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    if not (1 <= len(text) <= MAX_KEY_CHARS and text.isascii() and text.isprintable()):
        problem = f"must have 1 to {MAX_KEY_CHARS} printable ASCII characters"
        raise InvalidRequest(f"{IDEMPOTENCY_KEY} {problem}", field=IDEMPOTENCY_KEY)
    return text


def digest(*parts: bytes | str) -> bytes:
    """Returns a digest of 16 bytes over several parts and their lengths."""
    state = blake2b(digest_size=16, person=b"baton-answer-key")
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        state.update(len(raw).to_bytes(8))
        state.update(raw)
    return state.digest()


@dataclass(eq=False, slots=True)
class KeyEntry:
    """One key that this gateway knows."""

    scope: bytes  #: Digest of tenant and key.
    fingerprint: bytes  #: Digest of the request.
    created: int  #: Time of the first request, in seconds since the epoch.
    answer: SharedAnswer[Any] | None = None  #: The answer that runs or is kept; None if it was dropped.
    size: int = ENTRY_BYTES  #: Counted bytes of the key and its answer.
    expires_at: float = math.inf  #: When the key is forgotten; inf while an answer runs.


class KeyBook:
    """The keys of one gateway, with their answers. Pure: the caller gives the time, in seconds of one clock.

        add --> running -- end --> kept, or without its answer -------- ttl_s --> forgotten
                   ^                 |
                   '------ start ----'

    Invariant: `size` exceeds `max_bytes` only by entries with a running answer. If memory is needed, answers are
    dropped before keys, and older ones before newer ones.
    """

    def __init__(self, *, ttl_s: float, max_bytes: int) -> None:
        self.size = 0  #: Counted bytes of all entries.
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._entries: dict[bytes, KeyEntry] = {}
        self._ended: OrderedDict[bytes, KeyEntry] = OrderedDict()  #: Entries whose answer ended, the oldest first.
        self._kept: OrderedDict[bytes, KeyEntry] = OrderedDict()  #: Those of `_ended` with their answer, in its order.

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, scope: bytes, fingerprint: bytes, now: float) -> KeyEntry | None:
        """Returns the entry of a key; None if the key is not known.

        Raises IdempotencyConflict if the key belongs to another request.
        """
        self._forget_expired(now)
        entry = self._entries.get(scope)
        if entry is not None and entry.expires_at <= now:
            self.forget(entry)
            return None
        if entry is not None and entry.fingerprint != fingerprint:
            raise conflict()
        return entry

    def add(self, scope: bytes, fingerprint: bytes, created: int) -> KeyEntry:
        """Adds an unknown key. Call `start` next."""
        assert scope not in self._entries
        entry = self._entries[scope] = KeyEntry(scope, fingerprint, created)
        self.size += entry.size
        return entry

    def start(self, entry: KeyEntry, answer: SharedAnswer[Any]) -> None:
        """Called when the computing of an answer begins. The entry has no answer."""
        assert entry.answer is None
        self._ended.pop(entry.scope, None)
        entry.answer, entry.expires_at = answer, math.inf
        self._trim()

    def on_growth(self, entry: KeyEntry, answer: SharedAnswer[Any]) -> None:
        """Called when a running answer has grown. Lets it go if it is too large, or if no other memory can be freed."""
        if entry.answer is not answer:
            return
        self._resize(entry, ENTRY_BYTES + answer.size)
        self._trim()
        if answer.size > self._max_bytes // ANSWER_SHARE or self.size > self._max_bytes:
            answer.let_go()
            self._detach(entry)

    def end(self, entry: KeyEntry, answer: SharedAnswer[Any], now: float, *, keep: bool) -> None:
        """Called when an answer has ended or has no reader. With `keep` the answer is kept for retries."""
        if self._entries.get(entry.scope) is not entry or entry.answer not in (answer, None):
            return  # the entry was forgotten, or a later answer of it runs
        if entry.answer is not None and keep:
            self._resize(entry, ENTRY_BYTES + answer.size)
            self._kept[entry.scope] = entry
        else:
            self._detach(entry)
        self._ended[entry.scope] = entry
        self._ended.move_to_end(entry.scope)
        entry.expires_at = now + self._ttl_s
        self._trim()

    def forget(self, entry: KeyEntry) -> None:
        """Removes an entry. No effect if it is removed already."""
        if self._entries.get(entry.scope) is entry:
            del self._entries[entry.scope]
            self._ended.pop(entry.scope, None)
            self._kept.pop(entry.scope, None)
            self.size -= entry.size

    def _detach(self, entry: KeyEntry) -> None:
        entry.answer = None
        self._resize(entry, ENTRY_BYTES)

    def _resize(self, entry: KeyEntry, size: int) -> None:
        self.size += size - entry.size
        entry.size = size

    def _trim(self) -> None:
        while self.size > self._max_bytes and self._kept:
            _, entry = self._kept.popitem(last=False)
            self._detach(entry)
        while self.size > self._max_bytes and self._ended:
            self.forget(next(iter(self._ended.values())))

    def _forget_expired(self, now: float) -> None:
        while self._ended and (oldest := next(iter(self._ended.values()))).expires_at <= now:
            self.forget(oldest)


def conflict() -> IdempotencyConflict:
    """Returns the error of a key that belongs to another request."""
    text = f"this {IDEMPOTENCY_KEY} belongs to another request: send the same body, or a new key"
    return IdempotencyConflict(text, field=IDEMPOTENCY_KEY)


class KeyClaims:
    """The claims of keys in Redis. A claim says to which request a key belongs, and since when."""

    def __init__(self, url: str | None, *, ttl_s: float, timeout_s: float) -> None:
        """`url`: None for no Redis; then each call raises. `ttl_s`: life of a claim after its last request."""
        self._redis = ScriptRunner(url, timeout_s=timeout_s)
        self._ttl_ms = math.ceil(1000 * ttl_s)
        self._claim, self._release = (LuaScript(name, directory=_LUA) for name in ("claim", "release"))

    @property
    def shared(self) -> bool:
        """Gateways share their claims in a Redis."""
        return self._redis.has_redis

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.close()

    async def claim(self, tenant: str, entry: KeyEntry, owner: str) -> None:
        """Claims the key for its request. Sets `entry.created` to the time of the first claim.

        Raises IdempotencyConflict if the key belongs to another request, and IndexUnavailable without Redis.
        """
        args = (entry.fingerprint, entry.created, owner, self._ttl_ms)
        fingerprint, created = await self._run(self._claim, tenant, entry, args)
        if fingerprint != entry.fingerprint:
            raise conflict()
        entry.created = int(created)

    async def release(self, tenant: str, entry: KeyEntry, owner: str) -> None:
        """Removes the claim, if `owner` made it and no other request has repeated it. Raises IndexUnavailable."""
        await self._run(self._release, tenant, entry, (owner,))

    async def _run(self, script: LuaScript, tenant: str, entry: KeyEntry, args: Sequence[str | bytes | int]) -> Any:
        key = f"kv:{{tenant.{tenant}}}:once:{entry.scope.hex()}"
        return await self._redis.run(script, (key,), args)


class AnswerKeys:
    """Gives each request with an idempotency key its answer. It owns the tasks that compute the answers."""

    def __init__(
        self,
        url: str | None,
        metrics: GatewayMetrics,
        *,
        ttl_s: float,
        max_bytes: int,
        limit_s: float,
        timeout_s: float,
    ) -> None:
        """`ttl_s`: 0 turns keys off. `limit_s`: longest time of a request. `timeout_s`: time limit of a Redis call."""
        self.on = ttl_s > 0
        self._metrics = metrics
        self._book = KeyBook(ttl_s=ttl_s, max_bytes=max_bytes)
        self._claims = KeyClaims(url if self.on else None, ttl_s=ttl_s + limit_s, timeout_s=timeout_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_readers = 0
        self._no_readers = asyncio.Event()
        self._no_readers.set()

    async def drained(self) -> None:
        """Returns when every reader has its whole answer."""
        await self._no_readers.wait()

    async def stop(self) -> None:
        """Cancels the tasks that compute answers, and closes the connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)
        await self._claims.close()

    @contextmanager
    def read(
        self,
        caller: Caller,
        key: str,
        content: bytes,
        new_answer: Callable[[], A],
        compute: Callable[[AnswerIdentity, A], Coroutine[Any, Any, None]],
    ) -> Iterator[tuple[A, AnswerReader[Any], bool]]:
        """Yields the answer of a request, a reader of it, and whether an earlier request computes it.

        Args:
            content: Digest of the endpoint and the body. Requests with the same key need the same content.
            new_answer: Makes an empty answer.
            compute: Adds the items of a new answer, or raises BatonError. It is cancelled when no reader is left.

        Raises:
            IdempotencyConflict: The key belongs to another request.
            Overloaded: The answer has too many readers.
        """
        scope = digest(caller.tenant, key)
        # The models of the API key are part of the digest: no key may read the answer of a model that it may not use.
        fingerprint = digest(*caller.models, content)
        try:
            entry = self._book.find(scope, fingerprint, time.monotonic())
        except IdempotencyConflict:
            self._count("conflict")
            raise
        known = entry is not None
        if entry is None:
            entry = self._book.add(scope, fingerprint, int(time.time()))
        joined = entry.answer is not None
        if joined:
            answer: A = entry.answer  # type: ignore[assignment]  # equal contents are of one endpoint, so of one type
            self._count("replayed" if answer.complete else "attached")
        else:
            answer = self._start(caller.tenant, entry, new_answer(), compute)
            self._count("recomputed" if known else "computed")
        self._num_readers += 1
        self._no_readers.clear()
        try:
            with answer.reader() as reader:
                yield answer, reader, joined
        finally:
            self._num_readers -= 1
            if not self._num_readers:
                self._no_readers.set()

    def _start(
        self, tenant: str, entry: KeyEntry, answer: A, compute: Callable[[AnswerIdentity, A], Coroutine[Any, Any, None]]
    ) -> A:
        task = asyncio.get_running_loop().create_task(self._compute(tenant, entry, answer, compute))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def abandon() -> None:
            answer.let_go()
            self._book.end(entry, answer, time.monotonic(), keep=False)
            task.cancel()

        answer.on_growth = lambda: self._book.on_growth(entry, answer)
        answer.on_abandoned = abandon
        self._book.start(entry, answer)
        return answer

    async def _compute(
        self,
        tenant: str,
        entry: KeyEntry,
        answer: A,
        compute: Callable[[AnswerIdentity, A], Coroutine[Any, Any, None]],
    ) -> None:
        """Claims the key and computes its answer. Every failure becomes the error of the answer."""
        owner = secrets.token_hex(8)
        error: BatonError | None = Unavailable("the gateway is stopping", retry_after_s=1.0)  # if the task is cancelled
        try:
            try:
                await self._claims.claim(tenant, entry, owner)
            except IndexUnavailable as e:
                if self._claims.shared:
                    _log.debug("an idempotency key is known to this gateway only: %s", e)
                    self._metrics.local_keys.inc()
            answer_id = digest(entry.scope, entry.fingerprint).hex()[:24]
            await compute(AnswerIdentity(entry.scope, answer_id, entry.created), answer)
            error = None
        except IdempotencyConflict as e:
            self._count("conflict")
            self._book.forget(entry)
            error = e
        except BatonError as e:
            error = e
            if not answer.begun:
                self._book.forget(entry)
                with suppress(IndexUnavailable):
                    await self._claims.release(tenant, entry, owner)
        except Exception:
            _log.exception("an answer with an idempotency key failed inside the gateway")
            error = InternalError("internal error")
        finally:
            answer.end(error)
            self._book.end(entry, answer, time.monotonic(), keep=error is None)

    def _count(self, outcome: str) -> None:
        self._metrics.keyed_requests.labels(outcome).inc()
