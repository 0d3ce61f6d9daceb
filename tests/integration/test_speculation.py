"""Speculation changes no token, with any proposer, sampling parameters, batch or preemption."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from common.grammar.compiler import from_json_schema
from common.types import FinishReason, SamplingParams
from engine.engine import Engine
from engine.llm import LLM, Completion
from engine.sampling.sampler import SampleRow
from engine.schedule.scheduler import ScheduledSequence
from engine.schedule.sequence import Sequence as EngineSequence
from engine.schedule.stepper import LaunchCallback
from engine.speculation import draft_loop
from engine.speculation.controller import AlwaysDraft
from engine.speculation.proposer import DraftBatch, Proposer
from engine.step.step_tensors import LaunchedStep
from tests.rigs.engine.draft_models import BYTES, byte_tokenizer, draft_settings, tiny_target
from tests.rigs.engine.known_answer_proposer import Guesses

BLOCK, VOCAB = 4, 48
PROMPTS = 50


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("tiny"), vocab=VOCAB)


@pytest.fixture(scope="module")
def drafting(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Engine settings of each kind of proposer."""
    return draft_settings(tiny_dir, tmp_path_factory.mktemp("drafts"), vocab=VOCAB)


def make(directory: Path, **config: Any) -> LLM:
    defaults: dict[str, Any] = {"block_size": BLOCK, "num_blocks": 400, "chunk_tokens": 64, "threads": 1}
    return LLM(directory, **(defaults | config))


def mixed() -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests with repetitive prompts, of all lengths and kinds of sampling."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "logprobs": 2},
        {"temperature": 0.6, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 4, "min_p": 0.05, "logprobs": 0},
        {"temperature": 0.5, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
        {"temperature": 0.0, "logit_bias": ((5, 2.0), (7, 1.5)), "min_tokens": 9, "stop_token_ids": tuple(range(40))},
        {"temperature": 0.0, "frequency_penalty": 0.3, "logprobs": 1},
        {"temperature": 0.4, "stop_token_ids": (11, 12, 13)},
        {"temperature": 0.8, "allowed_token_ids": tuple(range(5, 12)), "logprobs": 1},
        {"temperature": 0.5, "bad_words": ((7,), (9, 10), (11, 12, 13))},
    ]
    random = np.random.default_rng(3)
    prompts = []
    for i in range(PROMPTS):
        motif = random.integers(3, VOCAB, 1 + i % 7).tolist()
        prompts.append((motif * 12)[: 1 + (i * 5) % 37])
    params = [
        SamplingParams(**({"max_tokens": 10 + i % 23, "seed": 7 * i} | kinds[i % len(kinds)])) for i in range(PROMPTS)
    ]
    return prompts, params


@pytest.fixture(scope="module")
def expected(tiny_dir: Path) -> list[Completion]:
    """Completions without speculation."""
    return make(tiny_dir).generate(*mixed(), ignore_eos=True, show_progress=False)


def check_equal(got: Sequence[Completion], wanted: Sequence[Completion]) -> None:
    assert [c.ids for c in got] == [c.ids for c in wanted]
    assert [c.finish for c in got] == [c.finish for c in wanted]
    for a, b in zip(got, wanted, strict=True):
        assert [t.index for t in a.tokens] == list(range(len(a.tokens)))
        assert [t.logprob for t in a.tokens] == pytest.approx([t.logprob for t in b.tokens], abs=1e-4)
        assert [[x.token for x in t.top] for t in a.tokens] == [[x.token for x in t.top] for t in b.tokens]


def check_clean(engine: Engine) -> None:
    """Checks that no block is in use, and that drafts were accepted and rejected."""
    engine.pool.check_integrity()
    counts = engine.pool.counts()
    assert counts.leased == counts.quarantined == 0
    assert engine.speculator is not None
    stats = engine.speculator.stats
    assert 0 < stats.accepted < stats.proposed
    assert stats.failures == 0


@pytest.mark.parametrize(
    ("proposer", "tokens", "overlap"),
    [
        ("ngram", 4, False),
        ("ngram", 1, True),
        ("suffix", 7, True),
        ("draft_model", 4, True),
        ("draft_model", 1, False),
        ("eagle", 3, True),
        ("eagle3", 7, False),
    ],
)
def test_no_token_changes(
    tiny_dir: Path,
    expected: list[Completion],
    drafting: dict[str, dict[str, Any]],
    proposer: str,
    tokens: int,
    overlap: bool,
) -> None:
    llm = make(tiny_dir, **drafting[proposer], speculation_tokens=tokens, overlap=overlap)
    check_equal(llm.generate(*mixed(), ignore_eos=True, show_progress=False), expected)
    check_clean(llm.engine)
    assert llm.engine.counters.decode_tokens == sum(len(c.ids) - 1 for c in expected)


