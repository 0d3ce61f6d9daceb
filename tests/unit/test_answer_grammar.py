"""Grammars of whole answers: which texts they accept, and that the parsers read the accepted texts."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.grammar import compiler as g
from common.grammar.compiler import GrammarCompiler, GrammarTokenizer
from common.types import Grammar
from gateway.text.answer_grammar import AnswerGrammarBuilder
from gateway.text.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningSection
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tools.arguments import TaggedArguments, json_types
from gateway.text.tools.format import AnswerFormat, Function, ToolCall, ToolFormat, assemble
from gateway.text.tools.json_formats import HermesFormat, MistralFormat
from gateway.text.tools.known_formats import DEEPSEEK_V3, GLM_45, KIMI_K2
from gateway.text.tools.marked import MarkedFormat
from gateway.text.tools.pythonic import PythonicFormat
from tests.rigs.tool_formats import ROWS as ALL_ROWS
from tests.rigs.tool_formats import FormatRow

#: The formats with grammars of calls only. An AnswerFormat has a grammar of the whole answer.
ROWS = [row for row in ALL_ROWS if not isinstance(row.format, AnswerFormat)]
FORMATS = [row.format for row in ROWS]
IDS = [row.id for row in ROWS]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/n"}, "dry": {"type": "boolean"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer"}},
}
FUNCTIONS = (Function("get_weather", CITY), Function("stop", {}))
STRICT = (Function("get_weather", CITY, strict=True), Function("stop", {}))
THINK = REASONING_FORMATS[0]


@pytest.fixture(scope="module")
def compiler(smollm2_dir: Path) -> GrammarCompiler:
    return GrammarCompiler(GrammarTokenizer(smollm2_dir, eos_ids=(2,)))


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> TextTokenizer:
    return TextTokenizer(smollm2_dir)


def compose(
    tokenizer: TextTokenizer,
    fmt: ToolFormat,
    text: Grammar | None = None,
    functions: tuple[Function, ...] = FUNCTIONS,
    *,
    reasoning: ReasoningFormat | None = None,
    required: bool = True,
    parallel: bool = True,
    begins: ReasoningSection = ReasoningSection.BEFORE,
) -> Grammar | None:
    composer = AnswerGrammarBuilder(tokenizer, fmt, reasoning)
    return composer.build(text, functions, required=required, parallel=parallel, initial_section=begins, field="tools")


def matches(compiler: GrammarCompiler, grammar: Grammar | None, text: str) -> bool:
    """Whether the grammar accepts the text and may end after it."""
    assert grammar is not None
    matcher = compiler.compile(grammar).matcher()
    ids = compiler.tokenizer.get().tokenize_str(text)
    return all(map(matcher.consume_token, ids)) and matcher.is_accepting()


def written(fmt: ToolFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    return fmt.render_calls([ToolCall("", name, json.dumps(arguments)) for name, arguments in calls])


GOOD = ("get_weather", {"city": 'O"slo', "days": 2})


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_required_accepts_only_calls(row: FormatRow, compiler: GrammarCompiler, tokenizer: TextTokenizer) -> None:
    fmt = row.format
    grammar, single = compose(tokenizer, fmt), compose(tokenizer, fmt, parallel=False)
    # Under a grammar a model of Pythonic calls writes JSON's literals. Only true, false and null differ from Python's.
    for text in (written(fmt, GOOD), written(fmt, ("stop", {}))):
        text = text.replace("'", '"').replace('O"slo', 'O\\"slo') if isinstance(fmt, PythonicFormat) else text
        assert matches(compiler, grammar, text)
        assert matches(compiler, single, text)
    two = written(fmt, ("stop", {}), ("stop", {}))
    assert matches(compiler, grammar, two)
    assert not matches(compiler, single, two)
    for bad in ("", "Hello", written(fmt, ("stop", {})) + " and", written(fmt, ("other", {}))):
        assert not matches(compiler, grammar, bad)
    # Formats without types write the string "1" and the number 1 alike.
    for arguments in ({}, *([{"city": 1}] if row.typed else []), {"city": "x", "days": "x"}):
        assert not matches(compiler, grammar, written(fmt, ("get_weather", arguments)).replace("'", '"'))


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_required_may_end_after_each_call(row: FormatRow, compiler: GrammarCompiler, tokenizer: TextTokenizer) -> None:
    grammar = compose(tokenizer, row.format)
    one, two = written(row.format, ("stop", {})), written(row.format, ("stop", {}), ("stop", {}))
    for text in (one, two):
        assert matches(compiler, grammar, text)
    if row.format.trigger and isinstance(row.format, MarkedFormat) and row.format.separator == "\n":
        assert matches(compiler, grammar, one.removesuffix(row.format.closing) + "\n")
        assert matches(compiler, grammar, one.removesuffix(row.format.closing))


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_auto_with_strict_functions_accepts_text_or_well_formed_calls(
    row: FormatRow, compiler: GrammarCompiler, tokenizer: TextTokenizer
) -> None:
    fmt = row.format
    assert compose(tokenizer, fmt, required=False) is None  # without strict functions any text is allowed
    grammar = compose(tokenizer, fmt, functions=STRICT, required=False)
    good = written(fmt, ("stop", {}))
    for text in ("", "Hello {there} [x].\n\n", good, f"So:\n{good}" if fmt.trigger else good):
        assert matches(compiler, grammar, text)
    wrong = {"city": 1} if row.typed else {"city": "x", "days": "x"}
    for bad in (written(fmt, ("other", {})), written(fmt, ("get_weather", wrong)).replace("'", '"')):
        known = isinstance(fmt, PythonicFormat) and bad.startswith(
            "[other"
        )  # does not begin a call of a declared function
        assert matches(compiler, grammar, bad) == known
    if fmt.trigger:
        assert not matches(compiler, grammar, f"So: {fmt.trigger}oops")


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_auto_with_a_client_grammar_accepts_calls_or_matching_text(
    fmt: ToolFormat, compiler: GrammarCompiler, tokenizer: TextTokenizer
) -> None:
    for text, good, bad in (
        (g.from_json_schema({"const": {"a": 1}}, field="f"), '{"a": 1}', '{"a": 2}'),
        (g.from_regex("[0-9]+", field="f"), "17", "17a"),
        (g.from_choice(["yes", "no"], field="f"), "no", "maybe"),
        (g.from_lark_or_gbnf('root ::= "a" | "b" root', field="f"), "bba", "ab"),
        (g.from_lark_or_gbnf('start: "x" rest\nrest: /y+/', field="f"), "xyy", "yx"),
    ):
        grammar = compose(tokenizer, fmt, text, required=False)
        assert matches(compiler, grammar, good)
        assert not matches(compiler, grammar, bad)
        assert matches(compiler, grammar, written(fmt, ("stop", {})))
        assert grammar is not None
        assert grammar.field == "f"
        assert not matches(compiler, compose(tokenizer, fmt, text, required=True), good)


def test_the_client_grammar_applies_after_the_reasoning_section(
    compiler: GrammarCompiler, tokenizer: TextTokenizer
) -> None:
    text = g.from_choice(["yes", "no"], field="f")

    def grammar(begins: ReasoningSection, style: ReasoningFormat | None = THINK) -> Grammar | None:
        return compose(tokenizer, HermesFormat(), text, (), required=False, reasoning=style, begins=begins)

    assert grammar(ReasoningSection.AFTER) == text
    assert grammar(ReasoningSection.BEFORE, None) == text
    may = grammar(ReasoningSection.BEFORE)
    for good in ("yes", "<think>yes or no?</think>no", "<think>\nhm < 1\n</think>\n\nno"):
        assert matches(compiler, may, good)
    for bad in ("<think>yes", "<think>x</think>maybe", "x</think>no"):
        assert not matches(compiler, may, bad)
    inside = grammar(ReasoningSection.INSIDE)
    assert matches(compiler, inside, "hm</think>no")
    assert not matches(compiler, inside, "no")
    called = compose(tokenizer, HermesFormat(), None, FUNCTIONS, reasoning=THINK)
    assert matches(compiler, called, f"<think>hm</think>\n{written(HermesFormat(), ('stop', {}))}")
    assert not matches(compiler, called, "<think>hm</think>\nno")


def test_special_tokens_stand_in_grammars_by_id(tmp_path: Path, smollm2_dir: Path) -> None:
    raw = json.loads((smollm2_dir / "tokenizer.json").read_text())
    for i, name in enumerate(("[TOOL_CALLS]", "[ARGS]", "[/THINK]", "[THINK]")):
        raw["added_tokens"][3 + i] |= {"content": name, "special": True}
        raw["model"]["vocab"] = {name if v == 3 + i else k: v for k, v in raw["model"]["vocab"].items()}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = TextTokenizer(tmp_path)
    compiler = GrammarCompiler(GrammarTokenizer(tmp_path, eos_ids=(2,)))
    fmt, style = MistralFormat(named=True), REASONING_FORMATS[2]
    call = [
        3,
        *tokenizer.encode("stop", add_special_tokens=False),
        4,
        *tokenizer.encode("{}", add_special_tokens=False),
    ]
    word = tokenizer.encode(" hm", add_special_tokens=False)
    letters = tokenizer.encode("[TOOL", add_special_tokens=False)  # the same text, not the token
    forced = compose(tokenizer, fmt)
    lazy = compose(tokenizer, fmt, functions=STRICT, required=False)
    thought = compose(tokenizer, fmt, reasoning=style)
    for grammar, ids, good in (
        (forced, call, True),
        (forced, [*call, *call], True),
        (forced, letters, False),
        (forced, word, False),
        (lazy, word, True),
        (lazy, [*word, *call], True),
        (lazy, [*word, 3, *word], False),
        (lazy, letters, True),
        (thought, [6, *word, 5, *call], True),
        (thought, [6, *word], False),
        (thought, [6, *word, 5], False),
    ):
        assert grammar is not None
        matcher = compiler.compile(grammar).matcher()
        assert (all(map(matcher.consume_token, ids)) and matcher.is_accepting()) == good


def test_functions_without_strict_accept_any_schema(compiler: GrammarCompiler, tokenizer: TextTokenizer) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "not": {"required": ["b"]}}
    lenient = compose(tokenizer, HermesFormat(), functions=(Function("f", odd),))
    assert matches(compiler, lenient, written(HermesFormat(), ("f", {"a": [1]})))
    assert not matches(compiler, lenient, written(HermesFormat(), ("f", {"a": 1})))
    strict = compose(tokenizer, HermesFormat(), functions=(Function("f", odd, strict=True),))
    assert strict is not None
    with pytest.raises(InvalidRequest):
        compiler.compile(strict)


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_the_parser_reads_what_the_grammar_generates(
    fmt: ToolFormat, compiler: GrammarCompiler, tokenizer: TextTokenizer
) -> None:
    """Generates with the first token that the mask allows, so that unusual white space and key orders occur too."""
    import numpy as np

    grammar = compose(tokenizer, fmt, parallel=False)
    assert grammar is not None
    vocab = compiler.tokenizer.get().vocab_size
    closing = np.array([t < 2 or any(c in tokenizer.token_bytes(t) for c in b'"}),') for t in range(vocab)])
    for seed in range(6):
        rng, matcher, ids = np.random.default_rng(seed), compiler.compile(grammar).matcher(), []
        while not matcher.is_stopped() and len(ids) < 400:
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            quick = allowed[closing[allowed]]
            token = int(rng.choice(quick if len(quick) and rng.random() < 0.6 else allowed))
            assert matcher.consume_token(token)
            if token == 2:
                break
            ids.append(token)
        if len(ids) < 400:
            parser = fmt.new_parser(frozenset({"get_weather", "stop"}), None, {"get_weather": CITY})
            text = tokenizer.raw.decode(ids, skip_special_tokens=False)
            message = assemble([*parser.feed(text), *parser.finish()])
            assert (message.content, len(message.tool_calls)) == (None, 1), text
            json.loads(message.tool_calls[0].arguments)


#: Schemas that are none.
ODD_SCHEMAS: dict[str, dict[str, Any]] = {
    "required": {"properties": {"a": {"type": "string"}}, "required": 5},
    "names": {"properties": {"a": {"type": "string"}}, "required": [["a"], 5]},
    "property": {"properties": {"a": 5, "b": [1], "c": None, "d": "x", "e": True}},
    "inner": {"properties": {"a": {"type": "object", "properties": [1], "required": True}}},
    "length": {"properties": {"a": {"type": "string", "minLength": "x", "maxLength": [1]}}},
    "negative": {"properties": {"a": {"type": "string", "minLength": -1, "maxLength": 1.5}}},
    "huge": {"properties": {"a": {"type": "string", "minLength": 1e300}}},
    "format": {"properties": {"a": {"type": "string", "format": ["date"], "pattern": 5}}},
    "type": {"properties": {"a": {"type": 5}, "b": {"type": [[], {}]}, "c": {"enum": 5}, "d": {"anyOf": [5]}}},
    "reference": {"properties": {"a": {"$ref": "#/$defs"}, "b": {"$ref": "#/"}, "c": {"$ref": 5}}, "$defs": [1]},
}


@pytest.mark.parametrize("row", ALL_ROWS, ids=[row.id for row in ALL_ROWS])
@pytest.mark.parametrize("schema", ODD_SCHEMAS.values(), ids=list(ODD_SCHEMAS))
def test_a_schema_that_is_none_is_refused_or_says_nothing(
    row: FormatRow, schema: dict[str, Any], compiler: GrammarCompiler, tokenizer: TextTokenizer
) -> None:
    for strict in (False, True):
        functions = (Function("f", schema, strict=strict, field="tools[0]"),)
        with contextlib.suppress(InvalidRequest):
            grammar = compose(tokenizer, row.format, functions=functions)
            assert grammar is not None
            compiler.compile(grammar)
        parser = row.format.new_parser(frozenset({"f"}), None, {"f": schema})
        call = row.format.render_calls([ToolCall("", "f", json.dumps({"a": "x", "b": [1]}))])
        parser.feed(call)


def _branching(levels: int, each: str) -> dict[str, Any]:
    """Returns a schema in which each of `levels` definitions refers ten times to the next one, or to the first."""

    def part(level: int) -> dict[str, Any]:
        reference = {"$ref": f"#/$defs/d{(level + 1) % levels}"}
        if each == "anyOf":
            return {"anyOf": [{**reference} for _ in range(10)]}
        return {"type": "object", "properties": {f"p{i}": {**reference} for i in range(10)}}

    definitions = {f"d{level}": part(level) for level in range(levels)}
    return {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions}


@pytest.mark.parametrize("row", ALL_ROWS, ids=[row.id for row in ALL_ROWS])
@pytest.mark.parametrize("schema", [_branching(n, each) for n in (1, 40) for each in ("anyOf", "properties")])
def test_references_that_branch_take_no_exponential_time(
    row: FormatRow, schema: dict[str, Any], tokenizer: TextTokenizer
) -> None:
    began = time.process_time()
    with contextlib.suppress(InvalidRequest):
        compose(tokenizer, row.format, functions=(Function("f", schema, field="tools[0]"),))
    assert json_types(schema["properties"]["a"], schema) in (None, {"object"})
    parser = row.format.new_parser(frozenset({"f"}), None, {"f": schema})
    parser.feed(row.format.render_calls([ToolCall("", "f", '{"a": "x"}')]))
    assert time.process_time() - began < 8.0


def test_definitions_that_would_be_copied_too_often_are_refused(tokenizer: TextTokenizer) -> None:
    definitions = {f"d{i}": {"const": "x" * 1000} for i in range(100)}
    schema = {"properties": {f"p{i}": {"type": "integer"} for i in range(1000)}, "$defs": definitions}
    for fmt in (PythonicFormat(), GLM_45):
        with pytest.raises(InvalidRequest, match="too large for a grammar"):
            compose(tokenizer, fmt, functions=(Function("f", schema, field="tools[0]"),))


UNTYPED = [row for row in ROWS if isinstance(getattr(row.format, "arguments", None), TaggedArguments)]
TEXTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": "^[a-z/]{2,}$", "maxLength": 5},
        "with_x": {"type": "string", "pattern": "x"},
        "kind": {"enum": ["u v", "w"]},
        "maybe": {"type": ["string", "null"]},
        "any": {},
        "day": {"type": "string", "format": "date"},
        "key": {"type": "string", "format": "password"},  # asserts nothing
    },
    "required": ["code"],
}


@pytest.mark.parametrize("row", UNTYPED, ids=[row.id for row in UNTYPED])
def test_texts_without_quotes_obey_their_schemas(
    row: FormatRow, compiler: GrammarCompiler, tokenizer: TextTokenizer
) -> None:
    grammar = compose(tokenizer, row.format, functions=(Function("f", TEXTS, strict=True),))
    for arguments, good in (
        ({"code": "ab/"}, True),
        ({"code": "a"}, False),
        ({"code": "abcdef"}, False),
        ({"code": "A1"}, False),
        ({"code": "ab", "with_x": "uxu\n"}, True),
        ({"code": "ab", "with_x": "uu"}, False),
        ({"code": "ab", "kind": "u v", "maybe": "n\n", "any": 3}, True),
        ({"code": "ab", "kind": "z"}, False),
        ({"code": "ab", "day": "2024-02-29", "key": "hm"}, True),
        ({"code": "ab", "day": "tomorrow"}, False),
        ({"kind": "w"}, False),
    ):
        assert matches(compiler, grammar, written(row.format, ("f", arguments))) == good


@pytest.mark.parametrize("row", UNTYPED, ids=[row.id for row in UNTYPED])
@pytest.mark.parametrize(("keyword", "value"), [("pattern", "(?=x)y"), ("pattern", "^a|b$"), ("format", "iri")])
def test_a_strict_text_with_a_keyword_that_is_not_enforced_is_refused(
    row: FormatRow, keyword: str, value: str, tokenizer: TextTokenizer
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", keyword: value}}}
    with pytest.raises(InvalidRequest, match=f"{keyword} of a strict function"):
        compose(tokenizer, row.format, functions=(Function("f", schema, strict=True),))
    assert compose(tokenizer, row.format, functions=(Function("f", schema),)) is not None


@pytest.mark.parametrize("fmt", [KIMI_K2, DEEPSEEK_V3, GLM_45], ids=lambda fmt: fmt.name)
def test_all_markers_of_a_description_may_be_special_tokens(
    fmt: MarkedFormat, tmp_path: Path, smollm2_dir: Path
) -> None:
    raw = json.loads((smollm2_dir / "tokenizer.json").read_text())
    for i, name in enumerate(fmt.markers):
        raw["added_tokens"][3 + i] |= {"content": name, "special": True}
        raw["model"]["vocab"] = {name if v == 3 + i else k: v for k, v in raw["model"]["vocab"].items()}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = TextTokenizer(tmp_path)
    compiler = GrammarCompiler(GrammarTokenizer(tmp_path, eos_ids=(2,)))
    grammar = compose(tokenizer, fmt)
    text = written(fmt, ("get_weather", {"city": "Os\nlo", "days": 2}), ("stop", {}))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert set(range(3, 3 + len(fmt.markers))) <= set(ids)
    assert grammar is not None
    matcher = compiler.compile(grammar).matcher()
    assert all(map(matcher.consume_token, ids))
    assert matcher.is_accepting()
    letters = compiler.tokenizer.get().tokenize_str(text[:4])  # the same text, not the token
    assert not compiler.compile(grammar).matcher().consume_token(letters[0])


@pytest.mark.parametrize("row", ALL_ROWS, ids=lambda row: row.id)
def test_functions_that_are_too_long_are_refused_before_their_rules_are_written(
    row: FormatRow, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = Function("f", {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(10_000)}})
    monkeypatch.setattr(AnswerGrammarBuilder, "literal", None)  # rules cannot be written without it
    with pytest.raises(InvalidRequest, match="tools has parameters that are longer than 262144 characters together"):
        compose(tokenizer, row.format, functions=(long,))
