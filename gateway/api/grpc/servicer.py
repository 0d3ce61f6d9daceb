"""The public gRPC API. Messages become bodies of the REST API, so that the same code checks both.

Answers are converted back. Both APIs share the core, `gateway.serving`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import Message

from common.errors import Cancelled, DeadlineExceeded, InvalidRequest, RequestTooLarge
from common.pb import inference_pb2 as pb
from common.pb import inference_pb2_grpc
from common.rpc import CALLER_DISCONNECTED, trace_context_of
from common.wire import finish_reason_to_pb, prompt_logprobs_to_pb, token_to_pb
from gateway.admission.api_keys import Caller
from gateway.api.grpc.keyed import MAX_CLIENT_ID, GrpcAnswer, serve_keyed
from gateway.api.grpc.limits import client_of_peer
from gateway.api.http.endpoint import SEND_GRACE_S, SESSION_AFFINITY, parse_affinity
from gateway.api.http.json import MAX_DEPTH, Json, deeper_than
from gateway.api.http.protocol import count_parts
from gateway.api.openai.bodies import CompletionRequest
from gateway.api.openai.requests import parse_chat, parse_completion
from gateway.api.openai.tokenize import TokenizeHandler
from gateway.serving.answer_keys import IDEMPOTENCY_KEY
from gateway.serving.answers import complete_answers, merge_choices
from gateway.serving.choice import Choice, total_usage
from gateway.serving.gateway import Gateway
from gateway.serving.request import MAX_JSON_PARTS, AnswerIdentity, RequestContext, Usage
from gateway.text.output import OutputPiece
from gateway.text.tools.format import ContentDelta, InvalidToolCall, MessageDelta, ReasoningDelta, ToolCallDelta

_Context = grpc.aio.ServicerContext[Any, Any]

REQUEST_ID = "x-request-id"
MESSAGE_PARTS = 8  #: Parts that a message counts for, because it costs more than a plain entry.
_JSON_TEXTS = ("parameters", "chat_template_kwargs")  #: Text fields that are parsed as JSON; their parts count.
_MODES: dict[int, str] = {
    pb.ToolChoice.MODE_UNSPECIFIED: "auto",
    pb.ToolChoice.MODE_NONE: "none",
    pb.ToolChoice.MODE_REQUIRED: "required",
}
_EARLY_STOPPING: dict[int, bool | str] = {
    pb.EARLY_STOPPING_UNSPECIFIED: False,
    pb.EARLY_STOPPING_FIRST: True,
    pb.EARLY_STOPPING_NEVER: "never",
}
_CHAT_ONLY = ("tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "chat_template_kwargs")
#: Fields with the same name and meaning in a REST body.
_SAME_FIELDS = frozenset(
    field.name
    for field in pb.GenerateRequest.DESCRIPTOR.fields
    if field.name in CompletionRequest.model_fields and field.message_type is None and field.enum_type is None
) - {"logprobs", "text"}


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Generate, Abort, Tokenize, Detokenize and ListModels."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._texts = TokenizeHandler(gateway)

    async def Generate(  # type: ignore[override]  # the stubs know generators only
        self, request: pb.GenerateRequest, context: _Context
    ) -> None:
        """Writes deltas. The last message of a choice has its finish reason, the last of all the usage."""
        key = dict(context.invocation_metadata() or ()).get(IDEMPOTENCY_KEY) if self._gateway.answer_keys.on else None
        if key is None:
            await self._answer(request, context, context)
            return

        async def compute(identity: AnswerIdentity, answer: GrpcAnswer) -> None:
            await self._answer(request, context, answer, identity, answer.client_ids)

        await serve_keyed(self._gateway, self._caller(context), key, request, context, compute)

    async def _answer(
        self,
        request: pb.GenerateRequest,
        context: _Context,
        call: _Context | GrpcAnswer,
        identity: AnswerIdentity | None = None,
        client_ids: Collection[str] = (),
    ) -> None:
        """Writes the answer to `call`. `context` is of the call that asked for it. Raises BatonError."""
        left = context.time_remaining()
        metadata = dict(context.invocation_metadata() or ())
        affinity = parse_affinity(metadata.get(SESSION_AFFINITY.decode()))
        client_span = trace_context_of(metadata)
        caller, client_id = self._caller(context), request.request_id[:MAX_CLIENT_ID]
        with self._gateway.admit(
            "generate", client_id or None, left, caller=caller, affinity=affinity, client_span=client_span
        ) as request_context:
            request_context.identity, request_context.client_ids = identity, client_ids
            # `call.write` instead of `yield`: a client that neither reads nor disconnects blocks the sending, and
            # only a write that this method awaits can be timed out.
            try:
                async with asyncio.timeout(request_context.deadline + SEND_GRACE_S - time.monotonic()):
                    # Sent at once, so that a client can abort a request that answers only at its end.
                    fits = client_id and client_id.isascii() and client_id.isprintable()
                    await call.send_initial_metadata(((REQUEST_ID, client_id if fits else request_context.id),))
                    await self._generate(request, call, request_context)
            except TimeoutError as e:
                raise DeadlineExceeded("the request's time is over") from e
            except CALLER_DISCONNECTED as e:
                raise Cancelled("the client disconnected") from e

    def _caller(self, context: _Context) -> Caller:
        """Returns the caller. Raises InvalidApiKey."""
        metadata = dict(context.invocation_metadata() or ())
        value, key = (
            value.decode("latin-1") if isinstance(value, bytes) else value
            for value in (metadata.get("authorization"), metadata.get("x-api-key"))
        )
        caller = self._gateway.keys.current.identify(f"Bearer {key}" if value is None and key is not None else value)
        return caller.at(client_of_peer(context.peer()))

    async def _generate(
        self, request: pb.GenerateRequest, call: _Context | GrpcAnswer, request_context: RequestContext
    ) -> None:
        # A task of its own, so that Abort can cancel it, and its error differs from a cancelled call.
        tokenizing = asyncio.get_running_loop().create_task(self._choices(request_context, request))
        request_context.set_task(tokenizing)
        try:
            choices = await tokenizing
        except asyncio.CancelledError:
            if request_context.abort_error is not None:
                raise request_context.abort_error from None
            raise
        call.set_trailing_metadata(tuple(request_context.response_headers.items()))
        queue: asyncio.Queue[tuple[int, OutputPiece] | None] = asyncio.Queue()
        work = asyncio.get_running_loop().create_task(_queue_pieces(choices, queue))
        work.add_done_callback(lambda _: queue.put_nowait(None))
        request_context.set_task(work)
        unfinished = choices[0].spec.n
        try:
            while (indexed_piece := await queue.get()) is not None:
                index, piece = indexed_piece
                unfinished -= piece.finish is not None
                usage = None if unfinished else total_usage(choices)
                await call.write(self._message(request_context, index, piece, choices[0], usage))
                queue.task_done()
            if work.cancelled() and request_context.abort_error is not None:
                raise request_context.abort_error
            await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _choices(self, request_context: RequestContext, request: pb.GenerateRequest) -> list[Choice]:
        _require_max_parts(request, self._gateway.max_json_parts)
        fields = _request_fields(request)
        kind = request.WhichOneof("prompt")
        if kind == "chat":
            if request.best_of > 1:
                raise InvalidRequest("best_of is for text and tokens, not for chat", field="best_of")
            fields |= _chat_fields(request)
            if request.HasField("logprobs"):
                fields |= {"logprobs": True, "top_logprobs": request.logprobs}
            return await self._gateway.chat(request_context, parse_chat(fields))
        for field, _ in request.ListFields():
            if field.name in _CHAT_ONLY:
                raise InvalidRequest(f"{field.name} is only for chat prompts", field=field.name)
        if kind is None:
            raise InvalidRequest("prompt is missing; expected one of text, tokens and chat", field="prompt")
        fields["prompt"] = request.text if kind == "text" else list(request.tokens.ids)
        if request.HasField("logprobs"):
            fields["logprobs"] = request.logprobs
        return await self._gateway.completion(request_context, parse_completion(fields))

    def _message(
        self, request_context: RequestContext, index: int, piece: OutputPiece, choice: Choice, usage: Usage | None
    ) -> pb.GenerateResponse:
        message = pb.GenerateResponse(
            request_id=request_context.answer_id,
            text=piece.text,
            tokens=[token_to_pb(token) for token in piece.tokens],
            index=index,
        )
        if (scores := choice.take_prompt_logprobs()) is not None:
            message.prompt_logprobs.CopyFrom(prompt_logprobs_to_pb(scores))
        if piece.deltas is not None:
            _add_deltas(message, piece.deltas)
        if piece.finish is not None:
            message.finish_reason = finish_reason_to_pb(piece.finish)
        if usage is not None:
            counts = message.usage
            counts.prompt_tokens, counts.completion_tokens = usage.prompt, usage.completion
            counts.cached_tokens, counts.reasoning_tokens = usage.cached, usage.reasoning
            counts.accepted_prediction_tokens, counts.rejected_prediction_tokens = usage.accepted, usage.rejected
        return message

    async def Abort(self, request: pb.AbortGenerateRequest, context: _Context) -> pb.AbortGenerateResponse:
        """Aborts the requests with this id, ours or the client's own."""
        self._gateway.abort(request.request_id[:MAX_CLIENT_ID], self._caller(context))
        return pb.AbortGenerateResponse()

    async def Tokenize(self, request: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:
        """Returns the token ids of a text or a chat."""
        caller, left = self._caller(context), context.time_remaining()
        _require_max_parts(request, self._gateway.max_json_parts)
        body: dict[str, Any] = {"model": request.model or None, "return_token_strs": request.return_token_strings}
        kind = request.WhichOneof("prompt")
        if kind == "text":
            body["prompt"] = request.text
        elif kind == "chat":
            body |= _conversation_fields(request)
        if request.HasField("add_special_tokens"):
            body["add_special_tokens"] = request.add_special_tokens
        with self._gateway.admit("tokenize", None, left, caller=caller) as request_context:
            tokenized = await self._texts.tokens(body, request_context)
        return pb.TokenizeResponse(
            ids=tokenized.ids, max_model_len=tokenized.max_model_len or 0, token_strings=tokenized.token_strings or ()
        )

    async def Detokenize(self, request: pb.DetokenizeRequest, context: _Context) -> pb.DetokenizeResponse:
        """Returns the text of token ids."""
        caller, left = self._caller(context), context.time_remaining()
        _require_max_parts(request, self._gateway.max_json_parts)
        body = {"model": request.model or None, "tokens": list(request.ids)}
        with self._gateway.admit("detokenize", None, left, caller=caller) as request_context:
            return pb.DetokenizeResponse(text=await self._texts.text(body, request_context))

    async def ListModels(self, request: pb.ListModelsRequest, context: _Context) -> pb.ListModelsResponse:
        """Lists every model name and alias that the caller may use. A model without pods has no limits."""
        caller, models = self._caller(context), []
        for name, model in self._gateway.models.listed():
            if not caller.may_use(name, *model.own_names):
                continue
            entry = pb.Model(id=name, root=model.name, created=model.created)
            if model.adapter is not None:
                entry.parent, entry.root = model.name, model.adapter.path
            if model.pod_table.ready:
                limits = model.pod_table.limits()
                entry.max_model_len, entry.vocab_size = limits.max_model_len, limits.vocab_size
            models.append(entry)
        return pb.ListModelsResponse(models=models)


async def _queue_pieces(choices: Sequence[Choice], queue: asyncio.Queue[tuple[int, OutputPiece] | None]) -> None:
    """Puts one piece at a time: the next one is read when the last was sent, so a slow client slows its own request."""
    async with aclosing(_pieces(choices)) as pieces:
        async for indexed_piece in pieces:
            queue.put_nowait(indexed_piece)
            await queue.join()


async def _pieces(choices: Sequence[Choice]) -> AsyncGenerator[tuple[int, OutputPiece], None]:
    spec = choices[0].spec
    if spec.complete_only:
        for answer in await complete_answers(choices, spec):
            tokens = [replace(token, child=answer.index) for token in answer.tokens]
            if spec.logprobs is None:
                tokens = [replace(token, logprob=None, top=()) for token in tokens]
            yield answer.index, OutputPiece(answer.text, (), tuple(tokens), answer.finish, answer.deltas)
    elif len(choices) == 1:
        with closing(choices[0]) as choice:
            async for piece in choice:
                yield 0, piece
    else:
        async with aclosing(merge_choices(choices)) as pieces:
            async for indexed_piece in pieces:
                yield indexed_piece


def _request_fields(request: pb.GenerateRequest) -> Json:
    """Returns the fields of a REST body that chats and other prompts have."""
    fields: Json = {
        field.name: list(value) if field.is_repeated else value
        for field, value in request.ListFields()
        if field.name in _SAME_FIELDS
    }
    if request.logit_bias:
        fields["logit_bias"] = {str(entry.token): entry.bias for entry in request.logit_bias}
    if request.HasField("structured_output"):
        forms: Json = {field.name: value for field, value in request.structured_output.ListFields()}
        if "choice" in forms:
            forms["choice"] = list(forms["choice"].texts)
        if "json_schema" in forms:
            forms["json"] = forms.pop("json_schema")
        fields["structured_outputs"] = forms
    return fields | {"early_stopping": _EARLY_STOPPING.get(request.early_stopping, request.early_stopping)}


def _chat_fields(request: pb.GenerateRequest) -> Json:
    """Returns the fields of a chat. Raises InvalidRequest for text that is not JSON."""
    fields = _conversation_fields(request)
    if request.HasField("tool_choice"):
        fields["tool_choice"] = _choice(request.tool_choice)
    for name in ("parallel_tool_calls", "include_reasoning"):
        if request.HasField(name):
            fields[name] = getattr(request, name)
    return fields


def _conversation_fields(request: pb.GenerateRequest | pb.TokenizeRequest) -> Json:
    """Returns the fields that the chat template renders. Raises InvalidRequest for text that is not JSON."""
    fields: Json = {"messages": [_message(message) for message in request.chat.messages]}
    if request.tools:
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    if request.chat_template_kwargs:
        fields["chat_template_kwargs"] = _object(request.chat_template_kwargs, "chat_template_kwargs")
    return fields


def _add_deltas(message: pb.GenerateResponse, deltas: Iterable[MessageDelta]) -> None:
    """Puts the parsed meaning of an answer's text into its message, in place of the text."""
    text: list[str] = []
    reasoning: list[str] = []
    for delta in deltas:
        match delta:
            case ContentDelta(part) | InvalidToolCall(text=part):
                text.append(part)
            case ReasoningDelta(part):
                reasoning.append(part)
            case ToolCallDelta(index, arguments, call_id, name):
                message.tool_calls.add(index=index, id=call_id, name=name, arguments=arguments)
    message.text, message.reasoning = "".join(text), "".join(reasoning)


def _message(message: pb.ChatMessage) -> Json:
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in message.tool_calls
    ]
    optional = {"tool_calls": calls, "tool_call_id": message.tool_call_id, "name": message.name}
    return {"role": message.role, "content": message.content, **{k: v for k, v in optional.items() if v}}


