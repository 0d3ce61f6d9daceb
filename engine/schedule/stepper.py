"""The life of a step: planned, launched, running on the device, collected. Policy only, over a StepRunner.

With overlap, a step is launched before the result of the step before it is read, at most two steps at a time:

    host     plan+launch 1 | plan+launch 2 |  wait  | collect 1 | plan+launch 3 | wait | collect 2 | ...
    device                 |        step 1          |          step 2           |        step 3 ...

- Tokens that the host has not seen are read on the device.
- A step after a decode step is launched as late as the times of the last steps allow, to include new requests.
- The launch of long prompts takes tens of milliseconds. If the step before ends during it, its result is reported
  between two layers of the launch (`LaunchCallback`).
- A step with drafts, or after one, is planned after the result of the step before it.
- A stop token, an abort, a failure or a preemption is known one step late: the result of the step in flight is then
  discarded, and the fence of that step keeps the blocks until it has ended.
"""

from __future__ import annotations

import logging
import time
from collections import abc, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from common.errors import BatonError, InternalError, describe
from common.grammar.compiler import MASK_LIMIT_S
from common.types import FinishReason, PromptLogprobs, Token
from engine.kv.blocks import BlockPool
from engine.kv.lease import Lease
from engine.kv.ledger import StepFence
from engine.sampling.mask_jobs import STEP_WAIT_S, MaskJob, run_jobs
from engine.schedule.outputs import EngineCounters, Inbox, OnStep, SequenceOutput, StepResult
from engine.schedule.scheduler import NO_DRAFTS, ScheduledSequence, Scheduler
from engine.schedule.sequence import DraftTokens, Sequence

log = logging.getLogger(__name__)
LAUNCH_LEAD_S = 0.001  # A step is launched this long before the device is free, plus the time of the launch
POLL_S = 0.0003  # Pause between two looks at the device before the next launch
END_POLL_S = 0.0001  # Pause if nothing is left to launch: the first tokens of the step wait for this look
TIMED_STEPS = 8  # The stepper keeps the times of this many steps
L = TypeVar("L")


@dataclass(slots=True)  # not frozen, like SequenceOutput
class RunnerOutput:
    """The runner's output for one scheduled sequence."""

    finite: bool  # The logits have no NaN and no infinity
    tokens: tuple[Token, ...] = ()  # The sampled token, if there is one, and one more for each accepted draft
    prompt_logprobs: PromptLogprobs | None = None  # Log-probabilities of prompt tokens, if wanted
    child_tokens: tuple[Token, ...] = ()  # First tokens of the other children; set with the first token of a request


LaunchCallback = Callable[[], None]  # The runner calls it now and then during a long launch


class StepRunner(Protocol[L]):
    """Computes steps in the order of their launch. L is its own record of a launched step."""

    def launch(self, scheduled: abc.Sequence[ScheduledSequence], on_layer: LaunchCallback | None = None, /) -> L:
        """Queues a step and returns without waiting. The leases cover all tokens of the step.

        A token that the host does not know is the one sampled last for the sequence; drafts are in the scheduled
        sequence. `on_layer` may be called during a long launch; it changes none of these sequences.
        """

    def sample_deferred(self, launched: L, /) -> L:
        """Ends the launch of a step once the step before it is collected: the masks of constraints are known then."""

    def is_done(self, launched: L, /) -> bool:
        """Returns whether `collect` would return without waiting."""

    def collect(self, launched: L, /) -> list[RunnerOutput]:
        """Waits for the oldest step and returns one output per scheduled sequence, in order."""


class StepSpeculator(Protocol):
    """Proposes drafts; see engine/speculation."""

    def draft(self, seqs: abc.Sequence[Sequence], /) -> Mapping[Sequence, DraftTokens]:
        """Returns drafts of sequences that decode in the next step."""

    def wants_drafts(self, seqs: abc.Sequence[Sequence], /) -> bool:
        """Returns whether some of the sequences of the step in flight should draft for the next one."""

    def on_verified(self, seq: Sequence, num_drafts: int, num_accepted: int, /) -> None:
        """Called when a step has verified drafts of the sequence."""

    def on_step(self, scheduled: abc.Sequence[ScheduledSequence], seconds: float, /, *, waited: bool) -> None:
        """Called when a step has ended; with `waited`, it was launched after the result of the step before."""


