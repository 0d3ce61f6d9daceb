"""Control tokens in chats: only the chat template writes them. Text of a client that spells one stays text.

    client's strings -> Placeholders.put -> chat template -> Placeholders.restore -> ChatPrompt -> ControlTokens.encode

A control token is a token that the tokenizer flags special, like <|im_end|>. A placeholder is one private-use character
that the request does not contain. It stands in place of a control token that a client's string spells, and in
place of the beginning of one at the end of a string, because the template may write the rest.
Chats that spell no control token take none of these steps.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, AnyStr

import orjson
from tokenizers import AddedToken, Tokenizer

from common.errors import InvalidRequest

MAX_BEGINNING = 64  #: Longest beginning of a control token that is found at the end of a string.
#: Characters of a part in which long texts are searched: a regular expression keeps the interpreter lock for up to
#: 50 ns a character.
WINDOW = 1 << 16
MAX_LITERALS = 1 << 16  #: Control tokens that one chat may spell; each takes some microseconds.
_FIRST, _LAST = 0x100000, 0x10FFFD  # the private-use plane 16, for placeholders
_PLACEHOLDER = re.compile("[\U00100000-\U0010fffd]|" + r"\\udb[c-f][0-9a-f]\\ud[c-f][0-9a-f]{2}")  # also in ASCII


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat."""

    text: str
    #: Ranges of the text in which a client spelled control tokens, in order.
    literals: tuple[tuple[int, int], ...] = ()


