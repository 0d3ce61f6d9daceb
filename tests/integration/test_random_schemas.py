"""A hundred random JSON schemas: each answer that ends by itself is valid JSON of its schema, also with preemptions."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from common.grammar import compiler as grammars
from common.types import FinishReason, Grammar, SamplingParams
from engine.llm import LLM, Completion
from engine.sampling.constraint import Constraint
from engine.schedule.outputs import StepResult
from tests.rigs.engine.grammar_shapes import ambiguous

COUNT = 100
MAX_TOKENS = 24
PROMPTS = ["JSON:", "The answer is", "{", "Tell me:", "A list of"]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["integer", "boolean", "enum", "string", "number", "null", "const", "anyOf"]
    kind = rng.choice([*kinds, *(["object", "array", "object"] if depth < 2 else [])])
    low = rng.randrange(-9, 9)
    made: dict[str, dict[str, Any]] = {
        "integer": {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 99)},
        "number": {"type": "number", "minimum": low, "maximum": low + 2},
        "string": {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 7)},
        "enum": {"enum": rng.sample(["a", 1, None, True, "two words", 2.5], 3)},
        "const": {"const": rng.choice(["x", 7, False])},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
    }
    if kind in made:
        return made[kind]
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, 2) for _ in range(2)]}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": rng.randrange(2), "maxItems": 3}
    names = rng.sample(["a", "b", "c", "name"], rng.randrange(1, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": names[: rng.randrange(1, len(names) + 1)],
        "additionalProperties": False,
    }


def answers(llm: LLM, schemas: list[dict[str, Any]]) -> list[Completion]:
    return llm.generate(
        [PROMPTS[i % len(PROMPTS)] for i in range(len(schemas))],
        [SamplingParams(temperature=1.0 if i % 2 else 0.0, seed=i, max_tokens=MAX_TOKENS) for i in range(len(schemas))],
        # Any white space: answers are longer then, so that sequences are preempted.
        grammar=[grammars.from_json_schema(schema, field="f", any_space=True) for schema in schemas],
        show_progress=False,
    )


def broken(done: list[Completion], schemas: list[dict[str, Any]]) -> list[str]:
    """Answers that ended by themselves and do not match their schema."""
    found: list[str] = []
    for completion, schema in zip(done, schemas, strict=True):
        if completion.finish is FinishReason.STOP:
            try:
                jsonschema.Draft202012Validator(schema).validate(json.loads(completion.text))
            except (ValueError, jsonschema.ValidationError):
                found.append(f"{completion.text!r} for {schema}")
    return found


@pytest.fixture(scope="module")
def llm(smollm2_dir: Path) -> LLM:
    return LLM(smollm2_dir, threads=2, num_blocks=40, max_model_len=64, block_size=4, max_seqs=24)


@pytest.mark.long
def test_every_finished_answer_is_valid(llm: LLM) -> None:
    rng = random.Random(5)
    schemas = [random_schema(rng) for _ in range(COUNT)]
    done = answers(llm, schemas)
    assert not broken(done, schemas)
    assert {c.finish for c in done} <= {FinishReason.STOP, FinishReason.LENGTH}
    assert sum(c.finish is FinishReason.STOP for c in done) >= COUNT * 3 // 4
    assert llm.engine.scheduler.stats().preemptions > 0
    assert llm.engine.counters.failed_sequences == 0


def test_without_masks_answers_are_broken(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: without masks the same engine gives invalid answers."""
    monkeypatch.setattr(Constraint, "mask", lambda self: self._always)
    monkeypatch.setattr(Constraint, "masks", lambda self, draft: (list(draft), self._always[None]))
    monkeypatch.setattr(Constraint, "advance", lambda self, token: None)
    rng = random.Random(5)
    schemas = [random_schema(rng) for _ in range(4)]
    done = answers(llm, schemas)
    assert all(c.finish is FinishReason.LENGTH or broken([c], [s]) for c, s in zip(done, schemas, strict=True))


