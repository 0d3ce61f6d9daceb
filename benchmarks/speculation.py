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

import argparse
import functools
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.engine import WAIT_S, Driver, Prompts, engine_settings, running
from benchmarks.support import report
from benchmarks.support.draft_pair import SMOLLM2_LAYERS, without_layers
from benchmarks.support.shapes import SHAPES
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
#: The token that the logit bias makes the answer.
ANSWER = 7
#: Steps between a change and the first step that counts.
AROUND = 16
BARS = {
    "tokens_per_step_copy": 3.2,
    "tokens_per_step_code_edit": 2.7,
    "tokens_per_step_summarise": 1.4,
    "tokens_per_step_chat": 1.05,
    "speedup_copy": 1.6,
    "speedup_code_edit": 1.3,
    "verify_cost_1": 1.10,
    "verify_cost_16": 1.15,
    "verify_cost_64": 1.35,
    "speedup_1": 2.6,
    "speedup_64": 1.6,
    "loss_when_useless": 0.02,
}
#: Prefixes of metrics for which less is better.
COSTS = ("verify_cost", "loss")

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


@dataclass(slots=True)
class BarTable:
    """Prints metrics with their bars and collects them. bars: the bars apply."""

    metrics: dict[str, float]
    rows: list[dict[str, Any]]
    bars: bool

    def line(self, name: str, value: float, **more: float | str) -> None:
        self.metrics[name] = round(value, 4)
        self.rows.append({"name": name, "value": round(value, 4)} | more)
        bar = BARS.get(name) if self.bars else None
        missed = bar is not None and (value > bar if name.startswith(COSTS) else value < bar)
        shown = "" if bar is None else f"  bar {bar:g}{'  BAR MISSED' if missed else ''}"
        print(f"{name:<28}{value:>9.3f}{shown}  {more or ''}", flush=True)


# -- tasks on a CPU ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TimedAnswers:
    """Answers to the prompts of a task."""

    #: Tokens of each answer.
    ids: list[list[int]]
    #: Seconds of each answer.
    seconds: list[float]
    #: Steps of all answers, without those of the first tokens.
    steps: int


def answer(llm: LLM, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> TimedAnswers:
    engine, steps = llm.engine, 0
    ids: list[list[int]] = []
    seconds: list[float] = []
    for prompt in prompts:
        before, began = engine.counters.steps, time.perf_counter()
        (completion,) = llm.generate([prompt], params, show_progress=False)
        seconds.append(time.perf_counter() - began)
        steps += engine.counters.steps - before - 1
        ids.append(completion.ids)
    return TimedAnswers(ids, seconds, steps)


def measure_tasks(table: BarTable, drafts: int, runs: int, settings: dict[str, Any]) -> None:
    options = {"kv_memory": 128 << 20, "max_model_len": 1024, "chunk_tokens": 512} | settings
    llm = LLM(demo_model(), speculation="ngram", speculation_tokens=drafts, **options)
    for task, (texts, tokens) in TASKS.items():
        rendered = [llm.template.render([{"role": "user", "content": text}]) for text in texts]
        prompts = [llm.encode(text, special_tokens=False) for text in rendered]
        params = SamplingParams(temperature=0.0, max_tokens=tokens)
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1), show_progress=False)
        plain: list[TimedAnswers] = []
        drafted: list[TimedAnswers] = []
        llm.engine.set_proposer(NgramProposer(), AlwaysDraft(drafts))
        always = answer(llm, prompts, params)
        assert llm.engine.speculator is not None
        stats = llm.engine.speculator.stats
        for _ in range(runs):
            llm.engine.set_proposer(None)
            plain.append(answer(llm, prompts, params))
            llm.engine.set_proposer(NgramProposer())
            drafted.append(answer(llm, prompts, params))
            if not always.ids == drafted[-1].ids == plain[-1].ids:
                raise SystemExit(f"{task}: the answers differ")
        num_tokens = sum(len(ids) - 1 for ids in always.ids)
        more = {"tokens": num_tokens, "steps": always.steps, "proposed": stats.proposed, "accepted": stats.accepted}
        table.line(f"tokens_per_step_{task}", num_tokens / always.steps, **more)
        best = [sum(map(min, zip(*(answers.seconds for answers in kind), strict=True))) for kind in (plain, drafted)]
        table.line(f"speedup_{task}", best[0] / best[1], plain_s=round(best[0], 3), drafted_s=round(best[1], 3))


