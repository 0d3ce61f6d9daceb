"""llguidance's matchers, by its C API: calls release the interpreter lock, and another thread can cancel them.

llguidance's Python classes hold the lock while a matcher takes a token, which takes up to a second, and their copies
share a lexer behind a mutex. The C API has no such limits. The wheel exports it, and tests/unit/test_private_names.py
names its functions. Any thread may call a matcher, but only one at a time. Only `cancel` may be called while another
call runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import llguidance._lib
from llguidance import LLTokenizer

_TokenizeFn = ctypes.CFUNCTYPE(c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t)


class _TokenizerInit(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("vocab_size", c_uint32),
        ("tok_eos", c_uint32),
        ("token_lens", POINTER(c_uint32)),
        ("token_bytes", c_char_p),
        ("tokenizer_json", c_char_p),
        ("tokenize_assumes_string", c_bool),
        ("tokenize_fn", _TokenizeFn),
        ("use_approximate_greedy_tokenize_fn", c_bool),
        ("tokenize_user_data", c_void_p),
        ("slices", c_void_p),
        ("tok_eos_extra", POINTER(c_uint32)),
        ("tok_eos_extra_count", c_uint32),
    )


class _Limits(Structure):
    _fields_ = (
        ("max_items_in_row", c_size_t),
        ("initial_lexer_fuel", c_uint64),
        ("step_lexer_fuel", c_uint64),
        ("step_max_items", c_size_t),
        ("max_lexer_states", c_size_t),
        ("max_grammar_size", c_size_t),
        ("precompute_large_lexemes", c_bool),
        ("verbose_errors", c_bool),
    )


class _MatcherInit(Structure):
    _fields_ = (
        ("tokenizer", c_void_p),
        ("log_buffer_level", c_uint32),
        ("log_stderr_level", c_uint32),
        ("ff_tokens_ok", c_bool),
        ("backtrack_ok", c_bool),
        ("limits", _Limits),
    )


#: The functions of llguidance.h that are used: result, then arguments.
_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    "llg_new_tokenizer_v2": (c_void_p, POINTER(_TokenizerInit), c_char_p, c_size_t),
    "llg_free_tokenizer": (None, c_void_p),
    "llg_constraint_init_set_defaults": (None, POINTER(_MatcherInit), c_void_p),
    "llg_new_matcher": (c_void_p, POINTER(_MatcherInit), c_char_p, c_char_p),
    "llg_clone_matcher": (c_void_p, c_void_p),
    "llg_free_matcher": (None, c_void_p),
    "llg_matcher_get_cancellation_handle": (c_void_p, c_void_p),
    "llg_free_cancellation_handle": (None, c_void_p),
    "llg_matcher_compute_mask_into": (c_int32, c_void_p, c_void_p, c_size_t),
    "llg_matcher_consume_token": (c_int32, c_void_p, c_uint32),
    "llg_matcher_rollback": (c_int32, c_void_p, c_size_t),
    "llg_matcher_is_accepting": (c_bool, c_void_p),
}
#: Functions that only read a field. They keep the interpreter lock, because taking it again takes longer.
_GETTERS: Mapping[str, tuple[Any, ...]] = {
    "llg_cancel": (None, c_void_p),
    "llg_matcher_is_error": (c_bool, c_void_p),
    "llg_matcher_is_stopped": (c_bool, c_void_p),
    "llg_matcher_get_error": (c_char_p, c_void_p),
}


def _declared(library: ctypes.CDLL, functions: Mapping[str, tuple[Any, ...]]) -> ctypes.CDLL:
    for name, (result, *arguments) in functions.items():
        if not hasattr(library, name):
            raise ImportError(f"llguidance does not export {name}; install the version that constraints.txt names")
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


_lib = _declared(ctypes.CDLL(llguidance._lib.__file__), _FUNCTIONS)
_getters = _declared(ctypes.PyDLL(llguidance._lib.__file__), _GETTERS)


class MatcherTokenizer:
    """A model's tokens for matchers, the same as in `tokens`. Raises ValueError if llguidance does not take them."""

    def __init__(self, tokens: LLTokenizer) -> None:
        self.vocab_size = tokens.vocab_size
        texts = [_token_text(tokens, token) for token in range(tokens.vocab_size)]
        #: The tokens' bytes, one after the other, and the number of bytes of each.
        self.texts = b"".join(texts)
        self.lengths = tuple(map(len, texts))
        self._tokenize = _tokenize_with(tokens)  # kept, because the native object refers to it
        first, *more = tokens.eos_tokens or [tokens.eos_token]
        self.eos = [token for token in (first, *more) if token < tokens.vocab_size]
        init = _TokenizerInit(
            struct_size=ctypes.sizeof(_TokenizerInit),
            vocab_size=tokens.vocab_size,
            tok_eos=first,
            token_lens=(c_uint32 * len(texts))(*map(len, texts)),
            token_bytes=self.texts,
            tokenize_fn=self._tokenize,
            tok_eos_extra=(c_uint32 * len(more))(*more),
            tok_eos_extra_count=len(more),
        )
        problem = ctypes.create_string_buffer(1000)
        self.pointer = _lib.llg_new_tokenizer_v2(byref(init), problem, len(problem))
        if not self.pointer:
            raise ValueError(problem.value.decode(errors="replace"))

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            _lib.llg_free_tokenizer(self.pointer)


