"""Tool calls are parsed in every format, however the text is cut, and malformed calls are content."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.tools.format import (
    ContentDelta,
    InvalidToolCall,
    MessageDelta,
    ParsedMessage,
    ToolCall,
    ToolCallDelta,
    ToolFormat,
    assemble,
)
from gateway.text.tools.json_formats import HermesFormat, Llama3Format, MistralFormat
from gateway.text.tools.json_scanner import JsonScanner
from gateway.text.tools.pythonic import PythonicFormat

NAMES = frozenset({"f", "get_weather", "ns.do-it"})
FORMATS: list[ToolFormat] = [
    HermesFormat(),
    Llama3Format(),
    MistralFormat(),
    MistralFormat(named=True),
    PythonicFormat(),
]
IDS = ["hermes", "llama3", "mistral", "mistral-named", "pythonic"]

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from(['a "q" \\', "}]</tool_call>", "世\n"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"{é', max_size=3), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "city", "_x1", "été"]), VALUES, max_size=4)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3)


def read(fmt: ToolFormat, parts: list[str], max_calls: int | None = None) -> list[MessageDelta]:
    parser = fmt.new_parser(NAMES, max_calls)
    deltas = [delta for part in parts for delta in parser.feed(part)]
    return deltas + parser.finish()


def cut(text: str, sizes: list[int]) -> list[str]:
    parts, at = [], 0
    for size in sizes:
        parts.append(text[at : at + size])
        at += size
    return [*parts, text[at:]]


def plain(message: ParsedMessage) -> tuple[str | None, list[tuple[str, Any]]]:
    return message.content, [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


def same(deltas: list[MessageDelta]) -> list[Any]:
    """Returns the deltas with neighbours joined and without their random ids."""
    out: list[list[Any]] = []
    for delta in deltas:
        kind: Any = type(delta)
        if isinstance(delta, ToolCallDelta):
            kind, text = (ToolCallDelta, delta.index), delta.arguments
            if delta.name:
                out.append([(kind, delta.name), ""])
        else:
            text = delta.text
        if out and out[-1][0] == kind and not isinstance(delta, InvalidToolCall):
            out[-1][1] += text
        elif text or isinstance(delta, InvalidToolCall):
            out.append([kind, text])
    return out


SIZES = st.lists(st.integers(1, 7), max_size=60)


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
@given(calls=CALLS, sizes=SIZES, before=st.sampled_from(["", "\n", "Let me see.\n\n"]))
def test_rendered_calls_are_parsed_back(
    fmt: ToolFormat, calls: list[tuple[str, dict[str, Any]]], sizes: list[int], before: str
) -> None:
    text = fmt.render_calls([ToolCall("x", name, json.dumps(arguments)) for name, arguments in calls])
    if not fmt.trigger:
        before = before if not before.strip() else ""
    deltas = read(fmt, cut(before + text, sizes))
    message = assemble(deltas)
    assert plain(message) == (before.strip() or None, calls)
    assert len({call.id for call in message.tool_calls}) == len(calls)
    starts = [d for d in deltas if isinstance(d, ToolCallDelta) and d.name]
    assert [d.index for d in starts] == list(range(len(calls)))  # named once each, in order
    assert not any(isinstance(d, InvalidToolCall) for d in deltas)


SCRAPS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "<|python_start|>",
        '{"name": "f", "arguments": {"a": 1}}',
        '{"name": "f", "parameters": {}}',
        '{"name": "g"}',
        '"name": "f",',
        "{",
        "}",
        "[",
        "]",
        "f(",
        "f(a=1)",
        "a=",
        ")",
        ",",
        ";",
        " ",
        "\n",
        "f",
        "ns.do-it",
        '"',
        "'",
        "\\",
        "1",
        "tr",
        "true",
        '{"name": "f", "arguments": "{\\"a\\": 2}"}',
        '{"arguments": {"b": [1]}, "name": "f"}',
        "x",
        "é",
        "<",
        '"""',
        "-",
        "1.",
        "\\u00",
        ":",
        '{"name": "f", "arguments": {"a": tru}}',
        "\x00",
    ]
)


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
@given(scraps=st.lists(SCRAPS, max_size=14), sizes=SIZES, max_calls=st.sampled_from([None, 1]))
def test_the_deltas_do_not_depend_on_the_pieces(
    fmt: ToolFormat, scraps: list[str], sizes: list[int], max_calls: int | None
) -> None:
    text = "".join(scraps)
    whole, parts = read(fmt, [text], max_calls), read(fmt, cut(text, sizes), max_calls)
    assert same(whole) == same(parts)
    for call in assemble(parts).tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
        assert call.name in NAMES


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
@given(text=st.text(st.characters(exclude_characters="<[{"), max_size=30), sizes=SIZES)
def test_text_without_calls_is_unchanged_content(fmt: ToolFormat, text: str, sizes: list[int]) -> None:
    assert assemble(read(fmt, cut(text, sizes))) == ParsedMessage(text or None, None, ())


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_arguments_come_in_several_deltas(fmt: ToolFormat) -> None:
    arguments = {"a": "x" * 40, "b": [1, 2, {"c": None}]}
    text = fmt.render_calls([ToolCall("x", "f", json.dumps(arguments))])
    deltas = [d for d in read(fmt, list(text)) if isinstance(d, ToolCallDelta)]
    assert (deltas[0].name, deltas[0].arguments) == ("f", "")
    assert not any(d.name or d.id for d in deltas[1:])
    assert len(deltas) > 3
    assert json.loads("".join(d.arguments for d in deltas)) == arguments


