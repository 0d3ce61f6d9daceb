"""Reasoning sections: separates the text that a model thinks from its answer.

    <think> reasoning </think> answer

A section stands at the beginning of the answer, between two markers. Templates may put the first marker into the
prompt. White space at both ends of the section, and between it and the answer, is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from common.errors import ConfigError
from common.settings.kinds import REASONING_PARSERS
from gateway.text.tools.format import split_at_marker
from gateway.text.tools.lark import MARKER


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A pair of markers around reasoning."""

    name: str  #: Value of --reasoning-parser.
    start: str
    end: str
    starts_inside: bool = False  # the model starts inside its section without a start marker
    #: Tags around the answer after a reasoning section. They are dropped.
    answer_start: str = ""
    answer_end: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of the format that may be special tokens."""
        texts = f"{self.start} {self.end} {self.answer_start} {self.answer_end}"
        return tuple(re.findall(MARKER, texts)) or (self.start, self.end)


REASONING_FORMATS = (
    # Qwen 3, DeepSeek R1 and V3.1, GLM 4.5, MiniMax M1 and M2, Kimi K2 Thinking, and many more
    ReasoningFormat("think", "<think>", "</think>"),
    # The first template of R1 has no marker in the prompt.
    ReasoningFormat("deepseek_r1", "<think>", "</think>", starts_inside=True),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),  # Magistral
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
    # Granite 3.3: https://huggingface.co/ibm-granite/granite-3.3-2b-instruct/blob/main/chat_template.jinja
    ReasoningFormat("granite", "<think>", "</think>", answer_start="<response>", answer_end="</response>"),
    # https://huggingface.co/ibm-granite/granite-3.2-2b-instruct
    ReasoningFormat("granite_3_2", "Here is my thought process:", "Here is my response:"),
    # https://huggingface.co/google/gemma-4-31B-it/blob/main/chat_template.jinja
    ReasoningFormat("gemma4", "<|channel>thought\n", "<channel|>"),
)


#: Models that write <think> and </think> as ordinary text. Neither their template nor their tokens show that.
_THINKERS = r"minimax-?m1|deepseek-?r1|kimi-?k2-thinking"
_THINKING_ARCHITECTURES = frozenset({"MiniMaxM1ForCausalLM", "minimax_m1"})


def choose_reasoning_format(
    name: str,
    template: str,
    tokens: Collection[str],
    architectures: Collection[str] = (),
    names: Collection[str] = (),
) -> ReasoningFormat | None:
    """Returns the format with this name; "none" gives None. Raises ConfigError.

    "auto" chooses the first format with an end marker that is in the chat template or an added token, else by the
    architecture and model_type of config.json, else by the model's names.
    """
    if name == "none":
        return None
    if name == "auto":
        for reasoning_format in sorted(REASONING_FORMATS, key=lambda one: not one.answer_start):
            # The templates of Granite show both tags in a row. Other templates have them around results of tools.
            shown = reasoning_format.answer_start + reasoning_format.answer_end in template
            if shown and (reasoning_format.end in template or reasoning_format.end in tokens):
                return reasoning_format
        thinks = any(re.search(_THINKERS, text, re.IGNORECASE) for text in names)
        return REASONING_FORMATS[0] if thinks or not _THINKING_ARCHITECTURES.isdisjoint(architectures) else None
    if (named := next((s for s in REASONING_FORMATS if s.name == name), None)) is not None:
        return named
    known = ", ".join(REASONING_PARSERS)
    raise ConfigError(f"reasoning_parser: {name!r} is not one of {known}", field="reasoning_parser")


class ReasoningSection(Enum):
    """Where an answer begins relative to the reasoning section."""

    BEFORE = auto()  # a section may follow
    INSIDE = auto()  # the prompt opened the section
    AFTER = auto()  # no section will follow

    @classmethod
    def from_prompt(cls, reasoning_format: ReasoningFormat, prompt: str) -> ReasoningSection:
        """Returns where the answer to a rendered prompt begins."""
        end = prompt[-256:].rstrip()
        if end.endswith(reasoning_format.end):
            return cls.AFTER
        return cls.INSIDE if reasoning_format.starts_inside or end.endswith(reasoning_format.start) else cls.BEFORE


class ReasoningParser:
    """Splits one answer's text into reasoning and answer."""

    def __init__(self, reasoning_format: ReasoningFormat, initial_section: ReasoningSection) -> None:
        self._format = reasoning_format
        self._section = initial_section
        self._starting = initial_section is not ReasoningSection.AFTER  # the start marker may still come
        self._trim = False  # drop white space until other text comes
        self._space = ""  #: White space that belongs to the section if more of it follows.
        self._buffer = ""
        self._held = ""  #: Held text of the answer that may be a tag.
        self._tag = ""  #: The tag of the answer that may come.
        self.chars_after_section = 0  #: Characters of the latest text after the section; all if there is none.

    @property
    def in_reasoning(self) -> bool:
        """The section goes on, or may still begin."""
        return self._section is ReasoningSection.INSIDE or self._starting

    def feed(self, text: str) -> tuple[str, str]:
        """Returns what the text adds to the reasoning and to the answer."""
        self._buffer += text
        self.chars_after_section = 0
        if self._starting and not self._start():
            return "", ""
        reasoning_text = ""
        if self._section is ReasoningSection.INSIDE:
            before, marker, self._buffer = split_at_marker(self._buffer, self._format.end)
            reasoning_text = self._trimmed(before)
            if not marker:
                return reasoning_text, ""
            self._section, self._trim, self._space = ReasoningSection.AFTER, True, ""
            self._tag = self._format.answer_start
        self.chars_after_section = min(len(text), len(self._buffer))
        rest, self._buffer = self._buffer, ""
        return reasoning_text, self._trimmed_start(self._untagged(rest))

    def finish(self) -> tuple[str, str]:
        """Returns what the end of the text adds to the reasoning and to the answer."""
        rest, self._buffer = self._buffer, ""
        if self._section is ReasoningSection.INSIDE:
            return self._trimmed(rest), ""
        held, self._held = self._held, ""
        return "", self._trimmed_start(held) + rest

    def _untagged(self, text: str) -> str:
        """Returns text of the answer without its tags. An end of the text that may begin a tag is held back."""
        if not self._tag:
            return text
        text, self._held = self._held + text, ""
        if self._tag == self._format.answer_start:
            rest = text.lstrip()
            if rest != self._tag and self._tag.startswith(rest):
                self._held = text
                return ""
            begins = rest.startswith(self._tag)
            text, self._tag = (rest[len(self._tag) :], self._format.answer_end) if begins else (text, "")
            self._trim = self._trim or begins
        if not self._tag:
            return text
        before, tag, rest = split_at_marker(text, self._tag)
        if tag:
            self._tag = ""
            return before + rest
        self._held = rest
        return before

    def _start(self) -> bool:
        """Looks for the start marker. Returns False while more text is needed to decide."""
        rest, marker = self._buffer.lstrip(), self._format.start
        if rest != marker and marker.startswith(rest):
            return False
        self._starting = False
        if rest.startswith(marker):
            self._section, self._buffer = ReasoningSection.INSIDE, rest[len(marker) :]
        elif self._section is ReasoningSection.BEFORE:
            self._section = ReasoningSection.AFTER
        self._trim = self._section is ReasoningSection.INSIDE
        return True

    def _trimmed(self, text: str) -> str:
        """Returns reasoning text without the trailing white space, which may be the section's end."""
        text = self._space + self._trimmed_start(text)
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return kept

    def _trimmed_start(self, text: str) -> str:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text
