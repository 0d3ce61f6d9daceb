"""The order in which cached blocks are evicted, by policy and by the retention that requests ask for.

    retention     low  ->  normal  ->  high  ->  pinned        a lower one is evicted first
    within one    lru:     the block that has been unused for the longest time
                  gdsf:    the block with the lowest H = L + uses, where L is the H of the last evicted block
                  s3fifo:  new blocks wait in a small queue; those that are used again move to the main queue.
                           New blocks that continue a used one, as those of a conversation do, begin in the main
                           queue, which is not in the paper: a crawl continues nothing

GDSF is GreedyDual-Size-Frequency (Cherkasova, HP Labs 1998) with one size and cost for all blocks. S3-FIFO is from Yang
et al., "FIFO queues are all you need for cache eviction" (SOSP 2023).

Only leaves are evicted: blocks that no cached block continues. So the cached hashes stay prefix-closed under any
policy. A retention ends at its time; the block is then a normal one. Pinned blocks are bounded, in all and for each
tenant; blocks beyond the bound are `high`. A pinned block is evicted when nothing else is left, so a pin never refuses
a request. The lock of the block pool guards all data of this module.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from common.types import ValidRequest

SMALL_SHARE = 0.1  # Share of the blocks that the small queue of S3-FIFO keeps.
MAX_USES = 3  # Uses that S3-FIFO counts.


class Priority(enum.IntEnum):
    """How long a block stays, compared with others."""

    LOW = 0
    NORMAL = 1
    HIGH = 2
    PINNED = 3


@dataclass(frozen=True, slots=True)
class Retention:
    """What a request asks for the blocks of its prompt."""

    priority: Priority = Priority.NORMAL
    ttl_s: float | None = None  # Seconds after the last use for which it holds; None: until eviction.
    tenant: str = ""  # Whose pinned blocks count together; "" for all requests without a tenant.

    @classmethod
    def of(cls, request: ValidRequest) -> Retention | None:
        """Returns what a request asks for; None if it asks for nothing."""
        if not request.cache_priority:
            return None
        # Gateways put the tenant into the salt. A client cannot: its own salts never begin so.
        marker, _, rest = request.cache_salt.partition(":")
        tenant = rest.partition(":")[0] if marker == "tenant" else ""
        return cls(Priority(request.cache_priority + 1), float(request.cache_ttl_s) or None, tenant)


class PolicyState:
    """The numbers by which one policy ranks blocks: leaf-first LRU. Subclasses are the other policies."""

    num_queues = 1

    def __init__(self, num_blocks: int) -> None:
        self.counter = itertools.count()
        self.score = [0.0] * num_blocks
        self.queue = bytearray(num_blocks)

    def on_registered(self, block: int, block_hash: bytes, parent: int) -> None:
        """A block is new in the cache."""

    def on_used(self, block: int) -> None:
        """A request uses a cached block that another one has registered."""

    def on_evictable(self, block: int) -> None:
        """The last user of a block, or of all that continue it, has ended."""
        self.score[block] = float(next(self.counter))

    def queues(self) -> Sequence[int]:
        """Returns the queues in the order in which a victim is searched."""
        return (0,)

    def keeps(self, block: int) -> bool:
        """Returns whether the block that would be next gets another place in the order instead."""
        return False

    def on_evicted(self, block: int, block_hash: bytes) -> None:
        """A block leaves the cache."""


class Gdsf(PolicyState):
    """GreedyDual-Size-Frequency with one size and one cost."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._floor = 0.0  # L
        self._uses = [0] * num_blocks

    def on_registered(self, block: int, block_hash: bytes, parent: int) -> None:
        self._uses[block] = 1

    def on_used(self, block: int) -> None:
        self._uses[block] += 1

    def on_evictable(self, block: int) -> None:
        self.score[block] = self._floor + self._uses[block]

    def on_evicted(self, block: int, block_hash: bytes) -> None:
        self._floor = max(self._floor, self.score[block])