def test_each_child_follows_the_grammar(llm: LLM) -> None:
    grammar = grammars.from_json_schema({"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2}, field="f")
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=MAX_TOKENS, n=3)
    done = llm.generate(["JSON:"], params, grammar=grammar, show_progress=False)
    assert sorted(c.child for c in done) == [0, 1, 2]
    schema = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2}
    assert not broken(done, [schema] * 3)
    assert len({c.text for c in done}) > 1
    assert all(c.text.lstrip()[:1] == "[" for c in done)


def test_a_slow_mask_fails_only_its_own_sequence_of_a_batch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.sampling.constraint.MASK_LIMIT_S", 0.06)
    bomb, good = Grammar(ambiguous(500), "guided"), grammars.from_regex("[a-z]{4}", field="f")
    done = llm.generate(["a", "b", "c"], SamplingParams(max_tokens=8), grammar=[good, bomb, good], show_progress=False)
    assert [completion.finish for completion in done] == [FinishReason.STOP, FinishReason.ERROR, FinishReason.STOP]


def test_a_late_mask_delays_only_its_own_sequence(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence with a mask that takes two seconds joins later steps, and its answer is the same."""
    schema = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 3, "maxItems": 3}
    late, good = grammars.from_json_schema(schema, field="late"), grammars.from_regex("[a-z]{12}", field="f")
    for module in ("schedule.stepper", "sampling.constraint"):  # no other mask is late on a busy machine
        monkeypatch.setattr(f"engine.{module}.STEP_WAIT_S", 0.5)
    prompts, params = ["JSON:", "b", "c"], SamplingParams(max_tokens=40)
    usual = llm.generate(prompts, params, grammar=[late, good, good], show_progress=False)
    taken, ended, waited = Counter[str](), dict[str, float](), threading.Event()
    take = Constraint._take

    def slow_take(self: Constraint, *args: Any) -> Any:
        taken[str(self._field)] += 1
        if self._field == "late" and taken["late"] in (2, 5):
            waited.wait(2.0)
        return take(self, *args)

    def on_step(result: StepResult) -> None:
        for output in result.outputs:
            if output.ended:
                ended[output.seq.request_id] = time.monotonic()

    monkeypatch.setattr(Constraint, "_take", slow_take)
    notify = llm.engine._stepper._notify
    monkeypatch.setattr(llm.engine._stepper, "_notify", lambda result, then: (on_step(result), notify(result, then))[1])
    before = llm.engine.scheduler.stats().preemptions
    done = llm.generate(prompts, params, grammar=[late, good, good], show_progress=False)
    assert [completion.text for completion in done] == [completion.text for completion in usual]
    assert llm.engine.scheduler.stats().preemptions == before + 2
    first, second, third = (when for _, when in sorted(ended.items()))
    assert first > max(second, third) + 0.3


@pytest.mark.parametrize("n", [1, 3])
def test_late_masks_change_no_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """With masks that are late at random, also those of first tokens, all answers stay the same."""
    rng, take = random.Random(3), Constraint._take
    schemas = [random_schema(rng) for _ in range(12)]
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=MAX_TOKENS, n=n) for i in range(len(schemas))]
    rules = [grammars.from_json_schema(schema, field="f") for schema in schemas]
    usual = llm.generate(["JSON:"] * len(schemas), params, grammar=rules, show_progress=False)
    monkeypatch.setattr(
        Constraint, "_take", lambda *args: (time.sleep(0.05 if rng.random() < 0.1 else 0), take(*args))[1]
    )
    before, failed = llm.engine.scheduler.stats().preemptions, llm.engine.counters.failed_sequences
    done = llm.generate(["JSON:"] * len(schemas), params, grammar=rules, show_progress=False)
    assert llm.engine.scheduler.stats().preemptions > before
    assert [completion.text for completion in done] == [completion.text for completion in usual]
    assert llm.engine.counters.failed_sequences == failed
