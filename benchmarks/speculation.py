"""Measures speculation: tokens per step and time on tasks with SmolLM2 (CPU), cost and gain of verify steps (GPU).

    python benchmarks/speculation.py --out benchmarks/results/speculation-cpu.json
    python benchmarks/speculation.py --device cuda --out benchmarks/results/speculation-h100.json

On a CPU it answers prompts of four kinds of tasks, greedy and one at a time, with and without drafts of prompt look-up
in turn. One engine gives all answers, which must be equal. The prompts are in the prefix cache, as on a decode pod.

On a GPU the model has the shape of Llama-3.1-8B with random weights, and rows have about 1024 tokens. Except for
verify_cost, a logit bias makes one token the answer everywhere, so that a proposer can be right at a fixed rate: a
draft is right with probability 0.8 if the drafts before it are right. Steps are computed in full.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support import report
from benchmarks.support.engine_driver import Driver, Prompts, engine_settings, running
from benchmarks.support.report import MetricTable, timed
from benchmarks.support.shapes import SHAPES, SMOLLM2_LAYERS, config_directory, without_layers
from cli.demo.model import demo_model
from common.types import SamplingParams
from engine.config import EngineConfig
from engine.llm import LLM
from engine.schedule.outputs import StepResult
from engine.schedule.sequence import Sequence as EngineSequence
from engine.speculation.controller import AlwaysDraft
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import DraftBatch, Proposer

METRICS = """
CPU:

- tokens_per_step_TASK: output tokens after the first over their steps, if K tokens are always drafted.
- speedup_TASK: time of the task's answers without drafts over the time with drafts when they pay; best of some runs.
- acceptance_draft_model, tokens_per_step_draft_model: chat, with K tokens always drafted by SmolLM2 without two layers.
- draft_model_over_plain: time of the answers with this draft model, which is as slow as the target, over the time
  without one; tokens are drafted only when they pay.

GPU:

- verify_cost_R: a step in which R rows verify K drafts each over a step without drafts, graphs replayed back to back.
- wall_cost_R: the same from the results of a step to those of the next. With drafts, the host's work is not hidden.
- speedup_R: tokens per second with drafts over tokens per second without.
- loss_when_useless: share of tokens per second that prompt look-up costs on random text; worst of 1 and 16 rows.
"""

RATE = 0.8
ANSWER = 7  # The token that the logit bias makes the answer.
AROUND = 16  # Steps between a change and the first step that counts.

TEXTS = (
    "The lighthouse at Corran Point was built in 1884 by the engineer David Alan. It stands 37 metres tall and "
    "its lamp could be seen from a distance of 28 kilometres. In 1931 the first electric lamp was installed, and "
    "in 1978 the last keeper, Mary Sinclair, left the island. Today the building is a small museum that is open "
    "from May to September. Visitors can climb the 142 steps to the gallery, where they look over the harbour and "
    "the islands in the west.",
    "Honey bees live in colonies of up to sixty thousand workers, a few hundred drones and a single queen. The "
    "workers gather nectar and pollen, build the wax combs, feed the larvae and guard the entrance of the hive. A "
    "worker lives for about six weeks in summer and for several months in winter. The queen can live for five "
    "years and lays up to two thousand eggs a day. When a colony grows too large, the old queen leaves with half "
    "of the workers to found a new one.",
    "Invoice 20417 of 3 March 2024. Customer: Oakfield Joinery Ltd, 12 Mill Lane, Barton. Items: 24 brackets of "
    "steel at 3.20 each, 150 wood screws of 5 by 60 mm at 0.08 each, 6 tins of clear varnish at 11.50 each, 2 "
    "boxes of sandpaper at 9.75 each. The total before tax is 177.30. Payment is due within 30 days of the date "
    "of this invoice to the account of Harrow Supplies at the Northern Bank, with the number of the invoice as "
    "reference.",
)
COPIED = (
    TEXTS[0],
    TEXTS[2],
    "The Ferry Hotel has 34 rooms on three floors. Breakfast is served from 7:00 to 10:30 in the garden room, and "
    "the kitchen is open until 21:45. Dogs are welcome on the ground floor. The car park behind the house has 28 "
    "places and costs 6 pounds a night. Guests who leave before 11:00 can keep their bags at the desk until the "
    "evening.",
)
CODE = (
    """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount
        self.history.append(("deposit", amount))
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance = self.balance - amount
        self.history.append(("withdraw", amount))
        return self.balance
