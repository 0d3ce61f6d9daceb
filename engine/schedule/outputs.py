"""The results of a step for the callers of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import BatonError
from common.types import FinishReason, PromptLogprobs, Token
from engine.schedule.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """The result of one step for one sequence."""

    seq: Sequence
    #: Tokens of the sequence that have KV now.
    computed: int
    #: The step computed tokens below `Sequence.prefill_len`.
    chunk_done: bool = False
    #: New tokens; several if drafts were accepted.
    tokens: tuple[Token, ...] = ()
    #: Why the request has ended; None before its end.
    finish_reason: FinishReason | None = None
    #: A `hand_off` sequence ended with its first token. Another pod continues it unless `finish_reason` is set too.
    handed_off: bool = False
    #: Set if `finish_reason` is ERROR.
    error: BatonError | None = None
    #: Drafts that the step verified; the accepted ones are the first of `tokens`.
    num_drafts: int = 0
    num_accepted: int = 0
    #: Log-probabilities of prompt tokens that the step computed.
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def ended(self) -> bool:
        """Whether the sequence has left the engine."""
        return self.finish_reason is not None or self.handed_off


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step: one output per scheduled sequence that was still in the engine when the step ended."""

    outputs: list[SequenceOutput] = field(default_factory=list)
    #: Prompt tokens that got KV for the first time.
    num_prompt_tokens: int = 0
    num_decode_tokens: int = 0
    #: Tokens with KV that had been lost, see `Sequence.recompute_until`.
    num_recomputed_tokens: int = 0
    #: Time from the end of the step before, or from the launch if that came later.
    seconds: float = 0.0


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start of the engine."""

    steps: int = 0
    #: Prompt tokens that got KV for the first time.
    prompt_tokens: int = 0
    #: Tokens that got KV again after it had been lost.
    recomputed_tokens: int = 0
    #: Output tokens that got KV for the first time; rejected drafts do not count.
    decode_tokens: int = 0
    #: Scheduled sequences that had ended or lost their blocks when the step ended.
    discarded_sequences: int = 0
    failed_sequences: int = 0
    #: Steps that failed because the device had no memory.
    out_of_memory: int = 0
    seconds: float = 0.0


#: Gets the result of each step.
OnStep = Callable[[StepResult], None]
#: Runs the messages to the engine that arrive until a time of `time.perf_counter()`; True if there were any.
Inbox = Callable[[float], bool]
