"""The life of a step: scheduled, launched, on the device, settled. Pure policy over a runner; one thread calls it.

With overlap, `step` launches the step after the one it returns before it waits for that: the host schedules and
accounts while the device computes, and a step's input tokens come from the device where the host has not seen them.
At most two steps are launched at a time, one of them between two calls.

After a decode step the next one is launched as late as the device allows, told by how long such steps took of late: a
sequence whose KV arrives meanwhile is in it, instead of waiting for a whole step that is launched already.

To queue a step with long prompts takes the host tens of milliseconds. When the step before ends meanwhile, whoever
waits for its tokens is told between two layers, not after the launch.

Drafts are proposed from tokens that the host has seen, and what follows a step that verifies some is known with its
result only. So where the speculator wants drafts for the next step, or the step has some, the next one is launched
after the result, though before anybody is told of it: the device waits for the host's accounting, and for nothing else.
Steps without drafts overlap as ever.

A sequence's limit on tokens is known ahead and never overrun. That it stopped, was aborted, failed or was preempted is
known one step late: what the step in flight does for it is discarded, and the fence of that step keeps its blocks from
everyone else until the step has ended on the device.
"""

from __future__ import annotations

import logging
import time
from collections import abc, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from common.errors import BatonError, InternalError
from common.types import FinishReason, PromptLogprobs, Token
from engine.kv.blocks import BlockPool, Lease, StepFence
from engine.schedule.outputs import EngineCounters, Inbox, OnStep, SequenceOutput, StepResult
from engine.schedule.scheduler import NO_DRAFTS, ScheduledSequence, Scheduler
from engine.schedule.sequence import Sequence
from engine.speculation.speculator import Speculator

log = logging.getLogger(__name__)

LAUNCH_LEAD_S = 0.001  # beside its own time, how long before the device is free a step is launched
POLL_S = 0.0003  # how often one looks whether the device is free
TIMED_STEPS = 8  # steps

