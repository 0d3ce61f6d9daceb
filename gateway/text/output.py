"""The output of one choice: tokens in order become pieces of text with log-probabilities.

    token -> detokenizer -> text -> stop strings -> released text -> parser (reasoning, tool calls) -> OutputPiece

Invariant of the detokenizers: all returned texts joined, `flush` included, equal the tokenizer's decode of all ids at
once, and no returned text ends inside a character. Byte-level vocabularies use the standard library's incremental UTF-8
decoder, all others the two offsets of text-generation-inference (prefix and read). `tokenizers.decoders.DecodeStream`
was tried: its text was right, but without a flush it kept back the tail of 45% of random byte-level sequences, and it
decodes a window per token.
"""

from __future__ import annotations

import codecs
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.types import FinishReason, PromptLogprobs, Token, TokenLogprob
from gateway.text.reasoning import ReasoningFormat, ReasoningParser, ReasoningSection
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tools.format import (
    AnswerParser,
    AnswerSection,
    ContentDelta,
    MessageDelta,
    ReasoningDelta,
    Schemas,
    ToolFormat,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParserConfig:
    """How the output of one request is parsed."""

    tokenizer: TextTokenizer
    reasoning_format: ReasoningFormat | None = None  # reasoning markers, None if the model has none
    initial_section: ReasoningSection = ReasoningSection.BEFORE  #: The answer begins before, in or after it.
    show_reasoning: bool = True  # reasoning becomes deltas; otherwise it is dropped
    #: Format of tool calls, None for a request without tools; an AnswerFormat is always given.
    tool_format: ToolFormat | None = None
    function_names: frozenset[str] = frozenset()  # functions that may be called
    schemas: Schemas = field(default_factory=dict)  #: JSON schemas of their parameters, for formats without types.
    max_calls: int | None = None  # number of calls after which the answer ends, None for no limit
    kept_special_ids: frozenset[int] = frozenset()  #: Special tokens in the text, for a parser or the client.


class OutputParser:
    """Splits the text of one choice into reasoning, tool calls and content."""

    def __init__(self, config: OutputParserConfig, id_source: random.Random | None = None) -> None:
        """`id_source` gives the ids of calls; None: the system does."""
        self._config = config
        reasoning, tools = config.reasoning_format, config.tool_format
        self._reasoning = None if reasoning is None else ReasoningParser(reasoning, config.initial_section)
        self._tools = (
            None if tools is None else tools.new_parser(config.function_names, config.max_calls, config.schemas)
        )
        if self._tools is not None and id_source is not None:
            self._tools.draw_ids_from(id_source)
        self.reasoning_tokens = 0  # tokens of the reasoning section, its markers included
        self._header_tokens = 0  #: Tokens of a message's header in an AnswerFormat, until its channel is known.

    def feed(
        self, text: str, tokens: Sequence[Token], finish: FinishReason | None
    ) -> tuple[tuple[MessageDelta, ...], FinishReason | None]:
        """Returns the deltas of more text, and the finish reason, which the last allowed call may set."""
        deltas: list[MessageDelta] = []
        reasoning, answer = self._reasoning, text
        if reasoning is not None:
            was_in_reasoning = reasoning.in_reasoning
            reasoning_text, answer = reasoning.feed(text)
            self._add_reasoning(reasoning_text, deltas)
            if was_in_reasoning:
                answer_chars = None if reasoning.in_reasoning else reasoning.chars_after_section
                self._count_reasoning_tokens(tokens, len(text), answer_chars)
        section = self._tools.section if isinstance(self._tools, AnswerParser) else None
        self._add_answer(answer, deltas)
        if section is not None:
            self._count_by_section(section, len(tokens))
        if finish is not None:
            if reasoning is not None:
                reasoning_text, answer = reasoning.finish()
                self._add_reasoning(reasoning_text, deltas)
                self._add_answer(answer, deltas)
            if self._tools is not None:
                deltas.extend(self._tools.finish(cut=finish is FinishReason.LENGTH))
        if self._tools is not None and self._tools.num_completed:
            full = self._tools.num_completed == self._config.max_calls
            if finish is FinishReason.STOP or (finish is None and full):
                finish = FinishReason.TOOL_CALLS
        if section is not None and not self._config.show_reasoning:
            deltas = [delta for delta in deltas if not isinstance(delta, ReasoningDelta)]
        return tuple(deltas), finish

    def _count_by_section(self, before: AnswerSection, count: int) -> None:
        """Counts the tokens of a step by the sections before and after it. The end marker of reasoning is reasoning."""
        assert isinstance(self._tools, AnswerParser)
        match self._tools.section:
            case AnswerSection.REASONING:
                self.reasoning_tokens += self._header_tokens + count
                self._header_tokens = 0
            case AnswerSection.HEADER if before is not AnswerSection.REASONING:
                self._header_tokens += count
            case AnswerSection.HEADER:
                self.reasoning_tokens += count
            case AnswerSection.ANSWER:
                self._header_tokens = 0

    def _count_reasoning_tokens(self, tokens: Sequence[Token], length: int, answer_chars: int | None) -> None:
        """Counts tokens in the section. Of their characters the last `answer_chars` follow it; None: it goes on."""
        if answer_chars is None:
            self.reasoning_tokens += len(tokens)
        elif answer_chars == length and answer_chars:
            self.reasoning_tokens = 0  # the answer has no section
        else:
            at = 0
            for i, token in enumerate(tokens):
                if i and at >= length - answer_chars:
                    break
                self.reasoning_tokens += 1
                at += len(self._config.tokenizer.token_bytes(token.id).decode("utf-8", "ignore"))

    def _add_reasoning(self, text: str, deltas: list[MessageDelta]) -> None:
        if text and self._config.show_reasoning:
            deltas.append(ReasoningDelta(text))

    def _add_answer(self, text: str, deltas: list[MessageDelta]) -> None:
        if text:
            deltas.extend((ContentDelta(text),) if self._tools is None else self._tools.feed(text))


_REPLACEMENT = "\ufffd"
_MAX_PENDING = 8  #: Tokens held back for an incomplete character. No character takes more: the bytes are invalid.


class ByteLevelDetokenizer:
    """Token ids of one sequence to text, for byte vocabularies. A special token in `kept_ids` has its name as text."""

    def __init__(self, tokenizer: TextTokenizer, kept_ids: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._texts = tokenizer.token_texts
        self._kept_ids = kept_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._clean = True  # no character is incomplete

    def feed(self, token_id: int) -> str:
        """Returns the text that this token completes, "" while a character is incomplete."""
        if self._clean and token_id not in self._kept_ids and (text := self._texts[token_id]) is not None:
            return text
        if token_id in self._tokenizer.special_ids and token_id not in self._kept_ids:
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self._clean = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        """Returns the text held back, with U+FFFD for incomplete characters. Nothing is pending afterwards."""
        self._clean = True
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """ByteLevelDetokenizer for any vocabulary: decodes a short window with and without the new tokens."""

    def __init__(self, tokenizer: TextTokenizer, kept_ids: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._kept_ids = kept_ids
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def feed(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:
            return self.flush() + self._tokenizer.token_bytes(token_id).decode() if token_id in self._kept_ids else ""
        self._ids.append(token_id)
        return self._advance(force=len(self._ids) - self._read > _MAX_PENDING)

    def flush(self) -> str:
        return self._advance(force=True)

    def _advance(self, *, force: bool) -> str:
        window = self._ids[self._prefix :]
        before = self._tokenizer.decode(window[: self._read - self._prefix])
        after = self._tokenizer.decode(window)
        if not force and (len(after) <= len(before) or after.endswith(_REPLACEMENT)):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return after[len(before) :]


def make_detokenizer(
    tokenizer: TextTokenizer, kept_ids: frozenset[int] = frozenset()
) -> ByteLevelDetokenizer | WindowDetokenizer:
    """Returns the detokenizer that fits the vocabulary."""
    return ByteLevelDetokenizer(tokenizer, kept_ids) if tokenizer.byte_level else WindowDetokenizer(tokenizer, kept_ids)


class StopStringScanner:
    """Finds stop strings in a growing text; a stop string may begin in one token and end in another.

    Invariant: `feed` never returns a character that may belong to a stop string, and returns all others at once. If
    several stop strings occur, the one that begins first counts.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: a stop string is part of the released text."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found = False  # a stop string occurred; no more text is released
        self.matched = ""  # the stop string that occurred

    def feed(self, text: str, *, may_end: bool = True) -> str:
        """Returns the text that may be sent now. `may_end` False: a stop string that `text` completes is content."""
        if self.found or not self._stops:
            return "" if self.found else text
        held, buffer = len(self._held), self._held + text
        # A stop string must end in the new text. One that ended in the held text was content.
        places = ((buffer.find(stop, max(0, held - len(stop) + 1)), len(stop)) for stop in self._stops if may_end)
        matches = [(at, length) for at, length in places if at >= 0]
        if matches:
            self.found, self._held = True, ""
            start, length = min(matches)
            self.matched = buffer[start : start + length]
            return buffer[: start + length if self._include else start]
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """Returns the text held back, once the output is known to end."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest proper prefix of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True, slots=True)
class ReportedToken:
    """A token with log-probabilities."""

    token: Token
    offset: int  # position of the token's text in the answer, in characters


@dataclass(slots=True)  # never changed, but not frozen, because a frozen one takes longer to create (see Token)
class OutputPiece:
    """The text and tokens that one step adds to a choice."""

    text: str
    reported: tuple[ReportedToken, ...]  #: Of released text only, so they may lag behind `tokens`.
    tokens: Sequence[Token]  #: Tokens generated in this step, also the tokens of a stop string.
    finish: FinishReason | None = None
    deltas: tuple[MessageDelta, ...] | None = None  # the parsed meaning of the text, None if all of it is content


class ChoiceOutput:
    """Turns the tokens of one sequence into pieces of text.

    Lifecycle: `add` tokens until `finish` is set, by a stop string or by the finish reason of the pods. While text is
    held back because a stop string may begin in it, the log-probabilities of its tokens are held back too. Tokens that
    begin inside a stop string are counted but not reported.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        stops: Sequence[str],
        *,
        logprobs: bool,
        parser_config: OutputParserConfig | None = None,
        include_stop: bool = False,
        min_tokens: int = 0,
        id_source: random.Random | None = None,
    ) -> None:
        """`parser_config` None: all text is content. `include_stop`: a stop string is part of the text.

        A stop string that is completed before `min_tokens` tokens is content. `id_source` gives the ids of calls.
        """
        self._min_tokens = min_tokens
        kept_ids = parser_config.kept_special_ids if parser_config else frozenset[int]()
        self._detokenizer = make_detokenizer(tokenizer, kept_ids)
        self._parser = OutputParser(parser_config, id_source) if parser_config else None
        self._scanner = StopStringScanner(stops, include=include_stop)
        self._logprobs = logprobs
        #: Pieces hold text and nothing else: no stop strings, no log-probabilities and no parser.
        self.text_only = not stops and not logprobs and parser_config is None
        self._pending: deque[ReportedToken] = deque()
        self._length = self._released = 0  #: Characters detokenized, and characters returned.
        self.num_tokens = 0
        self.finish: FinishReason | None = None

    def add(self, tokens: Sequence[Token], ended: FinishReason | None = None) -> OutputPiece:
        """Takes the next tokens. `ended` is the pods' finish reason; a stop string means STOP and drops the rest."""
        if self.text_only and ended is None:
            return OutputPiece("".join([self.add_id(token.id) for token in tokens]), (), tokens)
        text: list[str] = []
        taken: list[Token] = []
        for token in tokens:
            if self._scanner.found:
                break
            taken.append(token)
            self.num_tokens += 1
            if self._logprobs:
                self._pending.append(ReportedToken(token, self._length))
            text.append(self._scan(self._detokenizer.feed(token.id)))
        if ended is not None and not self._scanner.found:
            text.append(self._scan(self._detokenizer.flush()))
            if not self._scanner.found:
                text.append(self._scanner.flush())
        self.finish = FinishReason.STOP if self._scanner.found else ended
        out = "".join(text)
        self._released += len(out)
        deltas = None
        if self._parser is not None:
            deltas, self.finish = self._parser.feed(out, taken, self.finish)
        return OutputPiece(out, self._take_reported(), tuple(taken), self.finish, deltas)

    def add_id(self, token_id: int) -> str:
        """Returns the text of one more token that does not end the sequence. Only for text-only output."""
        self.num_tokens += 1
        return self._detokenizer.feed(token_id)

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens in reasoning sections; `num_tokens` includes them."""
        return self._parser.reasoning_tokens if self._parser else 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, None if none has."""
        return self._scanner.matched or None

    def _scan(self, text: str) -> str:
        self._length += len(text)
        return self._scanner.feed(text, may_end=self.num_tokens >= self._min_tokens)

    def _take_reported(self) -> tuple[ReportedToken, ...]:
        """Returns the tokens of the released text; at the end of the output, all that are left."""
        reported: list[ReportedToken] = []
        incomplete = self._released < self._length  # text is held back, or cut off by a stop string
        while self._pending and not (incomplete and self._pending[0].offset >= self._released):
            reported.append(self._pending.popleft())
        if self.finish is not None:
            self._pending.clear()
        return tuple(reported)


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of the prompt. `logprob` and `rank` are None for the first token, which has no predecessor."""

    id: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[TokenLogprob, ...] = ()  # alternatives, best first


def prompt_tokens_with_logprobs(
    ids: Sequence[int], parts: Sequence[PromptLogprobs], num_top: int
) -> tuple[PromptToken, ...]:
    """Returns the prompt's tokens with `num_top` alternatives each. `parts`, in order, cover all but the first."""
    scored = (
        PromptToken(ids[part.first + i], logprob, rank, part.top(i)[:num_top])
        for part in parts
        for i, (logprob, rank) in enumerate(zip(part.logprobs, part.ranks, strict=True))
    )
    return (PromptToken(ids[0]), *scored)


def join_prompt_logprobs(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
    """Joins parts that are in order."""
    return PromptLogprobs(
        parts[0].first,
        tuple(x for part in parts for x in part.logprobs),
        tuple(x for part in parts for x in part.ranks),
        tuple(x for part in parts for x in part.top_ids),
        tuple(x for part in parts for x in part.top_logprobs),
    )


def prompt_echo(tokenizer: TextTokenizer, tokens: Sequence[PromptToken]) -> tuple[str, tuple[ReportedToken, ...]]:
    """Returns the prompt's text, detokenized from its ids, and its tokens with their offsets in the text."""
    out = make_detokenizer(tokenizer)
    text, reported = "", []
    for index, token in enumerate(tokens):
        reported.append(ReportedToken(Token(index, token.id, token.logprob, token.top), len(text)))
        text += out.feed(token.id)
    return text + out.flush(), tuple(reported)