def measure_draft_model(table: BarTable, drafts: int, runs: int, settings: dict[str, Any]) -> None:
    options = {"kv_memory": 128 << 20, "max_model_len": 512, "chunk_tokens": 512} | settings
    texts, tokens = TASKS["chat"]
    params = SamplingParams(temperature=0.0, max_tokens=tokens // 2)
    with tempfile.TemporaryDirectory() as directory:
        draft = without_layers(demo_model(), Path(directory) / "draft", SMOLLM2_LAYERS)
        plain = LLM(demo_model(), **options)
        llm = LLM(
            demo_model(), speculation="draft_model", speculation_model=draft, speculation_tokens=drafts, **options
        )
        rendered = [llm.template.render([{"role": "user", "content": text}]) for text in texts]
        prompts = [llm.encode(text, special_tokens=False) for text in rendered]
        for engine in (plain, llm):
            engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1), show_progress=False)
        llm.engine.set_proposer(llm.engine.configured_proposer(), AlwaysDraft(drafts))
        always = answer(llm, prompts, params)
        assert llm.engine.speculator is not None
        stats = llm.engine.speculator.stats
        num_tokens = sum(len(ids) - 1 for ids in always.ids)
        more = {"tokens": num_tokens, "steps": always.steps, "proposed": stats.proposed, "accepted": stats.accepted}
        table.line("acceptance_draft_model", stats.accepted / stats.proposed, **more)
        table.line("tokens_per_step_draft_model", num_tokens / always.steps)
        llm.engine.set_proposer(llm.engine.configured_proposer())
        seconds: list[list[float]] = [[], []]
        for _ in range(runs):
            for times, engine in zip(seconds, (plain, llm), strict=True):
                answers = answer(engine, prompts, params)
                if answers.ids != always.ids:
                    raise SystemExit("draft_model: the answers differ")
                times.append(sum(answers.seconds))
        best = [min(times) for times in seconds]
        table.line("draft_model_over_plain", best[1] / best[0], plain_s=round(best[0], 3), drafted_s=round(best[1], 3))


# -- verify steps on a GPU --------------------------------------------------------------------------------------------


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

    #: Tokens per second of all rows.
    tokens_s: float
    #: Median seconds between the results of steps.
    step_s: float
    #: Seconds of a replay of the step's graph. None: without graphs.
    replay_s: float | None
    #: Mean accepted drafts of a row in a step.
    accepted: float
    #: Mean drafts of a row in the last step.
    proposed: float


def decode(
    driver: Driver,
    proposer: Proposer | None,
    prompts: list[list[int]],
    params: list[SamplingParams],
    steps: int,
    *,
    skip: int = AROUND,
    always: bool = False,
) -> SpeculationRun:
    """Decodes with all rows for `skip` and then `steps` steps, of which the latter count, and replays the graph.

    always: draft in every step, even if it does not pay.
    """
    rows = len(prompts)
    control = AlwaysDraft(driver.engine.config.speculation_tokens) if always else None
    driver.loop.call(functools.partial(driver.engine.set_proposer, proposer, control)).result(WAIT_S)

    def full(result: StepResult) -> bool:
        return len(result.outputs) == rows and not result.num_prompt_tokens

    counted = 0

    def enough(result: StepResult) -> bool:
        nonlocal counted
        counted += full(result)
        return counted > skip + steps

    driver.begin(prompts, params)
    driver.wait(enough)
    replay_s = driver.loop.call(lambda: driver.engine.runner.time_replay(2 * AROUND)).result(WAIT_S)
    seen = list(driver.seen)
    driver.end()
    window = [(ended, result) for ended, result in seen if full(result)][skip:][: steps + 1]
    times = [b - a for (a, _), (b, _) in itertools.pairwise(window)]
    tokens = sum(len(output.tokens) for _, result in window[1:] for output in result.outputs)
    accepted = sum(output.num_accepted for _, result in window[1:] for output in result.outputs)
    return SpeculationRun(
        tokens_s=tokens / (window[-1][0] - window[0][0]),
        step_s=statistics.median(times),
        replay_s=replay_s,
        accepted=accepted / rows / len(times),
        proposed=sum(output.num_drafts for output in seen[-1][1].outputs) / rows,
    )


def measure_cost(table: BarTable, driver: Driver, prompts: Prompts, context: int) -> None:
    """Measures verify_cost with requests without a bias. Their drafts are wrong, which does not change the cost."""
    for rows in (1, 16, 64):
        batch = prompts.make(rows, context)
        params = [SamplingParams(temperature=0.0, max_tokens=256)] * rows
        decode(driver, None, batch, params, 2, skip=1)  # puts the prompts into the prefix cache
        plain = decode(driver, None, batch, params, 2, skip=1)
        drafted = decode(driver, Coin(0.5), batch, params, 2, skip=1, always=True)
        assert drafted.proposed > 0
        if plain.replay_s is not None and drafted.replay_s is not None:
            cost = drafted.replay_s / plain.replay_s
            more = {"plain_ms": round(plain.replay_s * 1e3, 3), "verify_ms": round(drafted.replay_s * 1e3, 3)}
            table.line(f"verify_cost_{rows}", cost, **more)


