"""Which decode pod holds a request and which prefill pod computes it.

Cost in seconds: (tokens queued there + prompt tokens not cached there) / the pod's measured rate; among near-ties the
choice is random, so that two gateways with the same view do not herd. While the index is away: rendezvous hashing of
the prompt's first blocks with bounded load (Mirrokni et al., "Consistent Hashing with Bounded Loads"), by own counts.
The index is a hint: a wrong promise costs a recompute, never an error.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from common.block_hash import block_hashes, matchable_blocks
from common.errors import IndexUnavailable
from common.types import Role, ValidRequest
from gateway.metrics import GatewayMetrics
from gateway.pod import Pod
from gateway.pods import PodTable

START_RATE = 2000.0  # prompt tokens per second, until a pod's own rate is known
DECODE_COST_S = 0.002  # what one more running sequence costs its neighbours
MOVE_RATE = 20_000.0  # prompt tokens per second whose KV can be moved
FULL_COST_S = 1.0  # a decode pod without enough free blocks is a last resort
TIE_RATIO, TIE_S = 1.1, 0.002
LOAD_BOUND = 1.25
KEY_BLOCKS = 4  # blocks whose hash decides affinity without an index


class Rates:
    """Measured prefill rates, tokens per second, by pod name: a moving average."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def learn(self, pod: str, tokens: int, seconds: float) -> None:
        """One prompt: tokens computed in seconds."""
        if tokens >= 16 and seconds > 0:
            rate = tokens / seconds
            self._rates[pod] = 0.8 * self._rates.get(pod, rate) + 0.2 * rate

    def of(self, pod: str) -> float:
        """The rate of a pod, the mean of the known ones for a new pod."""
        known = self._rates
        return known.get(pod) or (sum(known.values()) / len(known) if known else START_RATE)


@dataclass(slots=True)
class Plan:
    """Choices for one request: what the index said when it arrived, and the pods' state at each choice.

    matched: pod name -> prompt tokens that the index says it holds; empty without an index.
    """

    request: ValidRequest
    table: PodTable
    rates: Rates
    indexed: bool = False
    matched: Mapping[str, int] = field(default_factory=dict)
    keys: Mapping[str, bytes] = field(default_factory=dict)

    def decode(self, avoid: Collection[str], tried: Collection[str]) -> Pod | None:
        """The decode pod to ask next; pods in `avoid` (addresses) only when no other is left, `tried` never again."""
        need = self.request.prompt_len + self.request.sampling.max_tokens
        pods = [p for p in self.table.decodes() if p.address not in tried and p.info and p.info.capacity >= need]
        return self._choose(_prefer(pods, avoid), self._decode_cost, lambda pod: len(pod.decoding))

    def prefill(self, fingerprint: str, avoid: Collection[str]) -> Pod | None:
        """The prefill pod for a decode pod of this layout."""
        need = self.request.prompt_len
        pods = [p for p in self.table.prefills(fingerprint) if p.info and p.info.capacity >= need]
        return self._choose(_prefer(pods, avoid), self._prefill_cost, lambda pod: len(pod.prefilling))

    def held(self, pod: Pod) -> int:
        """Prompt tokens that the index promises on a pod."""
        return self.matched.get(pod.name, 0)

    def uncached(self, pod: Pod) -> int:
        """Prompt tokens that a pod would have to compute, as far as the index knows."""
        return max(1, self.request.prompt_len - self.held(pod))

    def _prefill_cost(self, pod: Pod) -> float:
        # The pod's own report holds what reached it; what was booked since then is not in it yet.
        queued = pod.prefilling.tokens()
        if pod.load is not None:
            reported = max(pod.load.queued_tokens, pod.booked_tokens)
            queued = max(queued, reported + pod.prefilling.tokens(pod.load_seen))
        return (queued + self.uncached(pod)) / self.rates.of(pod.name)

    def _decode_cost(self, pod: Pod) -> float:
        running = len(pod.decoding)
        cost = 0.0
        if pod.load is not None and pod.info is not None:
            running = max(running, pod.load.running + pod.load.waiting + pod.decoding.count(pod.load_seen))
            if pod.load.free_blocks * pod.info.block_size < self.uncached(pod):
                cost = FULL_COST_S
        local = 0.0
        if pod.info is not None and pod.info.role is Role.BOTH:
            local = self.uncached(pod) / self.rates.of(pod.name)
        return cost + running * DECODE_COST_S + self.uncached(pod) / MOVE_RATE + local

    def _choose(self, pods: Sequence[Pod], cost: Callable[[Pod], float], count: Callable[[Pod], int]) -> Pod | None:
        if len(pods) <= 1:
            return pods[0] if pods else None
        if self.indexed:
            costs = [cost(pod) for pod in pods]
            limit = min(costs) * TIE_RATIO + TIE_S
            return random.choice([pod for pod, c in zip(pods, costs, strict=True) if c <= limit])
        loads = [count(pod) for pod in pods]
        bound = max(min(loads), int(LOAD_BOUND * (sum(loads) + 1) / len(pods)))
        light = [pod for pod, load in zip(pods, loads, strict=True) if load <= bound]
        key = self.keys.get(light[0].info.fingerprint if light[0].info else "")
        if key is None:
            least = min(count(pod) for pod in light)
            return random.choice([pod for pod in light if count(pod) == least])
        return max(light, key=lambda pod: hashlib.blake2b(pod.name.encode(), key=key, digest_size=8).digest())


class Router:
    """Makes a Plan per request."""

    def __init__(self, table: PodTable, metrics: GatewayMetrics) -> None:
        self._table = table
        self._metrics = metrics
        self.rates = Rates()

    async def plan(self, request: ValidRequest) -> Plan:
        """Hashes the prompt for every layout in use and asks the index who holds it. Never fails."""
        layouts: dict[str, list[Pod]] = {}
        for pod in self._table.pods.values():
            if pod.serving and pod.info is not None:
                layouts.setdefault(pod.info.fingerprint, []).append(pod)
        matched: dict[str, int] = {}
        keys: dict[str, bytes] = {}
        indexed = self._table.index is not None and self._table.index_up
        for fingerprint, pods in layouts.items():
            info = pods[0].info
            assert info is not None
            size = info.block_size
            usable = matchable_blocks(request.prompt_len, size)
            prompt = request.prompt_ids[: usable * size]
            hashes = block_hashes(prompt, fingerprint=fingerprint, block_size=size, salt=request.cache_salt)
            if not hashes:
                continue
            keys[fingerprint] = hashes[min(len(hashes), KEY_BLOCKS) - 1]
            if indexed:
                found = await self._lookup(info.scope, hashes, pods)
                indexed = found is not None
                matched.update({pod: blocks * size for pod, blocks in (found or {}).items()})
        self._metrics.index_mode("redis" if indexed else "hash")
        return Plan(request, self._table, self.rates, indexed, matched if indexed else {}, keys)

    async def _lookup(self, scope: str, hashes: list[bytes], pods: Sequence[Pod]) -> dict[str, int] | None:
        index = self._table.index
        assert index is not None
        start = time.monotonic()
        try:
            found = await index.lookup(scope, hashes, [(p.info.name, p.info.generation) for p in pods if p.info])
        except IndexUnavailable:
            return None
        self._metrics.index_lookup.observe(time.monotonic() - start)
        return found


def _prefer(pods: Sequence[Pod], avoid: Collection[str]) -> Sequence[Pod]:
    """The pods that did not fail this request; all of them when there are no others."""
    return [pod for pod in pods if pod.address not in avoid] or pods
