"""A cache of look-ups in the prefix index: a burst of equal prompts sends one look-up to Redis.

An answer is valid for CACHE_S and for the pod generations of its question. A booking that begins or ends on a pod makes
the answer invalid for this pod, because the pod will soon hold more blocks; the index knows them SETTLE_S later.
Answers by which the pod holds the whole prompt stay valid.

                    booking ends        index has the blocks
    time  ----|------------|--------------------|---------->
              answer A     |<---- SETTLE_S ---->|  answer B
          A and every answer up to here are invalid     B is valid
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from prefix_index.store import PrefixHits

CACHE_S = 1.0
SETTLE_S = 0.2  #: Time from the end of a prompt's booking until its blocks are in the index, with a margin.
MAX_ANSWERS = 256

PodGeneration = tuple[str, int]  #: Name and generation of a pod.


@dataclass(frozen=True, slots=True)
class _CachedLookup:
    asked_at: float
    length: int
    pods: Sequence[PodGeneration]
    matched: Mapping[PodGeneration, PrefixHits]


class LookupCache:
    """Answers by scope and last block hash, which identifies the whole prompt; never more than MAX_ANSWERS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answers: OrderedDict[tuple[str, bytes], _CachedLookup] = OrderedDict()  # oldest first
        self._booked: OrderedDict[str, float] = OrderedDict()  # pod -> time of the last booking event; oldest first

    def get(self, scope: str, last: bytes, pods: Sequence[PodGeneration]) -> Mapping[PodGeneration, PrefixHits] | None:
        """Returns the hits of these pods (pods without hits may be missing), or None if there is no valid answer."""
        answer = self._answers.get((scope, last))
        if answer is None or answer.asked_at < self._clock() - CACHE_S or not set(answer.pods).issuperset(pods):
            return None
        recent = set(takewhile(lambda pod: self._booked[pod] >= answer.asked_at - SETTLE_S, reversed(self._booked)))
        less = (answer.matched.get(pod, PrefixHits()).total_blocks < answer.length for pod in pods if pod[0] in recent)
        return None if recent and any(less) else answer.matched

    def put(
        self,
        scope: str,
        last: bytes,
        length: int,
        pods: Sequence[PodGeneration],
        matched: Mapping[PodGeneration, PrefixHits],
        asked_at: float,
    ) -> None:
        """Keeps an answer for a prompt of `length` blocks. `asked_at` is the clock's value before the look-up."""
        self._answers[scope, last] = _CachedLookup(asked_at, length, tuple(pods), matched)
        self._answers.move_to_end((scope, last))
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    def invalidate_pod(self, pod: str) -> None:
        """Makes older answers invalid for the pod on which a booking begins or ends: it will soon hold more blocks."""
        now = self._clock()
        self._booked[pod] = now
        self._booked.move_to_end(pod)
        while self._booked and next(iter(self._booked.values())) < now - CACHE_S - SETTLE_S:
            self._booked.popitem(last=False)
