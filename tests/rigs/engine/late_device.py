"""A stepper over a fake device that computes a step only when its result is collected, as late as possible.

The KV of a token is a hash of the token and all tokens before it, stored per physical position. A block that two
sequences write, or that is copied too late or reused or published too early, thus gives wrong tokens or missing KV. The
next token of child c is the KV plus c, modulo VOCAB.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from itertools import accumulate

from common.types import FinishReason, SamplingParams, Token, ValidRequest
from engine.kv.blocks import BlockPool
from engine.schedule.limits import SchedulerConfig
from engine.schedule.outputs import Inbox, SequenceOutput, StepResult
from engine.schedule.scheduler import ScheduledSequence, Scheduler
from engine.schedule.sequence import Sequence
from engine.schedule.stepper import LaunchCallback, RunnerOutput, Stepper
from engine.speculation.acceptance import accepted_tokens
from engine.speculation.controller import AlwaysDraft
from engine.speculation.speculator import Speculator
from tests.rigs.engine.known_answer_proposer import Guesses

FINGERPRINT = "00" * 16
VOCAB = 11
MAX_LEN = 60


def state(tokens: abc.Sequence[int], before: int = 0) -> int:
    """The KV at the last of these tokens; `before` is that of the token before them."""
    return list(accumulate(tokens, lambda s, token: hash((s, token)), initial=before))[-1]


def next_token(tokens: abc.Sequence[int], child: int = 0) -> int:
    return (state(tokens) + child) % VOCAB


def answer(prompt: abc.Sequence[int], params: SamplingParams, child: int = 0) -> list[int]:
    """The output of a request, or of a child of it, that runs alone."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens, child))
        output = tokens[len(prompt) :]
        stopped = output[-1] in params.stop_token_ids and len(output) > params.min_tokens
        if stopped or len(output) >= params.max_tokens:
            return output


@dataclass
class Step:
    """A launched step, with what the host knew at its launch."""

    scheduled: list[ScheduledSequence]
    slots: list[int]
    blocks: list[list[int]]
    known: list[list[int]]


