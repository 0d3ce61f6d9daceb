"""The grammar of a whole answer: a reasoning section, tool calls, and the client's own grammar for the text.

    answer:    [reasoning section] (calls | text)
    required:  calls only
    auto:      text that may contain calls; with a client's grammar, either calls or text that matches it

A marker that is a special token stands in the grammar by its id, because its letters would be other tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from common.errors import InvalidRequest
from common.grammar.compiler import MAX_GRAMMAR_CHARS, from_lark
from common.grammar.limits import refused
from common.types import Grammar
from gateway.text.reasoning import ReasoningFormat, ReasoningSection
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tools.format import AnswerFormat, Function, ToolFormat
from gateway.text.tools.lark import lark_string, lark_text

_ANY = r"/(.|\n)*/"
_GAP = r"/[ \n]{0,4}/"  #: White space between the reasoning section and the answer.


class AnswerGrammarBuilder:
    """Builds the answer grammars of one model."""

    def __init__(
        self, tokenizer: TextTokenizer, tool_format: ToolFormat | None, reasoning: ReasoningFormat | None
    ) -> None:
        """`tool_format` None: no answer calls functions."""
        self._tokenizer = tokenizer
        self._tool_format = tool_format
        self._reasoning = reasoning

    def build(
        self,
        text: Grammar | None,
        functions: Sequence[Function],
        *,
        required: bool,
        parallel: bool,
        initial_section: ReasoningSection,
        field: str,
    ) -> Grammar | None:
        """Returns the grammar of the answer, None if any text is allowed. Raises InvalidRequest, which names `field`.

        `text` is the client's grammar. The answer may call `functions`, several times if `parallel`, and must if
        `required`.
        """
        if required or text is not None or any(f.strict for f in functions):
            _require_short(functions, field)
        if isinstance(self._tool_format, AnswerFormat):
            return self._whole(self._tool_format, text, functions, required=required, parallel=parallel, field=field)
        rules: list[str] = []
        if functions and (required or text is not None or any(f.strict for f in functions)):
            rules = self._with_calls(text, functions, required=required, parallel=parallel)
            field = field if text is None or required else text.field
        elif text is not None:
            rules, field = ["body: @text"], text.field
        else:
            return None
        section = self._section(initial_section)
        if section is None and text is not None and not functions:
            return text
        start = "start: body" if section is None else f"start: {section[0]}"
        lark = "\n".join([start, *(section[1] if section else ()), *rules, f"ANY: {_ANY}", ""])
        if text is None or required:
            return from_lark(lark, field=field)
        return from_lark(_linked(lark, text), field=field)

    def _whole(
        self,
        answer_format: AnswerFormat,
        text: Grammar | None,
        functions: Sequence[Function],
        *,
        required: bool,
        parallel: bool,
        field: str,
    ) -> Grammar | None:
        """Returns the grammar of an answer in a format that also writes the reasoning and the text."""
        if text is None and not (functions and (required or any(f.strict for f in functions))):
            return None
        with_text = text is not None and not required
        lark = answer_format.answer_rules(functions, self.literal, text=with_text, required=required, parallel=parallel)
        if text is None or not with_text:
            return from_lark(lark, field=field)
        return from_lark(_linked(lark, text), field=text.field)

    def literal(self, text: str) -> str:
        """Returns a marker as Lark names it: its token id if it is a special token, else a string literal."""
        token = self._tokenizer.raw.token_to_id(text)
        return f"<[{token}]>" if token in self._tokenizer.special_ids else lark_string(text)

    def _with_calls(
        self, text: Grammar | None, functions: Sequence[Function], *, required: bool, parallel: bool
    ) -> list[str]:
        """Returns the rules of a body that may contain calls, or that is only calls if `required`."""
        tool_format = self._tool_format
        assert tool_format is not None, "requests with functions need a tool format"
        trigger = tool_format.trigger
        beside_json = text is not None and not required
        rules = tool_format.lark_rules(functions, self.literal, parallel=parallel, beside_json=beside_json)
        begin = self.literal(trigger) if trigger else '""'
        if required:
            return ["body: calls", f"begin: {begin}", rules]
        if text is not None:
            return ["body: calls | @text", f"begin: {begin}", rules]
        if not trigger:
            return ["body: calls | PLAIN", "begin: " + begin, rules, _plain(tool_format, functions)]
        several = "*" if parallel else "?"
        if begin.startswith("<["):
            return [f"body: calls{several} ANY", f"begin: ANY {begin}", rules]
        lazy = f"begin[lazy]: ANY {begin}"
        return [f"body: calls{several} PLAIN", lazy, rules, _plain(tool_format, functions)]

    def _section(self, initial_section: ReasoningSection) -> tuple[str, list[str]] | None:
        """Returns how the start rule begins and the rules it needs; None if no reasoning section can come."""
        reasoning = self._reasoning
        if reasoning is None or initial_section is ReasoningSection.AFTER:
            return None
        end = self.literal(reasoning.end)
        if end.startswith("<["):
            section = f"section: ANY {end}"
        else:
            marker = re.escape(reasoning.end).replace("/", r"\/")
            section = f"section[lazy]: /(.|\\n)*{marker}/"
        gap = f"gap: {_GAP}"
        if initial_section is ReasoningSection.INSIDE:
            return "section gap body", [section, gap]
        return f"({lark_text(reasoning.start, self.literal)} section gap)? body", [section, gap]


def _plain(tool_format: ToolFormat, functions: Sequence[Function]) -> str:
    """Returns the rule of text in which no call begins."""
    return f"PLAIN: {_ANY} & ~/{tool_format.call_regex(functions)}/"


def _linked(lark: str, text: Grammar) -> str:
    """Returns one llguidance document with our grammar, named "answer", and the client's, named "text"."""
    if text.text.lstrip().startswith("{"):
        [first, *rest] = json.loads(text.text)["grammars"]
    else:
        first, rest = {"lark_grammar": text.text}, []
    if any(grammar.get("name") in ("answer", "text") for grammar in rest):
        raise InvalidRequest(f"{text.field}: a grammar must not be named answer or text", field=text.field)
    return json.dumps({"grammars": [{"name": "answer", "lark_grammar": lark}, {**first, "name": "text"}, *rest]})


def _require_short(functions: Sequence[Function], field: str) -> None:
    """Raises InvalidRequest for functions whose grammar would be too long, before the time to write it is spent."""
    if sum(len(json.dumps(f.parameters)) for f in functions) > MAX_GRAMMAR_CHARS:
        raise refused(field, f"has parameters that are longer than {MAX_GRAMMAR_CHARS} characters together")
