"""The results of a step for the callers of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import BatonError
from common.types import FinishReason, PromptLogprobs, Token
from engine.schedule.sequence import Sequence


@dataclass(slots=True)
class SchedulerStats:
    """Numbers of sequences and tokens; `preemptions` and the fields below it count since the start."""

    running: int = 0
    waiting: int = 0
    num_preempted: int = 0  # Preempted sequences that wait for blocks; included in `waiting`
    queued_tokens: int = 0  # Prompt tokens of all sequences that are not computed, including those to compute again
    preemptions: int = 0
    recomputed_tokens: int = 0
    fully_restored: int = 0  # Preempted sequences that got back all KV that they had
    partly_recomputed: int = 0  # Preempted sequences that lost a part of their KV


@dataclass(slots=True)  # never changed, but not frozen: a frozen instance takes three times as long to make
class SequenceOutput:
    """The result of one step for one sequence."""

    seq: Sequence
    computed: int  # Tokens of the sequence that have KV now
    chunk_done: bool = False  # The step computed tokens below `Sequence.prefill_len`
    tokens: tuple[Token, ...] = ()  # New tokens; several if drafts were accepted
    finish_reason: FinishReason | None = None  # Why the request has ended; None before its end
    handed_off: bool = False  # It ended with its first token; another pod continues it unless `finish_reason` is set
    num_drafts: int = 0  # Drafts that the step verified; the accepted ones are the first of `tokens`
    num_accepted: int = 0
    prompt_logprobs: PromptLogprobs | None = None  # Log-probabilities of prompt tokens that the step computed
    error: BatonError | None = None  # Set if `finish_reason` is ERROR

    @property
    def ended(self) -> bool:
        """Whether the sequence has left the engine."""
        return self.finish_reason is not None or self.handed_off


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step: one output per scheduled sequence that was still in the engine when the step ended."""

    outputs: list[SequenceOutput] = field(default_factory=list)
    num_prompt_tokens: int = 0  # Prompt tokens that got KV for the first time
    num_decode_tokens: int = 0
    num_recomputed_tokens: int = 0  # Tokens with KV that had been lost, see `Sequence.recompute_until`
    seconds: float = 0.0  # Time from the end of the step before, or from the launch if that came later


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start of the engine."""

    steps: int = 0
    prompt_tokens: int = 0  # Prompt tokens that got KV for the first time
    recomputed_tokens: int = 0  # Tokens that got KV again after it had been lost
    decode_tokens: int = 0  # Output tokens that got KV for the first time; rejected drafts do not count
    discarded_sequences: int = 0  # Scheduled sequences that had ended or lost their blocks when the step ended
    failed_sequences: int = 0
    out_of_memory: int = 0  # Steps that failed because the device had no memory
    seconds: float = 0.0


OnStep = Callable[[StepResult], None]  # Gets the result of each step
Inbox = Callable[[float], bool]  # Runs the messages that arrive until a `time.perf_counter()`; True if there were any
