"""Reasoning sections: what a model thinks before it answers, told apart from the answer.

A section stands at an answer's beginning, between two markers; templates may put the first one into the prompt. White
space at the section's ends and between it and the answer belongs to neither.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from common.errors import ConfigError
from common.settings.kinds import REASONING_PARSERS
from gateway.text.tools.call_parser import split_at_marker


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """One pair of markers. implied: the model begins inside its section, whether or not it says so."""

    name: str
    start: str
    end: str
    starts_inside: bool = False


REASONING_FORMATS = (
    ReasoningFormat("think", "<think>", "</think>"),  # Qwen 3, DeepSeek R1 and V3.1, GLM 4.5, and many more
    ReasoningFormat(
        "deepseek_r1", "<think>", "</think>", starts_inside=True
    ),  # first template of R1: nothing in the prompt
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),  # Magistral
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
)


def choose_reasoning_format(name: str, template: str, tokens: Collection[str]) -> ReasoningFormat | None:
    """By name; auto: the style whose end marker the chat template or the added tokens know. Raises ConfigError."""
    if name == "none":
        return None
    if name == "auto":
        return next(
            (s for s in REASONING_FORMATS if not s.starts_inside and (s.end in template or s.end in tokens)), None
        )
    for style in REASONING_FORMATS:
        if style.name == name:
            return style
    raise ConfigError(
        f"reasoning_parser: {name!r} is not one of {', '.join(REASONING_PARSERS)}", field="reasoning_parser"
    )


class ReasoningSection(Enum):
    """Where an answer begins."""

    BEFORE = auto()  # a section may follow
    INSIDE = auto()
    AFTER = auto()  # no section will follow

    @classmethod
    def from_prompt(cls, style: ReasoningFormat, prompt: str) -> ReasoningSection:
        """Of the answer to a rendered prompt."""
        end = prompt[-256:].rstrip()
        if end.endswith(style.end):
            return cls.AFTER
        return cls.INSIDE if style.starts_inside or end.endswith(style.start) else cls.BEFORE


class ReasoningParser:
    """Splits one answer's text. thinking: the section goes on, or may still begin. behind: characters of the latest
    text that came behind the section's end; all of them when there is no section.
    """

    def __init__(self, style: ReasoningFormat, begins: ReasoningSection) -> None:
        self._style = style
        self._section = begins
        self._starting = begins is not ReasoningSection.AFTER  # the start marker may come
        self._trim = False  # white space that comes now belongs to nothing
        self._space = ""  # white space that belongs to the section if more of it follows
        self._buffer = ""
        self.chars_after_section = 0

    @property
    def in_reasoning(self) -> bool:
        return self._section is ReasoningSection.INSIDE or self._starting

    def feed(self, text: str) -> tuple[str, str]:
        """More of the section, more of the answer."""
        self._buffer += text
        self.chars_after_section = 0
        if self._starting and not self._start():
            return "", ""
        thought = ""
        if self._section is ReasoningSection.INSIDE:
            before, marker, self._buffer = split_at_marker(self._buffer, (self._style.end,))
            thought = self._trimmed(before)
            if not marker:
                return thought, ""
            self._section, self._trim, self._space = ReasoningSection.AFTER, True, ""
        self.chars_after_section = min(len(text), len(self._buffer))
        return thought, self._answer()

    def finish(self) -> tuple[str, str]:
        """What the text's end adds to both."""
        rest, self._buffer = self._buffer, ""
        if self._section is ReasoningSection.INSIDE:
            return self._trimmed(rest), ""
        return "", rest

    def _start(self) -> bool:
        """Whether it is clear if the start marker is there."""
        rest, marker = self._buffer.lstrip(), self._style.start
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
        """The section's text without the white space that may turn out to be its end."""
        text = self._space + self._trimmed_start(text)
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return kept

    def _answer(self) -> str:
        out, self._buffer = self._buffer, ""
        return self._trimmed_start(out)

    def _trimmed_start(self, text: str) -> str:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text