class ControlTokens:
    """The control tokens of one tokenizer."""

    def __init__(self, raw: Any) -> None:
        """`raw` is a tokenizer of the `tokenizers` library."""
        self._raw = raw
        self._special_ids = frozenset(i for i, t in raw.get_added_tokens_decoder().items() if t.special)
        self._tokens = {t.content: t for t in raw.get_added_tokens_decoder().values() if t.special and t.content}
        beginnings = {text[:size] for text in self._tokens for size in range(1, min(len(text), MAX_BEGINNING + 1))}
        #: The tokenizer finds control tokens only in text that is not normalized, so exactly as they are spelled.
        self._exact = raw.normalizer is None or not any(t.normalized for t in self._tokens.values())
        #: The normalizer maps other spellings to control tokens, for example in capitals.
        self._other_spellings = not self._exact and _changes_letters(raw.normalizer)
        self._longest = max(map(len, self._tokens), default=0)
        self._whole = re.compile(_pattern([*map(_atoms, self._tokens)]))
        self._at_end = re.compile(_pattern([(*_atoms(text), r"\Z") for text in beginnings]))
        in_json = [*map(_json_atoms, self._tokens), *((*_json_atoms(text), '"') for text in beginnings)]
        self._in_json = re.compile(_pattern(in_json).encode("latin-1"))

    def may_be_in(self, body: bytes) -> bool:
        """Returns whether a string of this JSON text spells a control token, or ends with the beginning of one."""
        return self._other_spellings or next(_matches(self._in_json, body, 8 * self._longest), None) is not None

    def spelled(self, text: str) -> Iterator[tuple[int, int]]:
        """Returns the ranges of control tokens in a text, from left to right; at each place the longest token."""
        if not self._other_spellings:
            return _matches(self._whole, text, self._longest)
        encoding = self._raw.encode(text, add_special_tokens=False)
        ids = self._special_ids - {self._raw.token_to_id(self._unknown)}
        return (span for i, span in zip(encoding.ids, encoding.offsets, strict=True) if i in ids)

    def beginning(self, text: str, start: int) -> int:
        """Returns where the beginning of a control token starts that ends `text`, not before `start`; -1 if none."""
        match = self._at_end.search(text, max(start, len(text) - MAX_BEGINNING))
        return -1 if match is None else match.start()

    def encode(self, prompt: ChatPrompt, *, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of a prompt, with its literals as ordinary text. Meant for a thread.

        Without literals the ids equal the tokenizer's.
        """
        tokenizer, aliases, gap, ids = self._aliased
        for between in ("", gap) if self._exact else (gap,):
            text = self._with_aliases(prompt, aliases, between)
            encoding = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
            # A vocabulary may hold control tokens as words (Unigram, WordLevel). No word crosses a gap.
            if self._special_ids.isdisjoint(encoding.ids):
                break
        if add_special_tokens:
            encoding = tokenizer.post_process(encoding, None, True)
        return [i for i in (ids.get(i, i) for i in encoding.ids) if i is not None]

    @functools.cached_property
    def _unknown(self) -> str:
        """The token of unknown characters, which may be flagged special; "" without one."""
        model = json.loads(self._raw.to_str())["model"]
        return model.get("unk_token") or self._raw.id_to_token(model.get("unk_id") or 0) or ""

    def warm_up(self) -> None:
        """Makes the second tokenizer of `encode`. That takes 0.2 s for 49,000 tokens."""
        self._aliased  # noqa: B018

    @functools.cached_property
    def _aliased(self) -> tuple[Any, dict[str, str], str, dict[int, int | None]]:
        """A copy of the tokenizer that matches a secret alias of each control token instead of the token.

        Returns the copy, the alias of each control token, a gap between words, and the map from the ids of aliases and
        gap to the ids that they stand for (None for the gap). There are no aliases if tokens match in normalized text.
        """
        tokenizer: Any = Tokenizer.from_str(self._raw.to_str())
        tokenizer.encode_special_tokens = self._exact
        secret = secrets.token_hex(16)
        tokens = self._tokens if self._exact else {}
        aliases = {text: f"{chr(_FIRST)}{secret}{i}{chr(_LAST)}" for i, text in enumerate(tokens)}
        gap = f"{chr(_FIRST)}{secret}{chr(_LAST)}"
        tokenizer.add_tokens(
            [
                AddedToken(aliases[text], normalized=False, single_word=t.single_word, lstrip=t.lstrip, rstrip=t.rstrip)
                for text, t in tokens.items()
            ]
            + [AddedToken(gap, normalized=False)]
        )
        ids = {tokenizer.token_to_id(alias): self._raw.token_to_id(text) for text, alias in aliases.items()}
        return tokenizer, aliases, gap, ids | {tokenizer.token_to_id(gap): None}

    def _with_aliases(self, prompt: ChatPrompt, aliases: dict[str, str], gap: str) -> str:
        """Returns the prompt with aliases of the template's control tokens, and gaps around literals' characters."""
        pieces: list[str] = []
        done = 0
        for start, end in (*prompt.literals, (len(prompt.text), len(prompt.text))):
            part, at = prompt.text[done:start], 0
            for first, last in _matches(self._whole, part, self._longest) if aliases else ():
                pieces += part[at:first], aliases[part[first:last]]
                at = last
            pieces += part[at:], gap.join(("", *prompt.text[start:end], "")) if end > start else ""
            done = end
        return "".join(pieces)


class Placeholders:
    """The placeholders of one request."""

    def __init__(self, tokens: ControlTokens, body: bytes) -> None:
        """`body` is the JSON text with all values that `put` will get."""
        self._tokens = tokens
        taken = set(re.findall(rb"\xf4[\x80-\x8f]..", body, re.DOTALL))
        first = secrets.randbelow(_LAST - _FIRST) + _FIRST
        every = (chr(code) for code in (*range(first, _LAST), *range(_FIRST, first)))
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
        for start, end in _matches(_PLACEHOLDER, rendered, 12):
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


def _changes_letters(normalizer: Any) -> bool:
    """Returns whether a normalizer changes more than spaces: capitals, accents, wide or invisible characters."""
    probe = "Aa\u00e9\uff1c|\u200b\u0001\ufb01"
    return str(normalizer.normalize_str(probe)).replace("▁", "").replace(" ", "") != probe


def json_text(value: Any) -> bytes:
    """Returns JSON in UTF-8."""
    try:
        return orjson.dumps(value)
    except TypeError:  # numbers of more than 64 bits, and half surrogate pairs
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _atoms(text: str) -> tuple[str, ...]:
    return tuple(map(re.escape, text))


def _json_atoms(text: str) -> tuple[str, ...]:
    return _atoms(json.dumps(text, ensure_ascii=False)[1:-1].encode().decode("latin-1"))


def _pattern(words: Iterable[Sequence[str]]) -> str:
    """Returns a regular expression for the longest of the words, each a sequence of regular expressions.

    It is a trie, so the time at one position is bounded by a word's length, whatever their number.
    """
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for atom in word:
            node = node.setdefault(atom, {})
        node[""] = {}
    return _trie_pattern(root) if root else r"(?!)"


def _trie_pattern(node: dict[str, Any]) -> str:
    chain: list[str] = []
    while len(node) == 1 and "" not in node:  # no branch: no group, so that groups nest less
        [(atom, node)] = node.items()
        chain.append(atom)
    branches = [atom + _trie_pattern(inner) for atom, inner in node.items() if atom]
    if not branches:
        return "".join(chain)
    return f"{''.join(chain)}(?:{'|'.join(branches)}){'?' if '' in node else ''}"


def _matches(pattern: re.Pattern[AnyStr], text: AnyStr, longest: int) -> Iterator[tuple[int, int]]:
    """Yields the ranges of all matches; a match has at most `longest` characters."""
    at = 0
    while at < len(text):
        end = at + WINDOW
        match = pattern.search(text, at, end + longest)
        if match is not None and match.start() < end:
            yield match.span()
            at = match.end()
        else:
            at = end