CALL = '{"name": "f", "arguments": {"a": 1}}'
TWICE = '{"name": "f", "arguments": {}, "arguments": {}}'
TEXTS: list[tuple[ToolFormat, str, str | None, list[tuple[str, Any]]]] = [
    (HermesFormat(), f"<tool_call>{CALL}</tool_call>", None, [("f", {"a": 1})]),
    (HermesFormat(), f"<tool_call>\n{CALL}", None, [("f", {"a": 1})]),  # without the end marker
    (HermesFormat(), f"A <tool_call>{CALL}</tool_call> B", "A B", [("f", {"a": 1})]),
    (HermesFormat(), f"<tool_call>{CALL}}}</tool_call>", "}</tool_call>", [("f", {"a": 1})]),
    (HermesFormat(), '<tool_call>{"name": "g"}</tool_call>', '<tool_call>{"name": "g"}</tool_call>', []),
    (
        HermesFormat(),
        '<tool_call>{"name": "f", "arguments": {"a": 1',
        '<tool_call>{"name": "f", "arguments": {"a": 1',
        [],
    ),
    (HermesFormat(), "<tool_call>no", "<tool_call>no", []),
    (HermesFormat(), "a <tool", "a <tool", []),
    (HermesFormat(), f"<tool_call>x</tool_call><tool_call>{CALL}", "<tool_call>x</tool_call>", [("f", {"a": 1})]),
    (HermesFormat(), '<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
    (HermesFormat(), '<tool_call>{"name": "f"}</tool_call>', None, [("f", {})]),
    (HermesFormat(), '<tool_call>{"name": "f", "arguments": null}', None, [("f", {})]),
    (HermesFormat(), '<tool_call>{"id": [{}], "arguments": "{\\"a\\": 1}", "name": "f"}', None, [("f", {"a": 1})]),
    (HermesFormat(), '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}', None, [("f", {"a": "x\ny"})]),
    (
        HermesFormat(),
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud83c\\udf89 🎉"}}',
        None,
        [("f", {"a": "🎉 🎉"})],
    ),
    (HermesFormat(), f"<tool_call>{TWICE}", f"<tool_call>{TWICE}", []),
    (Llama3Format(), f'{CALL}; {{"name": "f", "parameters": {{}}}}', None, [("f", {"a": 1}), ("f", {})]),
    (
        Llama3Format(),
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}',
        None,
        [("f", {"a": 1})],
    ),
    (Llama3Format(), '{"function": "f", "parameters": {}}', None, [("f", {})]),
    (Llama3Format(), '{"answer": 42}', '{"answer": 42}', []),
    (Llama3Format(), 'see {"name": "f", "parameters": {}}', 'see {"name": "f", "parameters": {}}', []),
    (Llama3Format(), 'see <|python_tag|>{"name": "f", "parameters": {}}', "see", [("f", {})]),
    (Llama3Format(), "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (MistralFormat(), f"[TOOL_CALLS] [{CALL}, {CALL}]", None, [("f", {"a": 1})] * 2),
    (MistralFormat(), f"Hi [TOOL_CALLS]{CALL}", "Hi", [("f", {"a": 1})]),
    (MistralFormat(), '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f{"b": []}', None, [("f", {"a": 1}), ("f", {"b": []})]),
    (MistralFormat(), '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', None, [("f", {"a": 1})]),
    (MistralFormat(), "[TOOL_CALLS]g[ARGS]{}", "[TOOL_CALLS]g[ARGS]{}", []),
    (MistralFormat(), f"[TOOL_CALLS][{CALL}, oops]", ", oops]", [("f", {"a": 1})]),
    (MistralFormat(), "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    (
        PythonicFormat(),
        "[f(a=1, b='it\\'s', c=[True, None, (1, -2.5)], d={'k': \"v\"}), f()]",
        None,
        [("f", {"a": 1, "b": "it's", "c": [True, None, [1, -2.5]], "d": {"k": "v"}}), ("f", {})],
    ),
    (PythonicFormat(), '[f(a=true, b=null, c="""x"y""",)]', None, [("f", {"a": True, "b": None, "c": 'x"y'})]),
    (PythonicFormat(), "<|python_start|>[ns.do-it(a=1)]<|python_end|>", None, [("ns.do-it", {"a": 1})]),
    (PythonicFormat(), "[1] is a reference", "[1] is a reference", []),
    (PythonicFormat(), "[f(a=x)]", "[f(a=x)]", []),
    (PythonicFormat(), "[f(1)]", "[f(1)]", []),
    (PythonicFormat(), "[f(a=1, a=2)]", "[f(a=1, a=2)]", []),
    (PythonicFormat(), "[f(a=1e999)]", "[f(a=1e999)]", []),
    (PythonicFormat(), "[f(a=__import__('os'))]", "[f(a=__import__('os'))]", []),
    (PythonicFormat(), "[f(), g()]", ", g()]", [("f", {})]),
    (PythonicFormat(), "[f(a='unfinished", "[f(a='unfinished", []),
]


@pytest.mark.parametrize(("fmt", "text", "content", "calls"), TEXTS, ids=range(len(TEXTS)))
def test_examples_of_each_format(fmt: ToolFormat, text: str, content: str | None, calls: list[tuple[str, Any]]) -> None:
    for parts in ([text], list(text)):
        assert plain(assemble(read(fmt, parts))) == (content, calls)


def test_text_after_the_last_allowed_call_is_dropped() -> None:
    for fmt in FORMATS:
        text = fmt.render_calls([ToolCall("x", "f", '{"a": 1}'), ToolCall("y", "get_weather", "{}")]) + " bye"
        for parts in ([text], list(text)):
            assert plain(assemble(read(fmt, parts, 1))) == (None, [("f", {"a": 1})])


def test_call_ids_have_the_form_that_templates_accept() -> None:
    [call] = assemble(read(HermesFormat(), [f"<tool_call>{CALL}"])).tool_calls
    assert call.id.startswith("call_")
    [call] = assemble(read(MistralFormat(), [f"[TOOL_CALLS][{CALL}]"])).tool_calls
    assert len(call.id) == 9
    assert call.id.isalnum()


def test_a_stream_shows_the_whole_text_of_a_malformed_call() -> None:
    text = 'x <tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>'
    deltas = read(HermesFormat(), list(text))
    assert isinstance(deltas[0], ContentDelta)
    shown = "".join(d.text for d in deltas if isinstance(d, ContentDelta | InvalidToolCall))
    assert shown == text


@given(value=VALUES, sizes=SIZES, tail=st.sampled_from(["", "x", " ,", "}"]))
def test_the_scanner_reads_exactly_one_value(value: Any, sizes: list[int], tail: str) -> None:
    text = json.dumps(value, ensure_ascii=False)
    scanner, out, taken = JsonScanner(), "", 0
    for part in cut(text + tail, sizes):
        at, clean = scanner.feed(part, 0)
        out, taken = out + clean, taken + at
        assert not scanner.invalid or (not isinstance(value, dict | list | str) and tail == "x")
    if isinstance(value, dict | list | str):
        assert (scanner.done, taken) == (True, len(text))
    if scanner.done:
        assert json.loads(out) == value


@given(text=st.lists(st.sampled_from(list('{}[]",:\\-.0123eEtrufalsn u\n\x01')), max_size=12).map("".join))
def test_the_scanner_agrees_with_the_json_module(text: str) -> None:
    scanner = JsonScanner()
    at, out = scanner.feed(text + "\n", 0)
    try:
        value = json.loads(text, strict=False, parse_constant=lambda _: pytest.fail("scanned"))
    except ValueError:
        assert not (scanner.done and not (text + "\n")[at:].strip())
    else:
        assert scanner.done
        assert json.loads(out) == value
