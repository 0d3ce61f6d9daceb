"""Decides whether a decode pod computes the uncached rest of a prompt, or a prefill pod computes the prompt. Pure.

    local cost:  queued local prompts + own steps + the delay that these add to every decoding sequence
    remote cost: queue of the prefill pod + computing + end of the hand-off

All times are measured:
- this pod measures its step times with and without a chunk;
- the gateway measures the queue and the rate of the prefill pod;
- the prefill pod measures the ends of hand-offs.

One second of delay of another sequence counts like one second of waiting, so a busy decode pod leaves prompts to
prefill pods. In mode "auto", a prompt without a cached token goes to a prefill pod at any cost, and so does a rest of
more than MAX_LOCAL_STEPS steps: a wrong estimate never makes a decode pod compute whole prompts.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

from common.types import RemotePrefillCost

MAX_LOCAL_STEPS = 4


class PrefillReason(enum.StrEnum):
    """Reason of a decision; label of a metric. "Local" means this pod computes, "remote" a prefill pod."""

    AGGREGATED = "aggregated"  # Local: the pod has both roles
    CHEAPER = "cheaper"  # Local or remote, by the predicted costs
    THRESHOLD = "threshold"  # Local or remote, by the length of the uncached rest
    OFF = "off"  # Remote: the setting is "off"
    REMOTE_ONLY = "asked"  # Remote: the request has remote_only
    NOTHING_CACHED = "nothing_cached"  # Remote: the cache holds no token of the prompt
    TOO_LONG = "too_long"  # Remote: the uncached rest takes more than MAX_LOCAL_STEPS steps
    UNKNOWN = "unknown"  # Remote: a time has not been measured yet


@dataclass(frozen=True, slots=True)
class DecodePodState:
    """This pod at the time of the decision."""

    running: int  # Decoding sequences
    queued_tokens: int  # Tokens of local prompts that are not computed yet
    chunk_tokens: int  # Most prompt tokens of a step
    step_s: float  # Seconds of a step without a chunk
    chunk_s: Callable[[int], float]  # Seconds that a chunk of this many tokens adds to a step; 0 while unknown


@dataclass(frozen=True, slots=True)
class PrefillDecision:
    """Which pod computes the prompt."""

    local: bool  # This pod computes it
    reason: PrefillReason
    local_s: float = 0.0  # Predicted cost of local prefill; 0 where no costs were compared


@dataclass(frozen=True, slots=True)
class LocalPrefillPolicy:
    """The local_prefill setting."""

    mode: str  # "off", "auto", or a number: an uncached rest of at most this many tokens is computed locally

    def decide(
        self,
        uncached: int,
        cached: int,
        state: DecodePodState,
        remote_cost: RemotePrefillCost | None,
        *,
        remote_only: bool,
    ) -> PrefillDecision:
        """Decides which pod computes the prompt.

        Args:
            uncached: prompt tokens that this pod would compute.
            cached: prompt tokens that its cache holds.
        """
        if self.mode == "off":
            return PrefillDecision(False, PrefillReason.OFF)
        if remote_only:
            return PrefillDecision(False, PrefillReason.REMOTE_ONLY)
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
        return PrefillDecision(local_s <= remote_cost.seconds, PrefillReason.CHEAPER, local_s)


def _local_cost_s(uncached: int, state: DecodePodState, remote_cost: RemotePrefillCost) -> float | None:
    """Returns the predicted cost of local prefill in seconds; None if no pod has measured the time of a chunk."""

    def chunk_delay_s(tokens: int) -> float:
        measured = state.chunk_s(min(tokens, state.chunk_tokens))
        return measured or (
            min(tokens, state.chunk_tokens) / remote_cost.tokens_per_s if remote_cost.tokens_per_s > 0 else 0.0
        )

    delay_s = chunk_delay_s(uncached)
    if delay_s <= 0:
        return None
    own_steps = math.ceil(uncached / state.chunk_tokens)
    steps_ahead = math.ceil(state.queued_tokens / state.chunk_tokens)
    step_s = state.step_s if state.running else 0.0
    waiting_s = own_steps * (step_s + delay_s) + steps_ahead * (step_s + chunk_delay_s(state.queued_tokens))
    # The chunks of this prompt delay every running sequence.
    return waiting_s + state.running * own_steps * delay_s
