"""OpenAI's Harmony format (gpt-oss): an answer is a series of messages, each with a header that names its channel.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary<|message|>text<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

The channel analysis is reasoning. A message to a declared function is a call, in any channel. All other messages are
content, joined by line breaks. The prompt ends with <|start|>assistant; <|call|> and <|return|> end the answer.
Source: https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from gateway.text.tools.format import (
    AnswerParser,
    AnswerSection,
    Functions,
    LarkLiteral,
    Schemas,
    Signs,
    ToolCall,
)
from gateway.text.tools.json_scanner import JsonScanner
from gateway.text.tools.lark import call_rules, lark_string

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS = (END, CALL, RETURN)
_AFTER_BODY = (*_ENDS, START, CHANNEL)  #: Markers behind a message. A model may forget the first three.
_HEADER_STARTS = (START, CHANNEL, MESSAGE, CONSTRAIN, "to=")
_HEADER = re.compile(
    r"\s*(?:<\|start\|>\s*assistant)?\s*(?:to=(?P<to>[^\s<]+))?\s*"
    r"(?:<\|channel\|>\s*(?P<channel>\w+)\s*(?:to=(?P<recipient>[^\s<]+))?)?\s*(?:<\|constrain\|>)?\s*[\w.+-]*\s*"
)
_ANY = r"/(.|\n)*/"
_MAX_HEADER = 512  #: Characters.
_THOUGHTS = ("thinking", "reasoning_content", "reasoning")  #: Fields of a message with its reasoning.


class _Kind(Enum):
    """The meaning of a message that is not a call."""

    CONTENT = auto()
    REASONING = auto()


class HarmonyParser(AnswerParser):
    """States: header -> body -> header ..., or header -> call -> body (text behind the arguments) -> header ..."""

    def __init__(
        self, function_names: frozenset[str], max_calls: int | None = None, schemas: Schemas | None = None
    ) -> None:
        super().__init__(function_names, max_calls, schemas)
        self._state = self._header
        self._kind = _Kind.CONTENT  #: The kind of the current message, unless it is a call.
        self._begun = dict.fromkeys(_Kind, False)  #: Whether there was text of this kind.
        self._gap = ""  #: Comes before the next text of this message.
        self._raw = ""  #: Text of the open call.
        self._scanner = JsonScanner()  # of the open call's arguments

    @property
    def section(self) -> AnswerSection:
        """The part of the answer that the next text belongs to."""
        if self._state == self._header:
            return AnswerSection.HEADER
        in_reasoning = self._state == self._body and self._kind is _Kind.REASONING
        return AnswerSection.REASONING if in_reasoning else AnswerSection.ANSWER

    def _step(self) -> bool:
        return self._state()

    def _flush_rest(self) -> None:
        rest, self._buffer = self._buffer, ""
        if self._state == self._body:
            self._add(rest)
        elif self._state == self._call and self._cut:
            self._builder.add_arguments(self._scanner.pending)
        elif self._state == self._call:
            self._builder.reject_call(self._raw + rest)
        elif not (self._cut and rest.lstrip().startswith((START, CHANNEL))):  # a cut header has no content
            self._begin(_Kind.CONTENT)
            self._gap = ""
            self._add(rest)

    def _add(self, text: str) -> None:
        """Adds text of the current message."""
        if not text:
            return
        if text.strip():
            text, self._gap = self._gap + text, ""
            self._begun[self._kind] = True
        if self._kind is _Kind.CONTENT:
            self._builder.add_content(text)
        else:
            self._builder.add_reasoning(text)

    def _begin(self, kind: _Kind) -> None:
        self._kind, self._state = kind, self._body
        self._gap = "\n" if self._begun[kind] else ""

    def _header(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest or any(start.startswith(rest) and rest != start for start in _HEADER_STARTS):
            return False
        window = _MAX_HEADER + len(MESSAGE)
        end = rest.find(MESSAGE, 0, window)
        header = None
        if rest.startswith(_HEADER_STARTS):
            if end < 0 and len(rest) < window and not any(marker in rest for marker in _ENDS):
                return False
            header = _HEADER.fullmatch(rest, 0, max(0, end))
        if end < 0 or header is None:
            return self._no_header(rest)
        self._raw, self._buffer = rest[: end + len(MESSAGE)], rest[end + len(MESSAGE) :]
        recipient, in_analysis = header["to"] or header["recipient"], header["channel"] == "analysis"
        name = (recipient or "").removeprefix("functions.")
        if name in self._function_names:
            self._builder.begin_call()
            self._builder.set_function(name)
            self._scanner, self._state = JsonScanner(), self._call
            return True
        self._begin(_Kind.REASONING if in_analysis else _Kind.CONTENT)
        if recipient and not in_analysis:  # a call of an unknown function
            self._add(self._raw)
        return True

    def _no_header(self, rest: str) -> bool:
        """Turns text where a header should be into content."""
        self._begin(_Kind.CONTENT)
        self._gap = ""
        marker = next((marker for marker in (START, CHANNEL) if rest.startswith(marker)), "")
        space = len(self._buffer) - len(rest)
        self._add(self._buffer[: space + len(marker)])
        self._buffer = rest[len(marker) :]
        return True

    def _body(self) -> bool:
        found = [(at, marker) for marker in _AFTER_BODY if (at := self._buffer.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            self._add(self._buffer[:at])
            self._buffer, self._state = self._buffer[at + len(marker) * (marker in _ENDS) :], self._header
            return True
        at = self._buffer.rfind("<")
        if at < 0 or not any(marker.startswith(self._buffer[at:]) for marker in _AFTER_BODY):
            at = len(self._buffer)
        self._add(self._buffer[:at])
        self._buffer = self._buffer[at:]
        return False

    def _call(self) -> bool:
        if not self._scanner.depth:
            rest = self._buffer.lstrip()
            if not rest or any(end.startswith(rest) and rest != end for end in _ENDS):
                return False
            if rest.startswith(_ENDS):
                self._end_call("{}")
                return True
            if rest[0] != "{":
                return self._reject()
        at, arguments = self._scanner.feed(self._buffer, 0)
        self._raw, self._buffer = self._raw + self._buffer[:at], self._buffer[at:]
        self._builder.add_arguments(arguments)
        if self._scanner.invalid:
            return self._reject()
        if self._scanner.done:
            self._end_call("")
        return self._scanner.done

    def _end_call(self, arguments: str) -> None:
        self._builder.add_arguments(arguments)
        self._builder.end_call()
        self._begin(_Kind.CONTENT)
        self._gap = ""

    def _reject(self) -> bool:
        self._builder.reject_call(self._raw)
        self._begin(_Kind.CONTENT)
        self._begun[_Kind.CONTENT], self._gap = True, ""
        return True


class HarmonyFormat:
    """The format of gpt-oss. Its parser also separates the reasoning and finds the text in its channel."""

    name = "harmony"
    source = "https://github.com/openai/harmony/blob/main/docs/format.md"
    signs = Signs(
        template=(CHANNEL, "analysis", MESSAGE),
        tokens=(CONSTRAIN,),
        architectures=("GptOssForCausalLM", "gpt_oss"),
        name=r"gpt-?oss",
    )
    markers = (START, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS)
    trigger = CHANNEL
    new_parser = HarmonyParser

    def call_regex(self, functions: Functions) -> str:
        return r"(.|\n)*<\|channel\|>commentary to=(.|\n)*"

    def lark_rules(self, functions: Functions, literal: LarkLiteral, *, parallel: bool, beside_json: bool) -> str:
        next_message = f'{literal(END)} {literal(START)} "assistant"'
        more = f" ({next_message} call)*" if parallel else ""
        json_body = f'{literal(CONSTRAIN)} "json" {literal(MESSAGE)}'
        rules = call_rules(
            "call", functions, lambda f: f"begin {lark_string(f'commentary to=functions.{f.name} ')} {json_body}"
        )
        return f"calls: call{more}\n{rules}"

    def answer_rules(
        self, functions: Functions, literal: LarkLiteral, *, text: bool, required: bool, parallel: bool
    ) -> str:
        next_message = f'{literal(START)} "assistant"'
        if literal(END).startswith("<["):
            until_end = f"until_end: {_ANY} {literal(END)}"
        else:
            until_end = f"until_end[lazy]: /(.|\\n)*{re.escape(END)}/"
        lines = [
            f"begin: {literal(CHANNEL)}",
            until_end,
            f'analysis: begin "analysis" {literal(MESSAGE)} until_end {next_message}',
            f'final: begin "final" {literal(MESSAGE)} {"@text" if text else _ANY}',
        ]
        if functions:
            lines.append(f'preamble: begin "commentary" {literal(MESSAGE)} until_end {next_message}')
            lines.append(self.lark_rules(functions, literal, parallel=parallel, beside_json=False))
        body = "final" if not functions else "preamble? calls" if required else "final | preamble? calls"
        return "\n".join([f"start: analysis* ({body})", *lines])

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        return f"{START}assistant".join(
            f"{CHANNEL}commentary to=functions.{call.name} {CONSTRAIN}json{MESSAGE}{call.arguments}{CALL}"
            for call in calls
        )

    def declared(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns tools as the template takes them: it needs a description of each."""
        return [
            {**tool, "function": {**tool["function"], "description": tool["function"].get("description") or ""}}
            for tool in tools
        ]

    def history(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns messages as the template takes them: one call each, answered at once, and reasoning as `thinking`.

        The template shows the text beside a call as reasoning, so both are joined.
        """
        out: list[Mapping[str, Any]] = []
        at = 0
        while at < len(messages):
            message = messages[at]
            at += 1
            if message["role"] != "assistant":
                out.append(message)
                continue
            thoughts = next((text for key in _THOUGHTS if isinstance(text := message.get(key), str) and text), "")
            plain = {key: value for key, value in message.items() if key not in _THOUGHTS}
            if not message.get("tool_calls"):
                out.append(plain | ({"thinking": thoughts} if thoughts else {}))
                continue
            end = at
            while end < len(messages) and messages[end]["role"] == "tool":
                end += 1
            plain |= {"content": "", "thinking": "\n".join(filter(None, (thoughts, message["content"])))}
            out += _one_by_one(plain, messages[at:end])
            at = end
        return out


def _one_by_one(message: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns a message of several calls as one message for each call, with its answer behind it."""
    by_id: dict[str, Mapping[str, Any]] = {}
    others: list[Mapping[str, Any]] = []
    for answer in answers:
        call_id = answer.get("tool_call_id")
        if isinstance(call_id, str) and call_id and call_id not in by_id:
            by_id[call_id] = answer
        else:
            others.append(answer)
    out: list[Mapping[str, Any]] = []
    for n, call in enumerate(message["tool_calls"]):
        out.append({**message, "thinking": "" if n else message["thinking"], "tool_calls": [call]})
        call_id = call.get("id")
        if call_id in by_id:
            out.append(by_id.pop(call_id))
        elif others:
            out.append(others.pop(0))
    return [*out, *by_id.values(), *others]