def _tool(tool: pb.Function, name: str) -> Json:
    function: Json = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = _object(tool.parameters, f"{name}.parameters")
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _choice(choice: pb.ToolChoice) -> str | Json:
    if choice.WhichOneof("choice") == "function":
        return {"type": "function", "function": {"name": choice.function}}
    if choice.mode not in _MODES:
        raise InvalidRequest(f"tool_choice has the unknown mode {choice.mode}", field="tool_choice")
    return _MODES[choice.mode]


def _object(text: str, name: str) -> Json:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be the text of a JSON object", field=name)
    if deeper_than(value, MAX_DEPTH):
        raise InvalidRequest(f"{name} is nested deeper than {MAX_DEPTH} levels", field=name)
    return value


def _require_max_parts(message: Message, max_parts: Callable[[], int]) -> None:
    """Raises RequestTooLarge for more parts than `max_parts()` allows, because parsing them would block the event loop.

    An entry is one part, and an entry that is a message counts as MESSAGE_PARTS. Texts of _JSON_TEXTS count by their
    brackets, colons and commas, also those within strings.
    """
    if message.ByteSize() > MAX_JSON_PARTS // MESSAGE_PARTS:  # a shorter message cannot have too many
        _subtract_parts(message, max_parts())


def _subtract_parts(message: Message, max_parts: int) -> int:
    for field, value in message.ListFields():
        if field.is_repeated:
            max_parts -= len(value) * (1 if field.message_type is None else MESSAGE_PARTS)
        elif field.name in _JSON_TEXTS:
            max_parts -= count_parts(value.encode())
        if max_parts < 0:
            raise RequestTooLarge(f"{field.name} has more entries than a request may have", field=field.name)
        if field.message_type is not None:
            for inner in value if field.is_repeated else (value,):
                max_parts = _subtract_parts(inner, max_parts)
    return max_parts
