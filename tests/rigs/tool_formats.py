"""All tool formats, one row each, for the tests of parsers, grammars and templates.

Add a format by a row in ROWS; the tests then cover it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.text.tools import known_formats as known
from gateway.text.tools.format import (
    InvalidToolCall,
    MessageDelta,
    ToolCall,
    ToolCallDelta,
    ToolFormat,
    assemble,
)
from gateway.text.tools.harmony import HarmonyFormat
from gateway.text.tools.json_formats import HermesFormat, Llama3Format, MistralFormat
from gateway.text.tools.pythonic import PythonicFormat

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"


@dataclass(frozen=True)
class FormatRow:
    """One tool format, and what the tests have to know about it."""

    id: str
    format: ToolFormat
    templates: tuple[str, ...] = ()  #: Files of vendors' templates (tests/data/chat_templates) that write the format.
    chosen_by: tuple[str, ...] = ()  #: Further templates for the format, which need list.append and cannot run.
    typed: bool = True  #: The text of a call shows the types of its arguments.
    free_keys: bool = True  #: Keys of arguments may be any text.
    unwritable: tuple[str, ...] = ()  #: Texts that a string argument cannot contain.
    before: bool = True  #: Text may stand before calls.
    after: bool = True  #: Text may stand after calls.
    single: bool = False  #: Templates write one call per message only.
    quoted: bool = True  #: Templates quote strings.
    same_writing: bool = True  #: Templates write calls of a history as models write calls.


ROWS = (
    FormatRow(
        "hermes", HermesFormat(), ("qwen2.5-7b-instruct", "qwen3-0.6b", "qwq-32b", "hermes-2-pro", "granite-4.0")
    ),
    FormatRow("llama3", Llama3Format(), ("llama-3.1-json",), before=False, single=True),
    FormatRow("mistral", MistralFormat(), ("mistral-nemo-instruct-2407",), same_writing=False),
    FormatRow("mistral-named", MistralFormat(named=True)),
    FormatRow("pythonic", PythonicFormat(), ("toolace", "llama-3.2-pythonic"), before=False, quoted=False),
    FormatRow("qwen3_coder", known.QWEN3_CODER, ("qwen3-coder",), typed=False, unwritable=("</parameter>",)),
    FormatRow("seed_oss", known.SEED_OSS, ("seed-oss",), typed=False, unwritable=("</parameter>",)),
    FormatRow("glm45", known.GLM_45, ("glm-4.5", "glm-4.6"), typed=False, unwritable=("</arg_value>",)),
    FormatRow("deepseek_v3", known.DEEPSEEK_V3, ("deepseek-v3", "deepseek-r1")),
    FormatRow("deepseek_v31", known.DEEPSEEK_V31, ("deepseek-v3.1",)),
    FormatRow("kimi_k2", known.KIMI_K2, ("kimi-k2-instruct",), chosen_by=("kimi-k2-thinking",)),
    FormatRow("minimax", known.MINIMAX_M1, ("minimax-m1",)),
    FormatRow("minimax_m2", known.MINIMAX_M2, ("minimax-m2",), typed=False, unwritable=("</parameter>",)),
    FormatRow("phi4_mini", known.PHI4_MINI),
    FormatRow("phi4_mini_tags", known.PHI4_MINI_TAGS),
    FormatRow("granite", known.GRANITE_3, ("granite-3.0",)),
    FormatRow("xlam", known.XLAM, ("xlam-2-llama", "xlam-2-qwen"), before=False),
    FormatRow("olmo3", known.OLMO_3),
    FormatRow(
        "functiongemma",
        known.FUNCTION_GEMMA,
        ("functiongemma",),
        typed=False,
        unwritable=("<escape>",),
        same_writing=False,
    ),
    FormatRow("gemma4", known.GEMMA_4, ("gemma-4-31b-it",), typed=False, unwritable=('<|"|>',)),
    FormatRow("harmony", HarmonyFormat(), ("gpt-oss-120b",), single=True, same_writing=False),
)
FORMATS: list[ToolFormat] = [row.format for row in ROWS]
IDS = [row.id for row in ROWS]

#: Schemas with one type for each argument, so that formats without types can be read.
PROPERTIES: dict[str, Any] = {
    "a": {"type": ["number", "integer", "boolean", "null", "array", "object"]},
    "city": {"type": "string"},
    "_x1": {"anyOf": [{"type": "array"}, {"$ref": "#/$defs/map"}]},
    "été": {"type": ["integer", "null"]},
}
SCHEMA: dict[str, Any] = {"type": "object", "properties": PROPERTIES, "$defs": {"map": {"type": "object"}}}
NAMES = frozenset({"f", "get_weather", "ns.do-it"})
SCHEMAS: Mapping[str, Mapping[str, Any]] = dict.fromkeys(NAMES, SCHEMA)
Calls = Sequence[tuple[str, Mapping[str, Any]]]


def read(
    fmt: ToolFormat, parts: Sequence[str], max_calls: int | None = None, *, cut: bool = False
) -> list[MessageDelta]:
    """Returns all deltas of a text that comes in parts. `cut`: max_tokens ended it."""
    parser = fmt.new_parser(NAMES, max_calls, SCHEMAS)
    deltas = [delta for part in parts for delta in parser.feed(part)]
    return deltas + parser.finish(cut=cut)


def written(fmt: ToolFormat, calls: Calls) -> str:
    """Returns calls as the format writes them."""
    return fmt.render_calls([ToolCall("x", name, json.dumps(arguments)) for name, arguments in calls])


def parsed(deltas: Sequence[MessageDelta]) -> tuple[str | None, list[tuple[str, Any]]]:
    """Returns content and calls of an answer."""
    message = assemble(deltas)
    return message.content, [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


def joined(deltas: Sequence[MessageDelta]) -> list[Any]:
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


_WORDS = [
    "Oslo",
    "",
    " ",
    "x\ny",
    'a "q" \\',
    "3",
    "null",
    "{}",
    "世 🎉",
    "it's",
    "<b>",
    "]",
    "[TOOL",
    "a\n",
    "\nb",
    "</",
]
_ANY: list[Callable[[random.Random], Any]] = [
    lambda r: r.choice([0, -7, 12345678901234567890, 1.5, -2e-7, True, False, None]),
    lambda r: [r.choice([1, "a]", None, {"k": []}]) for _ in range(r.randrange(3))],
    lambda r: {r.choice(["k", 'q"', "é"]): r.choice([1, "}", [True]]) for _ in range(r.randrange(3))},
]
_BY_KEY: dict[str, Callable[[random.Random], Any]] = {
    "a": lambda r: r.choice(_ANY)(r),
    "city": lambda r: "".join(r.choice(_WORDS) for _ in range(r.randrange(4))),
    "_x1": lambda r: r.choice(_ANY[1:])(r),
    "été": lambda r: r.choice([0, 42, None]),
}


def random_calls(row: FormatRow, rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Returns one to three calls that the format can write."""
    calls = []
    for _ in range(rng.randint(1, 3)):
        keys = [key for key in _BY_KEY if rng.random() < 0.5]
        arguments = {key: _BY_KEY[key](rng) for key in keys}
        if any(text in str(arguments.get("city")) for text in row.unwritable):
            arguments["city"] = ""
        calls.append((rng.choice(sorted(NAMES)), arguments))
    return calls


