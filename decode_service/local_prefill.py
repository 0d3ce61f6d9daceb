"""Whether a decode pod computes the rest of a prompt itself, or another pod does. Pure: figures in, a verdict out.

    here:  the local prompts that are ahead + its own steps + what those take from every sequence that decodes
    there: the prefill pod's queue + computing + the hand-off's end

All of it is measured: how long steps are with and without a chunk by this pod, queue and rate of the prefill pod as the
gateway knows them, the end of hand-offs by the prefill pod. The second a neighbour loses counts like the second that
this request waits, so a busy decode pod keeps to decoding.

Whatever the costs, a prompt of which this pod holds nothing is computed elsewhere, and so is a rest of more than
MOST_STEPS bounded steps: a decode pod never computes whole prompts because of a wrong estimate.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

from common.types import RemotePrefillCost

MAX_LOCAL_STEPS = 4


class PrefillReason(enum.StrEnum):
    """Why a prompt is computed here (local) or elsewhere (remote); labels of a metric."""

    AGGREGATED = "aggregated"  # local: this pod does everything
    CHEAPER = "cheaper"  # either
    THRESHOLD = "threshold"  # either: by its length alone
    OFF = "off"  # remote
    ASKED = "asked"  # remote: the request forbids the other
    NOTHING_CACHED = "nothing_cached"  # remote
    TOO_LONG = "too_long"  # remote
    UNKNOWN = "unknown"  # remote: some figure is missing


@dataclass(frozen=True, slots=True)
class DecodePodState:
    """This pod now.

    running: sequences that decode. queued_tokens: of local prompts, not computed yet. chunk_tokens: most prompt tokens
    of a step. step_s: a step without a chunk; chunk_s(tokens): by how much a chunk lengthens it, 0 while not known.
    """

    running: int
    queued_tokens: int
    chunk_tokens: int
    step_s: float
    chunk_s: Callable[[int], float]


@dataclass(frozen=True, slots=True)
class PrefillDecision:
    """local: this pod computes it. local_s, tlocal_s: the costs that were compared, 0 where none were."""

    local: bool
    reason: PrefillReason
    local_s: float = 0.0
    remote_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LocalPrefillPolicy:
    """The knob: mode is off, auto or a number of tokens (rests of up to so many are computed here)."""

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
        """uncached, cached: prompt tokens that this pod would compute, and that it holds."""
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
    """Seconds; None when no pod has measured what a chunk takes."""

    def lengthened_s(tokens: int) -> float:
        measured = state.chunk_s(min(tokens, state.chunk_tokens))
        return measured or (
            min(tokens, state.chunk_tokens) / remote_cost.tokens_per_s if remote_cost.tokens_per_s > 0 else 0.0
        )

    longer_s = lengthened_s(uncached)
    if longer_s <= 0:
        return None
    own = math.ceil(uncached / state.chunk_tokens)
    ahead = math.ceil(state.queued_tokens / state.chunk_tokens)
    plain_s = state.step_s if state.running else 0.0
    waits = own * (plain_s + longer_s) + ahead * (plain_s + lengthened_s(state.queued_tokens))
    return waits + state.running * own * longer_s