""",
    """def read_table(path, separator):
    rows = []
    with open(path) as file:
        header = file.readline().strip().split(separator)
        for line in file:
            values = line.strip().split(separator)
            row = {}
            for name, value in zip(header, values):
                row[name] = value
            rows.append(row)
    return rows

def write_table(path, rows, separator):
    header = list(rows[0].keys())
    with open(path, "w") as file:
        file.write(separator.join(header) + "\\n")
        for row in rows:
            values = [row[name] for name in header]
            file.write(separator.join(values) + "\\n")
""",
)
TASKS: dict[str, tuple[tuple[str, ...], int]] = {
    "copy": (tuple(f"Repeat the following text exactly, word for word.\n\n{text}" for text in COPIED), 120),
    "code_edit": (
        tuple(
            f"Rename the variable {a} to {b} in this Python code. Write the whole code.\n\n{code}"
            for code, a, b in ((CODE[0], "amount", "value"), (CODE[1], "separator", "delimiter"))
        ),
        170,
    ),
    "summarise": (tuple(f"Summarise the following text in two sentences.\n\n{text}" for text in TEXTS), 80),
    "chat": (("Why is the sky blue?", "Give me three tips for better sleep.", "How do I learn the guitar?"), 200),
}


@dataclass(frozen=True, slots=True)
class TimedAnswers:
    ids: list[list[int]]  # Tokens of each answer.
    seconds: list[float]  # Seconds of each answer.
    steps: int  # Steps of all answers, without those of the first tokens.

    @property
    def tokens(self) -> int:
        """Number of tokens after the first ones."""
        return sum(len(ids) - 1 for ids in self.ids)


def encode(llm: LLM, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Returns the chat prompts of the texts, which are in the prefix cache of the engine afterwards."""
    rendered = [llm.template.render([{"role": "user", "content": text}]) for text in texts]
    prompts = [llm.encode(text, special_tokens=False) for text in rendered]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1), show_progress=False)
    return prompts


def answer(llm: LLM, prompts: Sequence[tuple[int, ...]], tokens: int) -> TimedAnswers:
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    before = llm.engine.counters.steps
    timed_answers = [timed(lambda p=p: llm.generate([p], params, show_progress=False)) for p in prompts]  # type: ignore[misc]
    seconds, completions = zip(*timed_answers, strict=True)
    steps = llm.engine.counters.steps - before - len(prompts)
    return TimedAnswers([completion.ids for (completion,) in completions], list(seconds), steps)


def answer_always(
    llm: LLM, proposer: Proposer, prompts: Sequence[tuple[int, ...]], tokens: int, drafts: int
) -> tuple[TimedAnswers, dict[str, int]]:
    """Answers with drafts in every step. Returns the answers and the counts of tokens, steps and drafts."""
    llm.engine.set_proposer(proposer, AlwaysDraft(drafts))
    always = answer(llm, prompts, tokens)
    assert llm.engine.speculator is not None
    stats = llm.engine.speculator.stats
    counts = {"tokens": always.tokens, "steps": always.steps}
    return always, counts | {"proposed": stats.proposed, "accepted": stats.accepted}


def measure_tasks(table: MetricTable, drafts: int, runs: int, settings: dict[str, Any]) -> None:
    options = {"kv_memory": 128 << 20, "max_model_len": 1024, "chunk_tokens": 512} | settings
    llm = LLM(demo_model(), speculation="ngram", speculation_tokens=drafts, **options)
    for task, (texts, tokens) in TASKS.items():
        prompts = encode(llm, texts)
        always, counts = answer_always(llm, NgramProposer(), prompts, tokens, drafts)
        plain: list[TimedAnswers] = []
        drafted: list[TimedAnswers] = []
        for _ in range(runs):
            for answers, proposer in ((plain, None), (drafted, NgramProposer())):
                llm.engine.set_proposer(proposer)
                answers.append(answer(llm, prompts, tokens))
                if answers[-1].ids != always.ids:
                    raise SystemExit(f"{task}: the answers differ")
        table.add(f"tokens_per_step_{task}", always.tokens / always.steps, **counts)
        best = [sum(map(min, zip(*(answers.seconds for answers in kind), strict=True))) for kind in (plain, drafted)]
        table.add(f"speedup_{task}", best[0] / best[1], plain_s=best[0], drafted_s=best[1])


