"""Runs requests in different ways on deterministic engines, and compares the bits of their answers.

An answer is a list of (token id, bits of the float32 log-probability). The reference runs each request alone on an
empty cache. A *cause* is a way to compute an answer in other steps: in a batch, in chunks, over a cached prefix, after
a preemption, after a hand-off, after a migration, with drafts. An answer counts for a cause only if the cause happened.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.types import SamplingParams, ValidRequest
from engine.engine import Engine
from engine.schedule.outputs import SequenceOutput, StepResult
from engine.schedule.sequence import DraftState
from engine.schedule.sequence import Sequence as EngineSequence
from engine.speculation.controller import DraftController
from engine.speculation.proposer import DraftBatch

CAUSES = ("batch", "chunk", "hit", "preemption", "hand_off", "migration", "drafts")
MAX_STEPS = 1_000_000
Answer = list[tuple[int, int]]


@dataclass(frozen=True)
class Job:
    """One request of the proof."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams

    def request(self, model: str, run: str) -> ValidRequest:
        return ValidRequest(f"{run}-{self.name}", model, self.prompt, self.params)


def make_jobs(count: int, vocab: int, lengths: Sequence[int], outputs: Sequence[int], seed: int = 0) -> list[Job]:
    """Makes random prompts; half of them are sampled. Each fourth one shares a long prefix with the one before it."""
    rng = random.Random(seed)
    jobs: list[Job] = []
    for i in range(count):
        prompt = rng.choices(range(vocab), k=rng.choice(lengths))
        if i % 4 == 3:
            shared = jobs[-1].prompt
            prompt = [*shared[: len(shared) * 3 // 4], *prompt[: max(1, len(prompt) // 4)]]
        params = SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=rng.choice(outputs), logprobs=0)
        jobs.append(Job(str(i), tuple(prompt), params))
    return jobs


def bits(output: SequenceOutput) -> Answer:
    return [(token.id, _bits(token.logprob)) for token in output.tokens]


def _bits(value: float | None) -> int:
    assert value is not None
    return int.from_bytes(struct.pack("<f", value), "little")


@dataclass
class Seen:
    """What happened to one sequence."""

    answer: Answer = field(default_factory=list)
    most_rows: int = 0  # Largest number of sequences of a step beside it.
    chunks: int = 0  # Steps that computed a part of its prompt.
    drafts: int = 0  # Drafts that its steps verified.
    handed_off: bool = False


class Run:
    """Runs sequences on an engine, at most `width` at once, on the calling thread."""

    def __init__(self, engine: Engine, width: int, *, preempt: random.Random | None = None) -> None:
        self.engine, self._width, self._preempt = engine, width, preempt
        self.seen: dict[str, Seen] = {}
        self._running: dict[str, EngineSequence] = {}

    def finish(
        self, seqs: Mapping[str, Callable[[], EngineSequence]], on_step: Callable[[StepResult], None] | None = None
    ) -> dict[str, EngineSequence]:
        """Runs the sequences in order of `seqs`, which makes each one when it starts. Returns them."""
        waiting, made = list(seqs.items()), dict[str, EngineSequence]()
        for _ in range(MAX_STEPS):
            while waiting and len(self._running) < self._width:
                name, make = waiting.pop(0)
                made[name] = self._running[name] = make()
                self.seen[name] = Seen()
                self.engine.add(made[name])
            if not self._running:
                self.engine.finish_in_flight()
                return made
            self.engine.step(lambda result: self._collect(result, on_step))
            self._preempt_one()
        raise SystemExit("the proof does not end: sequences are still running")

    def _collect(self, result: StepResult, on_step: Callable[[StepResult], None] | None) -> None:
        if on_step is not None:
            on_step(result)
        names = {id(seq): name for name, seq in self._running.items()}
        for output in result.outputs:
            name = names.get(id(output.seq))
            if name is None:
                continue
            if output.error is not None:
                raise SystemExit(f"request {name} failed: {output.error}")
            seen = self.seen[name]
            seen.answer += bits(output)
            seen.most_rows = max(seen.most_rows, len(result.outputs))
            seen.chunks += output.chunk_done
            seen.drafts += output.num_drafts
            seen.handed_off |= output.handed_off
            if output.ended:
                del self._running[name]

    def _preempt_one(self) -> None:
        """Preempts a random sequence that decodes, now and then."""
        if self._preempt is None or self._preempt.random() > 0.5:
            return
        decoding = [seq for seq in self._running.values() if seq.slot >= 0 and seq.num_output and not seq.pending]
        if decoding:
            self.engine.scheduler.stall(self._preempt.choice(decoding))


class KnownAnswers:
    """A proposer that proposes the tokens of known answers, and a wrong one now and then."""

    name = "known"

    def __init__(self, answers: Mapping[str, Answer], vocab: int) -> None:
        self._answers, self._vocab = answers, vocab

    def new_state(self, seq: EngineSequence) -> None:
        """Keeps no state."""

    def propose(self, seqs: Sequence[EngineSequence], states: Sequence[Any], limits: Sequence[int]) -> DraftBatch:
        guesses = []
        for seq, limit in zip(seqs, limits, strict=True):
            name, first = seq.request_id.partition("-")[2], seq.num_output
            known = [token for token, _ in self._answers[name][first : first + limit]]
            guesses.append([(t + (seq.prompt_len + first + i) % 4 // 3) % self._vocab for i, t in enumerate(known)])
        return DraftBatch.of(guesses, max(limits))

    def expects_drafts(self, seq: EngineSequence, state: Any) -> bool:
        return True

    def on_verified(self, seq: EngineSequence, state: Any, drafts: int, accepted: int) -> None:
        """Does nothing."""


class ProofDrafts(DraftController):
    """Drafts wherever it may, also where it does not pay."""

    def limits(self, states: Sequence[tuple[DraftState, int]]) -> list[int]:
        return [self.max_drafts] * len(states)


class Proof:
    """Computes the reference answers on `first`, and compares the answers of every cause. `second` may be smaller.

    Both engines must be deterministic and have one fingerprint. `second` may have speculation and small chunks.
    """

    def __init__(self, first: Engine, second: Engine, jobs: Sequence[Job], width: int, seed: int = 0) -> None:
        assert first.layout.fingerprint == second.layout.fingerprint
        self.first, self.second, self.jobs, self.width = first, second, {job.name: job for job in jobs}, width
        self._rng = random.Random(seed)
        self.reference: dict[str, Answer] = {}
        self.causes = dict.fromkeys(CAUSES, 0)
        self.compared = dict.fromkeys(CAUSES, 0)
        self.mismatches: list[tuple[str, str]] = []  # Cause, and name of the job.

    def run_reference(self) -> None:
        run = Run(self.first, 1)
        for name in self.jobs:
            self.first.pool.reset_prefix_cache()
            run.finish({name: self._maker(self.first, name, "alone")})
        self.reference = {name: seen.answer for name, seen in run.seen.items()}

    def run_batch(self) -> None:
        """All jobs in random batches, on the first engine and an empty cache."""
        self.first.pool.reset_prefix_cache()
        run = self._run(self.first, "batch", self.jobs)
        self._compare("batch", run, lambda name: run.seen[name].most_rows > 1)

    def run_hits(self, names: Sequence[str]) -> None:
        """The jobs a second time, so that their prompts are in the cache."""
        self._run(self.first, "fill", names)
        run = Run(self.first, self.width)
        seqs = run.finish({name: self._maker(self.first, name, "hit") for name in names})
        self._compare("hit", run, lambda name: seqs[name].cached_tokens > 0)

    def run_chunks(self, names: Sequence[str]) -> None:
        """The jobs on the second engine, which has small chunks, and on an empty cache."""
        self.second.pool.reset_prefix_cache()
        run = self._run(self.second, "chunk", names)
        self._compare("chunk", run, lambda name: run.seen[name].chunks > 1)

    def run_preemptions(self, names: Sequence[str]) -> None:
        self.second.pool.reset_prefix_cache()
        run = Run(self.second, self.width, preempt=random.Random(self._rng.random()))
        seqs = run.finish({name: self._maker(self.second, name, "preempted") for name in names})
        self._compare("preemption", run, lambda name: seqs[name].preemptions > 0)

    def run_hand_offs(self, names: Sequence[str]) -> None:
        """Prompts on the first engine; their blocks are copied, and the second engine decodes in batches."""
        self.first.pool.reset_prefix_cache()
        self.second.pool.reset_prefix_cache()
        for first in range(0, len(names), self.width):
            group = names[first : first + self.width]
            moved: dict[str, tuple[Any, Answer]] = {}

            def push(result: StepResult) -> None:
                for output in result.outputs:
                    if output.handed_off or output.finish_reason is not None:
                        name = output.seq.request_id.partition("-")[2]
                        moved[name] = self._copy_blocks(output.seq), bits(output)  # noqa: B023

            run = Run(self.first, self.width)
            run.finish({name: self._maker(self.first, name, "handed", hand_off=True) for name in group}, push)
            continued = Run(self.second, self.width)
            going = [name for name in group if run.seen[name].handed_off]
            for name in group:
                if name not in going:
                    moved[name][0].finish("unused")
            continued.finish(
                {
                    name: self._maker(
                        self.second,
                        name,
                        "moved",
                        lease=moved[name][0],
                        computed=len(self.jobs[name].prompt),
                        output=[token for token, _ in moved[name][1]],
                    )
                    for name in going
                }
            )
            for name in going:
                continued.seen[name].answer = moved[name][1] + continued.seen[name].answer
            self._compare("hand_off", continued, lambda name: True)

    def run_migrations(self, names: Sequence[str]) -> None:
        """The second engine continues answers after a part of their tokens, without their KV."""
        self.second.pool.reset_prefix_cache()
        kept = {name: self._rng.randrange(1, max(2, len(self.reference[name]))) for name in names}
        names = [name for name in names if kept[name] < len(self.reference[name])]
        run = Run(self.second, self.width)
        run.finish(
            {
                name: self._maker(
                    self.second, name, "migrated", output=[t for t, _ in self.reference[name][: kept[name]]]
                )
                for name in names
            }
        )
        for name in names:
            run.seen[name].answer = self.reference[name][: kept[name]] + run.seen[name].answer
        self._compare("migration", run, lambda name: True)

    def run_drafts(self, names: Sequence[str]) -> None:
        """The jobs on the second engine, with drafts of which some are wrong."""
        engine, config = self.second, self.second.config
        engine.pool.reset_prefix_cache()
        controller = ProofDrafts(config.speculation_tokens, pads_steps=engine.runner.decode_step is not None)
        engine.set_proposer(KnownAnswers(self.reference, engine.vocab_size), controller)
        run = self._run(engine, "drafts", names)
        engine.set_proposer(None)
        self._compare("drafts", run, lambda name: run.seen[name].drafts > 0)

    def _run(self, engine: Engine, run_name: str, names: Sequence[str] | Mapping[str, Job]) -> Run:
        run = Run(engine, self.width)
        order = self._rng.sample(list(names), len(names))
        run.finish({name: self._maker(engine, name, run_name) for name in order})
        return run

    def _maker(self, engine: Engine, name: str, run: str, **more: Any) -> Callable[[], EngineSequence]:
        request = self.jobs[name].request(engine.layout.model, run)
        return lambda: engine.new_sequence(request, **more)

    def _copy_blocks(self, seq: EngineSequence) -> Any:
        """Copies the blocks of a prompt to the second engine. Returns their lease there."""
        count = self.second.layout.blocks_for(seq.prompt_len)
        lease = self.second.pool.lease([], count + 1)
        if lease is None or seq.lease is None:
            raise SystemExit("the second engine has too few blocks for the hand-offs")
        for target, source in zip(lease.blocks[:count], seq.lease.blocks[:count], strict=True):
            self.second.kv.data[target].copy_(self.first.kv.data[source])
        return lease

    def _compare(self, cause: str, run: Run, happened: Callable[[str], bool]) -> None:
        for name, seen in run.seen.items():
            self.compared[cause] += 1
            self.causes[cause] += happened(name)
            if seen.answer != self.reference[name]:
                self.mismatches.append((cause, name))
