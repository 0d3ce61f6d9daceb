"""The faults of one seed: a pure function of the seed, so that a seed that failed can be run again.

    group      process                        t ------------------------------------------------------>
    prefill    prefill-0, prefill-1               [kill .. ready]        [slow ..]     [cut ..]
    decode     decode-0, decode-1            [freeze]     [kill .. ready]      [reset]
    gateway    gateway-0, gateway-1                  [kill .. ready]         [full disk ..]
    store      valkey                         [flush]          [kill .. ready]

A group has at most one fault at a time. Its next fault waits until the process of the last one is ready again. So one
prefill pod, one decode pod and one gateway always work, and every request can be answered. Faults of different groups
overlap. Each seed kills at least one process, and seven consecutive seeds kill every process.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

GROUPS: dict[str, tuple[str, ...]] = {
    "prefill": ("prefill-0", "prefill-1"),
    "decode": ("decode-0", "decode-1"),
    "gateway": ("gateway-0", "gateway-1"),
    "store": ("valkey",),
}
PROCESSES = tuple(name for names in GROUPS.values() for name in names)
FAULT_EVERY_S = 6.0  #: Mean time between the faults of one group.
QUIET_S = 3.0  #: No fault begins in this last part of a seed, unless the seed has to kill a process.


class FaultKind(StrEnum):
    """What happens to a process."""

    KILL = "kill"  #: SIGKILL, and a restart after `lasts_s`.
    FREEZE = "freeze"  #: SIGSTOP for `lasts_s`.
    SLOW = "slow"  #: SIGSTOP for 80 ms of each 100 ms.
    CUT = "cut"  #: Calls to it and its connections to Valkey are silent; connections stay open.
    RESET = "reset"  #: All its connections break; new ones succeed.
    CUT_INDEX = "cut_index"  #: Only its connections to Valkey are silent.
    FULL_DISK = "full_disk"  #: Each write to a file fails.
    FLUSH = "flush"  #: FLUSHALL.


#: Kinds of faults of one process with their weights.
_POD = {
    FaultKind.KILL: 5,
    FaultKind.FREEZE: 3,
    FaultKind.SLOW: 2,
    FaultKind.CUT: 2,
    FaultKind.RESET: 2,
    FaultKind.CUT_INDEX: 1,
    FaultKind.FULL_DISK: 1,
}
_GATEWAY = {
    FaultKind.KILL: 5,
    FaultKind.FREEZE: 3,
    FaultKind.SLOW: 2,
    FaultKind.CUT_INDEX: 2,
    FaultKind.FULL_DISK: 1,
}
_STORE = {
    FaultKind.KILL: 3,
    FaultKind.FREEZE: 2,
    FaultKind.SLOW: 2,
    FaultKind.CUT: 2,
    FaultKind.RESET: 2,
    FaultKind.FLUSH: 3,
}
#: Weights of the kinds of faults, by group.
WEIGHTS = {"prefill": _POD, "decode": _POD, "gateway": _GATEWAY, "store": _STORE}
#: Shortest and longest time of a fault in seconds.
LASTS_S = {
    FaultKind.KILL: (0.2, 1.0),
    FaultKind.FREEZE: (0.3, 4.0),
    FaultKind.SLOW: (1.0, 3.0),
    FaultKind.CUT: (0.3, 4.0),
    FaultKind.RESET: (0.0, 0.0),
    FaultKind.CUT_INDEX: (0.5, 4.0),
    FaultKind.FULL_DISK: (0.5, 3.0),
    FaultKind.FLUSH: (0.0, 0.0),
}


class Moment(StrEnum):
    """A state of the load in which a fault begins. The harness waits at most a second for the state."""

    ANY = "any"  #: The fault begins at once.
    PROMPT = "prompt"  #: A request waits for its first token.
    ANSWER = "answer"  #: A stream has a part of its answer.


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    """One fault of a seed."""

    at_s: float  #: Seconds after the begin of the load.
    group: str
    kind: FaultKind
    victim: str  #: Name of the process.
    lasts_s: float  #: Seconds from its begin to its end; for KILL, to the restart.
    moment: Moment

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.2f} s" if self.lasts_s else ""
        return f"{self.at_s:6.2f} s  {self.kind} {self.victim}{lasts} ({self.moment})"


def schedule(seed: int, seconds: float) -> tuple[ScheduledFault, ...]:
    """Returns the faults of a seed in the order of their times.

    Args:
        seconds: Length of the load.
    """
    rng = random.Random(f"chaos-{seed}-{seconds:g}")
    certain = PROCESSES[seed % len(PROCESSES)]
    faults = [fault for group in GROUPS for fault in _of_group(rng, group, certain, seconds)]
    return tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.group)))


def _of_group(rng: random.Random, group: str, certain: str, seconds: float) -> Iterator[ScheduledFault]:
    """Yields the faults of one group. The first one kills `certain`, if that process belongs to the group."""
    at, weights = rng.uniform(0.2, min(FAULT_EVERY_S, max(0.3, seconds - QUIET_S))), WEIGHTS[group]
    first = certain in GROUPS[group]
    while first or at < seconds - QUIET_S:
        kind = FaultKind.KILL if first else rng.choices(list(weights), list(weights.values()))[0]
        victim = certain if first else rng.choice(GROUPS[group])
        lasts_s = round(rng.uniform(*LASTS_S[kind]), 2)
        yield ScheduledFault(round(at, 2), group, kind, victim, lasts_s, rng.choice(list(Moment)))
        first = False
        at += lasts_s + rng.uniform(0.5, 2 * FAULT_EVERY_S - 0.5)
