"""`Constraint`: grammar, allowed tokens and bad words together, drafts, the end of an answer, and copies."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.grammar import compiler as grammars
from common.grammar.compiler import CompiledGrammar, GrammarTokenizer, compile_grammar
from common.types import Grammar, SamplingParams, ValidRequest
from engine.sampling.constraint import Constraint, needs_constraint
from engine.sampling.mask_jobs import MaskJob, run_jobs
from tests.rigs.engine import grammar_shapes as shapes
from tests.rigs.engine.grammar_cases import PREFIX, WIDE, behind_prefix
from tests.rigs.engine.grammar_shapes import ambiguous

VOCAB, EOS = 49152, 2


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> GrammarTokenizer:
    return GrammarTokenizer(smollm2_dir, eos_ids=(EOS,), vocab_size=VOCAB)


def allowed(mask: np.ndarray) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def constraint(
    params: SamplingParams, grammar: CompiledGrammar | None = None, output: tuple[int, ...] = (), vocab: int = VOCAB
) -> Constraint:
    rules = None if grammar is None else grammar.grammar
    request = ValidRequest("r", "m", (3, 4), params, grammar=rules)
    assert needs_constraint(request)
    return Constraint(request, vocab, grammar=grammar, output=output)


WORDS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)


@given(WORDS, st.sets(st.integers(0, 39), max_size=6), st.lists(st.integers(0, 5), max_size=8))
def test_bad_words_and_allowed_tokens(
    words: tuple[tuple[int, ...], ...], allowed_ids: set[int], output: list[int]
) -> None:
    params = SamplingParams(bad_words=(*words, (39,)), allowed_token_ids=tuple(allowed_ids))
    rules = constraint(params, vocab=40)
    context = [3, 4]
    for token in [*output, -1]:
        want = (allowed_ids or set(range(40))) - {
            w[-1] for w in (*words, (39,)) if context[len(context) - len(w) + 1 :] == [*w[:-1]]
        }
        assert allowed(rules.mask()) & set(range(40)) == want
        if token not in want:
            break
        rules.advance(token)
        context.append(token)


def test_a_grammar_that_may_end_allows_stop_tokens(tokenizer: GrammarTokenizer) -> None:
    grammar = compile_grammar(tokenizer, grammars.from_regex("a+", field="f"))
    [a] = tokenizer.get().tokenize_str("a")
    rules = constraint(SamplingParams(stop_token_ids=(EOS, 77)), grammar)
    assert not {EOS, 77} & allowed(rules.mask())
    rules.advance(a)
    assert {EOS, 77, a} <= allowed(rules.mask())
    assert not rules.is_complete
    with_min_tokens = constraint(SamplingParams(stop_token_ids=(EOS,), min_tokens=2), grammar, (a,))
    assert EOS not in allowed(with_min_tokens.mask())
    with_min_tokens.advance(a)
    assert EOS in allowed(with_min_tokens.mask())
    without_stop_tokens = constraint(SamplingParams(), grammar, (a,))
    assert EOS not in allowed(without_stop_tokens.mask())


def test_a_grammar_that_can_only_end_is_complete_despite_min_tokens(tokenizer: GrammarTokenizer) -> None:
    grammar = compile_grammar(tokenizer, grammars.from_choice(["ab"], field="f"))
    ids = tokenizer.get().tokenize_str("ab")
    for params in (SamplingParams(stop_token_ids=(EOS,)), SamplingParams(min_tokens=9, stop_token_ids=(EOS,))):
        rules = constraint(params, grammar)
        for token in ids:
            assert not rules.is_complete
            rules.advance(token)
        assert rules.is_complete


def test_a_forbidden_token_raises(tokenizer: GrammarTokenizer) -> None:
    grammar = compile_grammar(tokenizer, grammars.from_choice(["ab"], field="f"))
    with pytest.raises(InvalidRequest):
        constraint(SamplingParams(), grammar).advance(EOS)
    with pytest.raises(InvalidRequest):
        constraint(SamplingParams(), grammar, (EOS,))
    nothing = constraint(SamplingParams(allowed_token_ids=(9,)), grammar)
    with pytest.raises(InvalidRequest):
        nothing.advance(9)


def test_a_grammar_with_too_many_states_is_an_invalid_request(tokenizer: GrammarTokenizer) -> None:
    grammar = compile_grammar(tokenizer, grammars.from_lark_or_gbnf('start: "a" start', field="f"))
    rules = constraint(SamplingParams(), grammar)

    def follow() -> None:
        for _ in range(100_000):
            rules.advance(min(allowed(rules.mask()), default=0))

    with pytest.raises(InvalidRequest, match="f cannot be followed") as error:
        follow()
    assert error.value.field == "f"


@pytest.mark.parametrize(
    ("grammar", "ends_soon"),
    [
        (grammars.from_json_schema({"type": "object", "additionalProperties": {"type": "integer"}}, field="f"), False),
        (grammars.from_regex("[ab]{3}c*", field="f"), True),
    ],
)
def test_masks_trims_drafts_and_keeps_the_state(tokenizer: GrammarTokenizer, grammar: Grammar, ends_soon: bool) -> None:
    compiled = compile_grammar(tokenizer, grammar)
    params = SamplingParams(bad_words=((7, 8),), stop_token_ids=(EOS,))
    rng, ended = random.Random(1), 0
    for _ in range(5):
        rules, plain = (constraint(params, compiled) for _ in range(2))
        for _step in range(12):
            draft: list[int] = []
            ahead = plain.copy()
            while len(draft) < 4 and not ahead.is_complete:
                choices = sorted(allowed(ahead.mask()) - {EOS})
                draft.append(rng.choice(choices))
                ahead.advance(draft[-1])
            accepted, masks = rules.masks([*draft, EOS, EOS])
            walk = plain.copy()
            for token, mask in zip(draft, masks, strict=False):
                assert allowed(mask) == allowed(walk.mask())
                walk.advance(token)
            ends = not walk.is_complete and EOS in allowed(walk.mask())
            assert accepted == [*draft, *([EOS] if ends else [])], "a stop token is a draft, and the last one"
            assert len(masks) == len(accepted) + 1
            if not walk.is_complete:
                assert allowed(masks[len(draft)]) == allowed(walk.mask())
            ended += ends
            assert allowed(rules.mask()) == allowed(plain.mask())
            if not draft:
                break
            rules.advance(draft[0])
            plain.advance(draft[0])
            assert rules.is_complete == plain.is_complete
            if rules.is_complete:
                break
    assert ended > 0 or not ends_soon


def test_drafts_end_at_a_forbidden_token(tokenizer: GrammarTokenizer) -> None:
    compiled = compile_grammar(tokenizer, grammars.from_regex("[ab]{4}", field="f"))
    a, b, x = (tokenizer.get().tokenize_str(c)[0] for c in "abx")
    accepted, masks = constraint(SamplingParams(), compiled).masks([a, b, x, a])
    assert accepted == [a, b]
    assert len(masks) == 3
    assert x not in allowed(masks[2])


def test_a_copy_is_independent(tokenizer: GrammarTokenizer) -> None:
    compiled = compile_grammar(tokenizer, grammars.from_regex("a[bc]", field="f"))
    a, b, c = (tokenizer.get().tokenize_str(x)[0] for x in "abc")
    first = constraint(SamplingParams(), compiled, (a,))
    second = first.copy()
    first.advance(b)
    assert {b, c} <= allowed(second.mask())
    second.advance(c)
    assert first.is_complete
    assert second.is_complete


def follow(rules: Constraint, tokens: list[int]) -> None:
    for token in tokens:
        rules.masks([token, token])
        rules.advance(token)


def test_a_slow_mask_fails_only_its_own_sequence(tokenizer: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mask of this grammar takes 200 ms or more, of the others 5 ms at most."""
    slow = compile_grammar(tokenizer, Grammar(ambiguous(500), "guided"))
    other = compile_grammar(tokenizer, grammars.json_object(field="f"))
    monkeypatch.setattr("engine.sampling.constraint.MASK_LIMIT_S", 0.06)
    bomb, good = (constraint(SamplingParams(), compiled) for compiled in (slow, other))
    with pytest.raises(InvalidRequest, match=r"guided is too costly: finding its next token takes more than") as error:
        follow(bomb, tokenizer.get().tokenize_str("abcabc"))
    assert error.value.field == "guided"
    follow(good, tokenizer.get().tokenize_str('{"a": 1}'))
    assert good.is_complete


