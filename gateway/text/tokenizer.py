"""Text to token ids and back for one model directory, without torch or transformers.

Invariant: ids equal the ids of `transformers` on the same directory, except of literals: text of a client that spells a
control token.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, AnyStr

import orjson
from tokenizers import AddedToken, Tokenizer

from common.errors import ConfigError, describe
from common.model.generation import end_token_ids, read_json

INLINE_CHARS = 8192  #: Longer texts are tokenized in a thread, so that the event loop waits a few milliseconds at most.
LONG_CHARS = 1 << 18  #: Texts of more characters take 0.1 s or more to tokenize.
CALL_CHARS = 16  #: Fixed cost of tokenizing one text, in characters.
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
MAX_BEGINNING = 64  #: Longest beginning of a control token that is found at the end of a string.
#: Characters of a part in which long texts are searched: a regular expression keeps the interpreter lock for up to
#: 50 ns a character.
WINDOW = 1 << 16
PRIVATE_USE = 0x100000, 0x10FFFD  #: First and last character of the private-use plane 16.


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat."""

    text: str
    #: Ranges of the text in which a client spelled control tokens, in order.
    literals: tuple[tuple[int, int], ...] = ()


@functools.cache
def byte_of_char() -> dict[str, int]:
    """Returns the byte for each character of a byte-level vocabulary (GPT-2's bytes_to_unicode, inverted)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    table.update({chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in set(printable))})
    return table


class _TokenTexts(dict[int, str | None]):
    """Cache of token texts: "" for a special token, None for a part of a character. A hit calls no Python function."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        text: str | None = ""
        if token_id not in self._tokenizer.special_ids:
            try:
                text = self._tokenizer.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                text = None
        self[token_id] = text
        return text