def measure_draft_model(table: MetricTable, drafts: int, runs: int, settings: dict[str, Any]) -> None:
    options: dict[str, Any] = {"kv_memory": 128 << 20, "max_model_len": 512, "chunk_tokens": 512} | settings
    texts, tokens = TASKS["chat"][0], TASKS["chat"][1] // 2
    with tempfile.TemporaryDirectory() as directory:
        draft = without_layers(demo_model(), Path(directory) / "draft", SMOLLM2_LAYERS)
        plain = LLM(demo_model(), **options)
        options |= {"speculation": "draft_model", "speculation_model": draft, "speculation_tokens": drafts}
        llm = LLM(demo_model(), **options)
        encode(plain, texts)
        prompts = encode(llm, texts)
        always, counts = answer_always(llm, llm.engine.configured_proposer(), prompts, tokens, drafts)
        table.add("acceptance_draft_model", counts["accepted"] / counts["proposed"], **counts)
        table.add("tokens_per_step_draft_model", always.tokens / always.steps)
        llm.engine.set_proposer(llm.engine.configured_proposer())
        seconds: list[list[float]] = [[], []]
        for _ in range(runs):
            for times, engine in zip(seconds, (plain, llm), strict=True):
                answers = answer(engine, prompts, tokens)
                if answers.ids != always.ids:
                    raise SystemExit("draft_model: the answers differ")
                times.append(sum(answers.seconds))
        best = [min(times) for times in seconds]
        table.add("draft_model_over_plain", best[1] / best[0], plain_s=best[0], drafted_s=best[1])


class Coin:
    """Proposes ANSWER with probability `rate` at each place of each request, otherwise another token."""

    name = "coin"

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def new_state(self, seq: EngineSequence) -> random.Random:
        return random.Random(seq.request_id)

    def propose(self, seqs: Sequence[EngineSequence], states: Sequence[Any], limits: Sequence[int]) -> DraftBatch:
        drafts = DraftBatch.empty(len(seqs), max(limits))
        drafts.lengths[:] = limits
        for row, rng in enumerate(states):
            drafts.tokens[row] = [ANSWER + (rng.random() >= self._rate) for _ in range(drafts.tokens.shape[1])]
        return drafts

    def expects_drafts(self, seq: EngineSequence, state: Any) -> bool:
        """Always has drafts."""
        return True

    def on_verified(self, seq: EngineSequence, state: Any, drafts: int, accepted: int) -> None:
        """Does nothing: the drafts do not depend on earlier results."""


@dataclass(frozen=True, slots=True)
class SpeculationRun:
    """Results of one run with all rows decoding."""

    tokens_s: float  # Tokens per second of all rows.
    step_s: float  # Median seconds between the results of steps.
    replay_s: float | None  # Seconds of a replay of the step's graph. None: without graphs.
    accepted: float  # Mean accepted drafts of a row in a step.
    proposed: float  # Mean drafts of a row in the last step.


def decode(
    driver: Driver,
    proposer: Proposer | None,
    prompts: list[list[int]],
    params: list[SamplingParams],
    steps: int,
    skip: int = AROUND,
    control: AlwaysDraft | None = None,
) -> SpeculationRun:
    """Decodes with all rows for `skip` and then `steps` steps, of which the latter count, and replays the graph."""
    rows = len(prompts)
    driver.call(lambda: driver.engine.set_proposer(proposer, control))

    def full(result: StepResult) -> bool:
        return len(result.outputs) == rows and not result.num_prompt_tokens

    counted = itertools.count(1)
    driver.begin(prompts, params)
    driver.wait(lambda result: full(result) and next(counted) > skip + steps)
    replay_s = driver.call(lambda: driver.engine.runner.time_replay(2 * AROUND))
    seen = list(driver.seen)
    driver.end()
    window = [(ended, result) for ended, result in seen if full(result)][skip:][: steps + 1]
    times = [b - a for (a, _), (b, _) in itertools.pairwise(window)]
    outputs = [output for _, result in window[1:] for output in result.outputs]
    return SpeculationRun(
        tokens_s=sum(len(output.tokens) for output in outputs) / (window[-1][0] - window[0][0]),
        step_s=statistics.median(times),
        replay_s=replay_s,
        accepted=sum(output.num_accepted for output in outputs) / rows / len(times),
        proposed=sum(output.num_drafts for output in seen[-1][1].outputs) / rows,
    )


