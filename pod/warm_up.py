"""A new pod pulls the prefixes that its peers use most, before it is ready.

    peers:    request finds a cached prefix -> HotPrefixes counts it -> kv:{m}:hot:<pod> in Redis, every 30 s
    new pod:  read the lists of all peers -> sort by hits -> pull, the most used first, until time or bytes are up

A pull may fail or hang: then the next pod that holds the prefix is asked, and the one that failed is not asked again.
Every failure ends in a pod with fewer cached blocks, never in a pod that is not ready. Without Redis, peers or lists
nothing is pulled.
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
from common.kv_groups import PageOrder
from common.process.lifecycle import log_phase
from common.settings.pod import PodConfig
from engine.engine import Engine
from engine.schedule.outputs import StepResult
from kv_transfer.messages import WantedBlocks
from kv_transfer.node import TransferNode
from prefix_index.reader import IndexReader
from prefix_index.store import PodRecord

_log = logging.getLogger(__name__)

MAX_KNOWN = 256  # Prefixes that a pod counts
MAX_PUBLISHED, MAX_PUBLISHED_BYTES = 16, 256 << 10
HALF_LIFE_S = 600.0  # A hit counts half after this time
MAX_UNIT = 1e12  # Older hits are scaled down before a new hit counts more than this
MIN_HITS = 1.5  # A prefix with fewer hits is not worth a pull: it was used once
POOL_SHARE = 0.5  # A new pod fills at most this share of its pool
PULL_SHARE = 0.25  # One pull takes at most this share of the time, so that a peer that hangs leaves time for others
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
        #: By the last hash: hits in units that grow with the time, and all hashes, joined.
        self._known: dict[bytes, tuple[float, bytes]] = {}

    def add(self, hashes: Sequence[bytes]) -> None:
        """Counts a request that found these blocks, the first ones of its prompt. O(number of blocks)."""
        key = hashes[-1]
        with self._lock:
            unit = self._unit()
            former = self._known.get(key)
            if former is None and len(self._known) >= MAX_KNOWN:
                del self._known[min(self._known, key=lambda known: self._known[known][0])]
            self._known[key] = (unit, b"".join(hashes)) if former is None else (former[0] + unit, former[1])

    def count(self, result: StepResult) -> None:
        """Counts the cached prefixes of the sequences that ended in a step. Engine thread."""
        for output in result.outputs:
            seq = output.seq
            if output.ended and (cached := seq.cached_tokens // seq.block_size):
                self.add(seq.matchable_hashes()[:cached])

    def _unit(self) -> float:
        """Returns what a hit counts now. Begins new units before they become too large. The lock is held."""
        half_lives = (self._clock() - self._began) / HALF_LIFE_S
        if half_lives <= math.log2(MAX_UNIT):
            return math.exp2(half_lives)
        scale = math.exp2(-min(half_lives, 1000.0))  # a pod may be idle for weeks
        self._known = {key: (hits * scale, chain) for key, (hits, chain) in self._known.items()}
        self._began = self._clock()
        return 1.0

    def to_bytes(self) -> bytes:
        """Returns the most used prefixes, at most MAX_PUBLISHED and MAX_PUBLISHED_BYTES; empty if there are none."""
        with self._lock:
            unit, known = self._unit(), sorted(self._known.values(), reverse=True)
        published = b""
        for hits, chain in known[:MAX_PUBLISHED]:
            entry = _ENTRY.pack(hits / unit, len(chain) // HASH_BYTES) + chain
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
    holders: tuple[PodRecord, ...]


class PrefixWarmUp:
    """Pulls of a pod that is not ready yet. Event loop."""

    def __init__(self, engine: Engine, node: TransferNode, reader: IndexReader, name: str) -> None:
        self._pool, self._layout, self._node, self._reader, self._name = engine.pool, engine.layout, node, reader, name
        self._failed: set[str] = set()  # Names of peers with a failed pull
        self._moved = 0  # Pages that were pulled: blocks, and those of windows and states

    async def run(self, limit_s: float, max_blocks: int) -> int:
        """Pulls for at most limit_s and the bytes of max_blocks; returns the number of new blocks.

        Raises only CancelledError.
        """
        until, pulled = time.monotonic() + limit_s, 0
        share = int(POOL_SHARE * self._pool.num_blocks)
        try:
            async with asyncio.timeout(limit_s):
                for number, offer in enumerate(await self._offers()):
                    for holder in offer.holders:
                        left = min(max_blocks - self._moved - self._layout.state_pages, share - pulled)
                        if left <= 0 or self._has_enough_states():
                            return pulled
                        if holder.pod not in self._failed:
                            left_s = min(PULL_SHARE * limit_s, until - time.monotonic())
                            request_id = f"warm-up-{self._name}-{number}"
                            pulled += await self._pull(request_id, offer.hashes, holder, left, left_s)
        except TimeoutError:
            _log.info("warm-up from peers stopped after %g s", limit_s)
        except BatonError as error:
            _log.info("no warm-up from peers: %s", error.message)
        except Exception:
            _log.exception("the warm-up from peers failed")
        return pulled

    def _has_enough_states(self) -> bool:
        """Returns whether another snapshot would exceed POOL_SHARE, or evict one of a prefix that is used more."""
        states = self._pool.state_counts()
        return states is not None and states.cached > 0 and states.cached + 1 > POOL_SHARE * states.total

    async def _offers(self) -> list[_Offer]:
        """Returns what the live peers offer, the most used first. Raises IndexUnavailable."""
        scope = self._layout.scope
        records = [
            status.record
            for status in await self._reader.pods()
            if status.record.scope == scope and status.record.pod != self._name and not status.draining
        ]
        if not records:
            return []
        lists = await self._reader.hot_prefixes(scope, [record.pod for record in records])
        return merge_offers(zip(records, lists, strict=True))

    async def _pull(
        self, request_id: str, hashes: Sequence[bytes], holder: PodRecord, max_blocks: int, timeout_s: float
    ) -> int:
        """Pulls what is missing of one prefix, or its start; returns the number of new blocks, 0 after an error.

        A holder without window pages or a state at the end of this prefix names a shorter one, which is then pulled.
        """
        cached = self._pool.match_prefix(hashes)
        hashes = hashes[: cached + max_blocks]
        try:
            pulled, held = await self._ask_holder(request_id, hashes, holder, timeout_s)
            if cached < held < len(hashes):
                pulled, _ = await self._ask_holder(request_id, hashes[:held], holder, timeout_s)
            return pulled
        except BatonError as error:
            self._failed.add(holder.pod)
            _log.info("a hot prefix of %s was not pulled: %s", holder.pod, describe(error))
            return 0

    async def _ask_holder(
        self, request_id: str, hashes: Sequence[bytes], holder: PodRecord, timeout_s: float
    ) -> tuple[int, int]:
        """Pulls a prefix in one call to the holder. Raises BatonError.

        Returns the number of new blocks, and the blocks that a holder that sends nothing would send.
        """
        lease = self._pool.lease(hashes, len(hashes))
        if lease is None:
            return 0, 0
        try:
            order = PageOrder.of_prefix(self._layout, len(hashes))
            if lease.cached_blocks == len(hashes) or not lease.cover_transfer(order):
                return 0, 0
            first = lease.cached_blocks  # `cover_transfer` takes blocks without a snapshot of their state
            pin = lease.pin_for_write(first, len(hashes) - first, order)
            wanted = WantedBlocks(
                request_id=request_id,
                hashes=hashes,
                first_block=order.first_page(first),
                blocks=pin.blocks,
                pin=pin,
                timeout_s=max(0.0, timeout_s),
            )
            got = await self._node.pull(holder.address, holder.pod, wanted)
            self._moved += got.blocks
            if not got.blocks:
                return 0, got.held
            return lease.publish_pulled(hashes, order, wanted.first_block + got.blocks) - first, 0
        finally:
            lease.finish("warm-up")


async def warm_up_from_peers(config: PodConfig, engine: Engine, node: TransferNode) -> int:
    """Pulls the most used prefixes of the pod's scope within the limits of its settings; returns the blocks."""
    if not config.warm_up_s or not config.pulls_prefixes or config.redis is None:
        return 0
    assert config.name is not None
    began, reader = time.monotonic(), IndexReader(config.redis, books=False)
    try:
        warm_up = PrefixWarmUp(engine, node, reader, config.name)
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
            if former is None:
                merged[hashes[-1]] = _Offer(hits, hashes, (record,))
            else:
                merged[hashes[-1]] = _Offer(former.hits + hits, hashes, (*former.holders, record))
    worth = [offer for offer in merged.values() if offer.hits >= MIN_HITS]
    return sorted(worth, key=lambda offer: offer.hits, reverse=True)