L = TypeVar("L")


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """finite: the model's output was a number. tokens: what was sampled, where that was asked for and is meaningful:
    one token, and one more for each draft that was accepted. prompt_logprobs: of prompt tokens that were to be scored.
    others: with the first one of a request, the first ones of its other children.
    """

    finite: bool
    tokens: tuple[Token, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    child_tokens: tuple[Token, ...] = ()


LaunchCallback = Callable[[], None]


class StepRunner(Protocol[L]):
    """Computes steps in the order in which they are launched."""

    def launch(self, items: abc.Sequence[ScheduledSequence], between: LaunchCallback | None = None) -> L:
        """Queues a step and returns without waiting; every item's lease covers its tokens.

        A token that the sequence does not know yet is the one that was sampled last for it. Drafts are not its tokens.
        between: called now and then by a launch that takes a while; it touches nothing of these items.
        """

    def sample_deferred(self, launched: L) -> L:
        """Ends the launch of a step once the step before it is accounted for: what sequences with constraints may
        sample is known by then.
        """

    def is_done(self, launched: L) -> bool:
        """Whether `collect` would not wait."""

    def collect(self, launched: L) -> list[RunnerOutput]:
        """One result per item, in order; waits for the step. Steps are collected in the order of their launch."""


@dataclass(frozen=True, slots=True)
class InFlightStep(Generic[L]):
    """A launched step. leases: of its items when it was launched; ended: outputs that are known without it; waited: it
    was launched after the result of the one before, for the sake of drafts.
    """

    scheduled: list[ScheduledSequence]
    leases: list[Lease | None]
    fence: StepFence
    launched: L | InternalError
    began_at: float
    known_outputs: list[SequenceOutput] = field(default_factory=list)
    launched_late: bool = False


@dataclass(slots=True)
class _StepDuringLaunch(Generic[L]):
    """A step on the device while the next one is launched. result: of the step, if it was told meanwhile; error: of the
    hook that was told.
    """

    flight: InFlightStep[L]
    on_step: OnStep | None
    result: StepResult | None = None
    error: Exception | None = None


class Stepper(Generic[L]):
    """max_model_len: tokens at which a sequence ends whatever it asked for. speculator: proposes drafts; None: none.
    drafts_lag: steps in which a sequence decodes without drafts do not compute the layers of its draft model.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: BlockPool,
        runner: StepRunner[L],
        *,
        max_model_len: int,
        overlap: bool,
        speculator: Speculator | None = None,
        draft_model_lags: bool = False,
    ) -> None:
        self.counters = EngineCounters()
        self._scheduler = scheduler
        self._pool = pool
        self._runner = runner
        self._max_model_len = max_model_len
        self._overlap = overlap
        self.speculator, self._draft_model_lags = speculator, draft_model_lags
        self._in_flight: InFlightStep[L] | None = None
        self._launched_late = False  # the next step was or is not launched ahead, for the sake of drafts
        self._settled_at = 0.0
        self._decode_s: deque[float] = deque(maxlen=TIMED_STEPS)  # what decode steps took
        self._launch_s: deque[float] = deque(maxlen=TIMED_STEPS)  # what it took to launch the step after one

    @property
    def has_work(self) -> bool:
        """A step is on the device, or a sequence wants one."""
        return self._in_flight is not None or self._scheduler.has_work

    def step(self, hook: OnStep | None = None, mail: Inbox | None = None) -> StepResult:
        """The result of one step; empty when nothing can run now. See Engine.step."""
        while True:
            flight = self._in_flight or self._launch_next()
            self._in_flight = None
            if flight is None:
                return StepResult()
            ahead = self._overlap and not self._needs_result_first(flight)
            self._launched_late = self._overlap and not ahead
            under = _StepDuringLaunch(flight, hook)
            if ahead:
                self._in_flight = self._launch_next(under) if mail is None else self._launch_late(under, mail)
            result = under.result or self._finish_step(flight)
            if self._in_flight is not None:
                self._in_flight = self._sample_deferred(self._in_flight)
            if self._overlap and not ahead and not any(o.ended or o.chunk_done for o in result.outputs):
                self._in_flight = self._launch_next()  # nobody needs the leases that this may take away
            if under.error is not None:
                raise under.error
            if result.outputs:
                if under.result is None:
                    self._notify(result, hook)
                return result

    def finish_in_flight(self, hook: OnStep | None = None) -> None:
        """Ends what is on the device; launches nothing."""
        flight, self._in_flight = self._in_flight, None
        if flight is not None:
            result = self._finish_step(flight)
            if result.outputs:
                self._notify(result, hook)

    def _notify(self, result: StepResult, hook: OnStep | None) -> None:
        try:
            if hook is not None:
                hook(result)
        finally:
            for output in result.outputs:
                if output.ended and output.seq.lease is not None:
                    output.seq.lease.finish("handed off" if output.finish_reason is None else str(output.finish_reason))

    def _needs_result_first(self, flight: InFlightStep[L]) -> bool:
        """The next step is planned with this one's result."""
        if self.speculator is None:
            return False
        return any(item.drafts for item in flight.scheduled) or self.speculator.wants_drafts(
            [item.seq for item in flight.scheduled]
        )

    def _launch_late(self, under: _StepDuringLaunch[L], mail: Inbox) -> InFlightStep[L] | None:
        """The step after the one on the device, with all that comes while there is time; None when nothing comes."""
        flight = self._in_flight = under.flight  # for whoever asks meanwhile whether there is work
        due = self._launch_deadline(flight)
        while (now := time.perf_counter()) < due and not self._has_ended(flight):
            mail(min(due, now + POLL_S))
        mail(0.0)
        began = time.perf_counter()
        following = self._launch_next(under)
        if following is not None and all(item.is_decode for item in following.scheduled):
            self._launch_s.append(time.perf_counter() - began)
        while following is None and not self._has_ended(flight):
            if mail(time.perf_counter() + POLL_S):
                following = self._launch_next(under)
        return following

    def _launch_deadline(self, flight: InFlightStep[L]) -> float:
        """When the step after this one has to be launched, if the device shall not wait: at once, beside prompts."""
        if not self._decode_s or not all(item.is_decode for item in flight.scheduled):
            return 0.0
        ends = max(flight.began_at, self._settled_at) + min(self._decode_s)
        return ends - LAUNCH_LEAD_S - 2 * max(self._launch_s, default=0.0)

    def _has_ended(self, flight: InFlightStep[L]) -> bool:
        """The device has ended it, or never began."""
        return isinstance(flight.launched, InternalError) or self._runner.is_done(flight.launched)

    def _launch_next(self, under: _StepDuringLaunch[L] | None = None) -> InFlightStep[L] | None:
        """Schedules and launches; None when nothing can run. A failure is told when the step's turn comes.

        under: a step is on the device, so there is nothing to propose from.
        """
        began = time.perf_counter()
        try:
            drafts = NO_DRAFTS
            if self.speculator is not None and under is None:
                drafts = self.speculator.draft(self._scheduler.draft_candidates())
            batch = self._scheduler.schedule(drafts)
        except Exception as error:
            failure = InternalError(f"the scheduler failed: {error}")
            return InFlightStep([], [], self._pool.begin_step(), failure, began, self._fail_all(error, failure))
        items, lost = batch.scheduled, [self._fail(seq, error) for seq, error in batch.failed]
        if not items:
            nothing = InternalError("nothing was launched")
            return InFlightStep([], [], self._pool.begin_step(), nothing, began, lost) if lost else None
        fence = self._pool.begin_step()
        launched: L | InternalError
        try:
            launched = self._runner.launch(items, None if under is None else self._launch_callback(under, items))
        except Exception as error:
            launched = self._failure(items, error)
        for item in items:
            item.seq.launch(item.num_new, sample=item.samples, drafts=len(item.drafts))
        return InFlightStep(
            items, [item.seq.lease for item in items], fence, launched, began, lost, self._launched_late
        )

    def _launch_callback(self, under: _StepDuringLaunch[L], items: list[ScheduledSequence]) -> LaunchCallback | None:
        """Settles and tells the step on the device once that has ended, if it has tokens and shares no sequence."""
        flight, launching = under.flight, {item.seq.request_id for item in items}
        apart = all(item.seq.request_id not in launching for item in flight.scheduled)
        if self.speculator is not None or not apart or not any(item.samples for item in flight.scheduled):
            return None

        def between() -> None:
            if under.result is not None or not self._has_ended(flight):
                return
            under.result = self._finish_step(flight)
            try:
                if under.result.outputs:
                    self._notify(under.result, under.on_step)
            except Exception as error:  # it is not the launch that failed
                under.error = error

        return between

    def _sample_deferred(self, flight: InFlightStep[L]) -> InFlightStep[L]:
        """The step that was on the device when this one was launched has been accounted for."""
        if isinstance(flight.launched, InternalError):
            return flight
        try:
            return replace(flight, launched=self._runner.sample_deferred(flight.launched))
        except Exception as error:
            return replace(flight, launched=self._failure(flight.scheduled, error))

    def _finish_step(self, flight: InFlightStep[L]) -> StepResult:
        try:
            results = self._collect(flight)
        finally:
            flight.fence.end()
        outputs = list(flight.known_outputs)
        items: list[ScheduledSequence] = []
        for item, lease, result in zip(flight.scheduled, flight.leases, results, strict=True):
            if item.seq.finish_reason is None and item.seq.lease is lease:
                items.append(item)
                outputs += self._apply_output(item, result)
        self.counters.discarded_sequences += len(flight.scheduled) - len(items)
        now = time.perf_counter()
        seconds, self._settled_at = now - max(flight.began_at, self._settled_at), now
        if items and all(item.is_decode for item in flight.scheduled):
            self._decode_s.append(seconds)
        if self.speculator is not None:
            self.speculator.on_step(items, seconds, waited=flight.launched_late)
        return self._result(items, outputs, seconds)

    def _collect(self, flight: InFlightStep[L]) -> list[RunnerOutput | InternalError]:
        if isinstance(flight.launched, InternalError):
            return [flight.launched] * len(flight.scheduled)
        try:
            results = self._runner.collect(flight.launched)
        except Exception as error:
            return [self._failure(flight.scheduled, error)] * len(flight.scheduled)
        return [r if r.finite else InternalError("the model's output is not a number") for r in results]

    def _failure(self, items: list[ScheduledSequence], error: Exception) -> InternalError:
        log.error("a step of %d sequences failed", len(items), exc_info=error)
        # torch's error by its name: this file, and who simulates with it, does without torch.
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            self.counters.out_of_memory += 1
        return InternalError(f"the engine step failed: {error}")

    def _apply_output(self, item: ScheduledSequence, result: RunnerOutput | InternalError) -> list[SequenceOutput]:
        """Advances one sequence by what the step did for it, and begins the other children of its request where it made
        their first tokens; its failure is its own.
        """
        if isinstance(result, InternalError):
            # What this step wrote is not to be trusted, so nothing of it is published.
            return [self._fail(item.seq, result)]
        try:
            if not result.child_tokens:
                return [self._advance_sequence(item, result)]
            children = [
                item.seq.fork(token.child) for token in result.child_tokens
            ]  # with nothing that this one's token adds
            output = self._advance_sequence(item, result)
            begun = zip(children, result.child_tokens, strict=True)
            return [output, *(self._start_child(item.seq, other, token) for other, token in begun)]
        except BatonError as error:
            return self._fail_with_children(item.seq, result, error)
        except Exception as error:
            log.exception("accounting for request %s failed", item.seq.request_id)
            return self._fail_with_children(item.seq, result, InternalError(f"the engine step failed: {error}"))

    def _fail_with_children(self, seq: Sequence, result: RunnerOutput, error: BatonError) -> list[SequenceOutput]:
        begun = self._scheduler.sequences_of(seq.request_id) if result.child_tokens else []
        return [self._fail(lost, error) for lost in dict.fromkeys((seq, *begun))]

    def _advance_sequence(self, item: ScheduledSequence, result: RunnerOutput) -> SequenceOutput:
        seq = item.seq
        seq.finish_step(item.num_new, sample=item.samples, drafts=len(item.drafts))
        seq.draft_lag += self._draft_model_lags and item.is_decode and not item.drafts
        finish: FinishReason | None = None
        kept = 0
        for token in result.tokens:
            if kept:
                seq.accept_draft()
            seq.append(token.id)
            kept += 1
            finish = self._finish_reason(seq, token.id)
            if finish is not None:
                break
        accepted = max(0, kept - 1)
        if (scores := result.prompt_logprobs) is not None:
            seq.next_prompt_logprob = max(seq.next_prompt_logprob, scores.first + len(scores.logprobs))
        seq.publish()
        handed_off = seq.hand_off and kept > 0
        if finish is not None or handed_off:
            self._scheduler.finish(seq, finish or FinishReason.LENGTH)
        if item.drafts:
            self._after_drafts(item, accepted)
        return SequenceOutput(
            seq,
            seq.computed,
            item.start < seq.prefill_len,
            result.tokens[:kept],
            finish,
            handed_off,
            num_drafts=len(item.drafts),
            num_accepted=accepted,
            prompt_logprobs=scores,
        )

    def _after_drafts(self, item: ScheduledSequence, accepted: int) -> None:
        """Returns the blocks that only wrong drafts needed, and tells the speculator."""
        seq = item.seq
        if seq.finish_reason is None:
            assert seq.lease is not None
            blocks = -(-len(seq.tokens) // seq.block_size)
            if blocks < len(seq.lease.blocks):
                seq.lease.trim(blocks)
        if self.speculator is not None:
            self.speculator.on_verified(seq, len(item.drafts), accepted)

    def _start_child(self, seq: Sequence, other: Sequence, token: Token) -> SequenceOutput:
        """Another child of a request, with its first token; seq is the one that computed the prompt."""
        other.append(token.id)
        finish = self._finish_reason(other, token.id)
        if finish is not None or seq.hand_off:
            other.finish_reason = finish or FinishReason.LENGTH
        else:
            self._scheduler.fork(seq, other)
        return SequenceOutput(other, seq.prompt_len, tokens=(token,), finish_reason=finish, handed_off=seq.hand_off)

    def _finish_reason(self, seq: Sequence, token: int) -> FinishReason | None:
        """Raises BatonError when the token is none that the sequence's constraint allows."""
        params = seq.request.sampling
        if seq.constraint is not None:
            seq.constraint.advance(token)
            if seq.constraint.is_complete:
                return FinishReason.STOP
        length = len(seq.tokens)
        output = length - seq.prompt_len
        if token in params.stop_token_ids and output > params.min_tokens:
            return FinishReason.STOP
        if output >= params.max_tokens or length >= self._max_model_len:
            return FinishReason.LENGTH
        return None

    def _fail(self, seq: Sequence, error: BatonError) -> SequenceOutput:
        self.counters.failed_sequences += 1
        self._scheduler.finish(seq, FinishReason.ERROR)
        return SequenceOutput(seq, seq.computed, finish_reason=FinishReason.ERROR, error=error)

    def _fail_all(self, cause: Exception, error: InternalError) -> list[SequenceOutput]:
        """The scheduler's state cannot be trusted any more: everything it knows ends."""
        log.error("the scheduler failed", exc_info=cause)
        known = [
            seq for request_id in self._scheduler.request_ids() for seq in self._scheduler.sequences_of(request_id)
        ]
        return [self._fail(seq, error) for seq in known]

    def _result(self, items: list[ScheduledSequence], outputs: list[SequenceOutput], seconds: float) -> StepResult:
        recomputed = sum(item.num_recomputed for item in items)
        prompt = sum(_num_new_prompt_tokens(item) for item in items)
        # What is left has KV for the first time and is output, also when a chunk after a preemption ends with it.
        right = sum(output.num_accepted for output in outputs)
        decoded = sum(item.num_new - len(item.drafts) for item in items) + right - prompt - recomputed
        counters = self.counters
        counters.steps += 1
        counters.prompt_tokens += prompt
        counters.decode_tokens += decoded
        counters.recomputed_tokens += recomputed
        counters.seconds += seconds
        return StepResult(outputs, prompt, decoded, recomputed, seconds)


def _num_new_prompt_tokens(item: ScheduledSequence) -> int:
    """Prompt tokens of the item that have KV for the first time."""
    end = min(item.start + item.num_new, item.seq.prompt_len)
    return max(0, end - max(item.start, item.seq.recompute_until))
