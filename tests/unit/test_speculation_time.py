"""What drafts cost and gain in time: a stepper with overlap over a device with a clock of its own.

Step times are those of an 8B model on one H100 (benchmarks/results/speculation-h100.json): plain steps, steps in which
every row verifies four drafts, and what the host takes between two steps where the second waits for the first.
"""

from __future__ import annotations

import random
from collections import abc
from dataclasses import dataclass

import pytest

from common.types import SamplingParams, Token, ValidRequest
from engine.kv.blocks import BlockPool
from engine.schedule import stepper as stepper_module
from engine.schedule.scheduler import ScheduledSequence, Scheduler, SchedulerConfig
from engine.schedule.sequence import Sequence
from engine.schedule.stepper import LaunchCallback, RunnerOutput, Stepper
from engine.speculation.acceptance import accepted_tokens
from engine.speculation.controller import FIRST_TIME_BUDGET, TIME_BUDGET_RATE, DraftController
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import Proposer
from engine.speculation.speculator import Speculator
from engine.speculation.suffix import SuffixProposer

MS = {1: (5.287, 5.834, 0.55), 16: (6.641, 7.534, 1.81), 64: (9.429, 12.711, 2.51)}  # rows: plain, verify, host
PROMPT, LENGTH = 32, 1200
Texts = list[list[int]]  # of each sequence, its prompt and all of its output


@dataclass
class Clock:
    """Stands for the module `time`."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class Step:
    items: list[ScheduledSequence]
    ends: float


class Device:
    """Says each sequence's text, one step after the other."""

    def __init__(self, clock: Clock, texts: dict[str, list[int]]) -> None:
        self.clock, self.texts = clock, texts
        self.plain_s, self.verify_s, self.host_s = (ms * 1e-3 for ms in MS[len(texts)])
        self.free_at = 0.0

    def launch(self, items: abc.Sequence[ScheduledSequence], between: LaunchCallback | None = None) -> Step:
        self.clock.now += self.host_s / 2
        seconds = self.verify_s if any(item.drafts for item in items) else self.plain_s
        self.free_at = max(self.clock.now, self.free_at) + seconds
        return Step(list(items), self.free_at)

    def sample_deferred(self, launched: Step) -> Step:
        return launched

    def is_done(self, launched: Step) -> bool:
        return self.clock.now >= launched.ends

    def collect(self, launched: Step) -> list[RunnerOutput]:
        self.clock.now = max(self.clock.now, launched.ends) + self.host_s / 2
        return [self._said(item) for item in launched.items]

    def _said(self, item: ScheduledSequence) -> RunnerOutput:
        after = item.start + item.num_new - len(item.drafts)
        said = self.texts[item.seq.request_id][after : after + 1 + len(item.drafts)]
        run = accepted_tokens(item.drafts, said)
        return RunnerOutput(True, tuple(Token(item.seq.num_output + i, token) for i, token in enumerate(run)))


@dataclass(frozen=True)
class Ran:
    """Until the first sequence had said its text. rate: tokens a second; steps: accepted drafts of each, and how much
    the first sequence had said by then.
    """

    rate: float
    steps: list[tuple[int, int]]
    speculator: Speculator | None


