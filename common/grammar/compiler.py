"""Makes grammars from the schemas, expressions and texts of clients, and compiles them with llguidance.

Compiling takes from under a millisecond to a second, without the GIL: call it in a thread. A constraint that cannot be
enforced is refused, so an answer that ended by itself always matches. Some texts that a schema allows are never
generated: other white space than json.dumps writes (unless the client asks for it), runs of white space over MAX_SPACE,
properties in another order, numbers of more digits than engine/sampling/digit_limits.py allows.

A grammar beyond the limits in limits.py is refused: llguidance would overflow its native stack, which ends the process.
Each compilation runs in a thread with a stack that fits those limits. In gateways and pods another process proves each
grammar first (prover.py).
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from llguidance import LLMatcher, LLTokenizer, grammar_from

from common.errors import BatonError, InvalidRequest, describe
from common.grammar import limits
from common.grammar.limits import refused
from common.grammar.matcher import Matcher, MatcherState, MatcherTokenizer
from common.json_schema.adapted import adapted
from common.json_schema.places import endless_reference, pointer
from common.json_schema.refusals import in_words
from common.types import Grammar

MAX_GRAMMAR_CHARS = 256 << 10
MAX_GBNF_CHARS = 1 << 15  #: Each character takes 2 us to read.
MAX_CACHED = 256  #: Max compiled grammars in the cache.
MAX_CACHED_CHARS = 8 << 20  #: Max characters of their texts together.
MAX_SPACE = 40  #: Max characters of white space in a row, so that a model that indents for ever ends.
#: Processor seconds that one token may take. A request beyond it fails. A token takes 0.05 ms as a rule, and 0.7 s at
#: most in an object that may follow 1,000 schemas. Other sequences do not wait for it (engine/sampling/mask_jobs.py).
MASK_LIMIT_S = 1.5
#: Limits of llguidance. By measurement the ordinary grammars of the tests need 13,500 items in a row, 60,000 for a
#: mask, fuel of 400,000, 1,000 states and a size of 50,000. These limits do not bound the time: it grows by the square
#: of the items of a row, and llguidance counts a row when it is complete.
_LIMITS = {
    "max_items_in_row": 16_000,
    "step_max_items": 100_000,
    "step_lexer_fuel": 1_000_000,
    "max_lexer_states": 10_000,  # each copy of a matcher has its own: 15 MB at most
    "max_grammar_size": 60_000,
    "verbose_errors": False,
}

#: White space as json.dumps writes it. Models have seen it; a model that may write more often writes up to the limit.
PLAIN_SPACE: dict[str, Any] = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_ANY_SPACE: dict[str, Any] = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_SPACE}}}",
}
#: Options that a schema must not change by "x-guidance": an ignored keyword would be a broken constraint.
_STRICT: dict[str, Any] = {"coerce_one_of": False, "lenient": False}
_WITH_JSON = re.compile(r'%json|"json_schema"\s*:\s*[^\sn]')
_STACK_SIZE = threading.Lock()  #: Held while threading.stack_size() is changed, because it applies to all new threads.
_T = TypeVar("_T")


def from_json_schema(schema: Mapping[str, Any] | bool | str, *, field: str, any_space: bool = False) -> Grammar:
    """Builds the grammar of a JSON schema, as JSON text or parsed. Raises InvalidRequest with that field if invalid.

    The text has the white space of PLAIN_SPACE. With `any_space` it has any, up to MAX_SPACE characters in a row.
    """
    if isinstance(schema, str):
        _require_short(schema, field)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise refused(field, f"is not valid JSON: {error}") from None
    if not isinstance(schema, Mapping | bool):
        raise refused(field, "must be a JSON schema, an object")
    parsed = dict(schema) if isinstance(schema, Mapping) else {} if schema else {"not": {}}
    parsed.pop("x-guidance", None)
    try:
        schema_text = json.dumps(parsed, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        _require_short(schema_text, field)
        schema_text.encode()
        if '"$ref"' in schema_text and (place := endless_reference(parsed)) is not None:
            where = f" (at {pointer(place)})" if place else ""
            raise refused(field, f"refers to itself without end, so no value of it ends{where}")
        ready = adapted(parsed, schema_text)
        if ready is not parsed:
            schema_text = json.dumps(ready, ensure_ascii=False, separators=(",", ":"))
        options = _STRICT | (_ANY_SPACE if any_space else PLAIN_SPACE)
        text = LLMatcher.grammar_from_json_schema(schema_text, overrides=options)  # type: ignore[arg-type]
    except UnicodeEncodeError:
        raise refused(field, "has half a surrogate pair, which is not valid Unicode") from None
    except (ValueError, RecursionError) as error:
        limits.check_schema(parsed, field)  # its error names the limit if the schema is nested too deeply
        raise refused(field, f"is not a usable JSON schema: {error}") from None
    return _grammar(text, field)


JSON_OBJECT: dict[str, Any] = {"type": "object"}  #: The schema of any JSON object.


def json_object(*, field: str) -> Grammar:
    """Builds the grammar of any JSON object."""
    return from_json_schema(JSON_OBJECT, field=field)


def from_regex(pattern: str, *, field: str) -> Grammar:
    """Builds the grammar of text that matches the whole pattern, in the syntax of Rust's regex crate."""
    _require_short(pattern, field)
    return _grammar(LLMatcher.grammar_from_regex(pattern), field)


