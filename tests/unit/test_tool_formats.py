"""Vendors' templates (the format that they choose, the calls that they write), registered formats, types of values."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.model.chat_template import ChatTemplate
from common.settings.kinds import tool_parser
from gateway.text.tools.choose import choose_tool_format
from gateway.text.tools.format import (
    ToolCall,
    assemble,
)
from gateway.text.tools.known_formats import GLM_45
from tests.rigs.tool_formats import (
    NAMES,
    ROWS,
    TEMPLATES,
    FormatRow,
    parsed,
    read,
)

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather?"}]
PLAIN_SCHEMA = {
    "type": "object",
    "properties": {key: {"type": "string", "description": "It."} for key in ("a", "city", "_x1", "été")},
    "required": [],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A function.", "parameters": PLAIN_SCHEMA}}
    for name in sorted(NAMES)
]
TEMPLATE_CASES = [(row, name) for row in ROWS for name in row.templates]
CHOICE_CASES = [(row, name) for row in ROWS for name in (*row.templates, *row.chosen_by)]


def from_template(name: str, calls: list[tuple[str, dict[str, Any]]], content: str) -> str:
    """Returns the answer as the vendor's template writes it in a conversation, with the text behind it."""
    function_calls = [
        {"id": f"call{n:05}", "type": "function", "function": {"name": f, "arguments": arguments}}
        for n, (f, arguments) in enumerate(calls)
    ]
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate(TEMPLATES, config, file=TEMPLATES / f"{name}.jinja")
    asked = template.render(MESSAGES, tools=TOOLS)
    answer = {"role": "assistant", "content": content, "tool_calls": function_calls}
    result = template.render([*MESSAGES, answer], tools=TOOLS)
    same = next(
        (i for i, (x, y) in enumerate(zip(asked, result, strict=False)) if x != y), min(len(asked), len(result))
    )
    if result.rfind("<", 0, same) > result.rfind(">", 0, same):  # both go on with a marker, but not with the same one
        same = result.rfind("<", 0, same)
    # Both end with the beginning of the next answer.
    ends = zip(reversed(asked), reversed(result[same:]), strict=False)
    next_answer = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ends))
    return result[same : len(result) - next_answer]


@pytest.mark.parametrize(("row", "name"), TEMPLATE_CASES, ids=[name for _, name in TEMPLATE_CASES])
def test_calls_that_the_vendors_template_writes(row: FormatRow, name: str) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("get_weather", {"city": 'Oslo "O"', "a": [1, {"k": None}], "été": 3}),
        ("f", {}),
        ("ns.do-it", {"a": True, "_x1": {"x": "y"}}),
    ]
    calls = calls[:1] if row.single else calls
    if not row.quoted:
        calls = [(f, {key: value for key, value in arguments.items() if key in ("a", "été")}) for f, arguments in calls]
    text = from_template(name, calls, "Let me see." if row.before and not row.single else "")
    message = assemble(read(row.format, list(text)))
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == calls
    assert not any(marker in (message.content or "") for marker in row.format.markers)
    if row.same_writing:
        simple = [(f, {key: value for key, value in a.items() if key in ("city", "été")}) for f, a in calls]
        text = from_template(name, simple, "")
        ours = row.format.render_calls([ToolCall("x", f, json.dumps(a, ensure_ascii=False)) for f, a in simple])
        assert "".join(ours.split()) in "".join(text.split())


@pytest.mark.parametrize(("row", "name"), CHOICE_CASES, ids=[name for _, name in CHOICE_CASES])
def test_the_vendors_template_chooses_the_format(row: FormatRow, name: str) -> None:
    chosen = choose_tool_format("auto", (TEMPLATES / f"{name}.jinja").read_text(), ())
    assert chosen is not None
    assert chosen.name == row.format.name


