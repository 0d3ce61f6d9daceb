"""Time that drafts cost and gain: a stepper with overlap over a simulated device with its own clock.

Step times are those of an 8B model on one H100 (benchmarks/results/speculation-h100.json): plain steps, steps in which
every row verifies four drafts, and the time of the host between two steps if the second waits for the first.
"""

from __future__ import annotations

import random
from collections import abc
from dataclasses import dataclass
from typing import Any

import pytest

from common.types import SamplingParams, Token, ValidRequest
from engine.kv.blocks import BlockPool
from engine.schedule import stepper as stepper_module
from engine.schedule.limits import SchedulerConfig
from engine.schedule.scheduler import ScheduledSequence, Scheduler
from engine.schedule.sequence import Sequence
from engine.schedule.stepper import LaunchCallback, RunnerOutput, Stepper
from engine.speculation.acceptance import accepted_tokens
from engine.speculation.controller import FIRST_TIME_BUDGET, TIME_BUDGET_RATE, DraftController
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import Proposer
from engine.speculation.speculator import Speculator
from engine.speculation.suffix import SuffixProposer

MS = {
    1: (5.287, 5.834, 0.55),
    16: (6.641, 7.534, 1.81),
    64: (9.429, 12.711, 2.51),
}  # rows: milliseconds of a plain step, of a verify step, and of the host
PROMPT, LENGTH = 32, 1200
Texts = list[list[int]]  # prompt and whole output of each sequence


@dataclass
class Clock:
    """Stands for the module `time`."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class Step:
    scheduled: list[ScheduledSequence]
    ends: float


class Device:
    """Returns the text of each sequence, step by step."""

    def __init__(self, clock: Clock, texts: dict[str, list[int]]) -> None:
        self.clock, self.texts = clock, texts
        self.plain_s, self.verify_s, self.host_s = (ms * 1e-3 for ms in MS[len(texts)])
        self.free_at = 0.0

    def launch(self, scheduled: abc.Sequence[ScheduledSequence], on_layer: LaunchCallback | None = None) -> Step:
        self.clock.now += self.host_s / 2
        seconds = self.verify_s if any(entry.drafts for entry in scheduled) else self.plain_s
        self.free_at = max(self.clock.now, self.free_at) + seconds
        return Step(list(scheduled), self.free_at)

    def sample_deferred(self, launched: Step) -> Step:
        return launched

    def is_done(self, launched: Step) -> bool:
        return self.clock.now >= launched.ends

    def collect(self, launched: Step) -> list[RunnerOutput]:
        self.clock.now = max(self.clock.now, launched.ends) + self.host_s / 2
        return [self._next_tokens(entry) for entry in launched.scheduled]

    def _next_tokens(self, entry: ScheduledSequence) -> RunnerOutput:
        after = entry.start + entry.num_new - len(entry.drafts)
        sampled = self.texts[entry.seq.request_id][after : after + 1 + len(entry.drafts)]
        accepted = accepted_tokens(entry.drafts, sampled)
        return RunnerOutput(True, tuple(Token(entry.seq.num_output + i, token) for i, token in enumerate(accepted)))


@dataclass(frozen=True)
class RunResult:
    """A run until the first sequence reached the end of its text."""

    #: Tokens per second.
    rate: float
    #: Accepted drafts of each step, and output tokens of the first sequence after it.
    steps: list[tuple[int, int]]
    speculator: Speculator | None


def run(texts: Texts, proposer: Proposer | None, monkeypatch: pytest.MonkeyPatch) -> RunResult:
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
    return RunResult(sum(seq.num_output for seq in seqs) / clock.now, steps, speculator)


def loss(drafted: RunResult, texts: Texts, monkeypatch: pytest.MonkeyPatch) -> float:
    """Share of the throughput without drafts that drafts cost; negative: they gain."""
    return 1 - drafted.rate / run(texts, None, monkeypatch).rate


def unique(row: int, length: int) -> list[int]:
    """No token occurs twice."""
    return list(range(row << 16, (row << 16) + length))


def misleading(row: int, length: int) -> list[int]:
    """The same two tokens again and again, each time with a different token after them."""
    first, *others = unique(row, length)
    return [token for word in others for token in (first, first + (1 << 15), word)][:length]


def random_words(row: int, length: int) -> list[int]:
    """Random tokens, a few of them very common: their pairs repeat, and predict nothing."""
    draws = random.Random(row)
    return [int(draws.paretovariate(0.7)) % 5000 for _ in range(length)]


def cases(first: abc.Callable[[int, int], list[int]], other: abc.Callable[[int, int], list[int]]) -> list[Any]:
    """Returns (text, rows) for both texts and all rows; most rows of the other text are a long test."""
    short = [(text, rows) for text in (first, other) for rows in MS if text is first or rows < max(MS)]
    return [*short, pytest.param(other, max(MS), marks=pytest.mark.long)]


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("proposer", [NgramProposer, SuffixProposer])
def test_text_without_repetition_costs_nothing(
    rows: int, proposer: type[NgramProposer | SuffixProposer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps overlap as without speculation: no step waits for drafts."""
    texts = [unique(row, LENGTH) for row in range(rows)]
    assert loss(run(texts, proposer(), monkeypatch), texts, monkeypatch) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(("text", "rows"), cases(misleading, random_words))
def test_wrong_drafts_cost_no_more_than_the_time_budget(
    rows: int, text: abc.Callable[[int, int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [text(row, LENGTH) for row in range(rows)]
    result = run(texts, NgramProposer(), monkeypatch)
    assert result.speculator is not None
    stats = result.speculator.stats
    assert stats.proposed > 4
    assert stats.accepted < 0.1 * stats.proposed
    plain, verify, host = MS[rows]
    overdrawn = (verify + host) / plain - 1
    allowed = TIME_BUDGET_RATE + (FIRST_TIME_BUDGET + overdrawn) / (LENGTH - PROMPT)
    assert 0 < loss(result, texts, monkeypatch) < allowed < 0.015


@pytest.mark.parametrize(("text", "rows"), cases(misleading, unique))
def test_a_text_that_begins_to_repeat_itself_gains(
    rows: int, text: abc.Callable[[int, int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts did not pay in the first half of the texts. Soon after the texts begin to repeat, they gain."""
    half = LENGTH // 2
    texts = [2 * text(row, half) for row in range(rows)]
    result = run(texts, NgramProposer(), monkeypatch)
    begins = half - PROMPT
    first_gain = next(count for accepted, count in result.steps if count > begins and accepted >= 4 * rows)
    assert first_gain - begins < (24 if text is unique else 160)
    assert loss(result, texts, monkeypatch) < -0.25


def test_one_repetitive_sequence_costs_a_batch_no_more_than_it_gains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of 16 sequences gains four tokens per step, and every step pays for a padded verify step."""
    texts = [unique(row, LENGTH) for row in range(16)]
    texts[0] = (texts[0][:40] * LENGTH)[:LENGTH]
    assert loss(run(texts, NgramProposer(), monkeypatch), texts, monkeypatch) < 0.015