def test_a_grammar_with_a_far_too_slow_mask_is_given_up(
    tokenizer: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = compile_grammar(tokenizer, Grammar(ambiguous(300), "guided"))
    monkeypatch.setattr("engine.sampling.constraint.MASK_LIMIT_S", 0.001)
    first = constraint(SamplingParams(), slow)
    with pytest.raises(InvalidRequest, match="too costly"):
        follow(first, tokenizer.get().tokenize_str("abcabc"))
    with pytest.raises(InvalidRequest, match="too costly"):
        constraint(SamplingParams(), slow)


@pytest.mark.parametrize("name", WIDE)
def test_an_answer_may_follow_one_of_a_thousand_schemas(tokenizer: GrammarTokenizer, name: str) -> None:
    compiled = compile_grammar(tokenizer, Grammar(shapes.ORDINARY[name](), "f"))
    for text in WIDE[name]:
        rules = constraint(SamplingParams(stop_token_ids=(EOS,)), compiled)
        for token in tokenizer.get().tokenize_str(text):
            rules.advance(token)
        assert rules.is_complete or EOS in allowed(rules.mask())


def test_a_token_is_cancelled_at_its_limit(tokenizer: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask after the literal takes 10 s."""
    monkeypatch.setattr("engine.sampling.constraint.MASK_LIMIT_S", 0.2)
    compiled = compile_grammar(tokenizer, Grammar(behind_prefix(1500), "guided"))
    rules = constraint(SamplingParams(), compiled)
    before = time.process_time()
    with pytest.raises(InvalidRequest, match="guided is too costly"):
        follow(rules, tokenizer.get().tokenize_str(f"{PREFIX}abcabcabc"))
    assert time.process_time() - before < 6


def test_the_interpreter_goes_on_while_a_token_is_followed(tokenizer: GrammarTokenizer) -> None:
    compiled = compile_grammar(tokenizer, Grammar(behind_prefix(300), "guided"))
    rules = constraint(SamplingParams(), compiled)
    ended, longest, spent = threading.Event(), 0.0, 0.0

    def work() -> None:
        nonlocal longest, spent
        for token in tokenizer.get().tokenize_str(f"{PREFIX}abcabcab"):
            before = time.process_time()
            rules.advance(token)
            spent = max(spent, time.process_time() - before)
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    gaps = []
    while not ended.wait(0.001):
        before = time.monotonic()
        sum(range(100))
        gaps.append(time.monotonic() - before)
    thread.join()
    assert spent > 0.05
    assert len(gaps) > 20
    assert sorted(gaps)[len(gaps) * 9 // 10] < 0.01


def test_a_late_constraint_is_busy_and_takes_the_same_token_later(
    tokenizer: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compile_grammar(tokenizer, grammars.from_regex("[ab]{4}", field="f"))
    a, b = (tokenizer.get().tokenize_str(x)[0] for x in "ab")
    rules, go_on = constraint(SamplingParams(), compiled), threading.Event()
    take = Constraint._take
    monkeypatch.setattr(Constraint, "_take", lambda *args: (go_on.wait(30), take(*args))[1])
    before = allowed(rules.mask())
    [job] = rules.start([a])
    run_jobs([job], 0.01, 1.0)
    assert rules.busy
    assert not job.done
    assert allowed(rules.mask()) == before
    assert rules.masks([a, b])[0] == []
    go_on.set()
    while rules.busy:
        time.sleep(0.001)
    assert rules.start([a]) == []
    rules.advance(a)
    plain = constraint(SamplingParams(), compiled, (a,))
    assert allowed(rules.mask()) == allowed(plain.mask())
    [job] = rules.start([a])  # the token that is sampled the second time may be another one
    run_jobs([job], 5.0, 1.0)
    rules.advance(b)
    plain.advance(b)
    assert allowed(rules.mask()) == allowed(plain.mask())
    assert rules.masks([a])[0] == plain.masks([a])[0] == [a]


def test_jobs_do_not_wait_for_a_slow_one() -> None:
    go_on = threading.Event()
    slow = [MaskJob(lambda _: (go_on.wait(30), None)[1], lambda: None) for _ in range(3)]
    quick = [MaskJob(lambda _: None, lambda: None) for _ in range(20)]
    began = time.monotonic()
    run_jobs([*slow, *quick], 0.1, 1.0)
    assert time.monotonic() - began < 20  # the slow ones take 30 s
    while not all(job.done for job in quick):
        time.sleep(0.001)
    assert not any(job.done for job in slow)
    go_on.set()
