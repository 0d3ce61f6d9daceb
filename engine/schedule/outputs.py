"""What a step did, as the engine's callers see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import BatonError
from common.types import FinishReason, PromptLogprobs, Token
from engine.schedule.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one step did for one sequence.

    computed: its tokens that have KV now. chunk_done: the step computed tokens that it was given, see Sequence. tokens:
    new ones, several where drafts were right. finish: the request is over, and why. handed_off: a hand_off sequence
    ended here with its first token; another pod goes on unless finish is set too. error: why it failed; finish is ERROR
    then. proposed: drafts that the step verified, of which the accepted ones are the first of tokens. prompt_logprobs:
    of the prompt's tokens that the step scored.
    """

    seq: Sequence
    computed: int
    chunk_done: bool = False
    tokens: tuple[Token, ...] = ()
    finish_reason: FinishReason | None = None
    handed_off: bool = False
    error: BatonError | None = None
    num_drafts: int = 0
    num_accepted: int = 0
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def ended(self) -> bool:
        """The engine is done with it."""
        return self.finish_reason is not None or self.handed_off


@dataclass(frozen=True, slots=True)
class StepResult:
    """One output per item of the step whose sequence still was there at its end.

    num_prompt_tokens excludes num_recomputed_tokens (KV that was lost, see Sequence). seconds: from the end of the step
    before it, or from its launch if that came later.
    """

    outputs: list[SequenceOutput] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_decode_tokens: int = 0
    num_recomputed_tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class EngineCounters:
    """Since the start. prompt_tokens were computed for the first time, recomputed_tokens after KV was lost.

    decode_tokens have KV and are output; drafts that were wrong are none. discarded: items of steps whose sequence had
    ended or lost its blocks when the step ended. out_of_memory: steps that failed for want of memory.
    """

    steps: int = 0
    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    decode_tokens: int = 0
    discarded_sequences: int = 0
    failed_sequences: int = 0
    out_of_memory: int = 0
    seconds: float = 0.0


OnStep = Callable[[StepResult], None]
# Takes messages to the engine in until `until` (time.perf_counter()); whether there were any.
Inbox = Callable[[float], bool]