def from_choice(choices: Sequence[str], *, field: str) -> Grammar:
    """Builds the grammar of one of these strings. Raises InvalidRequest if there are none, or one is empty."""
    if not choices or not all(choices):
        raise refused(field, "must have at least one choice, and none that is empty")
    return from_lark("start: " + " | ".join(json.dumps(choice) for choice in dict.fromkeys(choices)), field=field)


def from_lark(text: str, *, field: str) -> Grammar:
    """Builds a grammar from llguidance's dialect of Lark: rules, terminals, %json {schema}, <|special token|>."""
    _require_short(text, field)
    return _grammar(LLMatcher.grammar_from_lark(text), field)


def from_lark_or_gbnf(text: str, *, field: str) -> Grammar:
    """Builds a grammar from Lark or llama.cpp's GBNF. Raises InvalidRequest if the text is neither."""
    _require_short(text, field, MAX_GBNF_CHARS if "::=" in text else MAX_GRAMMAR_CHARS)
    try:
        return _grammar(grammar_from("grammar", text), field)
    except ValueError as error:
        raise refused(field, f"is not a grammar: {error}") from None


#: How a client's value becomes a grammar, by the form's name.
FORMS: dict[str, Callable[..., Grammar]] = {
    "json": from_json_schema,
    "json_any_space": partial(from_json_schema, any_space=True),
    "regex": from_regex,
    "choice": from_choice,
    "grammar": from_lark_or_gbnf,
    "text": Grammar,
}


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as a client sent it. A GrammarProver converts it, since that takes time."""

    form: str  #: Key of FORMS.
    value: Any  #: JSON.
    field: str  #: The request's field, for error messages.


def _grammar(text: str, field: str) -> Grammar:
    _require_short(text, field)
    return Grammar(text, field)


def _require_short(text: str, field: str, most: int = MAX_GRAMMAR_CHARS) -> None:
    """Checks the length. Used before and after a conversion, because the conversion takes time by itself."""
    if len(text) > most:
        raise refused(field, f"is longer than {most} characters")


class GrammarTokenizer:
    """A model directory's tokens, built by llguidance on first use (0.3 s for 50k tokens), by any thread."""

    def __init__(self, model_dir: Path, *, eos_ids: Sequence[int], vocab_size: int = 0) -> None:
        self.eos_ids = tuple(eos_ids)  #: Tokens that end a grammar that may end.
        self.model_dir = model_dir
        self.vocab_size = vocab_size  #: Bits of a mask; at least the tokenizer's size.
        self._lock = threading.Lock()
        self._built: tuple[LLTokenizer, MatcherTokenizer] | None = None

    def get(self) -> LLTokenizer:
        """Raises InvalidRequest where the model has no tokenizer that will do."""
        return self._build()[0]

    def for_matchers(self) -> MatcherTokenizer:
        """Returns the same tokens for matchers. Raises InvalidRequest as `get` does."""
        return self._build()[1]

    def _build(self) -> tuple[LLTokenizer, MatcherTokenizer]:
        with self._lock:
            if self._built is not None:
                return self._built
            try:
                raw = json.loads((self.model_dir / "tokenizer.json").read_bytes())
                raw["truncation"] = raw["padding"] = None
                text, eos = json.dumps(raw), list(self.eos_ids) or None
                built = LLTokenizer(text, eos_token=eos)
                if self.vocab_size > built.vocab_size:  # the model's embedding is padded
                    built = LLTokenizer(text, n_vocab=self.vocab_size, eos_token=eos)
                self._built = built, MatcherTokenizer(built)
            except (OSError, ValueError) as error:
                raise InvalidRequest(f"this model cannot follow a grammar: {describe(error)}", field=None) from error
            return self._built


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """A grammar that every sequence with it starts from. Any thread."""

    grammar: Grammar
    tokenizer: LLTokenizer
    prototype: Matcher
    start: MatcherState  #: The state before the first token.
    with_json: bool  #: Its texts may contain numbers of JSON.
    too_slow: bool = False  #: A token took more than MASK_LIMIT_S: no sequence may use the grammar any more.
    _copying: threading.Lock = field(default_factory=threading.Lock)

    def matcher(self) -> Matcher:
        """Returns a new matcher at the start of the grammar."""
        with self._copying:
            return self.prototype.copy()


