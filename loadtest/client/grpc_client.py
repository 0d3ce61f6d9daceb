"""Client of the public gRPC API: one channel, one call per request."""

from __future__ import annotations

import asyncio
import functools
import time
from array import array
from typing import Any

import grpc

from common.errors import Unavailable
from common.pb import inference_pb2, inference_pb2_grpc, types_pb2
from common.rpc import error_from_rpc, open_channel
from loadtest.client.base import (
    ABORT_WAIT_S,
    CACHED_PIECES,
    CONNECT_S,
    GRACE_S,
    RESPONSE_TIMEOUT_S,
    LoopYielder,
    RequestDraft,
    chosen_model,
)
from loadtest.config import LoadConfig
from loadtest.run import RequestRecord
from loadtest.workload.sessions import ModelAnswer, PromptMessage, TextPiece

Metadata = tuple[tuple[str, str], ...]

_FINISH = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_ABORT: "abort",
    types_pb2.FINISH_REASON_ERROR: "error",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


class GrpcClient:
    """LoadClient over gRPC. The constructor must run inside the event loop."""

    def __init__(self, config: LoadConfig) -> None:
        self._config = config
        self._channel = open_channel(config.url)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._model = config.model
        self._timeout_s = RESPONSE_TIMEOUT_S if config.deadline_s is None else config.deadline_s
        self._ids = functools.lru_cache(CACHED_PIECES)(lambda piece: array("I", piece.ids(*config.vocab)))
        self._text = functools.lru_cache(CACHED_PIECES)(TextPiece.text)

    async def model(self) -> str:
        call, metadata = inference_pb2.ListModelsRequest(), _metadata(self._config.key_of(0))
        try:
            response = await self._stub.ListModels(call, timeout=CONNECT_S, metadata=metadata)
        except grpc.aio.AioRpcError as e:
            raise Unavailable(f"{self._config.url}: {error_from_rpc(e).message}") from e
        self._model = chosen_model(self._config, [model.id for model in response.models])
        return self._model

    async def build(self, draft: RequestDraft) -> tuple[inference_pb2.GenerateRequest, Metadata]:
        config, turn, yielder = self._config, draft.turn, LoopYielder()
        request = inference_pb2.GenerateRequest(
            model=self._model,
            max_tokens=turn.output_tokens,
            temperature=config.temperature,
            ignore_eos=config.ignore_eos,
            request_id=draft.request_id,
        )
        if config.endpoint == "chat":
            for message in turn.messages:
                text = await self._message_text(message, draft, yielder)
                request.chat.messages.add(role=message.role, content=text)
        elif config.form == "text":
            request.text = " ".join([await self._message_text(message, draft, yielder) for message in turn.messages])
        else:
            for message in turn.messages:
                earlier = draft.earlier_answer(message)
                known = None if earlier is None else earlier.ids
                request.tokens.ids.extend(known or ())
                async for ids in yielder.each(self._ids, message.pieces if known is None else ()):
                    request.tokens.ids.extend(ids)
        return request, _metadata(draft.key, draft.affinity)

    async def send(self, request: tuple[inference_pb2.GenerateRequest, Metadata], record: RequestRecord) -> None:
        message, metadata = request
        record.sent_s = time.perf_counter()
        call = self._stub.Generate(message, timeout=self._timeout_s, metadata=metadata)
        try:
            if record.abort_after == 0:
                await asyncio.sleep(ABORT_WAIT_S)
                record.aborted = True
            else:
                async with asyncio.timeout(self._timeout_s + GRACE_S):
                    await _read(call, record)
        except grpc.aio.AioRpcError as e:
            error = error_from_rpc(e)
            record.fail(f"grpc {e.code().name} {error.kind}", error.message, time.perf_counter())
        except TimeoutError:
            record.fail("timeout", "no complete answer before the timeout", time.perf_counter())
        finally:
            call.cancel()  # no effect on a finished call
            record.ended_s = record.ended_s or time.perf_counter()
            record.tokens = record.tokens or len(record.event_times)

    async def close(self) -> None:
        await self._channel.close(None)

    async def _message_text(self, message: PromptMessage, draft: RequestDraft, yielder: LoopYielder) -> str:
        if (earlier := draft.earlier_answer(message)) is not None:
            return earlier.text
        return " ".join([part async for part in yielder.each(self._text, message.pieces)])


async def _read(call: Any, record: RequestRecord) -> None:
    texts, ids = [], []
    while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # absent from the stubs
        now = time.perf_counter()
        if message.tokens:
            record.event_times.append(now)
            ids.extend([token.id for token in message.tokens])
        texts.append(message.text)
        if message.finish_reason:
            record.finish, record.ended_s = _FINISH.get(message.finish_reason, "other"), now
        if message.HasField("usage"):
            record.tokens = message.usage.completion_tokens
            record.prompt_tokens = message.usage.prompt_tokens
            record.cached_tokens = message.usage.cached_tokens
        if record.abort_after is not None and len(record.event_times) >= record.abort_after:
            record.aborted = True
            return
    if not record.finish:
        record.fail("incomplete", "the stream ended without a finish reason", time.perf_counter())
    record.answer = ModelAnswer("".join(texts), tuple(ids))


def _metadata(key: str, affinity: str = "") -> Metadata:
    pairs = (("authorization", key and f"Bearer {key}"), ("x-session-affinity", affinity))
    return tuple(pair for pair in pairs if pair[1])