class S3Fifo(PolicyState):
    """A small and a main FIFO queue of blocks, and a ghost queue of the hashes that left the small one."""

    num_queues = 2  # 0: small, 1: main.

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._uses = bytearray(num_blocks)
        self._sizes = [0, 0]
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._num_blocks = num_blocks

    def on_registered(self, block: int, block_hash: bytes, parent: int) -> None:
        self._uses[block] = 0
        known = block_hash in self._ghosts
        if known:
            del self._ghosts[block_hash]
        continues = parent >= 0 and (self.queue[parent] == 1 or self._uses[parent] > 0)
        self._enter(block, int(known or continues))

    def on_used(self, block: int) -> None:
        self._uses[block] = min(MAX_USES, self._uses[block] + 1)

    def on_evictable(self, block: int) -> None:
        """Changes nothing: a FIFO queue keeps the order of arrival."""

    def queues(self) -> Sequence[int]:
        small, main = self._sizes
        return (0, 1) if small > SMALL_SHARE * (small + main) else (1, 0)

    def keeps(self, block: int) -> bool:
        if not self._uses[block]:
            return False
        self._sizes[self.queue[block]] -= 1
        self._uses[block] = self._uses[block] - 1 if self.queue[block] else 0
        self._enter(block, 1)
        return True

    def on_evicted(self, block: int, block_hash: bytes) -> None:
        self._sizes[self.queue[block]] -= 1
        if not self.queue[block]:
            self._ghosts[block_hash] = None
            if len(self._ghosts) > self._num_blocks:
                self._ghosts.popitem(last=False)

    def _enter(self, block: int, queue: int) -> None:
        self.queue[block] = queue
        self._sizes[queue] += 1
        self.score[block] = float(next(self.counter))


POLICIES: dict[str, type[PolicyState]] = {"lru": PolicyState, "gdsf": Gdsf, "s3fifo": S3Fifo}


