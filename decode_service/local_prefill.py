"""Policy: a decode pod computes the uncached rest of a prompt itself, or a prefill pod computes the prompt. Pure.

    local cost:  queued local prompts + own steps + the delay that these add to every decoding sequence
    remote cost: queue of the prefill pod + computing + end of the hand-off

All figures are measured: step times with and without a chunk by this pod, queue and rate of the prefill pod by the
gateway, ends of hand-offs by the prefill pod. One second of delay of a neighbour counts like one second of waiting, so
a busy decode pod sends prompts away.

Independent of the costs a prompt without a cached token goes to a prefill pod, and so does a rest of more than
MAX_LOCAL_STEPS steps: a wrong estimate never makes a decode pod compute whole prompts.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

from common.types import RemotePrefillCost

MAX_LOCAL_STEPS = 4


class PrefillReason(enum.StrEnum):
    """Reason of a decision; labels of a metric. local: this pod computes. remote: a prefill pod computes."""

    AGGREGATED = "aggregated"  # local: the pod has both roles
    CHEAPER = "cheaper"  # local or remote
    THRESHOLD = "threshold"  # local or remote, by the length of the rest
    OFF = "off"  # remote
    ASKED = "asked"  # remote: the request demands it
    NOTHING_CACHED = "nothing_cached"  # remote
    TOO_LONG = "too_long"  # remote
    UNKNOWN = "unknown"  # remote: a figure is missing


@dataclass(frozen=True, slots=True)
class DecodePodState:
    """This pod at the time of the decision."""

    #: Decoding sequences.
    running: int
    #: Tokens of local prompts that are not computed yet.
    queued_tokens: int
    #: Most prompt tokens of a step.
    chunk_tokens: int
    #: Seconds of a step without a chunk.
    step_s: float
    #: Seconds that a chunk of so many tokens adds to a step; 0 while unknown.
    chunk_s: Callable[[int], float]


@dataclass(frozen=True, slots=True)
class PrefillDecision:
    """Which pod computes the prompt."""

    #: This pod computes it.
    local: bool
    reason: PrefillReason
    #: The compared costs in seconds; 0 where none were compared.
    local_s: float = 0.0
    remote_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LocalPrefillPolicy:
    """The local_prefill setting."""

    #: "off", "auto", or a number: rests of up to so many tokens are computed locally.
    mode: str

    def decide(
        self,
        uncached: int,
        cached: int,
        state: DecodePodState,
        remote_cost: RemotePrefillCost | None,
        *,
        remote_only: bool,
    ) -> PrefillDecision:
        """uncached: prompt tokens that this pod would compute. cached: prompt tokens that its cache holds."""
        if self.mode == "off":
            return PrefillDecision(False, PrefillReason.OFF)
        if remote_only:
            return PrefillDecision(False, PrefillReason.ASKED)
        if self.mode != "auto":
            return PrefillDecision(uncached <= int(self.mode), PrefillReason.THRESHOLD)
        if not cached:
            return PrefillDecision(False, PrefillReason.NOTHING_CACHED)
        if uncached > MAX_LOCAL_STEPS * state.chunk_tokens:
            return PrefillDecision(False, PrefillReason.TOO_LONG)
        if remote_cost is None:
            return PrefillDecision(False, PrefillReason.UNKNOWN)
        local_s = _local_cost_s(uncached, state, remote_cost)
        if local_s is None:
            return PrefillDecision(False, PrefillReason.UNKNOWN)
        return PrefillDecision(local_s <= remote_cost.seconds, PrefillReason.CHEAPER, local_s, remote_cost.seconds)


def _local_cost_s(uncached: int, state: DecodePodState, remote_cost: RemotePrefillCost) -> float | None:
    """Seconds; None if no pod has measured the time of a chunk."""

    def chunk_delay_s(tokens: int) -> float:
        measured = state.chunk_s(min(tokens, state.chunk_tokens))
        return measured or (
            min(tokens, state.chunk_tokens) / remote_cost.tokens_per_s if remote_cost.tokens_per_s > 0 else 0.0
        )

    delay_s = chunk_delay_s(uncached)
    if delay_s <= 0:
        return None
    own = math.ceil(uncached / state.chunk_tokens)
    ahead = math.ceil(state.queued_tokens / state.chunk_tokens)
    step_s = state.step_s if state.running else 0.0
    waiting_s = own * (step_s + delay_s) + ahead * (step_s + chunk_delay_s(state.queued_tokens))
    return waiting_s + state.running * own * delay_s
