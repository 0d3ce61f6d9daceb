"""The public gRPC API on the same core as REST."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any

import grpc

from common.errors import Cancelled, DeadlineExceeded, InvalidRequest
from common.pb import inference_pb2, inference_pb2_grpc
from common.rpc import CALLER_DISCONNECTED, trace_context_of
from common.wire import finish_reason_to_pb, prompt_logprobs_to_pb, token_to_pb
from gateway.admission.api_keys import Caller
from gateway.api.grpc.conversion import (
    add_deltas,
    chat_fields,
    conversation_fields,
    require_max_parts,
    require_no_chat_fields,
    shared_fields,
)
from gateway.api.http.endpoint import SESSION_AFFINITY, parse_affinity
from gateway.api.openai.requests import CompletionRequest, parse_chat, parse_completion
from gateway.api.openai.tokenize import TokenizeHandler
from gateway.serving.answers import complete_answers, merge_choices
from gateway.serving.choice import Choice, total_usage
from gateway.serving.gateway import Gateway
from gateway.serving.request import RequestContext, Usage
from gateway.text.output import OutputPiece

REQUEST_ID = "x-request-id"
#: Characters of a client's own request id that are kept.
MAX_CLIENT_ID = 128
#: Seconds beyond the request's deadline that sending the end of the answer may take.
SEND_GRACE_S = 5.0

#: Fields with the same name and meaning in a REST body.
_SAME_FIELDS = frozenset(
    field.name
    for field in inference_pb2.GenerateRequest.DESCRIPTOR.fields
    if field.name in CompletionRequest.model_fields and field.message_type is None and field.enum_type is None
) - {"logprobs"}


def _request_fields(request: inference_pb2.GenerateRequest) -> dict[str, Any]:
    """Returns the request as fields of a REST body, so that the same code checks both."""
    fields: dict[str, Any] = {
        field.name: list(value) if field.is_repeated else value
        for field, value in request.ListFields()
        if field.name in _SAME_FIELDS
    }
    return fields | shared_fields(request)


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Generate, Abort, Tokenize, Detokenize and ListModels."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._texts = TokenizeHandler(gateway)

    async def Generate(  # type: ignore[override]  # the stubs know generators only
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Writes deltas. The last message of a choice has its finish reason, the last of all the usage."""
        left = context.time_remaining()
        metadata = dict(context.invocation_metadata() or ())
        affinity = parse_affinity(metadata.get(SESSION_AFFINITY.decode()))
        client_span = trace_context_of(metadata)
        caller, client_id = self._caller(context), request.request_id[:MAX_CLIENT_ID]
        with self._gateway.admit(
            "generate", client_id or None, left, caller=caller, affinity=affinity, client_span=client_span
        ) as request_context:
            # `context.write` instead of `yield`: a client that neither reads nor disconnects blocks the sending, and
            # only a write that this method awaits can be timed out.
            try:
                async with asyncio.timeout(request_context.deadline + SEND_GRACE_S - time.monotonic()):
                    # Sent at once, so that a client can abort a request that answers only at its end.
                    fits = client_id and client_id.isascii() and client_id.isprintable()
                    await context.send_initial_metadata(((REQUEST_ID, client_id if fits else request_context.id),))
                    await self._generate(request, context, request_context)
            except TimeoutError as e:
                raise DeadlineExceeded("the request's time is over") from e
            except CALLER_DISCONNECTED as e:
                raise Cancelled("the client disconnected") from e

    def _caller(self, context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
        """Returns the caller. Raises InvalidApiKey."""
        value = dict(context.invocation_metadata() or ()).get("authorization")
        return self._gateway.keys.current.identify(value.decode("latin-1") if isinstance(value, bytes) else value)

    async def _generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
        request_context: RequestContext,
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
        context.set_trailing_metadata(tuple(request_context.response_headers.items()))
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
                await context.write(self._message(request_context, index, piece, choices[0], usage))
                queue.task_done()
            if work.cancelled() and request_context.abort_error is not None:
                raise request_context.abort_error
            await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _choices(self, request_context: RequestContext, request: inference_pb2.GenerateRequest) -> list[Choice]:
        require_max_parts(request, self._gateway.max_json_parts)
        fields = _request_fields(request)
        kind = request.WhichOneof("prompt")
        if kind == "chat":
            if request.best_of > 1:
                raise InvalidRequest("best_of is for text and tokens, not for chat", field="best_of")
            fields |= chat_fields(request)
            if request.HasField("logprobs"):
                fields |= {"logprobs": True, "top_logprobs": request.logprobs}
            return await self._gateway.chat(request_context, parse_chat(fields))
        require_no_chat_fields(request)
        prompt: str | list[int] | None = None
        if kind == "text":
            prompt = request.text
        elif kind == "tokens":
            prompt = list(request.tokens.ids)
        else:
            raise InvalidRequest("prompt is missing; expected one of text, tokens and chat", field="prompt")
        if request.HasField("logprobs"):
            fields["logprobs"] = request.logprobs
        return await self._gateway.completion(request_context, parse_completion({**fields, "prompt": prompt}))

    def _message(
        self, request_context: RequestContext, index: int, piece: OutputPiece, choice: Choice, usage: Usage | None
    ) -> inference_pb2.GenerateResponse:
        message = inference_pb2.GenerateResponse(
            request_id=request_context.id,
            text=piece.text,
            tokens=[token_to_pb(token) for token in piece.tokens],
            index=index,
        )
        if (scores := choice.take_prompt_logprobs()) is not None:
            message.prompt_logprobs.CopyFrom(prompt_logprobs_to_pb(scores))
        if piece.deltas is not None:
            add_deltas(message, piece.deltas)
        if piece.finish is not None:
            message.finish_reason = finish_reason_to_pb(piece.finish)
        if usage is not None:
            message.usage.prompt_tokens = usage.prompt
            message.usage.completion_tokens = usage.completion
            message.usage.cached_tokens = usage.cached
            message.usage.reasoning_tokens = usage.reasoning
            message.usage.accepted_prediction_tokens = usage.accepted
            message.usage.rejected_prediction_tokens = usage.rejected
        return message

    async def Abort(
        self, request: inference_pb2.AbortGenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.AbortGenerateResponse:
        """Aborts the requests with this id, ours or the client's own."""
        self._gateway.abort(request.request_id[:MAX_CLIENT_ID], self._caller(context))
        return inference_pb2.AbortGenerateResponse()

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.TokenizeResponse:
        """Returns the token ids of a text or a chat."""
        require_max_parts(request, self._gateway.max_json_parts)
        body: dict[str, Any] = {"model": request.model or None, "return_token_strs": request.return_token_strings}
        kind = request.WhichOneof("prompt")
        if kind == "text":
            body["prompt"] = request.text
        elif kind == "chat":
            body |= conversation_fields(request)
        if request.HasField("add_special_tokens"):
            body["add_special_tokens"] = request.add_special_tokens
        with self._gateway.admit(
            "tokenize", None, context.time_remaining(), caller=self._caller(context)
        ) as request_context:
            tokenized = await self._texts.tokens(body, request_context)
        return inference_pb2.TokenizeResponse(
            ids=tokenized.ids, max_model_len=tokenized.max_model_len or 0, token_strings=tokenized.token_strings or ()
        )

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.DetokenizeResponse:
        """Returns the text of token ids."""
        require_max_parts(request, self._gateway.max_json_parts)
        body = {"model": request.model or None, "tokens": list(request.ids)}
        with self._gateway.admit(
            "detokenize", None, context.time_remaining(), caller=self._caller(context)
        ) as request_context:
            return inference_pb2.DetokenizeResponse(text=await self._texts.text(body, request_context))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ListModelsResponse:
        """Lists every model name and alias that the caller may use. A model without pods has no limits."""
        caller, models = self._caller(context), []
        for name, model in self._gateway.models.by_name.items():
            if not caller.may_use(name, model.name):
                continue
            entry = inference_pb2.Model(id=name, root=model.name, created=model.created)
            if model.pod_table.ready:
                limits = model.pod_table.limits()
                entry.max_model_len, entry.vocab_size = limits.max_model_len, limits.vocab_size
            models.append(entry)
        return inference_pb2.ListModelsResponse(models=models)


async def _queue_pieces(choices: Sequence[Choice], queue: asyncio.Queue[tuple[int, OutputPiece] | None]) -> None:
    """Puts one piece at a time: the next one is read when the last was sent, so a slow client slows its own request."""
    async with aclosing(_pieces(choices)) as pieces:
        async for indexed_piece in pieces:
            queue.put_nowait(indexed_piece)
            await queue.join()


async def _pieces(choices: Sequence[Choice]) -> AsyncGenerator[tuple[int, OutputPiece], None]:
    spec = choices[0].spec
    if spec.complete_only:
        for index, answer in enumerate(await complete_answers(choices, spec)):
            tokens = [replace(token, child=index) for token in answer.tokens]
            if spec.logprobs is None:
                tokens = [replace(token, logprob=None, top=()) for token in tokens]
            yield index, OutputPiece(answer.text, (), tuple(tokens), answer.finish, answer.deltas)
    elif len(choices) == 1:
        with closing(choices[0]) as choice:
            async for piece in choice:
                yield 0, piece
    else:
        async with aclosing(merge_choices(choices)) as pieces:
            async for indexed_piece in pieces:
                yield indexed_piece