class LeafOrder:
    """The evictable blocks; `popitem` takes the leaf that the policy and the retentions put first.

    It has the methods of the OrderedDict that the prefix cache uses without policy and retention.
    """

    def __init__(
        self,
        policy: str,
        num_blocks: int,
        max_pinned: int,
        max_pinned_by_tenant: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_pinned_by_tenant`: part of `max_pinned` that one tenant may have; 0 for all of it."""
        self._state = POLICIES[policy](num_blocks)
        self._now = now
        self._max_pinned = max_pinned
        self._max_pinned_by_tenant = max_pinned_by_tenant or max_pinned
        self._pinned = Counter[str]()  # Registered blocks with the priority PINNED, by tenant
        self._tenant = [""] * num_blocks  # The tenant of a pinned block
        self._members: dict[int, None] = {}
        self._hash: list[bytes] = [b""] * num_blocks
        self._parent = [-1] * num_blocks
        self._children = [0] * num_blocks  # Registered blocks that continue each block
        self._priority = bytearray([Priority.NORMAL]) * num_blocks
        self._ttl_s: list[float | None] = [None] * num_blocks
        self._expires = [math.inf] * num_blocks
        self._max_entries = 4 * num_blocks + 64  # Of a heap
        self._fresh = bytearray(num_blocks)  # 1 for blocks that no request has retained yet
        self._version = [0] * num_blocks  # An entry of a heap with another version is void
        #: Per priority and queue: (score, number, block, version) of the leaves.
        self._heaps: list[list[list[tuple[float, int, int, int]]]] = [
            [[] for _ in range(self._state.num_queues)] for _ in Priority
        ]
        self._expiries: list[tuple[float, int]] = []
        self._numbers = itertools.count()

    def on_registered(self, block: int, block_hash: bytes, parent: int) -> None:
        """A block is new in the cache; `parent` is the block before it, -1 for none."""
        self._hash[block], self._parent[block], self._children[block] = block_hash, parent, 0
        self._set_retention(block, Priority.NORMAL, None)
        self._fresh[block] = 1
        if parent >= 0:
            self._children[parent] += 1
        self._state.on_registered(block, block_hash, parent)

    def retain(self, blocks: Sequence[int], retention: Retention) -> None:
        """A request uses cached blocks of one prompt, first to last, or has registered them.

        A block keeps the highest retention that one of its requests asks for. A time to live begins again.
        """
        self._end_retentions()  # pins whose time is over make room
        for block in blocks:
            fresh, self._fresh[block] = self._fresh[block], 0
            if not fresh:
                self._state.on_used(block)
            wanted, ttl_s, mine = retention.priority, retention.ttl_s, self._ttl_s[block]
            if wanted is Priority.PINNED and self._priority[block] != wanted and not self._may_pin(retention.tenant):
                wanted = Priority.HIGH
            if fresh or wanted > self._priority[block]:
                self._set_retention(block, wanted, ttl_s, retention.tenant)
            elif wanted == self._priority[block]:
                longer = None if mine is None or ttl_s is None else max(mine, ttl_s)
                self._set_retention(block, wanted, longer, self._tenant[block])
            elif mine is not None:
                self._begin_ttl(block)

    def popitem(self, last: bool = True) -> tuple[int, None]:
        """Removes and returns the next block to evict, a leaf. `last` must be False, as for the oldest of a dict."""
        assert not last
        assert self._members
        self._end_retentions()
        while True:
            block = self._next()
            if not self._state.keeps(block):
                break
            self._push(block)
        self._void(block)
        del self._members[block]
        self._set_retention(block, Priority.NORMAL, None)
        self._state.on_evicted(block, self._hash[block])
        parent = self._parent[block]
        if parent >= 0:
            self._children[parent] -= 1
            self._push(parent)
        return block, None

    def __setitem__(self, block: int, _: None) -> None:
        self._members[block] = None
        self._state.on_evictable(block)
        self._push(block)

    def __delitem__(self, block: int) -> None:
        del self._members[block]
        self._void(block)

    def __contains__(self, block: object) -> bool:
        return block in self._members

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[int]:
        return iter(self._members)

    def inconsistencies(self) -> list[str]:
        """Returns violations of the invariants, one sentence each."""
        waiting = {
            block
            for heaps in self._heaps
            for heap in heaps
            for _, _, block, version in heap
            if version == self._version[block]
        }
        leaves = {block for block in self._members if not self._children[block]}
        return [] if waiting == leaves else [f"{len(waiting ^ leaves)} evictable leaves are wrongly queued"]

    def _next(self) -> int:
        for heaps in self._heaps:
            for queue in self._state.queues():
                heap = heaps[queue]
                while heap:
                    _, _, block, version = heapq.heappop(heap)
                    if version == self._version[block]:
                        return block
        raise AssertionError("evictable blocks without a leaf")

    def _push(self, block: int) -> None:
        """Queues the block if it is an evictable leaf; an earlier entry of it is void."""
        self._void(block)
        if block not in self._members or self._children[block]:
            return
        heap = self._heaps[self._priority[block]][self._state.queue[block]]
        heapq.heappush(heap, (self._state.score[block], next(self._numbers), block, self._version[block]))
        if len(heap) > self._max_entries:  # void entries would pile up while nothing is evicted
            heap[:] = [entry for entry in heap if entry[3] == self._version[entry[2]]]
            heapq.heapify(heap)

    def _void(self, block: int) -> None:
        self._version[block] += 1

    def _may_pin(self, tenant: str) -> bool:
        """Returns whether one more block of the tenant may be pinned."""
        return self._pinned[tenant] < self._max_pinned_by_tenant and self._pinned.total() < self._max_pinned

    def _set_retention(self, block: int, priority: Priority, ttl_s: float | None, tenant: str = "") -> None:
        if self._priority[block] == Priority.PINNED:
            self._pinned[self._tenant[block]] -= 1
            if not self._pinned[self._tenant[block]]:
                del self._pinned[self._tenant[block]]
        self._tenant[block] = tenant if priority is Priority.PINNED else ""
        if priority is Priority.PINNED:
            self._pinned[tenant] += 1
        self._priority[block], self._ttl_s[block] = priority, ttl_s
        self._begin_ttl(block)
        if block in self._members:
            self._push(block)

    def _begin_ttl(self, block: int) -> None:
        ttl_s = self._ttl_s[block]
        self._expires[block] = math.inf if ttl_s is None else self._now() + ttl_s
        if ttl_s is not None:
            heapq.heappush(self._expiries, (self._expires[block], block))
            if len(self._expiries) > self._max_entries:
                self._expiries = [(at, other) for other, at in enumerate(self._expires) if at < math.inf]
                heapq.heapify(self._expiries)

    def _end_retentions(self) -> None:
        """Makes blocks normal whose time to live is over."""
        now = self._now()
        while self._expiries and self._expiries[0][0] <= now:
            at, block = heapq.heappop(self._expiries)
            if at == self._expires[block]:  # else the time has begun again since
                self._set_retention(block, Priority.NORMAL, None)
