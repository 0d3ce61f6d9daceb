"""Text to token ids and back for one model directory, without torch or transformers.

Invariant: ids equal the ids of `transformers` on the same directory.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.errors import ConfigError, describe
from common.model.generation import end_token_ids, read_json
from gateway.text.control_tokens import ChatPrompt, ControlTokens

INLINE_CHARS = 8192  #: Longer texts are tokenized in a thread, so that the event loop waits a few milliseconds at most.
LONG_CHARS = 1 << 18  #: Texts of more characters take 0.1 s or more to tokenize.
CALL_CHARS = 16  #: Fixed cost of tokenizing one text, in characters.
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


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