class TextTokenizer:
    """Tokenizer of one model."""

    def __init__(self, model_dir: Path) -> None:
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"model: {model_dir} holds no tokenizer.json", field="model")
        try:
            raw: Any = Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises nothing narrower
            raise ConfigError(f"model: {path} is not a tokenizer: {describe(e)}", field="model") from e
        raw.no_truncation()
        raw.no_padding()
        self.raw = raw  # the tokenizer of the `tokenizers` library
        self.config = read_json(model_dir / "tokenizer_config.json")  #: Content of tokenizer_config.json.
        decoder = read_json(path).get("decoder") or {}
        self.byte_level: bool = decoder.get("type") == "ByteLevel"  #: Tokens are byte strings.
        self.vocab_size: int = raw.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, token in raw.get_added_tokens_decoder().items() if token.special)
        self.control_tokens = ControlTokens(raw)
        self._added: dict[int, str] = {i: token.content for i, token in raw.get_added_tokens_decoder().items()}
        self.eos_ids = end_token_ids(model_dir)  # the model's end-of-sequence tokens
        #: Max characters that one token can stand for. A normalizer may shorten a text, some of them by a lot.
        self.max_chars_per_token: int = max(map(len, raw.get_vocab())) * (1 if raw.normalizer is None else 16)
        self._pieces: dict[int, bytes] = {}
        self.token_texts = _TokenTexts(self)  # text by token id, see _TokenTexts
        self._long_texts: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None  #: Of one event loop.

    def is_quick(self, texts: Sequence[str]) -> bool:
        """Returns whether the texts may be tokenized in the event loop."""
        return sum(map(len, texts)) + CALL_CHARS * len(texts) <= INLINE_CHARS

    def turn(self, *texts: str) -> AbstractAsyncContextManager[None]:
        """Returns the context in which texts are tokenized that no context length bounds.

        Only one request with long texts is in it at a time, so that prompts of other requests find a free thread.
        """
        if sum(map(len, texts)) <= LONG_CHARS:
            return nullcontext()
        loop = asyncio.get_running_loop()
        if self._long_texts is None or self._long_texts[0] is not loop:
            self._long_texts = loop, asyncio.Semaphore(1)
        return self._long_texts[1]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of a text."""
        ids: list[int] = self.raw.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_in_thread(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """`encode` for use in a thread: only the batch calls of the library release the interpreter lock."""
        ids: list[int] = self.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    async def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Encodes several texts, in a thread if they are long."""

        def each(encode: Callable[..., list[int]]) -> list[list[int]]:
            return [encode(text, add_special_tokens=add_special_tokens) for text in texts]

        return each(self.encode) if self.is_quick(texts) else await asyncio.to_thread(each, self.encode_in_thread)

    async def encode_async(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encodes one text, in a thread if it is long."""
        return (await self.encode_all([text], add_special_tokens=add_special_tokens))[0]

    async def encode_chat(self, prompt: ChatPrompt, *, add_special_tokens: bool = False) -> list[int]:
        """Encodes a rendered chat, in a thread if it is long. Its literals are encoded as ordinary text."""
        if prompt.literals:
            encode = self.control_tokens.encode
            return await asyncio.to_thread(encode, prompt, add_special_tokens=add_special_tokens)
        return await self.encode_async(prompt.text, add_special_tokens=add_special_tokens)

    async def encode_words(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Returns the token sequences of words, at the start of a text and after a space."""
        if not texts:
            return ()
        forms = [form for text in texts for bare in (text.removeprefix(" "),) for form in (text, bare, f" {bare}")]
        sequences = await self.encode_all(forms, add_special_tokens=False)
        return tuple(dict.fromkeys(tuple(ids) for ids in sequences if ids))

    async def decode_async(self, ids: list[int]) -> str:
        """Returns the text of token ids, special tokens included, in a thread if there are many."""
        decode = functools.partial(self.raw.decode_batch, [ids], skip_special_tokens=False)
        texts: list[str] = await asyncio.to_thread(decode) if len(ids) > INLINE_CHARS else decode()
        return texts[0]

    async def token_strings_async(self, ids: list[int]) -> list[str]:
        """Returns the vocabulary entries of token ids, in a thread if there are many."""
        names: Callable[[], list[str]] = functools.partial(list, map(self.raw.id_to_token, ids))
        return names() if len(ids) <= INLINE_CHARS else await asyncio.to_thread(names)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of token ids without special tokens."""
        text: str = self.raw.decode(ids, skip_special_tokens=True)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token; the name of a special token, b"" for an id outside of the vocabulary."""
        if (piece := self._pieces.get(token_id)) is None:
            piece = self._pieces[token_id] = self._make_piece(token_id)
        return piece

    def _make_piece(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None and (token_id in self.special_ids or not self.byte_level):
            return added.encode()
        if not 0 <= token_id < self.vocab_size:
            return b""
        token: str = self.raw.id_to_token(token_id) or ""
        if self.byte_level:
            table = byte_of_char()
            decoded = [table[c] for c in token if c in table]
            return bytes(decoded) if len(decoded) == len(token) else token.encode()
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes.fromhex(byte[1])
        return token.replace("▁", " ").encode()


class ControlTokens:
    """The control tokens of one tokenizer: the tokens that it flags special, like <|im_end|>."""

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
        return self._other_spellings or next(matches(self._in_json, body, 8 * self._longest), None) is not None

    def spelled(self, text: str) -> Iterator[tuple[int, int]]:
        """Returns the ranges of control tokens in a text, from left to right; at each place the longest token."""
        if not self._other_spellings:
            return matches(self._whole, text, self._longest)
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
        (first, last), secret = PRIVATE_USE, secrets.token_hex(16)
        tokens = self._tokens if self._exact else {}
        aliases = {text: f"{chr(first)}{secret}{i}{chr(last)}" for i, text in enumerate(tokens)}
        gap = f"{chr(first)}{secret}{chr(last)}"
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
            for first, last in matches(self._whole, part, self._longest) if aliases else ():
                pieces += part[at:first], aliases[part[first:last]]
                at = last
            pieces += part[at:], gap.join(("", *prompt.text[start:end], "")) if end > start else ""
            done = end
        return "".join(pieces)


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


def matches(pattern: re.Pattern[AnyStr], text: AnyStr, longest: int) -> Iterator[tuple[int, int]]:
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
