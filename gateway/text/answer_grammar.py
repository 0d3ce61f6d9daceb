"""The grammar of a whole answer, of its parts: a reasoning section, calls, and what the client wants the text to match.

    answer:    [section] (calls | text)
    required:  calls alone
    auto:      text with calls in it; or, where the text has to match something, either calls or that text

Special tokens stand in it by id: where a marker is one, its letters would not be the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from common.errors import InvalidRequest
from common.grammar import from_lark
from common.types import Grammar
from gateway.text.reasoning import ReasoningFormat, ReasoningSection
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tools.format import Function, ToolFormat
from gateway.text.tools.lark import lark_string

_ANY = r"/(.|\n)*/"
_GAP = r"/[ \n]{0,4}/"  # between a section and the answer


class AnswerGrammarBuilder:
    """Composes for one model. calls: how it writes them."""

    def __init__(self, tokenizer: TextTokenizer, calls: ToolFormat, reasoning: ReasoningFormat | None) -> None:
        self._tokenizer = tokenizer
        self._tool_format = calls
        self._reasoning = reasoning

    def build(
        self,
        text: Grammar | None,
        functions: Sequence[Function],
        *,
        required: bool,
        parallel: bool,
        begins: ReasoningSection,
        field: str,
    ) -> Grammar | None:
        """None when anything goes. field: what errors about the calls name. Raises InvalidRequest."""
        rules: list[str] = []
        if functions and (required or text is not None or any(f.strict for f in functions)):
            rules = self._with_calls(text, functions, required=required, parallel=parallel)
            field = field if text is None or required else text.field
        elif text is not None:
            rules, field = ["body: @text"], text.field
        else:
            return None
        section = self._section(begins)
        if section is None and text is not None and not functions:
            return text
        start = "start: body" if section is None else f"start: {section[0]}"
        lark = "\n".join([start, *(section[1] if section else ()), *rules, f"ANY: {_ANY}", ""])
        if text is None or required:
            return from_lark(lark, field=field)
        return from_lark(_linked(lark, text), field=field)

    def literal(self, text: str) -> str:
        """A marker as the grammar has to name it."""
        token = self._tokenizer.raw.token_to_id(text)
        return f"<[{token}]>" if token in self._tokenizer.special_ids else lark_string(text)

    def _with_calls(
        self, text: Grammar | None, functions: Sequence[Function], *, required: bool, parallel: bool
    ) -> list[str]:
        calls, trigger = self._tool_format, self._tool_format.trigger
        beside_json = text is not None and not required
        rules = calls.lark_rules(functions, self.literal, parallel=parallel, beside_json=beside_json)
        begin = self.literal(trigger) if trigger else '""'
        if required:
            return ["body: calls", f"begin: {begin}", rules]
        if text is not None:
            return ["body: calls | @text", f"begin: {begin}", rules]
        if not trigger:
            return ["body: calls | PLAIN", "begin: " + begin, rules, self._plain(functions)]
        several = "*" if parallel else "?"
        if begin.startswith("<["):
            return [f"body: calls{several} ANY", f"begin: ANY {begin}", rules]
        lazy = f"begin[lazy]: ANY {begin}"
        return [f"body: calls{several} PLAIN", lazy, rules, self._plain(functions)]

    def _plain(self, functions: Sequence[Function]) -> str:
        """Text in which no call begins."""
        return f"PLAIN: {_ANY} & ~/{self._tool_format.call_regex(functions)}/"

    def _section(self, begins: ReasoningSection) -> tuple[str, list[str]] | None:
        """How an answer begins, and the rules that this needs."""
        style = self._reasoning
        if style is None or begins is ReasoningSection.AFTER:
            return None
        end = self.literal(style.end)
        if end.startswith("<["):
            rest = f"section: ANY {end}"
        else:
            rest = f"section[lazy]: /(.|\\n)*{_escaped(style.end)}/"
        gap = f"gap: {_GAP}"
        if begins is ReasoningSection.INSIDE:
            return "section gap body", [rest, gap]
        return f"({self.literal(style.start)} section gap)? body", [rest, gap]


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _linked(lark: str, text: Grammar) -> str:
    """One grammar of ours, and the client's beside it under the name that ours uses."""
    if text.text.lstrip().startswith("{"):
        [first, *rest] = json.loads(text.text)["grammars"]
    else:
        first, rest = {"lark_grammar": text.text}, []
    if any(grammar.get("name") in ("answer", "text") for grammar in rest):
        raise InvalidRequest(f"{text.field} has a grammar whose name is taken", field=text.field)
    return json.dumps({"grammars": [{"name": "answer", "lark_grammar": lark}, {**first, "name": "text"}, *rest]})
