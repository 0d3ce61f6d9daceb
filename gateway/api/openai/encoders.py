"""The JSON that OpenAI's clients expect: answers, stream chunks, usage and log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from common.types import FinishReason, TokenLogprob
from gateway.api.http.json_fields import Json
from gateway.serving.choice import CompleteAnswer
from gateway.serving.request_context import Usage
from gateway.text.output import OutputPiece, PromptToken, ReportedToken
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tools.format import ContentDelta, InvalidToolCall, MessageDelta, ReasoningDelta, ToolCallDelta

#: OpenAI's value for minus infinity, which JSON cannot express.
LOWEST_LOGPROB = -9999.0


def usage_json(usage: Usage) -> Json:
    """Returns OpenAI's usage object. It counts prediction tokens if speculative decoding was used."""
    details = {"reasoning_tokens": usage.reasoning}
    if usage.accepted or usage.rejected:
        details |= {"accepted_prediction_tokens": usage.accepted, "rejected_prediction_tokens": usage.rejected}
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": details,
    }


def finish_json(finish: FinishReason | None) -> str | None:
    """Returns OpenAI's finish_reason."""
    return None if finish is None else finish.value


def _number(logprob: float | None) -> float:
    return LOWEST_LOGPROB if logprob is None or not logprob > LOWEST_LOGPROB else logprob


def token_logprobs(tokenizer: TextTokenizer, reported: Sequence[ReportedToken]) -> list[Json]:
    """Returns tokens with log-probabilities in the form of chats and responses."""

    def entry(token: TokenLogprob) -> Json:
        piece = tokenizer.token_bytes(token.token)
        text = piece.decode("utf-8", "replace")
        return {"token": text, "logprob": _number(token.logprob), "bytes": list(piece)}

    return [
        {
            **entry(TokenLogprob(r.token.id, _number(r.token.logprob))),
            "top_logprobs": [entry(top) for top in r.token.top],
        }
        for r in reported
    ]


def prompt_logprobs_json(tokenizer: TextTokenizer, tokens: Sequence[PromptToken]) -> list[Json | None]:
    """Returns vLLM's prompt_logprobs: each prompt token and its alternatives by id; null for the first token."""

    def entry(token: int, logprob: float | None, rank: int | None) -> Json:
        text = tokenizer.token_bytes(token).decode("utf-8", "replace")
        return {"logprob": _number(logprob), "rank": rank, "decoded_token": text}

    out: list[Json | None] = []
    for token in tokens:
        if token.rank is None:
            out.append(None)
            continue
        line = {str(token.id): entry(token.id, token.logprob, token.rank)}
        for rank, top in enumerate(token.top, 1):
            line.setdefault(str(top.token), entry(top.token, top.logprob, rank))
        out.append(line)
    return out


class AnswerEncoder(Protocol):
    """Encodes the answers of one request in the shape of its endpoint."""

    def encode_answer(self, answers: Sequence[CompleteAnswer], usage: Usage) -> Json:
        """Returns the whole answer."""

    def first_chunk(self, index: int) -> Json | None:
        """Returns the first chunk of a choice's stream, None if it has no special one."""

    def encode_piece(self, index: int, piece: OutputPiece) -> list[Json]:
        """Returns the chunks of one piece, [] if it shows nothing."""

    def usage_chunk(self) -> Json:
        """Returns the chunk without choices to which the usage is added."""


class CompletionEncoder:
    """Answers of /v1/completions."""

    def __init__(self, request_id: str, model: str, tokenizer: TextTokenizer, *, logprobs: bool) -> None:
        self._head = {"id": f"cmpl-{request_id}", "object": "text_completion", "created": int(time.time())}
        self._head["model"] = model
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def encode_answer(self, answers: Sequence[CompleteAnswer], usage: Usage) -> Json:
        choices = [self._choice(i, a.text, a.reported, a.finish) for i, a in enumerate(answers)]
        for choice, answer in zip(choices, answers, strict=True):
            if answer.prompt_tokens is not None:
                choice["prompt_logprobs"] = prompt_logprobs_json(self._tokenizer, answer.prompt_tokens)
        return {**self._head, "choices": choices, "usage": usage_json(usage)}

    def first_chunk(self, index: int) -> Json | None:
        return None

    def encode_piece(self, index: int, piece: OutputPiece) -> list[Json]:
        if not (piece.text or piece.reported or piece.finish):
            return []
        return [{**self._head, "choices": [self._choice(index, piece.text, piece.reported, piece.finish)]}]

    def usage_chunk(self) -> Json:
        return {**self._head, "choices": []}

    def _choice(self, index: int, text: str, reported: Sequence[ReportedToken], finish: FinishReason | None) -> Json:
        logprobs = self._logprobs_json(reported) if self._logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_json(finish)}

    def _logprobs_json(self, reported: Sequence[ReportedToken]) -> Json:
        entries = [TokenLogprob(r.token.id, _number(r.token.logprob)) for r in reported]
        # The first token of an echoed prompt has no log-probability.
        return {
            "tokens": [self._text(entry.token) for entry in entries],
            "token_logprobs": [
                None if r.token.logprob is None else entry.logprob for entry, r in zip(entries, reported, strict=True)
            ],
            "top_logprobs": [
                None
                if r.token.logprob is None
                else {self._text(t.token): _number(t.logprob) for t in (entry, *reversed(r.token.top))}
                for entry, r in zip(entries, reported, strict=True)
            ],
            "text_offset": [r.offset for r in reported],
        }

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")