class GrammarCompiler:
    """Compiles grammars and caches those used last. Any thread; one grammar is compiled once at a time."""

    def __init__(self, tokenizer: GrammarTokenizer, *, max_cached: int = MAX_CACHED) -> None:
        self.tokenizer = tokenizer
        self._max_cached = max_cached
        self._lock = threading.Lock()
        self._cached: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._chars = 0
        self._compiling: dict[str, threading.Event] = {}

    def get_cached(self, grammar: Grammar) -> CompiledGrammar | None:
        """Returns the result of `compile` if it is cached, else None."""
        with self._lock:
            compiled = self._cached.get(grammar.text)
            if compiled is not None:
                self._cached.move_to_end(grammar.text)
            return compiled

    def compile(self, grammar: Grammar, *, proven: bool = False) -> CompiledGrammar:
        """Raises InvalidRequest that names the grammar's field and, in a JSON schema, the keyword that is refused.

        `proven` leaves out the check of the limits, which holds the interpreter lock: a GrammarProver has done it.
        """
        while True:
            if (found := self.get_cached(grammar)) is not None:
                return found
            with self._lock:
                other = self._compiling.get(grammar.text)
                if other is None:
                    done = self._compiling[grammar.text] = threading.Event()
                    break
            other.wait()
        try:
            compiled = compile_grammar(self.tokenizer, grammar, proven=proven)
            self._keep(compiled)
            return compiled
        finally:
            with self._lock:
                del self._compiling[grammar.text]
            done.set()

    def _keep(self, compiled: CompiledGrammar) -> None:
        with self._lock:
            self._cached[compiled.grammar.text] = compiled
            self._chars += len(compiled.grammar.text)
            while len(self._cached) > self._max_cached or self._chars > MAX_CACHED_CHARS:
                text, _ = self._cached.popitem(last=False)
                self._chars -= len(text)


def compile_grammar(tokenizer: GrammarTokenizer, grammar: Grammar, *, proven: bool = False) -> CompiledGrammar:
    """Compiles a grammar like GrammarCompiler.compile, without a cache."""
    if not proven:
        _require_short(grammar.text, grammar.field)
        limits.check(grammar.text, grammar.field)
    if "\0" in grammar.text:  # would end the text for llguidance
        raise refused(grammar.field, "has a NUL character")
    try:
        tokens = tokenizer.for_matchers()
    except BatonError as error:
        raise InvalidRequest(error.message, field=grammar.field) from error

    def compiled() -> tuple[Matcher, MatcherState]:
        matcher = Matcher(tokens, grammar.text, _LIMITS)
        return matcher, matcher.look()  # the first mask is slow and may fail, so compute it here

    matcher, start = _on_large_stack(compiled)
    if start.failure is not None:
        raise InvalidRequest(_refusal(grammar, start.failure), field=grammar.field)
    if start.mask is None:
        raise refused(grammar.field, "allows no text at all")
    return CompiledGrammar(grammar, tokenizer.get(), matcher, start, _WITH_JSON.search(grammar.text) is not None)


def _on_large_stack(work: Callable[[], _T]) -> _T:
    """Runs `work` in a new thread that has COMPILE_STACK (of address space), and returns or raises as it does."""
    result: Future[_T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="grammar-compiler")
    with _STACK_SIZE:
        usual = threading.stack_size(limits.COMPILE_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return result.result()


def _refusal(grammar: Grammar, reason: str) -> str:
    """Returns llguidance's reason in words that name the keyword and its place."""
    words = in_words(reason, _schema_of(grammar.text))
    return f"{grammar.field}{': ' if words.startswith('the JSON') else ' '}{words}"


def _schema_of(text: str) -> object:
    """Returns the JSON schema that is the whole grammar; None for another kind of grammar."""
    if not text.lstrip().startswith("{"):
        return None
    grammars = json.loads(text).get("grammars")
    if not isinstance(grammars, list) or len(grammars) != 1 or not isinstance(grammars[0], dict):
        return None
    schema: object = grammars[0].get("json_schema")
    return schema
