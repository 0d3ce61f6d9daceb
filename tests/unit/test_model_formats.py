"""What single models write: calls that their templates rendered, answers in tags, and Gemma's pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.grammar.compiler import GrammarCompiler, GrammarTokenizer
from common.types import Grammar
from gateway.text.answer_grammar import AnswerGrammarBuilder
from gateway.text.reasoning import REASONING_FORMATS, ReasoningParser, ReasoningSection, choose_reasoning_format
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tools import known_formats as known
from gateway.text.tools.choose import choose_tool_format
from gateway.text.tools.format import Function, ToolCall, ToolFormat, assemble
from gateway.text.tools.marked import MarkedFormat
from gateway.text.tools.pythonic import PythonicFormat
from tests.rigs.tool_formats import NAMES, TEMPLATES, joined, parsed, read
from tests.unit.test_tool_formats import from_template

RENDERED: dict[str, Any] = json.loads((TEMPLATES / "rendered.json").read_text())
FORMATS: dict[str, ToolFormat] = {"olmo-3": known.OLMO_3, "phi-4-mini-instruct": known.PHI4_MINI_TAGS}
BY_NAME = {reasoning_format.name: reasoning_format for reasoning_format in REASONING_FORMATS}


@pytest.mark.parametrize("name", RENDERED)
def test_answers_that_templates_rendered(name: str) -> None:
    answer, fmt = RENDERED[name], FORMATS[name]
    calls = [(function, arguments) for function, arguments in answer["calls"]]
    assert parsed(read(fmt, list(answer["text"]))) == (answer["content"], calls)


def test_each_stored_template_has_a_source() -> None:
    readme = (TEMPLATES / "README.md").read_text()
    listed = {
        name.strip() for line in readme.splitlines() if line[:2] == "| " for name in line.split("|")[1].split(",")
    }
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} <= listed
    assert all(answer["source"].startswith("https://") for answer in RENDERED.values())


def test_the_template_of_llama_4_writes_pythonic_calls() -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "Oslo"}), ("f", {})]
    text = from_template("llama-4-pythonic", calls, "")
    assert (
        parsed(read(PythonicFormat(), list(text.removesuffix("<|header_start|>assistant<|header_end|>\n\n"))))[1]
        == calls
    )
    chosen = choose_tool_format("auto", (TEMPLATES / "llama-4-pythonic.jinja").read_text(), ())
    assert chosen is not None
    assert chosen.name == "pythonic"
    wrapped = '<|python_start|>[f(a="x"), f()]<|python_end|>'
    assert parsed(read(PythonicFormat(), list(wrapped))) == (None, [("f", {"a": "x"}), ("f", {})])


def test_the_guide_of_phi_4_mini_says_how_calls_are_written() -> None:
    source = (TEMPLATES / "phi-4-mini.jinja").read_text()
    example = 'functools[{"name": [function name], "arguments": [function arguments as JSON]}, ...]'
    assert example in source
    written = known.PHI4_MINI.render_calls([ToolCall("", "f", '{"a": 1}'), ToolCall("", "f", "{}")])
    assert written == 'functools[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]'


OTHER_WRITING: list[tuple[ToolFormat, str, str | None]] = [
    (known.GRANITE_3, '<|tool_call|> [\n  {"name": "f", "arguments": {"a": 1}}\n]', None),
    (known.GRANITE_3, '<tool_call>[{"name": "f", "arguments": {"a": 1}}]', None),
    (known.GRANITE_3, '<|tool_call|>{"name": "f", "arguments": {"a": 1}}', None),
    (known.PHI4_MINI, '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>', None),
    (known.PHI4_MINI, 'So: functools[{"name": "f", "arguments": {"a": 1}}] ok', "So: ok"),
    (known.PHI4_MINI_TAGS, 'functools[{"name": "f", "arguments": {"a": 1}}]', None),
    (known.PHI4_MINI_TAGS, '<|tool_call|>{"name": "f", "arguments": {"a": 1}}<|/tool_call|>', None),
    (known.XLAM, '```json\n[{"name": "f", "arguments": {"a": 1}}]\n```', None),
    (known.XLAM, '\n[{"name": "f", "arguments": "{\\"a\\": 1}"}]', None),
    (known.OLMO_3, "<function_calls>\nf(a=1)\n</function_calls>", None),
    (known.FUNCTION_GEMMA, "<start_function_call>call:f{a:<escape>1<escape>}<end_function_call>", None),
    (known.FUNCTION_GEMMA, "<start_function_call>call:f{ a : 1 }", None),
    (known.GEMMA_4, '<|tool_call>call:f{<|"|>a<|"|>:1,}<tool_call|>', None),
]


@pytest.mark.parametrize(("fmt", "text", "content"), OTHER_WRITING, ids=range(len(OTHER_WRITING)))
def test_calls_that_models_write_in_another_way(fmt: ToolFormat, text: str, content: str | None) -> None:
    whole = read(fmt, [text])
    assert parsed(whole) == (content, [("f", {"a": 1})])
    for at in range(len(text)):
        assert joined(read(fmt, [text[:at], text[at:]])) == joined(whole)


NO_CALLS = [
    (known.XLAM, "[1] is a reference"),
    (known.XLAM, "Look: [{}]"),
    (known.XLAM, "```json\n[1]\n```"),
    (known.PHI4_MINI, "functools is a module"),
    (known.PHI4_MINI, "functools[0]"),
    (known.GRANITE_3, "<|tool_call|>[oops]"),
    (known.OLMO_3, "<function_calls>f(a=x)</function_calls>"),
    (known.FUNCTION_GEMMA, "<start_function_call>call:f{a}<end_function_call>"),
    (known.FUNCTION_GEMMA, "<start_function_call>call:f{a:1,a:2}<end_function_call>"),
    (known.FUNCTION_GEMMA, "<start_function_call>call:f{a:[1}<end_function_call>"),
    (known.FUNCTION_GEMMA, "<start_function_call>call:zz{a:1}<end_function_call>"),
]


@pytest.mark.parametrize(("fmt", "text"), NO_CALLS, ids=range(len(NO_CALLS)))
def test_text_that_is_no_call_is_content(fmt: ToolFormat, text: str) -> None:
    for parts in ([text], list(text)):
        assert parsed(read(fmt, parts)) == (text, [])


GRANITE, THINK = BY_NAME["granite"], "<think>hm</think>\n"


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        (f"{THINK}<response>Hi.</response>", "hm", "Hi."),
        (f"{THINK}<response>\nHi </resp.\n</response>\n", "hm", "Hi </resp.\n\n"),
        (f"{THINK}Hi <response>x</response>", "hm", "Hi <response>x</response>"),
        (f"{THINK}<response>Hi", "hm", "Hi"),
        (f"{THINK}<response>Hi </res", "hm", "Hi </res"),
        (f"{THINK}<resp", "hm", "<resp"),
        ("<response>Hi</response>", "", "<response>Hi</response>"),  # without a section
        ("<think>hm", "hm", ""),
    ],
)
@given(sizes=st.lists(st.integers(1, 5), max_size=20))
def test_tags_around_an_answer_are_dropped(text: str, thought: str, answer: str, sizes: list[int]) -> None:
    parser, at, found = ReasoningParser(GRANITE, ReasoningSection.BEFORE), 0, []
    for size in [*sizes, len(text)]:
        found.append(parser.feed(text[at : at + size]))
        at += size
    found.append(parser.finish())
    assert ("".join(r for r, _ in found), "".join(a for _, a in found)) == (thought, answer)


@pytest.mark.parametrize(
    ("template", "name"),
    [("granite-3.3-2b-instruct", "granite"), ("qwen3-0.6b", "think"), ("gemma-4-31b-it", "gemma4")],
)
def test_templates_choose_the_reasoning_format(template: str, name: str) -> None:
    assert choose_reasoning_format("auto", (TEMPLATES / f"{template}.jinja").read_text(), ()) == BY_NAME[name]


def test_granite_3_2_thinks_in_words() -> None:
    source = "'Here is my thought process:' and write your response after 'Here is my response:'"
    assert choose_reasoning_format("auto", source, ()) == BY_NAME["granite_3_2"]
    parser = ReasoningParser(BY_NAME["granite_3_2"], ReasoningSection.BEFORE)
    found = [parser.feed(char) for char in "Here is my thought process:\nhm\nHere is my response:\nHi"]
    assert ("".join(r for r, _ in found), "".join(a for _, a in found)) == ("hm", "Hi")


# Grammars of Gemma's pairs.

TRIP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "to": {"type": "string"},
        "unit": {"enum": ["km", "mi", 3]},
        "days": {"type": "integer"},
        "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}},
        "extra": {},
        "note": {"type": ["string", "null"]},
    },
    "required": ["to"],
    "$defs": {"stop": {"type": "object", "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/stop"}}}},
}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("fmt", [known.FUNCTION_GEMMA, known.GEMMA_4], ids=["functiongemma", "gemma4"])
def test_the_grammar_of_pairs_follows_the_schema(
    fmt: MarkedFormat, special: bool, tmp_path: Path, smollm2_dir: Path
) -> None:
    model_dir = smollm2_dir
    if special:
        raw = json.loads((smollm2_dir / "tokenizer.json").read_text())
        for i, name in enumerate(fmt.markers):
            raw["added_tokens"][3 + i] |= {"content": name, "special": True}
            raw["model"]["vocab"] = {name if v == 3 + i else k: v for k, v in raw["model"]["vocab"].items()}
        (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
        model_dir = tmp_path
    tokenizer = TextTokenizer(model_dir)
    compiler = GrammarCompiler(GrammarTokenizer(model_dir, eos_ids=(2,)))

    def grammar(*functions: Function) -> Grammar | None:
        builder, after = AnswerGrammarBuilder(tokenizer, fmt, None), ReasoningSection.AFTER
        return builder.build(None, functions, required=True, parallel=True, initial_section=after, field="tools")

    def matches(made: Grammar | None, text: str) -> bool:
        assert made is not None
        matcher = compiler.compile(made).matcher()
        ids = tokenizer.encode(text, add_special_tokens=False)
        return all(map(matcher.consume_token, ids)) and matcher.is_accepting()

    def written(**arguments: Any) -> str:
        return fmt.render_calls([ToolCall("", "f", json.dumps(arguments))])

    made = grammar(Function("f", TRIP))
    stop = {"name": "x, {y}", "next": {"name": "z"}}
    for good in (
        {"to": "Oslo, N {1}\n"},
        {"to": "", "unit": "km", "days": 3, "stops": [stop, {}], "note": None},
        {"to": "x", "unit": 3, "extra": {"a": [1, "b", {"c": True}], "d": None}, "note": "hm"},
    ):
        text = written(**good)
        assert matches(made, text), text
        [call] = assemble(fmt.new_parser(NAMES, None, {"f": TRIP}).feed(text)).tool_calls
        assert json.loads(call.arguments) == good
    for bad in ({}, {"to": 1}, {"to": "x", "days": "x"}, {"to": "x", "unit": "m"}, {"to": "x", "stops": [1]}, {"b": 1}):
        assert not matches(made, written(**bad)), bad
    lengths = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 3}}, "required": ["s"]}
    strict = grammar(Function("f", lengths, strict=True))
    assert matches(strict, written(s="abc"))
    assert not matches(strict, written(s="abcd"))
    for refused in ({"type": "string", "contentEncoding": "base64"}, {"type": "array", "maxItems": 2}):
        with pytest.raises(InvalidRequest, match="of a strict function"):
            grammar(Function("f", {"type": "object", "properties": {"x": refused}}, strict=True))


def test_values_of_pairs_become_json() -> None:
    def read_pairs(pairs: str, **properties: Any) -> Any:
        text = f"<start_function_call>call:f{{{pairs}}}<end_function_call>"
        parser = known.FUNCTION_GEMMA.new_parser(NAMES, None, {"f": {"type": "object", "properties": properties}})
        [call] = assemble([*parser.feed(text), *parser.finish()]).tool_calls
        return json.loads(call.arguments)

    assert read_pairs("a:<escape>x}<escape>,b:-1.5,c:true,d:null,e:[],g:{}") == {
        "a": "x}",
        "b": -1.5,
        "c": True,
        "d": None,
        "e": [],
        "g": {},
    }
    assert read_pairs("a:[None,True,[1,2]],b:{x-y:{z:<escape><escape>}}") == {
        "a": [None, True, [1, 2]],
        "b": {"x-y": {"z": ""}},
    }
    assert read_pairs("unit:celsius,zip:0123", zip={"type": "string"}) == {"unit": "celsius", "zip": "0123"}
    assert read_pairs(
        "days:<escape>3<escape>,tags:<escape>['a']<escape>", days={"type": "integer"}, tags={"type": "array"}
    ) == {
        "days": 3,
        "tags": ["a"],
    }
