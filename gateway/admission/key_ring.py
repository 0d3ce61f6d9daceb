"""The keys that count now, read again from their sources while the gateway runs.

A file is looked at every FILE_PERIOD_S, Redis is asked every REDIS_PERIOD_S: so long does a revoked key live on. What
cannot be read, or is wrong, changes nothing: the keys that were read last go on to count.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import BatonError, ConfigError, InvalidApiKey, Unavailable
from gateway.admission.api_keys import ANONYMOUS, ApiKey, Caller, KeySet
from gateway.admission.key_store import KeyFile, RedisKeyStore

FILE_PERIOD_S, REDIS_PERIOD_S = 0.5, 1.0
REDIS_SOURCE = "redis"  # as a source: the hash in the Redis of the index

_log = logging.getLogger(__name__)


class KeyRing:
    """Keys of any number of sources; with none everybody may come in. Raises ConfigError when a file is wrong."""

    def __init__(self, sources: Sequence[str] = (), redis: str | None = None) -> None:
        self._files = [KeyFile(Path(source)) for source in sources if source != REDIS_SOURCE]
        self._versions = [file.version() for file in self._files]
        self._of_files = [file.read() for file in self._files]
        self._hash: RedisKeyStore | None = None
        self._of_hash: list[ApiKey] | None = None
        if REDIS_SOURCE in sources:
            if redis is None:
                raise ConfigError("api_keys: redis needs --redis, where the keys are", field="api_keys")
            self._hash = RedisKeyStore(redis)
        self._keys = KeySet()
        self._tasks: list[asyncio.Task[None]] = []
        self._complaints: dict[str, str] = {}
        self._rebuild()

    @property
    def allows_anonymous(self) -> bool:
        """No keys are needed."""
        return not self._files and self._hash is None

    async def start(self) -> None:
        """Reads Redis for the first time, and begins to look for changes."""
        loop = asyncio.get_running_loop()
        if self._files:
            self._tasks.append(loop.create_task(self._watch_files()))
        if self._hash is not None:
            await self._ask(self._hash)
            self._tasks.append(loop.create_task(self._watch_hash(self._hash)))

    async def stop(self) -> None:
        """Stops looking."""
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if self._hash is not None:
            await self._hash.close()

    def identify(self, authorization: str | None) -> Caller:
        """Whose the header `Authorization: Bearer KEY` is. Raises InvalidApiKey.

        Raises Unavailable for a key that only Redis may know, as long as Redis has never answered.
        """
        if self.allows_anonymous:
            return ANONYMOUS
        scheme, _, key = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise InvalidApiKey("an API key is missing: send the header Authorization: Bearer KEY")
        try:
            return self._keys.identify(key.strip())
        except InvalidApiKey:
            if self._hash is not None and self._of_hash is None:
                raise Unavailable("API keys cannot be checked now", retry_after_s=1.0) from None
            raise

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(FILE_PERIOD_S)
            for i, file in enumerate(self._files):
                version = file.version()
                if version == self._versions[i]:
                    continue
                try:
                    self._of_files[i] = file.read()
                except ConfigError as e:
                    self._log_failure(str(file.path), e)
                    continue
                self._versions[i] = version
                self._on_read(str(file.path), self._of_files[i])

    async def _watch_hash(self, source: RedisKeyStore) -> None:
        while True:
            await asyncio.sleep(REDIS_PERIOD_S)
            await self._ask(source)

    async def _ask(self, source: RedisKeyStore) -> None:
        try:
            records = await source.read()
        except BatonError as e:
            self._log_failure(REDIS_SOURCE, e)
            return
        changed, self._of_hash = records != self._of_hash, records
        if changed or REDIS_SOURCE in self._complaints:
            self._on_read(REDIS_SOURCE, records)

    def _log_failure(self, source: str, error: BatonError) -> None:
        """Said once per change of mind, not per look."""
        if self._complaints.get(source) != error.message:
            self._complaints[source] = error.message
            _log.error("API keys of %s are not read again, those known go on to count: %s", source, error.message)

    def _on_read(self, source: str, records: Sequence[ApiKey]) -> None:
        self._complaints.pop(source, None)
        _log.info("%d API keys in %s", len(records), source)
        self._rebuild()

    def _rebuild(self) -> None:
        every: list[Iterable[Any]] = [*self._of_files, self._of_hash or ()]
        self._keys = KeySet(record for records in every for record in records)