def _reasoning_json(text: str) -> Json:
    """Returns the text under both names that clients use."""
    return {"reasoning_content": text, "reasoning": text}


def _call_json(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": _function_json(name, arguments)}


def _function_json(name: str, arguments: str) -> Json:
    return {"name": name, "arguments": arguments}


def _delta_json(delta: MessageDelta, *, legacy: bool) -> Json:
    match delta:
        case ContentDelta(text) | InvalidToolCall(text=text):
            return {"content": text}
        case ReasoningDelta(text):
            return _reasoning_json(text)
        case ToolCallDelta(_, arguments, _, name) if legacy:
            return {"function_call": _function_json(name, arguments) if name else {"arguments": arguments}}
        case ToolCallDelta(index, arguments, call_id, name) if name:
            return {"tool_calls": [{"index": index, **_call_json(call_id, name, arguments)}]}
        case ToolCallDelta(index, arguments):
            return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}


class ChatEncoder:
    """Answers of /v1/chat/completions. `legacy`: the client uses function_call instead of tool_calls."""

    def __init__(
        self, request_id: str, model: str, tokenizer: TextTokenizer, *, logprobs: bool, legacy: bool = False
    ) -> None:
        self._legacy = legacy
        self._id = f"chatcmpl-{request_id}"
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._chunk_head = self._head("chat.completion.chunk")

    def _head(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def encode_answer(self, answers: Sequence[CompleteAnswer], usage: Usage) -> Json:
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "refusal": None, **self._message(a)},
                "logprobs": self._logprobs_json(a.reported),
                "finish_reason": self._finish(a.finish),
            }
            for i, a in enumerate(answers)
        ]
        whole = {**self._head("chat.completion"), "choices": choices, "usage": usage_json(usage)}
        if answers and answers[0].prompt_tokens is not None:
            whole["prompt_logprobs"] = prompt_logprobs_json(self._tokenizer, answers[0].prompt_tokens)
        return whole

    def _message(self, answer: CompleteAnswer) -> Json:
        message = answer.message
        if message is None:
            return {"content": answer.text}
        content = message.content if message.content is not None or message.tool_calls else ""
        out: Json = {"content": content}
        if message.reasoning is not None:
            out |= _reasoning_json(message.reasoning)
        if message.tool_calls and self._legacy:
            out["function_call"] = _function_json(message.tool_calls[0].name, message.tool_calls[0].arguments)
        elif message.tool_calls:
            out["tool_calls"] = [_call_json(call.id, call.name, call.arguments) for call in message.tool_calls]
        return out

    def first_chunk(self, index: int) -> Json | None:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def encode_piece(self, index: int, piece: OutputPiece) -> list[Json]:
        out = []
        if piece.deltas is not None:
            deltas = [_delta_json(delta, legacy=self._legacy) for delta in piece.deltas] or [{}] * bool(piece.reported)
            out = [self._chunk(index, delta, () if i else piece.reported) for i, delta in enumerate(deltas)]
        elif piece.text or piece.reported:
            out.append(self._chunk(index, {"content": piece.text}, piece.reported))
        if piece.finish is not None:
            out.append(self._chunk(index, {}, finish=piece.finish))
        return out

    def usage_chunk(self) -> Json:
        return {**self._chunk_head, "choices": []}

    def _finish(self, finish: FinishReason | None) -> str | None:
        return "function_call" if self._legacy and finish is FinishReason.TOOL_CALLS else finish_json(finish)

    def _chunk(
        self, index: int, delta: Json, reported: Sequence[ReportedToken] = (), finish: FinishReason | None = None
    ) -> Json:
        logprobs = self._logprobs_json(reported) if reported else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": self._finish(finish)}
        return {**self._chunk_head, "choices": [choice]}

    def _logprobs_json(self, reported: Sequence[ReportedToken]) -> Json | None:
        if not self._logprobs:
            return None
        return {"content": token_logprobs(self._tokenizer, reported), "refusal": None}
