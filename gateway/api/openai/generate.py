"""/v1/chat/completions and /v1/completions: one JSON answer, or server-sent events, in OpenAI's shapes.

The routes are raw ASGI, because a response object per token would cost more than the token. While a client keeps up,
its events are written in the event loop turn in which the pod's message arrives, without waking a task per token.
Chunks are merged only when the client reads too slowly.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, closing
from typing import Any, ClassVar, TypeVar

import orjson

from common.types import FinishReason, Token, TokenLogprob
from gateway.api.http.endpoint import DONE, HttpResponse, sse_event
from gateway.api.http.json import Json
from gateway.api.openai.requests import parse_chat, parse_completion
from gateway.serving.answers import complete_answers, merge_choices, reserve_all
from gateway.serving.choice import Choice, CompleteAnswer, total_usage
from gateway.serving.gateway import Gateway
from gateway.serving.request import GenerationSpec, RequestContext, Usage
from gateway.text.output import OutputPiece, PromptToken, ReportedToken
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tools.format import ContentDelta, InvalidToolCall, MessageDelta, ReasoningDelta, ToolCallDelta

#: Stands for the text in an event that is encoded once. No other value of the event begins with NUL.
_TEXT_PLACEHOLDER = "\0text"
LOWEST_LOGPROB = -9999.0  #: OpenAI's value for minus infinity, which JSON cannot express.
TOKENS_PER_LOOP_TURN = 1024  #: Tokens with log-probabilities that are encoded before other tasks run.
_T = TypeVar("_T")


class GenerateHandler:
    """Answers bodies of /v1/chat/completions, or of /v1/completions."""

    def __init__(self, gateway: Gateway, *, chat: bool) -> None:
        self._gateway = gateway
        self._chat = chat

    async def serve(self, body: Any, response: HttpResponse, context: RequestContext) -> None:
        """Answers one body; a RequestHandler."""
        gateway = self._gateway
        make: type[AnswerEncoder] = ChatEncoder if self._chat else CompletionEncoder
        legacy = False
        if self._chat:
            chat = parse_chat(body)
            spec, choices = chat.spec, await gateway.chat(context, chat)
            legacy = chat.tools is not None and chat.tools.legacy
        else:
            completion = parse_completion(body)
            spec, choices = completion.spec, await gateway.completion(context, completion)
        tokenizer, created = choices[0].model.tokenizer, context.created
        encoder = make(context.answer_id, spec, tokenizer, legacy=legacy, created=created)
        if spec.stream:
            await _stream(choices, spec, encoder, response)
        else:
            answers = await complete_answers(choices, spec)
            await response.send_json(200, await encoder.encode_answer(answers, total_usage(choices)))
        context.record_usage(total_usage(choices))


class _SseEncoder:
    """Encodes the pieces of one choice as server-sent events.

    Most pieces are only text, and their events differ only in it. That event is encoded once: `plain` holds the bytes
    before and after the text. It is None while events differ in more (log-probabilities, running usage, parsed text).
    """

    def __init__(self, choice: Choice, index: int, spec: GenerationSpec, encoder: AnswerEncoder) -> None:
        self._choice = choice
        self._index = index
        self._spec = spec
        self._encoder = encoder
        self._opened = False
        self.plain: tuple[bytes, bytes] | None = None

    def encode(self, piece: OutputPiece) -> bytes:
        """Returns the events of one piece, b"" if it shows nothing."""
        if self.plain is not None and piece.finish is None:
            return self.encode_text(piece.text)
        chunks = self._encoder.encode_piece(self._index, piece)
        if not self._opened:
            self._opened = True
            if (opening := self._encoder.first_chunk(self._index)) is not None:
                chunks.insert(0, opening)
            plain = self._choice.parser_config is None and self._spec.logprobs is None
            if plain and not self._spec.continuous_usage:
                [chunk] = self._encoder.encode_piece(self._index, OutputPiece(_TEXT_PLACEHOLDER, (), ()))
                before, after = self._event(chunk).split(orjson.dumps(_TEXT_PLACEHOLDER))
                self.plain = before, after
        return b"".join([self._event(chunk) for chunk in chunks])

    def encode_text(self, text: str) -> bytes:
        """Returns the events of a piece that is only text, with the help of `plain`."""
        assert self.plain is not None
        before, after = self.plain
        return before + orjson.dumps(text) + after if text else b""

    def _event(self, chunk: Json) -> bytes:
        if self._spec.continuous_usage:
            chunk["usage"] = usage_json(self._choice.usage)
        elif self._spec.include_usage:
            chunk["usage"] = None
        return sse_event(chunk)


async def _stream(
    choices: Sequence[Choice], spec: GenerationSpec, encoder: AnswerEncoder, response: HttpResponse
) -> None:
    """Sends the pieces of all choices as events, then the usage, if requested, and [DONE]."""
    if len(choices) == 1:
        await choices[0].reserve()
    else:
        await reserve_all(choices)
    await response.open_stream()
    events = [_SseEncoder(choice, index, spec, encoder) for index, choice in enumerate(choices)]
    if len(choices) == 1:
        with closing(choices[0]) as choice:
            async for piece in choice:
                if raw := events[0].encode(piece):
                    await response.send_event(raw)
                if (write := response.fast_write) is not None:
                    await choice.relay(*_relay_callbacks(write, events[0]))
    else:
        async with aclosing(merge_choices(choices)) as pieces:
            async for index, piece in pieces:
                if raw := events[index].encode(piece):
                    await response.send_event(raw)
    usage = sse_event(encoder.usage_chunk(total_usage(choices))) if spec.include_usage else b""
    await response.send_event(usage + DONE)
    await response.end()


def _relay_callbacks(
    write: Callable[[bytes], bool], events: _SseEncoder
) -> tuple[Callable[[OutputPiece], bool], Callable[[str], bool] | None]:
    """Returns the arguments of Choice.relay."""
    encode, encode_text = events.encode, events.encode_text
    return lambda piece: write(encode(piece)), (
        lambda text: write(encode_text(text))
    ) if events.plain is not None else None


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


def _number(logprob: float | None) -> float:
    return LOWEST_LOGPROB if logprob is None or not logprob > LOWEST_LOGPROB else logprob


def token_logprobs(tokenizer: TextTokenizer, reported: Sequence[ReportedToken]) -> list[Json]:
    """Returns tokens with log-probabilities in the form of chats and responses."""

    def entry(token: TokenLogprob) -> Json:
        piece = tokenizer.token_bytes(token.token)
        text = piece.decode("utf-8", "replace")
        return {"token": text, "logprob": _number(token.logprob), "bytes": list(piece)}

    tokens = [r.token for r in reported]
    return [
        {**entry(TokenLogprob(t.id, _number(t.logprob))), "top_logprobs": [entry(top) for top in t.top]} for t in tokens
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


class AnswerEncoder(ABC):
    """Encodes the answers of one request in the shape of its endpoint."""

    _id_prefix: ClassVar[str]
    _object: ClassVar[str]  #: Value of `object` of a whole answer.
    _chunk_object: ClassVar[str]  #: Value of `object` of a stream's chunk.

    def __init__(
        self, answer_id: str, spec: GenerationSpec, tokenizer: TextTokenizer, *, legacy: bool, created: int = 0
    ) -> None:
        """`created`: seconds since the epoch."""
        head = {"id": f"{self._id_prefix}-{answer_id}", "object": self._chunk_object}
        self._chunk_head: Json = {**head, "created": created, "model": spec.model}
        self._tokenizer = tokenizer
        self._logprobs = spec.logprobs is not None  #: Log-probabilities are part of the answer.
        self._legacy = legacy  #: The client of a chat uses function_call instead of tool_calls.
        self._encoded_tokens = 0  #: Tokens of a whole answer that were encoded in this loop turn.

    @abstractmethod
    async def encode_answer(self, answers: Sequence[CompleteAnswer], usage: Usage) -> Json:
        """Returns the whole answer. Its log-probabilities are JSON already; other tasks run meanwhile."""

    @abstractmethod
    def encode_piece(self, index: int, piece: OutputPiece) -> list[Json]:
        """Returns the chunks of one piece, [] if it shows nothing."""

    def first_chunk(self, index: int) -> Json | None:
        """Returns the first chunk of a choice's stream, None if it has no special one."""
        return None

    def usage_chunk(self, usage: Usage) -> Json:
        """Returns the chunk that has the usage and no choices."""
        return {**self._chunk_head, "choices": [], "usage": usage_json(usage)}

    @abstractmethod
    def _logprobs_json(self, reported: Sequence[ReportedToken]) -> Json:
        """Returns the log-probabilities of tokens. Those of a longer list have the same members with longer lists."""

    async def _whole_logprobs(self, reported: Sequence[ReportedToken]) -> Json | None:
        """Returns `_logprobs_json` of many tokens, None if the client asked for none."""
        if not self._logprobs:
            return None
        lists: dict[str, list[bytes]] = defaultdict(list)
        async for part in self._parts(reported):
            for name, values in self._logprobs_json(part).items():
                lists[name] += [orjson.dumps(values)] if values else []
        return {
            name: value if value is None else _joined(lists[name]) for name, value in self._logprobs_json(()).items()
        }

    async def _prompt_logprobs(self, tokens: Sequence[PromptToken]) -> orjson.Fragment:
        """Returns `prompt_logprobs_json` of many tokens."""
        parts = [orjson.dumps(prompt_logprobs_json(self._tokenizer, part)) async for part in self._parts(tokens)]
        return _joined(parts)

    async def _parts(self, tokens: Sequence[_T]) -> AsyncGenerator[Sequence[_T], None]:
        """Yields the tokens in parts, between which other tasks run. They also run between many short lists."""
        for first in range(0, len(tokens), TOKENS_PER_LOOP_TURN):
            part = tokens[first : first + TOKENS_PER_LOOP_TURN]
            self._encoded_tokens += len(part)
            if self._encoded_tokens > TOKENS_PER_LOOP_TURN:
                self._encoded_tokens = len(part)
                await asyncio.sleep(0)
            yield part

    def _whole(self, choices: list[Json], usage: Usage) -> Json:
        return {**self._chunk_head, "object": self._object, "choices": choices, "usage": usage_json(usage)}