def measure_cost(table: MetricTable, driver: Driver, prompts: Prompts, context: int) -> None:
    """Measures verify_cost with requests without a bias. Their drafts are wrong, which does not change the cost."""
    for rows in (1, 16, 64):
        batch = prompts.make(rows, context)
        params = [SamplingParams(temperature=0.0, max_tokens=256)] * rows
        decode(driver, None, batch, params, 2, skip=1)  # puts the prompts into the prefix cache
        plain = decode(driver, None, batch, params, 2, skip=1)
        always = AlwaysDraft(driver.engine.config.speculation_tokens)
        drafted = decode(driver, Coin(0.5), batch, params, 2, skip=1, control=always)
        assert drafted.proposed > 0
        if plain.replay_s is not None and drafted.replay_s is not None:
            times = {"plain_ms": plain.replay_s * 1e3, "verify_ms": drafted.replay_s * 1e3}
            table.add(f"verify_cost_{rows}", drafted.replay_s / plain.replay_s, **times)


def measure_verify(table: MetricTable, driver: Driver, prompts: Prompts, context: int, steps: int) -> None:
    for rows in (1, 16, 64):
        batch = prompts.make(rows, context - steps)
        tokens = 5 * (steps + 2 * AROUND) + 128
        params = [SamplingParams(temperature=0.0, max_tokens=tokens, logit_bias=((ANSWER, 100.0),))] * rows
        # Puts the prompts into the prefix cache.
        decode(driver, None, batch, [SamplingParams(temperature=0.0, max_tokens=steps + 64)] * rows, 2)
        plain = decode(driver, None, batch, params, steps)
        # With drafts, a row advances about three times as far per step.
        drafted = decode(driver, Coin(RATE), batch, params, steps // 3, skip=AROUND // 3)
        times = {"plain_ms": plain.step_s * 1e3, "verify_ms": drafted.step_s * 1e3}
        table.add(f"wall_cost_{rows}", drafted.step_s / plain.step_s, **times)
        rates = {"plain_tok_s": plain.tokens_s, "drafted_tok_s": drafted.tokens_s}
        speedup = drafted.tokens_s / plain.tokens_s
        table.add(f"speedup_{rows}", speedup, **rates, accepted_per_step=drafted.accepted)


def measure_useless(table: MetricTable, driver: Driver, prompts: Prompts, context: int, steps: int) -> None:
    losses: dict[str, float] = {}
    for rows in (1, 16):
        batch = prompts.make(rows, max(8, context - steps))
        params = [SamplingParams(temperature=1.0, seed=i, max_tokens=2 * steps + 256) for i in range(rows)]
        decode(driver, None, batch, params, 2)
        plain = [decode(driver, None, batch, params, steps).tokens_s for _ in range(2)]
        drafted = [decode(driver, NgramProposer(), batch, params, steps).tokens_s for _ in range(2)]
        losses[f"loss_{rows}"] = 1 - max(drafted) / max(plain)
    table.add("loss_when_useless", max(losses.values()), **losses)


def measure_gpu(table: MetricTable, shape_name: str, drafts: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Measures verify steps. Returns the settings of the engine."""
    shape = SHAPES[shape_name]
    context, steps, longest = (48, 12, 1024) if shape_name == "tiny" else (1024, 96, 3072)
    options = {
        "load_format": "dummy",
        "chunk_tokens": max(shape.chunk_tokens, 64 * 5),
        "block_size": shape.block_size,
        "max_seqs": 64,
        "max_model_len": longest,
        "speculation": "ngram",
        "speculation_tokens": drafts,
    } | settings
    with config_directory(shape.config) as model_dir, running(EngineConfig(model_dir=model_dir, **options)) as driver:
        prompts = Prompts(driver.engine.vocab_size)
        measure_cost(table, driver, prompts, context)
        measure_verify(table, driver, prompts, context, steps)
        measure_useless(table, driver, prompts, context, 4 * steps)
    return options


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.arguments(__doc__, METRICS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=SHAPES, help="measure verify steps instead of tasks (default on a GPU)")
    parser.add_argument("--drafts", type=int, default=4, metavar="K", help="drafts per row and step")
    parser.add_argument("--runs", type=int, default=3, help="runs of each task, with and without drafts")
    parser.add_argument("--engine", metavar="NAME=VALUE", nargs="+", default=[], help="fields of EngineConfig")
    args = parser.parse_args(argv)
    settings = {"device": args.device} | engine_settings(args.engine)
    shape = args.shape or ("llama-3.1-8b" if args.device == "cuda" else None)
    table = MetricTable()
    if shape is None:
        measure_tasks(table, args.drafts, args.runs, settings)
        measure_draft_model(table, args.drafts, args.runs, settings)
    else:
        settings = measure_gpu(table, shape, args.drafts, settings)
    more = {"rows": table.rows, "drafts": args.drafts, "shape": shape, "engine": settings}
    report.write(args.out, "speculation", table.metrics, "torch", "triton", **more)


if __name__ == "__main__":
    main()