def measure_verify(table: BarTable, driver: Driver, prompts: Prompts, context: int, steps: int) -> None:
    for rows in (1, 16, 64):
        batch = prompts.make(rows, context - steps)
        params = [
            SamplingParams(temperature=0.0, max_tokens=5 * (steps + 2 * AROUND) + 128, logit_bias=((ANSWER, 100.0),))
        ] * rows
        # Puts the prompts into the prefix cache.
        decode(driver, None, batch, [SamplingParams(temperature=0.0, max_tokens=steps + 64)] * rows, 2)
        plain = decode(driver, None, batch, params, steps)
        # With drafts, a row advances about three times as far per step.
        drafted = decode(driver, Coin(RATE), batch, params, steps // 3, skip=AROUND // 3)
        table.line(
            f"wall_cost_{rows}",
            drafted.step_s / plain.step_s,
            plain_ms=round(plain.step_s * 1e3, 3),
            verify_ms=round(drafted.step_s * 1e3, 3),
        )
        table.line(
            f"speedup_{rows}",
            drafted.tokens_s / plain.tokens_s,
            plain_tok_s=round(plain.tokens_s, 1),
            drafted_tok_s=round(drafted.tokens_s, 1),
            accepted_per_step=round(drafted.accepted, 3),
        )


def measure_useless(table: BarTable, driver: Driver, prompts: Prompts, context: int, steps: int) -> None:
    losses: list[float] = []
    more: dict[str, float] = {}
    for rows in (1, 16):
        batch = prompts.make(rows, max(8, context - steps))
        params = [SamplingParams(temperature=1.0, seed=i, max_tokens=2 * steps + 256) for i in range(rows)]
        decode(driver, None, batch, params, 2)
        plain = [decode(driver, None, batch, params, steps).tokens_s for _ in range(2)]
        drafted = [decode(driver, NgramProposer(), batch, params, steps).tokens_s for _ in range(2)]
        losses.append(1 - max(drafted) / max(plain))
        more[f"loss_{rows}"] = round(losses[-1], 4)
    table.line("loss_when_useless", max(losses), **more)


def measure_gpu(table: BarTable, shape_name: str, drafts: int, settings: dict[str, Any]) -> dict[str, Any]:
    shape = SHAPES[shape_name]
    full_size = shape_name != "tiny"
    context, steps = (1024, 96) if full_size else (48, 12)
    with tempfile.TemporaryDirectory() as directory:
        model_dir = Path(directory)
        (model_dir / "config.json").write_text(json.dumps(shape.config))
        options = {
            "load_format": "dummy",
            "chunk_tokens": max(shape.chunk_tokens, 64 * 5),
            "block_size": shape.block_size,
            "max_seqs": 64,
            "max_model_len": 3072 if full_size else 1024,
            "speculation": "ngram",
            "speculation_tokens": drafts,
        } | settings
        with running(EngineConfig(model_dir=model_dir, **options)) as driver:
            prompts = Prompts(driver.engine.vocab_size)
            measure_cost(table, driver, prompts, context)
            measure_verify(table, driver, prompts, context, steps)
            measure_useless(table, driver, prompts, context, 4 * steps)
    return options


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=METRICS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--shape", choices=SHAPES, help="measure verify steps of this shape instead of tasks (default on a GPU)"
    )
    parser.add_argument("--drafts", type=int, default=4, metavar="K", help="drafts per row and step")
    parser.add_argument("--runs", type=int, default=3, help="runs of each task, with and without drafts")
    parser.add_argument("--engine", metavar="NAME=VALUE", nargs="+", default=[], help="fields of EngineConfig")
    args = parser.parse_args(argv)
    settings = {"device": args.device} | engine_settings(args.engine)
    shape = args.shape or ("llama-3.1-8b" if args.device == "cuda" else None)
    table = BarTable({}, [], bars=args.drafts == 4 and shape != "tiny")
    if shape is None:
        measure_tasks(table, args.drafts, args.runs, settings)
        measure_draft_model(table, args.drafts, args.runs, settings)
    else:
        settings = measure_gpu(table, shape, args.drafts, settings)
    report.write(
        args.out,
        "speculation",
        table.metrics,
        "torch",
        "triton",
        rows=table.rows,
        drafts=args.drafts,
        shape=shape,
        engine=settings,
    )


if __name__ == "__main__":
    main()
