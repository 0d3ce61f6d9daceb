"""Digits of numbers in generated JSON: bounded wherever a number may stand, and no double or text loses its digits."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.grammar import compiler as grammars
from common.grammar.compiler import GrammarTokenizer, compile_grammar
from common.types import Grammar, SamplingParams, ValidRequest
from engine.sampling.constraint import Constraint
from engine.sampling.digit_limits import (
    EXPONENT,
    FRACTION,
    MAX_EXPONENT,
    MAX_FRACTION,
    MAX_WHOLE,
    NO_NUMBER,
    WHOLE,
    DigitLimits,
    NumberTail,
)

VOCAB, EOS = 49152, 2


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> GrammarTokenizer:
    return GrammarTokenizer(smollm2_dir, eos_ids=(EOS,), vocab_size=VOCAB)


class _Tokens:
    """Tokens of several digits, which SmolLM2 does not have."""

    def __init__(self, *texts: bytes) -> None:
        self.texts, self.lengths = b"".join(texts), tuple(map(len, texts))


def constraint(tokenizer: GrammarTokenizer, grammar: Grammar) -> Constraint:
    request = ValidRequest("r", "m", (3, 4), SamplingParams(stop_token_ids=(EOS,)), grammar=grammar)
    return Constraint(request, VOCAB, grammar=compile_grammar(tokenizer, grammar))


def allows(rules: Constraint, token: int) -> bool:
    return bool(int(rules.mask()[token >> 5]) >> (token & 31) & 1)


def follows(tokenizer: GrammarTokenizer, grammar: Grammar, text: str) -> bool:
    """Whether the text can be generated, to its end."""
    rules = constraint(tokenizer, grammar)
    for token in tokenizer.get().tokenize_str(text):
        if rules.is_complete or not allows(rules, token):
            return False
        rules.advance(token)
    return rules.is_complete or allows(rules, EOS)


def eager(tokenizer: GrammarTokenizer, grammar: Grammar, prefer: str, start: str = "", most: int = 300) -> str:
    """Returns the text of a model that writes the characters of `prefer`, the first of them that are allowed."""
    rules, text = constraint(tokenizer, grammar), start
    for token in tokenizer.get().tokenize_str(start):
        rules.advance(token)
    ids = [tokenizer.get().tokenize_str(character)[-1] for character in prefer]
    for _ in range(most):
        if rules.is_complete or (allows(rules, EOS) and not any(allows(rules, token) for token in ids)):
            return text
        chosen = next((token for token in ids if allows(rules, token)), None)
        if chosen is None:
            return text
        rules.advance(chosen)
        text += prefer[ids.index(chosen)]
    return text


def js(schema: Any) -> Grammar:
    return grammars.from_json_schema(schema, field="f")


PLACES: dict[str, tuple[Grammar, str]] = {
    "a number": (js({"type": "number"}), ""),
    "an integer": (js({"type": "integer"}), "-"),
    "bounds": (js({"type": "number", "minimum": 0, "maximum": 1}), "0."),
    "one bound": (js({"type": "integer", "minimum": 5}), "1"),
    "multipleOf": (js({"type": "integer", "multipleOf": 5}), ""),
    "multipleOf of a number": (js({"type": "number", "multipleOf": 0.25}), ""),
    "multipleOf beside types": (js({"multipleOf": 5}), ""),
    "an array": (js({"type": "array", "items": {"type": "number"}}), "[1, "),
    "an object": (js({"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}), '{"a": '),
    "any value": (js({"type": "object"}), '{"a": [1, {"b": '),
    "anyOf": (js({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}), ""),
    "any white space": (grammars.from_json_schema(True, field="f", any_space=True), "[ "),
    "Lark around it": (grammars.from_lark('start: "x" a "]"\na: %json {"type": "number"}', field="f"), "x"),
    "a tool's arguments": (
        grammars.from_lark(
            'start: "<tool_call>\\n" a "\\n</tool_call>"\n'
            'a: %json {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],'
            ' "x-guidance": {"whitespace_flexible": false, "key_separator": ": "}}',
            field="f",
        ),
        '<tool_call>\n{"n": ',
    ),
}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("prefer", ["7.e", "7e.", "0.7"])
def test_digits_end_wherever_a_number_stands(tokenizer: GrammarTokenizer, name: str, prefer: str) -> None:
    grammar, start = PLACES[name]
    text = eager(tokenizer, grammar, prefer, start)
    written = len(text) - len(start)
    assert written <= MAX_WHOLE + 1 + MAX_FRACTION + 1 + MAX_EXPONENT
    assert written > 1 or prefer == "0.7"


def test_the_parts_have_their_own_limits(tokenizer: GrammarTokenizer) -> None:
    assert eager(tokenizer, js({"type": "number"}), "7.e") == "7" * MAX_WHOLE + "." + "7" * MAX_FRACTION + "e777"


def test_limits_do_not_touch_texts(tokenizer: GrammarTokenizer) -> None:
    for grammar, start in (
        (js({"type": "string"}), '"'),
        (js({"type": "object"}), '{"'),
        (grammars.from_regex("[0-9]+", field="f"), ""),
        (grammars.from_lark_or_gbnf('start: /[0-9]+/ "x"', field="f"), ""),
    ):
        assert len(eager(tokenizer, grammar, "7", start)) == 300 + len(start)


def test_more_digits_are_allowed_where_nothing_else_is(tokenizer: GrammarTokenizer) -> None:
    long = "1" * 60
    assert follows(tokenizer, js({"type": "string", "pattern": "^[0-9]{60}$"}), f'"{long}"')
    assert len(eager(tokenizer, js({"const": 10**50}), "0123456789")) == 50


DOUBLES = st.floats(allow_nan=False, allow_infinity=False) | st.builds(
    lambda bits: struct.unpack("<d", bits)[0], st.binary(min_size=8, max_size=8)
).filter(math.isfinite)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DOUBLES, st.integers(-(2**127), 2**128 - 1))
def test_every_double_and_wide_integer_is_possible(tokenizer: GrammarTokenizer, number: float, integer: int) -> None:
    assert follows(tokenizer, js({"type": "number"}), json.dumps(number))
    assert follows(tokenizer, js({"type": "integer"}), str(integer))


@pytest.mark.parametrize(
    "text",
    [
        "100000000000000000000",
        "1.2345678901234567e-300",
        "5e-324",
        "1.7976931348623157e+308",
        "0.0000012345678901234567",
        "123456789012345680000",
        "-0.1",
        "1E5",
        str(2**64 - 1),
    ],
)
def test_numbers_as_other_writers_have_them(tokenizer: GrammarTokenizer, text: str) -> None:
    assert follows(tokenizer, js({"type": "number"}), text)


@pytest.mark.parametrize(
    ("texts", "tail"),
    [
        ((b"12", b"345"), NumberTail(WHOLE, 5)),
        ((b'"a": -1', b"2"), NumberTail(WHOLE, 2)),
        ((b"1", b".", b"50"), NumberTail(FRACTION, 2)),
        ((b"1.5", b"e", b"+", b"10"), NumberTail(EXPONENT, 2)),
        ((b"1e", b""), NumberTail(EXPONENT, 0)),
        ((b"1, ", b"2"), NumberTail(WHOLE, 1)),
        ((b"12", b"}"), NO_NUMBER),
        ((b"1.5", b".5"), NumberTail(WHOLE, 1)),
        ((b"1", b"-2"), NumberTail(WHOLE, 1)),
        ((b"e5",), NumberTail(WHOLE, 1)),
        ((b"1", b"\xff<|im_end|>"), NO_NUMBER),
    ],
)
def test_the_number_at_the_end_of_an_output(texts: tuple[bytes, ...], tail: NumberTail) -> None:
    limits: Any = DigitLimits(_Tokens(*texts), 1)  # type: ignore[arg-type]
    found = NO_NUMBER
    for token in range(len(texts)):
        found = limits.after(found, token)
    assert found == tail


def test_tokens_of_several_digits_stay_within_the_limit() -> None:
    limits = DigitLimits(_Tokens(b"7", b"77", b"777", b",", b"e", b"a", b'"', b"77,"), 1)  # type: ignore[arg-type]
    number, text = np.array([0b10011111], dtype=np.int32), np.array([0b10111111], dtype=np.int32)

    def left(mask: np.ndarray, digits: int, part: int = WHOLE, *, may_end: bool = False) -> set[int]:
        bits = int(limits.limited(mask, NumberTail(part, digits), may_end=may_end)[0])
        return {token for token in range(8) if bits >> token & 1}

    assert left(number, MAX_WHOLE - 3) == {0, 1, 2, 3, 4, 7}
    assert left(number, MAX_WHOLE - 2) == {0, 1, 3, 4, 7}
    assert left(number, MAX_WHOLE - 1) == {0, 3, 4}
    assert left(number, MAX_WHOLE) == {3, 4}
    assert left(number, MAX_EXPONENT, EXPONENT) == {3, 4}
    assert left(text, MAX_WHOLE) == {0, 1, 2, 3, 4, 5, 7}
    only_digits = np.array([0b111], dtype=np.int32)
    assert left(only_digits, MAX_WHOLE) == {0, 1, 2}
    assert left(only_digits, MAX_WHOLE, may_end=True) == set()
