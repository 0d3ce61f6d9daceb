"""What an answer says of its prompt: the text and tokens that `echo` puts before it, and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.types import PromptLogprobs, Token, TokenLogprob
from gateway.detokenizer import detokenizer
from gateway.output import ShownToken
from gateway.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class PromptToken:
    """logprob and rank: None for the first one, which nothing stands before. top: alternatives, best first."""

    id: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[TokenLogprob, ...] = ()


def prompt_tokens(ids: Sequence[int], parts: Sequence[PromptLogprobs], num_top: int) -> tuple[PromptToken, ...]:
    """The prompt's tokens with num_top alternatives each; parts come in order and cover all but the first token."""
    tokens = [PromptToken(ids[0])]
    for part in parts:
        for i, (logprob, rank) in enumerate(zip(part.logprobs, part.ranks, strict=True)):
            tokens.append(PromptToken(ids[part.first + i], logprob, rank, part.top(i)[:num_top]))
    return tuple(tokens)


def joined(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
    """Parts in order as one."""
    return PromptLogprobs(
        parts[0].first,
        tuple(x for part in parts for x in part.logprobs),
        tuple(x for part in parts for x in part.ranks),
        tuple(x for part in parts for x in part.top_ids),
        tuple(x for part in parts for x in part.top_logprobs),
    )


@dataclass(frozen=True, slots=True)
class Echo:
    """text: of the prompt. shown: its tokens, with offsets in it."""

    text: str
    reported: tuple[ShownToken, ...]


def echo_of(tokenizer: TextTokenizer, tokens: Sequence[PromptToken]) -> Echo:
    """The prompt as its tokens say it."""
    out = detokenizer(tokenizer)
    text, shown, length = [], [], 0
    for index, token in enumerate(tokens):
        shown.append(ShownToken(Token(index, token.id, token.logprob, token.top), length))
        piece = out.feed(token.id)
        text.append(piece)
        length += len(piece)
    text.append(out.flush())
    return Echo("".join(text), tuple(shown))
