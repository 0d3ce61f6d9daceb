"""Grammars: errors name the field and the keyword, compiled grammars are cached, and threads share the work."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.grammar import compiler as grammars
from common.grammar.compiler import GrammarCompiler, GrammarTokenizer
from common.types import Grammar


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> GrammarTokenizer:
    return GrammarTokenizer(smollm2_dir, eos_ids=(2,), vocab_size=49152)


def accepts(tokenizer: GrammarTokenizer, grammar: Grammar, text: str) -> bool:
    """Whether the grammar accepts the whole text."""
    matcher = grammars.compile_grammar(tokenizer, grammar).matcher()
    ids = tokenizer.get().tokenize_str(text)
    return all(map(matcher.consume_token, ids)) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "object", "not": {}}, '"not"'),
        ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
        ({"if": {}, "then": {}}, '"if", "then"'),
        ({"properties": {"a": {"propertyNames": {"maxLength": 3}}}}, '"propertyNames"'),
        ({"x-guidance": {"lenient": True}, "not": {}}, '"not"'),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, '"oneOf"'),
        ({"type": "string", "format": "colour"}, '"format"'),
        (False, '"not"'),
    ],
)
def test_an_unsupported_keyword_is_rejected_by_name(tokenizer: GrammarTokenizer, schema: Any, keyword: str) -> None:
    grammar = grammars.from_json_schema(schema, field="response_format.json_schema.schema")
    with pytest.raises(InvalidRequest) as refused:
        grammars.compile_grammar(tokenizer, grammar)
    assert refused.value.field == "response_format.json_schema.schema"
    assert keyword in refused.value.message


@pytest.mark.parametrize(
    "make",
    [
        lambda: grammars.from_json_schema('{"a": ', field="f"),
        lambda: grammars.from_json_schema("[1]", field="f"),
        lambda: grammars.from_json_schema({"type": "colour"}, field="f"),
        lambda: grammars.from_json_schema({"$ref": "#/nowhere"}, field="f"),
        lambda: grammars.from_regex("(?=a)b", field="f"),
        lambda: grammars.from_regex("[a-", field="f"),
        lambda: grammars.from_regex("a" * (grammars.MAX_GRAMMAR_CHARS + 1), field="f"),
        lambda: grammars.from_choice([], field="f"),
        lambda: grammars.from_choice(["a", ""], field="f"),
        lambda: grammars.from_lark("start: missing", field="f"),
        lambda: grammars.from_lark_or_gbnf("%nonsense", field="f"),
        lambda: grammars.from_lark_or_gbnf('root ::= "a" missing', field="f"),
    ],
)
def test_a_grammar_that_does_not_compile_names_its_field(tokenizer: GrammarTokenizer, make: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammars.compile_grammar(tokenizer, make())
    assert refused.value.field == "f"


LONG = grammars.MAX_GRAMMAR_CHARS + 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: grammars.from_json_schema({"type": "object", "description": "x" * LONG}, field="f"),
        lambda: grammars.from_json_schema('{"type": "object"}' + " " * LONG, field="f"),
        lambda: grammars.from_regex("a" * LONG, field="f"),
        lambda: grammars.from_choice(["a" * LONG], field="f"),
        lambda: grammars.from_lark('start: "a"' + " " * LONG, field="f"),
        lambda: grammars.from_lark_or_gbnf('start: "a"' + " " * LONG, field="f"),
        lambda: grammars.from_lark_or_gbnf('root ::= "a"' + " " * grammars.MAX_GBNF_CHARS, field="f"),
    ],
)
def test_a_grammar_that_is_too_long_is_rejected_before_it_is_compiled(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "LLMatcher", None)
    monkeypatch.setattr(grammars, "grammar_from", None)
    with pytest.raises(InvalidRequest, match="longer than"):
        make()


def test_the_length_of_a_schema_is_that_of_its_text() -> None:
    schema = {"enum": ["é" * 100] * 1000}
    assert len(grammars.from_json_schema(schema, field="f").text) > 100_000


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (grammars.json_object(field="f"), '{"a": [1, null]}', "[1]"),
        (grammars.from_json_schema({"enum": [1, "x"]}, field="f"), '"x"', '"y"'),
        (grammars.from_json_schema(True, field="f"), "[1, {}]", "[1,"),
        (grammars.from_regex("[a-c]{2}/d", field="f"), "ab/d", "abc/d"),
        (grammars.from_choice(['say "hé"', "a\nb"], field="f"), 'say "hé"', "say"),
        (grammars.from_lark('start: "a"+ b\nb: %json {"type": "integer"}', field="f"), "aa12", "aa"),
        (grammars.from_lark_or_gbnf('root ::= "x" num\nnum ::= [0-9]+', field="f"), "x42", "x"),
    ],
)
def test_each_form_accepts_its_texts(tokenizer: GrammarTokenizer, grammar: Grammar, good: str, bad: str) -> None:
    assert accepts(tokenizer, grammar, good)
    assert not accepts(tokenizer, grammar, bad)


def test_white_space_is_bounded(tokenizer: GrammarTokenizer) -> None:
    grammar = grammars.from_json_schema(grammars.JSON_OBJECT, field="f", any_space=True)
    assert accepts(tokenizer, grammar, '{\n  "a": 1\n}')
    assert not accepts(tokenizer, grammar, "{" + " " * (grammars.MAX_SPACE + 1) + "}")


def test_the_cache_is_bounded_and_keeps_recently_used_grammars(tokenizer: GrammarTokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, max_cached=2)
    first, second, third = (grammars.from_choice([c], field="f") for c in "abc")
    compiled = compiler.compile(first)
    compiler.compile(second)
    assert compiler.compile(first) is compiled
    compiler.compile(third)
    assert compiler.get_cached(first) is compiled
    assert compiler.get_cached(second) is None


def test_threads_that_ask_for_one_grammar_compile_it_once(
    tokenizer: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer)
    grammar, calls, begin = grammars.json_object(field="f"), [], threading.Barrier(4)
    inner = grammars.compile_grammar

    def counted(tokenizer: GrammarTokenizer, grammar: Grammar, **kwargs: bool) -> grammars.CompiledGrammar:
        calls.append(grammar)
        return inner(tokenizer, grammar, **kwargs)

    monkeypatch.setattr(grammars, "compile_grammar", counted)

    def work() -> None:
        begin.wait()
        compiler.compile(grammar)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_a_failure_is_not_cached_and_does_not_block(tokenizer: GrammarTokenizer) -> None:
    compiler = GrammarCompiler(tokenizer)
    bad = grammars.from_regex("[a-", field="f")
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            compiler.compile(bad)


def test_an_error_names_the_field_of_its_own_request(tokenizer: GrammarTokenizer) -> None:
    compiler = GrammarCompiler(tokenizer)
    for field in ("a", "b"):
        with pytest.raises(InvalidRequest) as refused:
            compiler.compile(grammars.from_regex("[a-", field=field))
        assert refused.value.field == field


def test_a_model_without_a_tokenizer_rejects_only_grammars(tmp_path: Path) -> None:
    compiler = GrammarCompiler(GrammarTokenizer(tmp_path, eos_ids=(0,)))
    with pytest.raises(InvalidRequest) as refused:
        compiler.compile(grammars.json_object(field="response_format"))
    assert refused.value.field == "response_format"
