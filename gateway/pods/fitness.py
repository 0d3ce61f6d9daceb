"""Says whether a pod should get requests: a breaker by its error rate, and its speed against its peers. Pure.

    breaker   closed -- half of the last requests failed --> open -- pause --> half-open -- probe succeeds --> closed
                                                              ^                    |
                                                              '--- probe fails, twice the pause

    speed     normal -- SLOW_RATIO times slower than its peers for SLOW_S --> slow -- UNFIT_RATIO times --> unfit
                 ^                                                             |
                 '----- less than NORMAL_RATIO for SLOW_S ---------------------'

A pod with an open breaker, or an unfit one, gets requests only if there are no others. It still gets a probe, one
request at a time, so that it can recover. A slow pod costs what its own measured rates say. Peers are the pods of the
same layout, role and card.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol, TypeVar

from common.types import PodLoad, Role

FAILURE_RATE = 0.5  #: Share of failed requests at which a breaker opens, ...
MIN_FAILURES = 3.5  #: ... and so many of them failed lately, older ones with less weight.
MAX_SUCCESSES = 20  #: Successes in a row that count. So a pod that was fine for hours is found after as many failures.
FORGET_S = 30.0  #: Time constant with which outcomes lose their weight.
OPEN_S, MAX_OPEN_S = 2.0, 60.0  #: First and longest pause before a probe.
PROBE_S = 30.0  #: A probe without an outcome is given up after this time.

SLOW_RATIO, NORMAL_RATIO = 2.0, 1.5  #: A pod becomes slow, and normal again, at this multiple of its peers' time.
UNFIT_RATIO = 4.0  #: A slow pod is unfit from this multiple on.
SLOW_S = 5.0  #: A ratio has to last so long.
UNFIT_PROBE_S = 5.0  #: An unfit pod gets a request in this period, so that it measures its rates again.
MIN_PEERS = 2  #: Other pods that a pod is compared with, at least.
PROMPT_TOKENS = 2048  #: The prompt whose computing times are compared.


class BreakerState(enum.StrEnum):
    """Label of a metric."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class Breaker:
    """The recent outcomes of the requests of one pod process."""

    closed: bool = True  #: The pod gets requests as others do.
    successes: int = 0  #: Requests that succeeded since the last failure. Callers may count them here while closed.
    _failed: float = 0.0  #: Failed requests, older ones with less weight.
    _total: float = 0.0
    _at: float = 0.0  #: When the two were last brought up to date.
    _open_until: float = 0.0  #: Without a meaning while closed.
    _pause_s: float = OPEN_S
    _probes: dict[str, float] = field(default_factory=dict)  #: Probes under way: when they were sent, by request id.

    def state(self, now: float) -> BreakerState:
        """Returns the state at a time."""
        if self.closed:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Returns whether the pod may get one more request."""
        if self.closed:
            return True
        newest = next(reversed(self._probes.values()), -math.inf)
        return now >= max(self._open_until, newest + PROBE_S)

    def on_sent(self, request_id: str, now: float) -> None:
        """A request goes to the pod. While the breaker is not closed, it is a probe."""
        if not self.closed:
            self._probes[request_id] = now

    def on_end(self, request_id: str) -> None:
        """A request has ended, with or without an outcome."""
        self._probes.pop(request_id, None)

    def on_success(self, request_id: str) -> None:
        """A request succeeded. The success of a probe closes the breaker."""
        self.successes += 1
        if not self.closed and request_id in self._probes:
            self.closed, self._pause_s, self._failed, self._total = True, OPEN_S, 0.0, 0.0
            self._probes = {}

    def on_failure(self, request_id: str, now: float, weight: float = 1.0) -> bool:
        """A request failed; `weight`: how sure it is that this pod is to blame. Returns whether the breaker opened."""
        if not self.closed:
            # A request from before the breaker opened, or one that the open pod got as the last resort, tells nothing
            # new. If all pods fail, many of these fail at once, and the pause must not be doubled for each.
            if self._probes.pop(request_id, -math.inf) >= self._open_until:
                self._pause_s = min(MAX_OPEN_S, 2 * self._pause_s)
                self._open_until = now + self._pause_s
            return False
        keep = 1 / (1 + max(0.0, now - self._at) / FORGET_S)
        self._failed = self._failed * keep + weight
        self._total = self._total * keep + 1 + min(self.successes, MAX_SUCCESSES)
        self.successes, self._at = 0, now
        if self._failed < MIN_FAILURES or self._failed < FAILURE_RATE * self._total:
            return False
        self.closed, self._open_until = False, now + self._pause_s
        return True


@dataclass(slots=True)
class Slowness:
    """How a pod's measured time compares with that of its peers."""

    ratio: float = 1.0  #: Own time over the median of the peers; 1.0 without enough peers.
    slow: bool = False
    _crossed_at: float = field(default=math.inf)  #: Since when the ratio asks for another state.
    _probed_at: float = -math.inf

    @property
    def unfit(self) -> bool:
        return self.slow and self.ratio >= UNFIT_RATIO

    def update(self, ratio: float, now: float) -> bool:
        """Takes the present ratio. Returns whether `slow` changed."""
        self.ratio = ratio
        if not (ratio < NORMAL_RATIO if self.slow else ratio >= SLOW_RATIO):
            self._crossed_at = math.inf
            return False
        self._crossed_at = min(self._crossed_at, now)
        if now - self._crossed_at < SLOW_S:
            return False
        self.slow, self._crossed_at = not self.slow, math.inf
        return True

    def allows(self, now: float) -> bool:
        """Returns whether the pod may get one more request."""
        return not self.unfit or now - self._probed_at >= UNFIT_PROBE_S

    def on_sent(self, now: float) -> None:
        """A request goes to the pod."""
        self._probed_at = now