class Device:
    """Runs steps in order, as late as possible."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.kv: dict[tuple[int, int], int] = {}
        self.last: dict[int, int] = {}
        self.queue: list[Step] = []
        #: Numbers of the launches that raise `error`.
        self.broken: set[int] = set()
        self.error: Exception = RuntimeError("the device broke")
        #: Ids of requests with NaN as output.
        self.poisoned: set[str] = set()
        self.launches = 0
        #: Number of copied blocks.
        self.copies = 0

    def launch(self, scheduled: abc.Sequence[ScheduledSequence], on_layer: LaunchCallback | None = None) -> Step:
        assert len(self.queue) < 2
        self.launches += 1
        if self.launches in self.broken:
            raise self.error
        blocks = [list(entry.seq.lease.blocks) for entry in scheduled if entry.seq.lease is not None]
        written = [block for row, entry in zip(blocks, scheduled, strict=True) for block in self._touched(row, entry)]
        assert len(written) == len(set(written)), "two sequences write one block in a step"
        known = [entry.seq.tokens[entry.start : entry.start + entry.num_new] for entry in scheduled]
        step = Step(list(scheduled), [entry.seq.slot for entry in scheduled], blocks, known)
        assert len(set(step.slots)) == len(scheduled)
        if on_layer is not None:
            on_layer()
        self.queue.append(step)
        return step

    def sample_deferred(self, launched: Step) -> Step:
        return launched

    def is_done(self, launched: Step) -> bool:
        """Always True: a step takes no time."""
        return True

    def collect(self, launched: Step) -> list[RunnerOutput]:
        assert self.queue[0] is launched, "steps are collected in order"
        self.queue.pop(0)
        for entry in launched.scheduled:
            for source, target in entry.block_copies:
                self.copies += source != target
                for offset in range(self.size):
                    if (found := self.kv.get((source, offset))) is not None:
                        self.kv[target, offset] = found
        rows = zip(launched.scheduled, launched.slots, launched.blocks, launched.known, strict=True)
        return [self._compute(*row) for row in rows]

    def _compute(self, entry: ScheduledSequence, slot: int, blocks: list[int], known: list[int]) -> RunnerOutput:
        seq, drafts = entry.seq, entry.drafts
        tokens = known if len(known) == entry.num_new - len(drafts) else [*known, self.last[slot]]
        for position, token in enumerate([*tokens, *drafts], entry.start):
            before = self.kv[self._at(blocks, position - 1)] if position else 0
            self.kv[self._at(blocks, position)] = state([token], before)
        if not entry.samples:
            return RunnerOutput(seq.request_id not in self.poisoned)
        end = entry.start + entry.num_new
        found = [self.kv[self._at(blocks, position)] for position in range(end - 1 - len(drafts), end)]
        accepted = accepted_tokens(drafts, [(kv + seq.child) % VOCAB for kv in found])
        self.last[slot] = accepted[-1]
        if seq.request_id in self.poisoned:
            return RunnerOutput(False)
        child_tokens = tuple(Token(0, (found[-1] + child) % VOCAB, child=child) for child in range(1, seq.num_samples))
        own = tuple(Token(seq.num_output + i, token, child=seq.child) for i, token in enumerate(accepted))
        return RunnerOutput(True, own, child_tokens=child_tokens)

    def _touched(self, blocks: list[int], entry: ScheduledSequence) -> list[int]:
        return blocks[entry.start // self.size : (entry.start + entry.num_new - 1) // self.size + 1]

    def _at(self, blocks: list[int], position: int) -> tuple[int, int]:
        return blocks[position // self.size], position % self.size


class Steps:
    """A stepper on a late device, over a pool of blocks of `size` tokens; subclasses define `on_step`."""

    def __init__(
        self, pool: BlockPool, size: int, *, overlap: bool, budget: int, seqs: int, speculator: Speculator | None = None
    ) -> None:
        self.size = size
        self.device = Device(size)
        self.pool = pool
        self.scheduler = Scheduler(SchedulerConfig(chunk_tokens=budget, max_seqs=seqs, max_model_len=MAX_LEN), pool)
        self.speculator = speculator
        self.stepper = Stepper(
            self.scheduler, pool, self.device, max_model_len=MAX_LEN, overlap=overlap, speculator=speculator
        )

    def on_step(self, result: StepResult) -> None:
        raise NotImplementedError

    def add(self, name: str, prompt: abc.Sequence[int], params: SamplingParams, *, hand_off: bool = False) -> Sequence:
        request = ValidRequest(name, "m", tuple(prompt), params)
        seq = Sequence(request, fingerprint=FINGERPRINT, block_size=self.size, hand_off=hand_off)
        self.scheduler.add(seq)
        return seq

    def step(self, inbox: Inbox | None = None) -> StepResult:
        result = self.stepper.step(self.on_step, inbox)
        self.pool.check_integrity()
        return result

    def drain(self) -> None:
        """Runs steps until all sequences have ended; then neither pool nor device may have anything left of them."""
        for _ in range(3000):
            if not self.stepper.has_work:
                break
            self.step()
        else:
            raise AssertionError("starved")
        counts = self.pool.counts()
        assert (counts.leased, counts.quarantined) == (0, 0)
        assert not self.device.queue


class World(Steps):
    """Collects the tokens and the end of each sequence; each may have `drafts` drafts in a step."""

    def __init__(
        self,
        *,
        overlap: bool,
        blocks: int = 60,
        size: int = 4,
        budget: int = 16,
        seqs: int = 4,
        drafts: int = 0,
        pool: BlockPool | None = None,
    ) -> None:
        self.answers: dict[str, list[int]] = {}
        guesses = Guesses(self.answers, vocab=VOCAB)
        speculator = Speculator(guesses, AlwaysDraft(drafts), max_seqs=seqs) if drafts else None
        pool = pool or BlockPool(blocks, size)
        super().__init__(pool, size, overlap=overlap, budget=budget, seqs=seqs, speculator=speculator)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, SequenceOutput] = {}

    def add(self, name: str, prompt: abc.Sequence[int], params: SamplingParams, *, hand_off: bool = False) -> Sequence:
        self.answers[name] = answer(prompt, params)
        return super().add(name, prompt, params, hand_off=hand_off)

    def receive(self, name: str, prompt: list[int], params: SamplingParams) -> Sequence | None:
        """Adds a sequence with KV and first token from another pod; None if there is no room."""
        lease = None
        if not self.scheduler.waits_for_blocks:
            lease = self.pool.lease([], -(-len(prompt) // self.size), keep_free=1)
        if lease is None:
            return None
        for position in range(len(prompt)):
            at = (lease.blocks[position // self.size], position % self.size)
            self.device.kv[at] = state(prompt[: position + 1])
        first = next_token(prompt)
        self.answers[name] = answer(prompt, params)
        request = ValidRequest(name, "m", tuple(prompt), params)
        seq = Sequence(
            request, fingerprint=FINGERPRINT, block_size=self.size, lease=lease, computed=len(prompt), output=[first]
        )
        self.scheduler.add(seq)
        self.tokens[name] = [first]
        return seq

    def on_step(self, result: StepResult) -> None:
        assert result.outputs
        for output in result.outputs:
            seq, name = output.seq, output.seq.request_id
            assert name not in self.ends, "an output after the end"
            if output.error is None and seq.lease is None:
                # The step after one with drafts is launched before on_step, and may have preempted the sequence.
                assert seq.preemptions > 0
                assert self.speculator is not None
                assert not output.ended
                assert not output.chunk_done
            elif output.error is None:
                assert seq.lease is not None
                assert not seq.lease.finished
                assert output.computed == seq.computed <= len(seq.tokens)
                assert seq.lease.num_published * self.size <= seq.computed, "published blocks have complete KV"
                for position in range(seq.computed):  # on_step may send this KV
                    at = (seq.lease.blocks[position // self.size], position % self.size)
                    assert self.device.kv[at] == state(seq.tokens[: position + 1])
            known = len(self.tokens.get(name, []))
            assert [t.index for t in output.tokens] == list(range(known, known + len(output.tokens)))
            assert output.num_accepted == max(0, len(output.tokens) - 1) <= output.num_drafts
            if output.num_drafts and seq.finish_reason is None and not seq.num_drafted and seq.lease is not None:
                assert len(seq.lease.blocks) <= -(-len(seq.tokens) // self.size), (
                    "blocks of rejected drafts are released"
                )
            self.tokens.setdefault(name, []).extend(t.id for t in output.tokens)
            if output.ended:
                self.ends[name] = output

    def abort(self, name: str) -> None:
        for seq in self.scheduler.abort(name):
            if seq.lease is not None:
                seq.lease.finish("abort")
            self.ends[name] = SequenceOutput(seq, seq.computed, finish_reason=FinishReason.ABORT)