@pytest.mark.parametrize(
    ("proposer", "overlap"),
    [
        pytest.param("ngram", False, marks=pytest.mark.long),
        ("ngram", True),
        ("suffix", False),
        pytest.param("draft_model", True, marks=pytest.mark.long),
        pytest.param("eagle", False, marks=pytest.mark.long),
        ("eagle3", True),
    ],
)
def test_preemption_changes_no_token(
    tiny_dir: Path, expected: list[Completion], drafting: dict[str, dict[str, Any]], proposer: str, overlap: bool
) -> None:
    llm = make(tiny_dir, **drafting[proposer], num_blocks=40, overlap=overlap)
    llm.engine.set_proposer(llm.engine.configured_proposer(), AlwaysDraft(4))
    check_equal(llm.generate(*mixed(), ignore_eos=True, show_progress=False), expected)
    assert llm.engine.scheduler.stats().preemptions > 0
    check_clean(llm.engine)


@pytest.mark.parametrize("proposer", ["ngram", "draft_model", pytest.param("eagle", marks=pytest.mark.long), "eagle3"])
def test_rejection_sampling_changes_no_greedy_token(
    tiny_dir: Path, expected: list[Completion], drafting: dict[str, dict[str, Any]], proposer: str
) -> None:
    """Sampled requests still end correctly and have all log-probabilities."""
    llm = make(tiny_dir, **drafting[proposer], speculation_accept="rejection")
    llm.engine.set_proposer(llm.engine.configured_proposer(), AlwaysDraft(4))
    prompts, params = mixed()
    got = llm.generate(prompts, params, ignore_eos=True, show_progress=False)
    greedy = [i for i, p in enumerate(params) if p.greedy]
    check_equal([got[i] for i in greedy], [expected[i] for i in greedy])
    for completion, p in zip(got, params, strict=True):
        assert len(completion.ids) == p.max_tokens or completion.ids[-1] in p.stop_token_ids
        assert all((token.logprob is not None) == (p.logprobs is not None) for token in completion.tokens)
    assert any(got[i].ids != expected[i].ids for i in range(PROMPTS) if i not in greedy), (
        "different noise gives different tokens"
    )
    check_clean(llm.engine)