def run(texts: Texts, proposer: Proposer | None, monkeypatch: pytest.MonkeyPatch) -> Ran:
    clock = Clock()
    monkeypatch.setattr(stepper_module, "time", clock)
    named = {f"r{i}": text for i, text in enumerate(texts)}
    pool = BlockPool(len(texts) * (LENGTH // 16 + 4), 16)
    scheduler = Scheduler(SchedulerConfig(chunk_tokens=2048, max_seqs=64, max_model_len=2 * LENGTH), pool)
    speculator = None if proposer is None else Speculator(proposer, DraftController(4, pads_steps=True), max_seqs=64)
    stepper = Stepper(
        scheduler, pool, Device(clock, named), max_model_len=2 * LENGTH, overlap=True, speculator=speculator
    )
    seqs: list[Sequence] = []
    for name, text in named.items():
        request = ValidRequest(name, "m", tuple(text[:PROMPT]), SamplingParams(max_tokens=len(text) - PROMPT - 5))
        seqs.append(Sequence(request, fingerprint="00" * 16, block_size=16))
        scheduler.add(seqs[-1])
    steps: list[tuple[int, int]] = []
    while not any(seq.finish_reason for seq in seqs):
        result = stepper.step()
        steps.append((sum(output.num_accepted for output in result.outputs), seqs[0].num_output))
    return Ran(sum(seq.num_output for seq in seqs) / clock.now, steps, speculator)


def loss(drafted: Ran, texts: Texts, monkeypatch: pytest.MonkeyPatch) -> float:
    """Share of the tokens a second without drafts that they cost."""
    return 1 - drafted.rate / run(texts, None, monkeypatch).rate


def new(row: int, length: int) -> list[int]:
    """Nothing is said twice."""
    return list(range(row << 16, (row << 16) + length))


def tempting(row: int, length: int) -> list[int]:
    """The same two words again and again, and another one after them each time."""
    first, *unique = new(row, length)
    return [token for word in unique for token in (first, first + (1 << 15), word)][:length]


def babble(row: int, length: int) -> list[int]:
    """Words by chance, a few of them very common: two often follow each other, and lead to nothing."""
    draws = random.Random(row)
    return [int(draws.paretovariate(0.7)) % 5000 for _ in range(length)]


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("proposer", [NgramProposer, SuffixProposer])
def test_text_without_repetition_costs_nothing(
    rows: int, proposer: type[NgramProposer | SuffixProposer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps overlap as ever: nobody waits to learn that there are no drafts."""
    texts = [new(row, LENGTH) for row in range(rows)]
    assert loss(run(texts, proposer(), monkeypatch), texts, monkeypatch) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("rows", MS)
@pytest.mark.parametrize("text", [tempting, babble])
def test_drafts_that_are_never_right_cost_what_is_allowed(
    rows: int, text: abc.Callable[[int, int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [text(row, LENGTH) for row in range(rows)]
    ran = run(texts, NgramProposer(), monkeypatch)
    assert ran.speculator is not None
    stats = ran.speculator.stats
    assert stats.proposed > 4
    assert stats.accepted < 0.1 * stats.proposed
    plain, verify, host = MS[rows]
    overdrawn = (verify + host) / plain - 1
    allowed = TIME_BUDGET_RATE + (FIRST_TIME_BUDGET + overdrawn) / (LENGTH - PROMPT)
    assert 0 < loss(ran, texts, monkeypatch) < allowed < 0.015


@pytest.mark.parametrize("rows", MS)
@pytest.mark.parametrize("text", [new, tempting])
def test_a_text_that_begins_to_repeat_itself_is_found_out(
    rows: int, text: abc.Callable[[int, int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long drafts did not pay: soon after all begin to repeat what they said, and from then on they gain."""
    half = LENGTH // 2
    texts = [(said := text(row, half)) + said for row in range(rows)]
    ran = run(texts, NgramProposer(), monkeypatch)
    begins = half - PROMPT
    found = next(said for accepted, said in ran.steps if said > begins and accepted >= 4 * rows)
    assert found - begins < (24 if text is new else 160)
    assert loss(ran, texts, monkeypatch) < -0.25


def test_one_of_many_that_repeats_itself_makes_the_others_wait_no_longer_than_it_gains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sixteenth of the batch gains four tokens a step, and all of it verifies for that."""
    texts = [new(row, LENGTH) for row in range(16)]
    texts[0] = (texts[0][:40] * LENGTH)[:LENGTH]
    assert loss(run(texts, NgramProposer(), monkeypatch), texts, monkeypatch) < 0.015
