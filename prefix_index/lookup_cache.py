"""Answers of the prefix index that are still good: a burst of equal prompts asks it once.

An answer is good for CACHE_S, for the generations it was asked about, and for a pod only while no booking there begins
or ends: it is about to hold more then, and the index knows SETTLE_S later. Invariant: never more than MAX_ANSWERS.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from prefix_index.records import PrefixHits

CACHE_S = 1.0
SETTLE_S = 0.2  # from the end of a prompt's booking until its blocks are in the index, with a margin
MAX_ANSWERS = 256

PodGeneration = tuple[str, int]  # name, generation


@dataclass(frozen=True, slots=True)
class _CachedLookup:
    asked: float
    length: int
    pods: Sequence[PodGeneration]
    matched: Mapping[PodGeneration, PrefixHits]


class LookupCache:
    """By scope and the last hash of a chain, which names all of it. clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answers: OrderedDict[tuple[str, bytes], _CachedLookup] = OrderedDict()  # oldest first
        self._booked: OrderedDict[str, float] = OrderedDict()  # pod -> when; oldest first

    def get(self, scope: str, last: bytes, pods: Sequence[PodGeneration]) -> Mapping[PodGeneration, PrefixHits] | None:
        """What these pods hold (pods without anything may be left out), or None when the index must be asked."""
        answer = self._answers.get((scope, last))
        if answer is None or answer.asked < self._clock() - CACHE_S or not set(answer.pods).issuperset(pods):
            return None
        since = set(takewhile(lambda pod: self._booked[pod] >= answer.asked - SETTLE_S, reversed(self._booked)))
        if since and any(
            pod[0] in since and answer.matched.get(pod, PrefixHits()).total_blocks < answer.length for pod in pods
        ):
            return None
        return answer.matched

    def put(
        self,
        scope: str,
        last: bytes,
        length: int,
        pods: Sequence[PodGeneration],
        matched: Mapping[PodGeneration, PrefixHits],
        asked: float,
    ) -> None:
        """Keeps an answer about a chain of `length` blocks. asked: when, by the clock, before it was asked."""
        self._answers[scope, last] = _CachedLookup(asked, length, tuple(pods), matched)
        self._answers.move_to_end((scope, last))
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    def invalidate_pod(self, pod: str) -> None:
        """A booking on the pod begins or ends: it will hold more than answers say."""
        now = self._clock()
        self._booked[pod] = now
        self._booked.move_to_end(pod)
        while self._booked and next(iter(self._booked.values())) < now - CACHE_S - SETTLE_S:
            self._booked.popitem(last=False)
