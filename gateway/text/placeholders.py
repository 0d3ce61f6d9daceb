"""Placeholders for control tokens in chats: only the chat template writes them. Text that spells one stays text.

    client's strings -> Placeholders.put -> chat template -> Placeholders.restore -> ChatPrompt -> ControlTokens.encode

A placeholder is one private-use character that the request does not contain. It stands in place of a control token that
a client's string spells, and in place of the beginning of one at the end of a string, because the template may write
the rest. Chats that spell no control token take none of these steps.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from typing import Any

from common.errors import InvalidRequest
from gateway.text.tokenizer import PRIVATE_USE, ChatPrompt, ControlTokens, matches

MAX_LITERALS = 1 << 16  #: Control tokens that one chat may spell; each takes some microseconds.
_PLACEHOLDER = re.compile("[\U00100000-\U0010fffd]|" + r"\\udb[c-f][0-9a-f]\\ud[c-f][0-9a-f]{2}")  # also in ASCII


class Placeholders:
    """The placeholders of one request."""

    def __init__(self, tokens: ControlTokens, body: bytes) -> None:
        """`body` is the JSON text with all values that `put` will get."""
        self._tokens = tokens
        taken = set(re.findall(rb"\xf4[\x80-\x8f]..", body, re.DOTALL))
        low, high = PRIVATE_USE
        first = secrets.randbelow(high - low) + low
        every = (chr(code) for code in (*range(first, high), *range(low, first)))
        self._free = (char for char in every if char.encode() not in taken)
        self._chars: dict[str, str] = {}
        self._left = MAX_LITERALS

    def put(self, value: Any, kept: Collection[str] = ()) -> Any:
        """Returns a value with placeholders in its strings. The control tokens `kept` stay. Raises InvalidRequest."""
        match value:
            case str():
                return self._put(value, kept)
            case dict():
                return {self._put(key, kept): self.put(item, kept) for key, item in value.items()}
            case list() | tuple():
                return [self.put(item, kept) for item in value]
            case _:
                return value

    def restore(self, rendered: str) -> ChatPrompt:
        """Returns the prompt that a template made of the strings."""
        if not self._chars:
            return ChatPrompt(rendered)
        # A template may print JSON in ASCII.
        shown = {char: text for text, char in self._chars.items()}
        shown |= {json.dumps(char)[1:-1]: json.dumps(text)[1:-1] for char, text in shown.items()}
        pieces: list[str] = []
        literals: list[tuple[int, int]] = []
        length = done = 0
        for start, end in matches(_PLACEHOLDER, rendered, 12):
            if (text := shown.get(rendered[start:end])) is None:
                continue
            pieces += rendered[done:start], text
            length, done = length + start - done + len(text), end
            literals.append((length - len(text), length))
        return ChatPrompt("".join((*pieces, rendered[done:])), tuple(literals))

    def _put(self, text: str, kept: Collection[str]) -> str:
        pieces: list[str] = []
        done = 0
        for start, end in self._tokens.spelled(text):
            if text[start:end] not in kept:
                pieces += text[done:start], self._char(text[start:end])
                done = end
        if (start := self._tokens.beginning(text, done)) >= 0:
            pieces += text[done:start], self._char(text[start:])
            done = len(text)
        return "".join((*pieces, text[done:])) if pieces else text

    def _char(self, text: str) -> str:
        self._left -= 1
        if self._left < 0:
            raise InvalidRequest(f"the chat spells more than {MAX_LITERALS} control tokens", field="messages")
        if (char := self._chars.get(text)) is None:
            if (char := next(self._free, None)) is None:
                raise InvalidRequest("the chat uses all private-use characters of plane 16", field="messages")
            self._chars[text] = char
        return char