@pytest.mark.parametrize(
    ("known", "name"),
    [
        ({"names": ("glm", "GLM-4.5-Air")}, "glm45"),
        ({"names": ("Qwen/Qwen3-Coder-30B-A3B-Instruct",)}, "qwen3_coder"),
        ({"names": ("DeepSeek-R1",)}, "deepseek_v3"),
        ({"names": ("DeepSeek-V3-0324",)}, "deepseek_v3"),
        ({"names": ("DeepSeek-V3.1",)}, "deepseek_v31"),
        ({"names": ("DeepSeek-V3.2",)}, None),
        ({"names": ("Kimi-K2-Instruct",)}, "kimi_k2"),
        ({"names": ("SmolLM2-135M-Instruct",)}, None),  # with a template that is not its own
        ({"names": ("Hermes-3-Llama-3.1-8B",)}, "hermes"),
        ({"architectures": ("MiniMaxM2ForCausalLM",)}, "minimax_m2"),
        ({"architectures": ("MiniMaxM1ForCausalLM",)}, "minimax"),
        ({"architectures": ("Glm4MoeForCausalLM",), "names": ("kimi-k2",)}, "glm45"),  # the architecture goes first
        ({"architectures": ("LlamaForCausalLM",), "names": ("my-model",)}, None),
        ({"tokens": ("[TOOL_CALLS]", "[ARGS]"), "names": ("glm-4.5",)}, "mistral"),  # the tokens go first
    ],
)
def test_architecture_and_name_choose_the_format_of_a_template_without_signs(
    known: dict[str, Any], name: str | None
) -> None:
    chosen = choose_tool_format("auto", "{{ tools }}{{ messages }}", **{"tokens": (), **known})
    assert (chosen and chosen.name) == name


def test_another_package_registers_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "toy_formats-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-formats\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[baton.tool_formats]\ntoy = toy_formats:TOY\nmade = toy_formats:make\nbroken = toy_formats:absent\n"
    )
    (tmp_path / "toy_formats.py").write_text(
        "from gateway.text.tools.format import Signs\n"
        "from gateway.text.tools.marked import MarkedFormat\n"
        "TOY = MarkedFormat(name='toy', source='', call='<toy>$call</toy>', signs=Signs(template=('<toy>',)))\n"
        "def make():\n    return MarkedFormat(name='made', source='', call='<made>$call</made>')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    kind = tool_parser()
    assert [kind.parse(name) for name in ("toy", "made", "hermes")] == ["toy", "made", "hermes"]
    with pytest.raises(ValueError, match="no tool format is named other"):
        kind.parse("other")
    for name in ("toy", "made"):
        chosen = choose_tool_format(name, "", ())
        assert chosen is not None
        assert parsed(read(chosen, [chosen.render_calls([ToolCall("", "f", '{"a": 1}')])])) == (None, [("f", {"a": 1})])
    with pytest.raises(ConfigError, match="the format 'broken' of toy_formats:absent does not load"):
        choose_tool_format("broken", "", ())
    with pytest.raises(ConfigError, match="tool_parser: 'other' is not one of auto, "):
        choose_tool_format("other", "", ())


def test_auto_knows_a_registered_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "toy_formats-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-formats\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[baton.tool_formats]\ntoy2 = toy_formats_2:TOY\n")
    (tmp_path / "toy_formats_2.py").write_text(
        "from gateway.text.tools.format import Signs\n"
        "from gateway.text.tools.marked import MarkedFormat\n"
        "TOY = MarkedFormat(name='toy2', source='', call='<toy>$call</toy>', signs=Signs(template=('<toy>',)))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for template, name in (("{{ tools }}<toy>", "toy2"), ("<tool_call>", "hermes"), ("{{ tools }}", None)):
        chosen = choose_tool_format("auto", template, ())
        assert (chosen and chosen.name) == name


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "string"}, "3"),
        ("3", {"type": "integer"}, 3),
        ("3", {}, 3),
        ("3", {"type": ["string", "integer"]}, 3),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("null", {"type": "string"}, "null"),
        ("True", {"type": "boolean"}, True),
        ("True", {}, "True"),
        ('"x"', {}, '"x"'),
        ("[1, 'a']", {"type": "array"}, [1, "a"]),
        ("{'a': (1, 2)}", {"type": "object"}, {"a": [1, 2]}),
        ("oops", {"type": "object"}, "oops"),
        ("b", {"enum": ["a", "b"]}, "b"),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("2", {"$ref": "#/$defs/n"}, 2),
        ("2", {"$ref": "#/$defs/loop"}, 2),
        ("2", {"allOf": [{"$ref": "#/$defs/n"}, {"type": ["integer", "string"]}]}, 2),
        ("1.0", {"type": "number"}, 1.0),
        ("", {"type": "string"}, ""),
        ("", {"type": "integer"}, ""),
    ],
)
def test_a_value_without_type_gets_the_type_of_its_schema(text: str, schema: dict[str, Any], value: Any) -> None:
    root = {"$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}, "properties": {"a": schema}}
    written_call = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    for parts in ([written_call], list(written_call)):
        parser = GLM_45.new_parser(NAMES, None, {"f": root})
        deltas = [delta for part in parts for delta in parser.feed(part)] + parser.finish()
        assert parsed(deltas) == (None, [("f", {"a": value})])
