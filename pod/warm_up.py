"""A new pod pulls the prefixes that its peers use most, before it is ready.

    peers:    request finds a cached prefix -> HotPrefixes counts it -> kv:{m}:hot:<pod> in Redis, every 30 s
    new pod:  read the lists of all peers -> sort by hits -> pull, the most used first, until time or bytes are up

A pull may fail. Every failure ends in a pod with fewer cached blocks, never in a pod that is not
ready. Without Redis, peers or lists nothing is pulled.
"""

from __future__ import annotations

import asyncio
import logging
import math
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from common.block_hash import HASH_BYTES
from common.errors import BatonError, describe
from common.process.lifecycle import log_phase
from common.settings.configs import PodConfig
from engine.engine import Engine
from engine.kv.blocks import BlockPool
from engine.schedule.outputs import StepResult
from kv_transfer.messages import WantedBlocks
from kv_transfer.node import TransferNode
from prefix_index.reader import IndexReader
from prefix_index.store import PodRecord

_log = logging.getLogger(__name__)

MAX_KNOWN = 256  # Prefixes that a pod counts
MAX_PUBLISHED, MAX_PUBLISHED_BYTES = 16, 256 << 10
HALF_LIFE_S = 600.0  # A hit counts half after this time
MIN_HITS = 1.5  # A prefix with fewer hits is not worth a pull: it was used once
POOL_SHARE = 0.5  # A new pod fills at most this share of its pool
_ENTRY = struct.Struct("<fI")  # Hits, blocks; then the hashes


class HotPrefix(NamedTuple):
    """A cached prefix and how much it is used."""

    hits: float  # Requests that found it, the later ones weigh more
    hashes: tuple[bytes, ...]  # Of all its blocks