class ComparedPod(Protocol):
    """The part of a PodView that is compared with its peers."""

    role: Role
    card: str
    load: PodLoad | None
    slowness: Slowness

    def num_sequences(self) -> int:
        """Returns the number of sequences that decode on the pod or are about to."""


_Pod = TypeVar("_Pod", bound=ComparedPod)


def compare_speeds(views: Collection[_Pod], now: float) -> list[_Pod]:
    """Compares the pods of one layout with their peers. Returns the pods that became slow, or normal again."""
    changed: list[_Pod] = []
    for view in views:
        peers = [v for v in views if v is not view and (v.role, v.card) == (view.role, view.card)]
        ratio = max((_ratio(view, peers, kind) for kind in _KINDS[view.role]), default=1.0)
        if view.slowness.update(ratio, now):
            changed.append(view)
    return changed


_KINDS = {Role.PREFILL: ("prefill",), Role.DECODE: ("decode",), Role.BOTH: ("prefill", "decode")}


def _ratio(view: ComparedPod, peers: Sequence[ComparedPod], kind: str) -> float:
    """Returns the pod's own measured time over the median of its peers; 1.0 if too few have measured."""
    # Equal batches are compared: a pod with many sequences has longer steps without being slower.
    sequences = median(v.num_sequences() for v in (view, *peers))
    own = _measured_s(view, kind, sequences)
    others = [seconds for peer in peers if (seconds := _measured_s(peer, kind, sequences)) is not None]
    if own is None or len(others) < MIN_PEERS:
        return 1.0
    return own / max(1e-9, median(others))


def _measured_s(view: ComparedPod, kind: str, sequences: float) -> float | None:
    """Returns the seconds of a prompt or of a decode step by the rates that the pod itself measured."""
    load = view.load
    if load is None:
        return None
    if kind == "prefill":
        return load.prefill_overhead_s + PROMPT_TOKENS / load.prefill_rate if load.prefill_rate > 0 else None
    return load.step_s + load.step_slope_s * sequences if load.has_decode_times else None
