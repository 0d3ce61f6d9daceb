"""Tool calls are parsed in every format, however the text is cut, and malformed calls are content."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.tools.format import (
    ContentDelta,
    InvalidToolCall,
    ParsedMessage,
    ToolCall,
    ToolCallDelta,
    ToolFormat,
    assemble,
)
from gateway.text.tools.json_formats import HermesFormat, Llama3Format, MistralFormat
from gateway.text.tools.json_scanner import JsonScanner
from gateway.text.tools.known_formats import DEEPSEEK_V3, DEEPSEEK_V31, GLM_45, KIMI_K2, MINIMAX_M2, QWEN3_CODER
from gateway.text.tools.pythonic import PythonicFormat
from tests.rigs.tool_formats import (
    FORMATS,
    IDS,
    NAMES,
    ROWS,
    FormatRow,
    damaged,
    joined,
    parsed,
    read,
    transcript,
    written,
)

#: Generated answers of each format, and damaged ones. Longer runs set BATON_TRANSCRIPTS=200 and BATON_TOOL_FUZZ=5000.
TRANSCRIPTS = int(os.environ.get("BATON_TRANSCRIPTS", "20"))
EXAMPLES = 40  #: Of each property and format; there are 21 formats, and most of them share a parser.
FIRST = 6  #: Of these answers, so many are read by the tests that are not long.
DAMAGED = int(os.environ.get("BATON_TOOL_FUZZ", "300"))

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
TEXT = VALUES.filter(lambda value: isinstance(value, str) and "</" not in value)
NO_TEXT = VALUES.filter(lambda value: not isinstance(value, str) and "</" not in json.dumps(value))
NESTED = VALUES.filter(lambda value: isinstance(value, list | dict) and "</" not in json.dumps(value))
#: Arguments of the types that SCHEMAS have, for formats that write no types.
TYPED_ARGUMENTS = st.fixed_dictionaries(
    {}, optional={"a": NO_TEXT, "city": TEXT, "_x1": NESTED, "été": st.integers() | st.none()}
)


def calls_of(arguments: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[list[tuple[str, dict[str, Any]]]]:
    return st.lists(st.tuples(st.sampled_from(sorted(NAMES)), arguments), min_size=1, max_size=3)


def cut(text: str, sizes: list[int]) -> list[str]:
    parts, at = [], 0
    for size in sizes:
        parts.append(text[at : at + size])
        at += size
    return [*parts, text[at:]]


SIZES = st.lists(st.integers(1, 7), max_size=60)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@settings(max_examples=EXAMPLES)
@given(data=st.data(), sizes=SIZES, before=st.sampled_from(["", "\n", "Let me see.\n\n"]))
def test_rendered_calls_are_parsed_back(row: FormatRow, data: st.DataObject, sizes: list[int], before: str) -> None:
    fmt, calls = row.format, data.draw(calls_of(ARGUMENTS if row.typed else TYPED_ARGUMENTS))
    text = written(fmt, calls)
    if not row.before:
        before = before if not before.strip() else ""
    deltas = read(fmt, cut(before + text, sizes))
    message = assemble(deltas)
    assert parsed(deltas) == (before.strip() or None, calls)
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
@settings(max_examples=EXAMPLES)
@given(scraps=st.lists(SCRAPS, max_size=14), sizes=SIZES, max_calls=st.sampled_from([None, 1]))
def test_the_deltas_do_not_depend_on_the_pieces(
    fmt: ToolFormat, scraps: list[str], sizes: list[int], max_calls: int | None
) -> None:
    text = "".join(scraps)
    whole, parts = read(fmt, [text], max_calls), read(fmt, cut(text, sizes), max_calls)
    assert joined(whole) == joined(parts)
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


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize(
    "seeds", [range(FIRST), pytest.param(range(FIRST, TRANSCRIPTS), marks=pytest.mark.long)], ids=["first", "others"]
)
def test_generated_answers_cut_at_every_position(row: FormatRow, seeds: range) -> None:
    for seed in seeds:
        answer = transcript(row, seed)
        whole = read(row.format, [answer.text])
        assert parsed(whole) == (answer.content, answer.calls), answer.text
        expected = joined(whole)
        assert joined(read(row.format, list(answer.text))) == expected
        for at in range(1, len(answer.text)):
            assert joined(read(row.format, [answer.text[:at], answer.text[at:]])) == expected


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 4), marks=pytest.mark.long)], ids=["first", "others"]
)
def test_a_call_that_max_tokens_cuts_keeps_its_arguments_so_far(row: FormatRow, seeds: range) -> None:
    for seed in seeds:
        answer = transcript(row, seed)
        complete = assemble(read(row.format, [answer.text])).tool_calls
        for at in range(len(answer.text)):
            text = answer.text[:at]
            whole, stream = read(row.format, [text], cut=True), read(row.format, list(text), cut=True)
            assert joined(whole) == joined(stream)
            assert not any(isinstance(delta, InvalidToolCall) for delta in whole)
            message = assemble(whole)
            assert [call.name for call in message.tool_calls] == [c[0] for c in answer.calls][: len(message.tool_calls)]
            for call in message.tool_calls[:-1]:
                json.loads(call.arguments)
            if message.tool_calls:  # what comes is the beginning of the whole call, but for white space
                assert complete[len(message.tool_calls) - 1].arguments.startswith(message.tool_calls[-1].arguments)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_damaged_answers_raise_nothing_and_read_alike_in_pieces(row: FormatRow) -> None:
    rng = random.Random(row.id)
    for seed in range(DAMAGED):
        text = damaged(row, rng)
        cut_by_length, limit = seed % 3 == 0, rng.choice([None, None, 1])
        size = rng.randint(1, 9)
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        whole = read(row.format, [text], limit, cut=cut_by_length)
        assert joined(whole) == joined(read(row.format, pieces, limit, cut=cut_by_length)), text
        if not cut_by_length:
            for call in assemble(whole).tool_calls:
                assert call.name in NAMES
                assert JsonScanner().feed(call.arguments, 0)[0] == len(call.arguments)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_a_broken_call_ends_as_text_without_losing_any(row: FormatRow) -> None:
    text = written(row.format, [("f", {"a": [1, 2], "city": "Oslo"})])
    for at in range(1, len(text)):
        broken = text[:at]
        for parts in ([broken], list(broken)):
            message = assemble(read(row.format, parts))
            if not message.tool_calls:
                assert message.content == broken.rstrip() or (message.content or "").strip() == broken.strip()
            else:
                assert json.loads(message.tool_calls[0].arguments) == {"a": [1, 2], "city": "Oslo"}
                assert message.content is None or text[:at].endswith(message.content)


@pytest.mark.parametrize(
    ("fmt", "text", "arguments"),
    [
        (HermesFormat(), '<tool_call>\n{"name": "f", "arguments": {"a": 12', '{"a": 12'),
        (HermesFormat(), '<tool_call>\n{"name": "f", "arguments": {"a": "x\\', '{"a": "x'),
        (HermesFormat(), '<tool_call>\n{"name": "f"', ""),
        (Llama3Format(), '{"name": "f", "parameters": {"a": tr', '{"a": tr'),
        (MistralFormat(), '[TOOL_CALLS]f[ARGS]{"a": [1, ', '{"a": [1, '),
        (PythonicFormat(), "[f(a=1, city='Os", '{"a": 1, "city": "Os'),
        (PythonicFormat(), "[f(a=1, city='Os\\", '{"a": 1'),
        (QWEN3_CODER, "<tool_call>\n<function=f>\n<parameter=city>\nOs", '{"city": "Os'),
        (QWEN3_CODER, "<tool_call>\n<function=f>\n<parameter=city>\nOs\n</par", '{"city": "Os'),
        (QWEN3_CODER, "<tool_call>\n<function=f>\n<parameter=a>\n[1, 2", '{"a": [1, 2'),
        (QWEN3_CODER, "<tool_call>\n<function=f>\n<param", ""),
        (KIMI_K2, '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"', '{"'),
    ],
)
def test_what_is_left_of_a_call_that_max_tokens_cuts(fmt: ToolFormat, text: str, arguments: str) -> None:
    for parts in ([text], list(text)):
        message = assemble(read(fmt, parts, cut=True))
        assert message.content is None
        assert [(call.name, call.arguments) for call in message.tool_calls] == [("f", arguments)]
        assert not assemble(read(fmt, parts)).tool_calls  # not cut, but broken


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
    # What Python's literal_eval takes, and a raw line break, which it does not.
    (
        PythonicFormat(),
        '[f(a=\'x\ny\', b="""x\ny""", c=[\'\n\'])]',
        None,
        [("f", {"a": "x\ny", "b": "x\ny", "c": ["\n"]})],
    ),
    (PythonicFormat(), "[f(a=+5, b=-1.5, c=0x10, d=1_000)]", None, [("f", {"a": 5, "b": -1.5, "c": 16, "d": 1000})]),
    (
        PythonicFormat(),
        "[f(a='x' 'y', b=b'z', c={1, 2}, d=set())]",
        None,
        [("f", {"a": "xy", "b": "z", "c": [1, 2], "d": []})],
    ),
    (PythonicFormat(), "[f(a={1: 2, None: 3, True: 4})]", None, [("f", {"a": {"1": 2, "null": 3, "true": 4}})]),
    (PythonicFormat(), "[f(a=r'\\n', b=+True)]", "[f(a=r'\\n', b=+True)]", []),
    (PythonicFormat(), "[f(a='\\ud83d', b='\\ud83c\\udf89')]", None, [("f", {"a": "\ufffd", "b": "🎉"})]),
    (PythonicFormat(), f"[f(a={'9' * 5000})]", f"[f(a={'9' * 5000})]", []),
    # Half of a surrogate pair, also in arguments that are a string, and numbers that int() refuses.
    (HermesFormat(), '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}', None, [("f", {"a": "\ufffd"})]),
    (
        HermesFormat(),
        '<tool_call>{"name": "f", "arguments": {"\\udf89x": "\\ud83dy\\ud83d\\n"}}',
        None,
        [("f", {"\ufffdx": "\ufffdy\ufffd\n"})],
    ),
    (
        HermesFormat(),
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}',
        None,
        [("f", {"a": "\ufffd"})],
    ),
    (HermesFormat(), f'<tool_call>{{"id": {"9" * 5000}, "name": "f", "arguments": {{}}}}', None, [("f", {})]),
    (Llama3Format(), f'{{"x": [{"9" * 5000}], "name": "f", "parameters": {{}}}}', None, [("f", {})]),
    # Qwen 3 Coder: without <tool_call>, without </function>, Python's literals, text around, text between markers.
    (
        QWEN3_CODER,
        "Hm.\n<function=f>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
        "Hm.",
        [("f", {"city": "Oslo"})],
    ),
    (QWEN3_CODER, "<tool_call><function=f><parameter=a>True</parameter></tool_call> So.", " So.", [("f", {"a": True})]),
    (
        QWEN3_CODER,
        "<tool_call>\n<function=f>\n<parameter=a>\n{'k': None}\n</parameter>\n</function>",
        None,
        [("f", {"a": {"k": None}})],
    ),
    (
        QWEN3_CODER,
        "<tool_call>\n<function=f>\n<parameter=other>\n3\n</parameter>\n</function>",
        None,
        [("f", {"other": 3})],
    ),
    (
        QWEN3_CODER,
        "<tool_call>\n<function=f>\n<parameter=a>\nmany\n</parameter>\n</function>",
        None,
        [("f", {"a": "many"})],
    ),
    (
        QWEN3_CODER,
        "<tool_call>\n<function=f>\n<parameter=city>\n\nx\n\n</parameter>\n</function>",
        None,
        [("f", {"city": "\nx\n"})],
    ),
    (
        QWEN3_CODER,
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        [],
    ),
    (QWEN3_CODER, "<tool_call>\n<function=f>\noops", "<tool_call>\n<function=f>\noops", []),
    (QWEN3_CODER, "a <tool_call> b", "a <tool_call> b", []),
    # GLM 4.5 and 4.7, whose template has no line breaks.
    (
        GLM_45,
        "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value> x\n</arg_value>\n</tool_call>",
        None,
        [("f", {"city": " x\n"})],
    ),
    (GLM_45, "<tool_call>f<arg_key>a</arg_key><arg_value>[1]</arg_value></tool_call>", None, [("f", {"a": [1]})]),
    (GLM_45, "<tool_call>f</tool_call><tool_call>f\n</tool_call>", None, [("f", {}), ("f", {})]),
    (GLM_45, "<tool_call>f\n<arg_key>a</arg_key>\n3", "<tool_call>f\n<arg_key>a</arg_key>\n3", []),
    # DeepSeek: without the section, and an unfinished section.
    (
        DEEPSEEK_V3,
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>",
        None,
        [("f", {})],
    ),
    (DEEPSEEK_V31, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", None, [("f", {})]),
    (DEEPSEEK_V31, "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", []),
    (
        DEEPSEEK_V31,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>oops<｜tool▁calls▁end｜>",
        "oops<｜tool▁calls▁end｜>",
        [("f", {})],
    ),
    (MINIMAX_M2, '<minimax:tool_call><invoke name="f"></invoke></minimax:tool_call>Done', "Done", [("f", {})]),
]


@pytest.mark.parametrize(("fmt", "text", "content", "calls"), TEXTS, ids=range(len(TEXTS)))
def test_examples_of_each_format(fmt: ToolFormat, text: str, content: str | None, calls: list[tuple[str, Any]]) -> None:
    for parts in ([text], list(text)):
        assert parsed(read(fmt, parts)) == (content, calls)


def test_text_after_the_last_allowed_call_is_dropped() -> None:
    for fmt in FORMATS:
        text = fmt.render_calls([ToolCall("x", "f", '{"a": 1}'), ToolCall("y", "get_weather", "{}")]) + " bye"
        for parts in ([text], list(text)):
            assert parsed(read(fmt, parts, 1)) == (None, [("f", {"a": 1})])


def test_call_ids_have_the_form_that_templates_accept() -> None:
    text = KIMI_K2.render_calls([ToolCall("", "f", "{}"), ToolCall("", "f", "{}")])
    assert [call.id for call in assemble(read(KIMI_K2, [text])).tool_calls] == ["functions.f:0", "functions.f:1"]
    first, second = assemble(read(KIMI_K2, [text.replace("f:1", "f:0")])).tool_calls
    assert (first.id, second.id[:5]) == ("functions.f:0", "call_")  # an id is unique
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