class HotPrefixes:
    """Counts the prefixes that requests find in the cache. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began = clock()
        #: By the last hash: hits in units that grow with the time, and all hashes.
        self._known: dict[bytes, tuple[float, tuple[bytes, ...]]] = {}

    def add(self, hashes: Sequence[bytes]) -> None:
        """Counts a request that found these blocks, the first ones of its prompt. O(number of blocks)."""
        with self._lock:
            unit = self._unit()
            if unit > 1e12:  # keeps the numbers finite
                self._known = {key: (hits / unit, chain) for key, (hits, chain) in self._known.items()}
                self._began, unit = self._clock(), 1.0
            former = self._known.get(hashes[-1])
            if former is None and len(self._known) >= MAX_KNOWN:
                del self._known[min(self._known, key=lambda key: self._known[key][0])]
            self._known[hashes[-1]] = (former[0] if former else 0.0) + unit, former[1] if former else tuple(hashes)

    def count(self, result: StepResult) -> None:
        """Counts the cached prefixes of the sequences that ended in a step. Engine thread."""
        for output in result.outputs:
            seq = output.seq
            if output.ended and (cached := seq.cached_tokens // seq.block_size):
                self.add(seq.matchable_hashes()[:cached])

    def _unit(self) -> float:
        return math.exp2((self._clock() - self._began) / HALF_LIFE_S)

    def to_bytes(self) -> bytes:
        """Returns the most used prefixes, at most MAX_PUBLISHED and MAX_PUBLISHED_BYTES; empty if there are none."""
        with self._lock:
            unit, known = self._unit(), sorted(self._known.values(), reverse=True)
        published = b""
        for hits, chain in known[:MAX_PUBLISHED]:
            entry = _ENTRY.pack(hits / unit, len(chain)) + b"".join(chain)
            if len(published) + len(entry) <= MAX_PUBLISHED_BYTES:
                published += entry
        return published


def parse_hot_prefixes(raw: bytes) -> list[HotPrefix]:
    """Returns the prefixes of `to_bytes`. Raises ValueError for anything else."""
    found, at = [], 0
    while at < len(raw):
        if at + _ENTRY.size > len(raw):
            raise ValueError("a list of hot prefixes is cut")
        hits, count = _ENTRY.unpack_from(raw, at)
        at += _ENTRY.size
        end = at + count * HASH_BYTES
        if not count or end > len(raw) or not math.isfinite(hits):
            raise ValueError("a list of hot prefixes is damaged")
        found.append(HotPrefix(hits, tuple(raw[i : i + HASH_BYTES] for i in range(at, end, HASH_BYTES))))
        at = end
    return found


class _Offer(NamedTuple):
    hits: float
    hashes: tuple[bytes, ...]
    holder: PodRecord


class PrefixWarmUp:
    """Pulls of a pod that is not ready yet. Event loop."""

    def __init__(self, pool: BlockPool, node: TransferNode, reader: IndexReader, scope: str, name: str) -> None:
        self._pool, self._node, self._reader, self._scope, self._name = pool, node, reader, scope, name

    async def run(self, limit_s: float, max_blocks: int) -> int:
        """Pulls for at most limit_s and max_blocks; returns the number of blocks. Raises only CancelledError."""
        until, pulled = time.monotonic() + limit_s, 0
        max_blocks = min(max_blocks, int(POOL_SHARE * self._pool.num_blocks))
        try:
            async with asyncio.timeout(limit_s):
                for number, offer in enumerate(await self._offers()):
                    if pulled >= max_blocks:
                        break
                    pulled += await self._pull(f"warm-up-{self._name}-{number}", offer, max_blocks - pulled, until)
        except TimeoutError:
            _log.info("warm-up from peers stopped after %g s", limit_s)
        except BatonError as error:
            _log.info("no warm-up from peers: %s", error.message)
        except Exception:
            _log.exception("the warm-up from peers failed")
        return pulled

    async def _offers(self) -> list[_Offer]:
        """Returns what the live peers offer, the most used first. Raises IndexUnavailable."""
        records = [
            status.record
            for status in await self._reader.pods()
            if status.record.scope == self._scope and status.record.pod != self._name and not status.draining
        ]
        if not records:
            return []
        lists = await self._reader.hot_prefixes(self._scope, [record.pod for record in records])
        return merge_offers(zip(records, lists, strict=True))

    async def _pull(self, request_id: str, offer: _Offer, max_blocks: int, until: float) -> int:
        """Pulls one prefix, or its start; returns the number of new blocks. A holder's error is 0."""
        pool = self._pool
        hashes = offer.hashes[: pool.match_prefix(offer.hashes) + max_blocks]
        lease = pool.lease(hashes, len(hashes))
        if lease is None:
            return 0
        try:
            first = lease.cached_blocks
            if first == len(hashes):
                return 0
            wanted = WantedBlocks(
                request_id=request_id,
                hashes=hashes,
                first_block=first,
                blocks=tuple(lease.blocks[first:]),
                pin=lease.pin_for_write(first, len(hashes) - first),
                timeout_s=max(0.0, until - time.monotonic()),
            )
            got = await self._node.pull(offer.holder.address, offer.holder.pod, wanted)
            lease.publish(hashes[: first + got.blocks])
            return got.blocks
        except BatonError as error:
            _log.info("a hot prefix of %s was not pulled: %s", offer.holder.pod, describe(error))
            return 0
        finally:
            lease.finish("warm-up")


async def warm_up_from_peers(config: PodConfig, engine: Engine, node: TransferNode) -> int:
    """Pulls the most used prefixes of the pod's scope within the limits of its settings; returns the blocks."""
    if not config.warm_up_s or not config.pulls_prefixes or config.redis is None:
        return 0
    assert config.name is not None
    began, reader = time.monotonic(), IndexReader(config.redis, books=False)
    try:
        warm_up = PrefixWarmUp(engine.pool, node, reader, engine.layout.scope, config.name)
        blocks = await warm_up.run(config.warm_up_s, config.warm_up_size // engine.layout.block_bytes)
    finally:
        await reader.close()
    log_phase(f"{blocks} KV blocks of peers pulled in {time.monotonic() - began:.1f} s", done=True)
    return blocks


def merge_offers(lists: Iterable[tuple[PodRecord, bytes | None]]) -> list[_Offer]:
    """Returns one offer per prefix, the most used first; hits of several pods add up. Damaged lists are left out."""
    merged: dict[bytes, _Offer] = {}
    for record, raw in lists:
        try:
            prefixes = parse_hot_prefixes(raw or b"")
        except ValueError as error:
            _log.warning("hot prefixes of pod %s left out: %s", record.pod, describe(error))
            continue
        for hits, hashes in prefixes:
            former = merged.get(hashes[-1])
            merged[hashes[-1]] = _Offer(hits + (former.hits if former else 0.0), hashes, record)
    worth = [offer for offer in merged.values() if offer.hits >= MIN_HITS]
    return sorted(worth, key=lambda offer: offer.hits, reverse=True)