@dataclass(frozen=True)
class Transcript:
    """An answer's text, and what it says."""

    text: str
    content: str | None
    calls: list[tuple[str, Any]]


def transcript(row: FormatRow, seed: int) -> Transcript:
    """Returns the generated answer of this seed: calls, with or without text before and after."""
    rng = random.Random(f"{row.id} {seed}")
    before = rng.choice(["", "", "Let me see.", "A < b [1]"]) if row.before else ""
    after = rng.choice(["", "", "", "Done."]) if row.after else ""
    calls = random_calls(row, rng)
    gaps = [rng.choice(["", "\n", "\n\n"]) for _ in range(2)]
    text = (before and before + gaps[0]) + written(row.format, calls) + (after and gaps[1] + after)
    message = before + (after and gaps[1] + after)
    return Transcript(text, message or None, calls)


_SCRAPS = ['{"name": "f"', "f(", '"', "'", "\\", "\\ud83d", "9" * 5000, "{", "}", "\n", " ", ")", "<"]


def damaged(row: FormatRow, rng: random.Random) -> str:
    """Returns a generated answer in which one to four places are lost, repeated, reversed or filled with scraps."""
    text = transcript(row, rng.randrange(1 << 30)).text
    for _ in range(rng.randint(1, 4)):
        at, end = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        match rng.randrange(4):
            case 0:
                text = text[:at] + text[end:]
            case 1:
                text = text[:at] + rng.choice([*row.format.markers, *_SCRAPS]) + text[at:]
            case 2:
                text = text[:end] + text[at:]
            case _:
                text = text[:at] + text[at:end][::-1] + text[end:]
    return text