@dataclass(slots=True)
class InFlightStep(Generic[L]):
    """A launched step that is not collected yet."""

    scheduled: list[ScheduledSequence]
    leases: list[Lease | None]  # The leases of the sequences at the launch
    fence: StepFence
    launched: L | InternalError  # The runner's record, or why there is none
    began_at: float
    known_outputs: list[SequenceOutput]  # Outputs of sequences that failed before the launch
    launched_late: bool  # Launched after the result of the step before, because of drafts
    early_result: StepResult | None = None  # Set if the step was collected during the launch of the next one
    early_error: Exception | None = None  # The exception that `on_step` raised for `early_result`

    @property
    def decodes_only(self) -> bool:
        """Whether all its sequences decode."""
        return all(entry.is_decode for entry in self.scheduled)


class Stepper(Generic[L]):
    """Plans, launches and collects steps; one thread calls it."""

    def __init__(
        self,
        scheduler: Scheduler,
        pool: BlockPool,
        runner: StepRunner[L],
        *,
        max_model_len: int,  # A sequence ends at this length, also if its max_tokens allows more
        overlap: bool,
        speculator: StepSpeculator | None = None,  # Proposes drafts; None for no drafts
        assign_adapters: Callable[[abc.Sequence[Sequence], abc.Sequence[Sequence]], None]
        | None = None,  # Of AdapterSlots
        draft_model_lags: bool = False,  # Steps without drafts compute no KV of the draft model for the decodes
        plan_states: Callable[[list[ScheduledSequence]], list[ScheduledSequence]] | None = None,  # See states.py
    ) -> None:
        self.counters = EngineCounters()
        self.speculator = speculator
        #: The scheduled sequences of each step that has not ended, oldest first. Any thread may read it.
        self.under_way: tuple[list[ScheduledSequence], ...] = ()
        self._scheduler, self._pool, self._runner = scheduler, pool, runner
        self._max_model_len, self._overlap, self._draft_model_lags = max_model_len, overlap, draft_model_lags
        self._assign_adapters, self._plan_states = assign_adapters, plan_states
        self._in_flight: InFlightStep[L] | None = None
        self._launches_late = False  # The step that is launched next comes after a result, because of drafts
        self._ended_at = 0.0
        #: Seconds of the last decode steps, and of the launches after one.
        self._decode_s: deque[float] = deque(maxlen=TIMED_STEPS)
        self._launch_s: deque[float] = deque(maxlen=TIMED_STEPS)

    @property
    def has_work(self) -> bool:
        """Whether a step is on the device, or a sequence wants to run."""
        return self._in_flight is not None or self._scheduler.has_work

    def step(self, on_step: OnStep | None = None, inbox: Inbox | None = None) -> StepResult:
        """Runs one step and returns its result, which is empty if nothing can run now. See Engine.step."""
        while (current := self._in_flight or self._launch()) is not None:
            self._in_flight = None
            ahead = self._overlap and not self._needs_result_first(current)
            self._launches_late = self._overlap and not ahead
            if ahead:
                self._in_flight = self._launch_ahead(current, on_step, inbox)
            result = current.early_result or self._collect(current)
            if self._in_flight is not None:
                self._sample_deferred(self._in_flight)
            if self._launches_late and not any(o.ended or o.chunk_done for o in result.outputs):
                # Callers get the result after this launch, which may preempt: no caller needs the leases now.
                self._in_flight = self._launch()
            self.under_way = () if self._in_flight is None else (self._in_flight.scheduled,)
            if current.early_error is not None:
                raise current.early_error
            if result.outputs:
                if current.early_result is None:
                    self._notify(result, on_step)
                return result
        return StepResult()

    def finish_in_flight(self, on_step: OnStep | None = None) -> None:
        """Waits for the step on the device, if there is one; launches nothing."""
        current, self._in_flight = self._in_flight, None
        if current is not None:
            self._notify(self._collect(current), on_step)
            self.under_way = ()

    # -- launch -------------------------------------------------------------------------------------------------------

    def _launch(self, current: InFlightStep[L] | None = None, on_step: OnStep | None = None) -> InFlightStep[L] | None:
        """Plans and launches a step after `current`, if any; None if nothing can run. Errors are the step's result."""
        began = time.perf_counter()
        scheduled: list[ScheduledSequence] = []
        failed: list[SequenceOutput] = []
        try:
            drafts = NO_DRAFTS
            if self._assign_adapters is not None:
                self._assign_adapters(*self._scheduler.queues)
            if self.speculator is not None and current is None:
                drafts = self.speculator.draft(self._scheduler.draft_candidates())
            planned = self._scheduler.schedule(drafts)
            scheduled = planned if self._plan_states is None else self._plan_states(planned)
        except Exception as error:
            failed = self._fail_all(error)
        failed += [self._fail(seq, error) for seq, error in self._scheduler.take_failed()]
        if not scheduled and not failed:
            return None
        self.under_way = (scheduled,) if current is None else (current.scheduled, scheduled)
        fence = self._pool.begin_step()
        launched: L | InternalError = InternalError("nothing was launched")
        if scheduled:
            try:
                callback = None if current is None else self._launch_callback(current, on_step, scheduled)
                launched = self._runner.launch(scheduled, callback)
            except Exception as error:
                launched = self._failure(scheduled, error)
        for entry in scheduled:
            entry.seq.launch(entry.num_new, sample=entry.samples, drafts=len(entry.drafts))
        if __debug__ and Sequence.CHECKS:
            for entry in scheduled:
                entry.seq.check()
        leases = [entry.seq.lease for entry in scheduled]
        return InFlightStep(scheduled, leases, fence, launched, began, failed, self._launches_late)

    def _needs_result_first(self, current: InFlightStep[L]) -> bool:
        """Returns whether the next step must be planned with the result of this one."""
        if self.speculator is None:
            return False
        return any(entry.drafts for entry in current.scheduled) or self.speculator.wants_drafts(
            [entry.seq for entry in current.scheduled]
        )

    def _launch_ahead(
        self, current: InFlightStep[L], on_step: OnStep | None, inbox: Inbox | None
    ) -> InFlightStep[L] | None:
        """Launches the step after `current`, with an inbox as late as possible; None if `current` must end first."""
        if inbox is None:
            return self._launch(current, on_step)
        self._in_flight = current  # `has_work` may be asked meanwhile
        deadline = self._launch_deadline(current)
        while (now := time.perf_counter()) < deadline and not self._has_ended(current):
            inbox(min(deadline, now + POLL_S))
        inbox(0.0)
        began = time.perf_counter()
        following = self._launch(current, on_step)
        if following is not None and following.decodes_only:
            self._launch_s.append(time.perf_counter() - began)
        while following is None and not self._has_ended(current):
            if inbox(time.perf_counter() + END_POLL_S):
                following = self._launch(current, on_step)
        return following

    def _launch_deadline(self, current: InFlightStep[L]) -> float:
        """Returns the latest time of the next launch so that the device does not wait; 0 if `current` has prompts."""
        if not self._decode_s or not current.decodes_only:
            return 0.0
        ends = max(current.began_at, self._ended_at) + min(self._decode_s)
        return ends - LAUNCH_LEAD_S - 2 * max(self._launch_s, default=0.0)

    def _has_ended(self, step: InFlightStep[L]) -> bool:
        """Returns whether the step has ended on the device, or its launch failed."""
        return isinstance(step.launched, InternalError) or self._runner.is_done(step.launched)

    def _launch_callback(
        self, current: InFlightStep[L], on_step: OnStep | None, launching: list[ScheduledSequence]
    ) -> LaunchCallback | None:
        """Returns a callback that collects `current` and reports it, if it ends while `launching` are launched.

        Returns None with a speculator, or if `current` samples no token or shares a request with `launching`.
        """
        request_ids = {entry.seq.request_id for entry in launching}
        is_apart = all(entry.seq.request_id not in request_ids for entry in current.scheduled)
        if self.speculator is not None or not is_apart or not any(entry.samples for entry in current.scheduled):
            return None

        def callback() -> None:
            if current.early_result is not None or not self._has_ended(current):
                return
            current.early_result = self._collect(current)
            try:
                self._notify(current.early_result, on_step)
            except Exception as error:  # not an error of the launch
                current.early_error = error

        return callback

    def _sample_deferred(self, step: InFlightStep[L]) -> None:
        """Ends the launch of a step, now that the step before it has been collected."""
        if isinstance(step.launched, InternalError):
            return
        try:
            step.launched = self._runner.sample_deferred(step.launched)
        except Exception as error:
            step.launched = self._failure(step.scheduled, error)

    # -- collect ------------------------------------------------------------------------------------------------------

    def _collect(self, step: InFlightStep[L]) -> StepResult:
        """Waits for a step and advances its sequences by its results."""
        try:
            results = self._wait(step)
        finally:
            step.fence.end()
        outputs = list(step.known_outputs)
        live = [
            (entry, result)
            for entry, lease, result in zip(step.scheduled, step.leases, results, strict=True)
            if entry.seq.finish_reason is None and entry.seq.lease is lease
        ]
        late = self._late_constraints(live)
        kept: list[ScheduledSequence] = []
        for entry, result in live:
            if entry.seq.finish_reason is not None:  # it ended together with another sample of its request
                continue
            if entry.seq in late:
                self._scheduler.stall(entry.seq)
                continue
            kept.append(entry)
            outputs += self._apply_output(entry, result)
        self.counters.discarded_sequences += len(step.scheduled) - len(kept)
        now = time.perf_counter()
        seconds, self._ended_at = now - max(step.began_at, self._ended_at), now
        if kept and step.decodes_only:
            self._decode_s.append(seconds)
        if self.speculator is not None:
            self.speculator.on_step(kept, seconds, waited=step.launched_late)
        return self._count(kept, outputs, seconds)

    def _late_constraints(
        self, live: abc.Sequence[tuple[ScheduledSequence, RunnerOutput | InternalError]]
    ) -> set[Sequence]:
        """Advances the constraints by the sampled tokens. Returns the sequences whose masks took more than STEP_WAIT_S.

        Such a sequence is preempted, and joins a later step.
        """
        jobs: dict[Sequence, list[MaskJob]] = {}
        for entry, result in live:
            if (constraint := entry.seq.constraint) is not None and isinstance(result, RunnerOutput):
                children = {token.child: token.id for token in result.child_tokens}
                jobs[entry.seq] = constraint.start([token.id for token in result.tokens], children)
        if all_jobs := [job for each in jobs.values() for job in each]:
            run_jobs(all_jobs, STEP_WAIT_S, MASK_LIMIT_S)
        return {seq for seq, each in jobs.items() if not all(job.done for job in each)}

    def _wait(self, step: InFlightStep[L]) -> list[RunnerOutput | InternalError]:
        if isinstance(step.launched, InternalError):
            return [step.launched] * len(step.scheduled)
        try:
            results = self._runner.collect(step.launched)
        except Exception as error:
            return [self._failure(step.scheduled, error)] * len(step.scheduled)
        return [r if r.finite else InternalError("the model's output has a NaN or an infinity") for r in results]

    def _notify(self, result: StepResult, on_step: OnStep | None) -> None:
        """Reports a result with outputs, then finishes the leases of the sequences that have ended."""
        try:
            if on_step is not None and result.outputs:
                on_step(result)
        finally:
            for output in result.outputs:
                if output.ended and output.seq.lease is not None:
                    output.seq.lease.finish("handed off" if output.finish_reason is None else str(output.finish_reason))

    def _apply_output(self, entry: ScheduledSequence, result: RunnerOutput | InternalError) -> list[SequenceOutput]:
        """Advances a sequence, and starts the children that have first tokens. An error ends this request only."""
        seq = entry.seq
        if isinstance(result, InternalError):
            # The KV that this step wrote is unreliable, so none of it is published.
            return [self._fail(seq, result)]
        try:
            if not result.child_tokens:
                return [self._advance_sequence(entry, result)]
            # Forked first: the children must not have this sequence's token.
            children = [seq.fork(token.child) for token in result.child_tokens]
            output = self._advance_sequence(entry, result)
            started = zip(children, result.child_tokens, strict=True)
            return [output, *(self._start_child(seq, child, token) for child, token in started)]
        except Exception as error:
            if not isinstance(error, BatonError):
                log.exception("accounting for request %s failed", seq.request_id)
                error = InternalError(f"the engine step failed: {describe(error)}")
            failed = [seq, *(self._scheduler.sequences_of(seq.request_id) if result.child_tokens else ())]
            return [self._fail(child, error) for child in dict.fromkeys(failed)]

    def _advance_sequence(self, entry: ScheduledSequence, result: RunnerOutput) -> SequenceOutput:
        seq, num_drafts = entry.seq, len(entry.drafts)
        seq.finish_step(entry.num_new, sample=entry.samples, drafts=num_drafts)
        seq.draft_lag += self._draft_model_lags and entry.is_decode and not entry.drafts
        finish: FinishReason | None = None
        num_tokens = 0
        for token in result.tokens:
            seq.append(token.id, after_draft=num_tokens > 0)
            num_tokens += 1
            finish = self._finish_reason(seq, token.id)
            if finish is not None:
                break
        accepted = max(0, num_tokens - 1)
        if (logprobs := result.prompt_logprobs) is not None:
            seq.next_prompt_logprob = max(seq.next_prompt_logprob, logprobs.first + len(logprobs.logprobs))
        seq.publish()
        handed_off = seq.hand_off and num_tokens > 0
        if finish is not None or handed_off:
            self._scheduler.finish(seq, finish or FinishReason.LENGTH)
        if entry.drafts:
            blocks = -(-len(seq.tokens) // seq.block_size)
            if seq.finish_reason is None and seq.lease is not None and blocks < len(seq.lease.blocks):
                seq.lease.trim(blocks)  # only rejected drafts needed the others
            if self.speculator is not None:
                self.speculator.on_verified(seq, num_drafts, accepted)
        chunk_done, tokens = entry.start < seq.prefill_len, result.tokens[:num_tokens]
        return SequenceOutput(seq, seq.computed, chunk_done, tokens, finish, handed_off, num_drafts, accepted, logprobs)

    def _start_child(self, seq: Sequence, child: Sequence, token: Token) -> SequenceOutput:
        """Starts another child of a request with its first token; `seq` is the child that computed the prompt."""
        child.append(token.id)
        finish = self._finish_reason(child, token.id)
        if finish is not None or seq.hand_off:
            child.finish_reason = finish or FinishReason.LENGTH
        else:
            self._scheduler.fork(seq, child)
        return SequenceOutput(child, seq.prompt_len, tokens=(token,), finish_reason=finish, handed_off=seq.hand_off)

    def _finish_reason(self, seq: Sequence, token: int) -> FinishReason | None:
        """Returns why the sequence ends with the token. BatonError if its constraint does not allow the token."""
        params = seq.request.sampling
        if seq.constraint is not None:
            if params.allowed_logprobs and seq.constraint.is_complete:
                return FinishReason.STOP  # before the token: the output that came with the request ended already
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

    def _fail_all(self, cause: Exception) -> list[SequenceOutput]:
        """Ends all sequences: the state of the scheduler is unreliable."""
        log.error("the scheduler failed", exc_info=cause)
        error = InternalError(f"the scheduler failed: {describe(cause)}")
        seqs = [seq for request_id in self._scheduler.request_ids() for seq in self._scheduler.sequences_of(request_id)]
        return [self._fail(seq, error) for seq in seqs]

    def _failure(self, scheduled: list[ScheduledSequence], error: Exception) -> InternalError:
        log.error("a step of %d sequences failed", len(scheduled), exc_info=error)
        # torch's error is recognised by its name: this module and the simulator do not import torch.
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            self.counters.out_of_memory += 1
        return InternalError(f"the engine step failed: {describe(error)}")

    def _count(self, kept: list[ScheduledSequence], outputs: list[SequenceOutput], seconds: float) -> StepResult:
        """Makes the result of a step, and adds it to the counters."""
        recomputed = sum(entry.num_recomputed for entry in kept)
        prompt = 0  # prompt tokens that get KV for the first time
        for seq, start, num_new, *_ in kept:
            prompt += max(0, min(start + num_new, seq.prompt_len) - max(start, seq.recompute_until))
        # The other tokens are output with its first KV, also those in a chunk after a preemption.
        accepted = sum(output.num_accepted for output in outputs)
        decoded = sum(entry.num_new - len(entry.drafts) for entry in kept) + accepted - prompt - recomputed
        counters = self.counters
        counters.steps += 1
        counters.prompt_tokens += prompt
        counters.decode_tokens += decoded
        counters.recomputed_tokens += recomputed
        counters.seconds += seconds
        return StepResult(outputs, prompt, decoded, recomputed, seconds)