@pytest.mark.parametrize("proposer", ["draft_model", "eagle3"])
def test_draft_kv_follows_its_blocks(tiny_dir: Path, drafting: dict[str, dict[str, Any]], proposer: str) -> None:
    """To children, in an 8-bit cache, and to host memory and back."""
    prompts, params = (part[:20] for part in mixed())
    params = [dataclasses.replace(p, n=1 + i % 3) for i, p in enumerate(params)]
    wanted = make(tiny_dir, kv_dtype="fp8_e4m3").generate(prompts, params, ignore_eos=True, show_progress=False)
    llm = make(tiny_dir, **drafting[proposer], kv_dtype="fp8_e4m3", num_blocks=45, host_cache=4 << 20, checksums=True)
    llm.engine.set_proposer(llm.engine.configured_proposer(), AlwaysDraft(4))
    got = llm.generate(prompts, params, ignore_eos=True, show_progress=False)
    assert [c.ids for c in got] == [c.ids for c in wanted]
    stats = llm.engine.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.fully_restored > 0
    check_clean(llm.engine)
    llm.engine.close()


ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["salt", "pepper"]}, "hot": {"type": "boolean"}},
    "required": ["name", "hot"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {"type": "array", "items": ITEM, "minItems": 2, "maxItems": 3}


class Counting:
    """Wraps a proposer and counts the drafts that constraints trim.

    Args:
        answers: expected output by prompt. Two of three proposals begin with its tokens, because a random model hardly
            ever drafts what a grammar allows.
    """

    def __init__(self, proposer: Proposer, answers: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        self.name, self._proposer, self.trimmed = proposer.name, proposer, 0
        self._answers, self._proposals = answers, 0
        self.new_state, self.expects_drafts, self.on_verified = (
            proposer.new_state,
            proposer.expects_drafts,
            proposer.on_verified,
        )

    def propose(self, seqs: Sequence[EngineSequence], states: Sequence[Any], limits: Sequence[int]) -> DraftBatch:
        drafts = self._proposer.propose(seqs, states, limits)
        for seq, row, length in zip(seqs, drafts.tokens, drafts.lengths.tolist(), strict=True):
            self._proposals += 1
            num_known = min(length, self._proposals % 3 * 2)
            known = self._answers[seq.request.prompt_ids][seq.num_output :][:num_known]
            row[: len(known)] = known
            if seq.constraint is not None:
                self.trimmed += length - len(seq.constraint.masks(row[:length].tolist())[0])
        return drafts


@pytest.fixture(scope="module")
def json_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_target(tmp_path_factory.mktemp("json"), vocab=BYTES)
    assert byte_tokenizer(directory) == BYTES
    return directory


@pytest.fixture(scope="module")
def json_drafting(json_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return draft_settings(json_dir, tmp_path_factory.mktemp("json-drafts"), vocab=BYTES)


def verified_under_constraints(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list that gets, for each chain verified under a constraint, whether the constraint allows all of it."""
    verified: list[bool] = []
    launch = llm.engine.runner.launch

    def watched(scheduled: Sequence[ScheduledSequence], on_layer: LaunchCallback | None = None) -> LaunchedStep:
        for entry in scheduled:
            if entry.drafts and entry.seq.constraint is not None:
                verified.append(entry.seq.constraint.masks(entry.drafts)[0] == list(entry.drafts))
        return launch(scheduled, on_layer)

    monkeypatch.setattr(llm.engine.runner, "launch", watched)
    return verified


def grammatical_prompts() -> list[list[int]]:
    return [[40 + i, 41, 42, 41, 42] for i in range(12)]


def grammatical(llm: LLM) -> list[Completion]:
    """Completions of greedy, sampled and penalised requests, most of them with a JSON schema."""
    prompts = grammatical_prompts()
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "logprobs": 1},
        {"temperature": 0.7, "frequency_penalty": 0.1},
    ]
    no_space = tuple(
        (token, -30.0) for token in llm.encode(" \n\t\r")
    )  # otherwise a random model writes mostly white space
    params = [
        SamplingParams(**({"seed": i, "max_tokens": 96, "logit_bias": no_space} | kinds[i % 3])) for i in range(12)
    ]
    grammar = from_json_schema(SCHEMA, field="response_format")
    return llm.generate(prompts, params, grammar=[None if i % 4 == 3 else grammar for i in range(12)])


@pytest.fixture(scope="module")
def followed(json_dir: Path) -> list[Completion]:
    """Completions without speculation."""
    return grammatical(make(json_dir))


@pytest.mark.parametrize(
    ("proposer", "blind"),
    [
        ("ngram", True),
        ("suffix", True),
        ("draft_model", False),
        ("draft_model", True),
        pytest.param("eagle", True, marks=pytest.mark.long),
        ("eagle3", False),
    ],
)
def test_schemas_are_followed_with_every_proposer(
    json_dir: Path,
    followed: list[Completion],
    json_drafting: dict[str, dict[str, Any]],
    proposer: str,
    blind: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """blind: drafts are drawn without masks, like those of a captured draft loop."""
    if blind:
        monkeypatch.setattr(
            draft_loop,
            "_row",
            lambda seq, drafts: SampleRow(
                seq.request.sampling, seq.tokens, seq.prompt_len, seq.child, drafts=drafts.tolist()
            ),
        )
    llm = make(json_dir, **json_drafting[proposer])
    verified = verified_under_constraints(llm, monkeypatch)
    answers = {tuple(p): answer.ids for p, answer in zip(grammatical_prompts(), followed, strict=True)}
    counting = Counting(llm.engine.configured_proposer(), answers)
    llm.engine.set_proposer(counting, AlwaysDraft(4))
    got = grammatical(llm)
    check_equal(got, followed)
    ended = [c for i, c in enumerate(got) if i % 4 != 3 and c.finish is FinishReason.STOP]
    assert len(ended) >= 3
    for completion in ended:
        jsonschema.validate(json.loads(completion.text), SCHEMA)
    assert counting.trimmed > 0 or not blind
    assert len(verified) > 30
    assert all(verified), "forbidden drafts are trimmed before the verify step"
    check_clean(llm.engine)


@pytest.mark.long  # the same with a byte tokenizer: test_schemas_are_followed_with_every_proposer
def test_smollm2_follows_a_schema_with_drafts(smollm2_dir: Path) -> None:
    llm = LLM(smollm2_dir, kv_memory=64 << 20, chunk_tokens=64, max_model_len=256, threads=1, speculation="ngram")
    item = {"type": "object", "properties": {"name": {"enum": ["salt", "pepper"]}, "grams": {"type": "integer"}}}
    item |= {"required": ["name", "grams"], "additionalProperties": False}
    schema = {"type": "array", "items": item, "minItems": 2, "maxItems": 3}
    grammar = from_json_schema(schema, field="response_format")
    params = [SamplingParams(temperature=t, max_tokens=60, seed=3) for t in (0.0, 0.9)]
    prompts = ["A list of spices:", "Two spices and their weight:"]
    llm.engine.set_proposer(None)
    wanted = llm.generate(prompts, params, grammar=grammar, show_progress=False)
    answers = {f"local-{3 + i}": completion.ids for i, completion in enumerate(wanted)}
    llm.engine.set_proposer(Guesses(answers, vocab=llm.engine.vocab_size, wrong=3))
    got = llm.generate(prompts, params, grammar=grammar, show_progress=False)
    check_equal(got, wanted)
    for completion in got:
        if completion.finish is FinishReason.STOP:
            assert 2 <= len(json.loads(completion.text)) <= 3
    assert any(completion.finish is FinishReason.STOP for completion in got)
    check_clean(llm.engine)