class CompletionEncoder(AnswerEncoder):
    """Answers of /v1/completions."""

    _id_prefix = "cmpl"
    _object = _chunk_object = "text_completion"

    async def encode_answer(self, answers: Sequence[CompleteAnswer], usage: Usage) -> Json:
        choices: list[Json] = []
        prompts: dict[int, orjson.Fragment] = {}  # by the identity of the tokens, which answers of one prompt share
        for answer in answers:
            choice = self._choice(answer.index, answer.text, await self._whole_logprobs(answer.reported), answer.finish)
            if (tokens := answer.prompt_tokens) is not None:
                if id(tokens) not in prompts:
                    prompts[id(tokens)] = await self._prompt_logprobs(tokens)
                choice["prompt_logprobs"] = prompts[id(tokens)]
            choices.append(choice)
        return self._whole(choices, usage)

    def encode_piece(self, index: int, piece: OutputPiece) -> list[Json]:
        if not (piece.text or piece.reported or piece.finish):
            return []
        logprobs = self._logprobs_json(piece.reported) if self._logprobs else None
        return [{**self._chunk_head, "choices": [self._choice(index, piece.text, logprobs, piece.finish)]}]

    def _choice(self, index: int, text: str, logprobs: Json | None, finish: FinishReason | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish and finish.value}

    def _logprobs_json(self, reported: Sequence[ReportedToken]) -> Json:
        # The first token of an echoed prompt has no log-probability.
        return {
            "tokens": [self._text(r.token.id) for r in reported],
            "token_logprobs": [None if r.token.logprob is None else _number(r.token.logprob) for r in reported],
            "top_logprobs": [None if r.token.logprob is None else self._top(r.token) for r in reported],
            "text_offset": [r.offset for r in reported],
        }

    def _top(self, token: Token) -> dict[str, float]:
        """Returns the alternatives by their texts. A second token with the same text is named by its id."""
        found = {self._text(token.id): _number(token.logprob)}
        for top in token.top:
            if top.token != token.id:
                text = self._text(top.token)
                found[f"token_id:{top.token}" if text in found else text] = _number(top.logprob)
        return found

    def _text(self, token: int) -> str:
        """Returns a token's text. As at OpenAI, bytes that are not UTF-8 are shown as bytes."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _joined(arrays: Sequence[bytes]) -> orjson.Fragment:
    """Returns one JSON array of the entries of several, none of which is empty."""
    return orjson.Fragment(b"[" + b",".join([array[1:-1] for array in arrays]) + b"]")


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


class ChatEncoder(AnswerEncoder):
    """Answers of /v1/chat/completions."""

    _id_prefix = "chatcmpl"
    _object, _chunk_object = "chat.completion", "chat.completion.chunk"

    async def encode_answer(self, answers: Sequence[CompleteAnswer], usage: Usage) -> Json:
        choices = [
            {
                "index": a.index,
                "message": {"role": "assistant", "refusal": None, **self._message(a)},
                "logprobs": await self._whole_logprobs(a.reported),
                "finish_reason": self._finish(a.finish),
            }
            for a in answers
        ]
        whole = self._whole(choices, usage)
        if answers and answers[0].prompt_tokens is not None:
            whole["prompt_logprobs"] = await self._prompt_logprobs(answers[0].prompt_tokens)
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

    def _finish(self, finish: FinishReason | None) -> str | None:
        return "function_call" if self._legacy and finish is FinishReason.TOOL_CALLS else finish and finish.value

    def _chunk(
        self, index: int, delta: Json, reported: Sequence[ReportedToken] = (), finish: FinishReason | None = None
    ) -> Json:
        logprobs = self._logprobs_json(reported) if self._logprobs and reported else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": self._finish(finish)}
        return {**self._chunk_head, "choices": [choice]}

    def _logprobs_json(self, reported: Sequence[ReportedToken]) -> Json:
        return {"content": token_logprobs(self._tokenizer, reported), "refusal": None}