def _token_text(tokens: LLTokenizer, token: int) -> bytes:
    """Returns a token's bytes as llguidance keeps them: special tokens begin with 0xff, unused ones are empty."""
    text = tokens.decode_bytes([token])
    if tokens.is_special_token(token):
        return b"\xff" + text
    return b"" if text == b"<[%d]>" % token else text


def _tokenize_with(tokens: LLTokenizer) -> Callable[..., int]:
    def tokenize(_: int, text: int, size: int, output: int, room: int) -> int:
        ids = tokens.tokenize_bytes(ctypes.string_at(text, size)) if size else []
        count = min(len(ids), room)
        ctypes.memmove(output, (c_uint32 * count)(*ids[:count]), 4 * count)
        return len(ids)

    return _TokenizeFn(tokenize)


@dataclass(frozen=True, slots=True)
class MatcherState:
    """The tokens that may follow in one state of a matcher."""

    mask: bytes | None  # Bit i % 8 of byte i // 8 allows token i; None: none may follow
    is_accepting: bool  # The text may end here
    failure: str | None = None  # Why the matcher has failed


class Matcher:
    """Follows one answer. A matcher that fails, or is cancelled, stays in that state.

    Args:
        limits: Fields of llguidance's LLParserLimits.
    """

    def __init__(self, tokenizer: MatcherTokenizer, grammar: str, limits: Mapping[str, int]) -> None:
        init = _MatcherInit()
        _lib.llg_constraint_init_set_defaults(byref(init), tokenizer.pointer)
        init.log_buffer_level = init.log_stderr_level = 0
        for name, value in limits.items():
            setattr(init.limits, name, value)
        self._adopt(tokenizer, _lib.llg_new_matcher(byref(init), b"llguidance", grammar.encode()))

    def _adopt(self, tokenizer: MatcherTokenizer, pointer: int) -> None:
        self._tokenizer, self._pointer = tokenizer, pointer
        self._cancellation = _lib.llg_matcher_get_cancellation_handle(pointer)

    def __del__(self) -> None:
        if getattr(self, "_cancellation", None):
            _lib.llg_free_cancellation_handle(self._cancellation)
            _lib.llg_free_matcher(self._pointer)

    def copy(self) -> Matcher:
        """Returns an independent matcher in the same state."""
        other = Matcher.__new__(Matcher)
        other._adopt(self._tokenizer, _lib.llg_clone_matcher(self._pointer))
        return other

    @property
    def tokenizer(self) -> MatcherTokenizer:
        return self._tokenizer

    def cancel(self) -> None:
        """Makes the running call and all later calls fail soon. Any thread."""
        _getters.llg_cancel(self._cancellation)

    def compute_bitmask(self) -> bytes:
        """Returns MatcherState.mask, all zeros if the matcher has failed."""
        size = -(-self._tokenizer.vocab_size // 32) * 4
        buffer = ctypes.create_string_buffer(size)
        if _lib.llg_matcher_compute_mask_into(self._pointer, buffer, size) != 0:
            return bytes(size)
        return buffer.raw

    def look(self) -> MatcherState:
        """Returns the current state: the tokens that may follow."""
        mask = None if self.is_stopped() else self.compute_bitmask()
        if self.is_error():
            return MatcherState(None, False, self.get_error())
        # In a state where the text may end, the mask allows the end-of-sequence tokens.
        may_end = mask is None or any(mask[token >> 3] >> (token & 7) & 1 for token in self._tokenizer.eos)
        return MatcherState(mask, may_end and self.is_accepting())

    def consume_token(self, token: int) -> bool:
        """Advances by a token. Returns False if the matcher has failed."""
        return bool(_lib.llg_matcher_consume_token(self._pointer, token) == 0)

    def rollback(self, num_tokens: int) -> bool:
        """Takes back the last tokens. Returns False if the matcher has failed."""
        return bool(_lib.llg_matcher_rollback(self._pointer, num_tokens) == 0)

    def is_accepting(self) -> bool:
        return bool(_lib.llg_matcher_is_accepting(self._pointer))

    def is_stopped(self) -> bool:
        """Whether no token may follow, also if the matcher has failed."""
        return bool(_getters.llg_matcher_is_stopped(self._pointer))

    def is_error(self) -> bool:
        return bool(_getters.llg_matcher_is_error(self._pointer))

    def get_error(self) -> str:
        """Returns why the matcher has failed, "" if it has not."""
        reason: bytes | None = _getters.llg_matcher_get_error(self._pointer)
        return "" if reason is None else reason.decode(errors="replace")
