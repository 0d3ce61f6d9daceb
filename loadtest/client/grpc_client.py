"""Client of the public gRPC API: one channel, one call per request."""

from __future__ import annotations

import asyncio
import functools
import time
from array import array
from typing import Any

import grpc

from common.errors import BatonError, ConfigError, Unavailable
from common.pb import inference_pb2, inference_pb2_grpc, types_pb2
from common.rpc import error_from_rpc, open_channel
from loadtest.client.base import ABORT_WAIT_S, GRACE_S, RESPONSE_TIMEOUT_S, LoopYielder, RequestDraft
from loadtest.config import LoadConfig
from loadtest.run import RequestRecord
from loadtest.workload.prompts import ModelAnswer, PromptMessage, TextPiece

CONNECT_S = 10.0
CACHED_PIECES = 4096
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
        """Returns the configured model, or the first that the server lists. Raises Unavailable, ConfigError."""
        key = self._config.api_keys[0] if self._config.api_keys else ""
        try:
            response = await self._stub.ListModels(
                inference_pb2.ListModelsRequest(), timeout=CONNECT_S, metadata=_metadata(key)
            )
        except grpc.aio.AioRpcError as e:
            raise Unavailable(f"{self._config.url}: {error_from_rpc(e).message}") from e
        names = [model.id for model in response.models]
        if not names:
            raise Unavailable(f"{self._config.url} serves no model")
        if self._model and self._model not in names:
            raise ConfigError(
                f"--model: {self._config.url} serves {', '.join(names)}, not {self._model}", field="model"
            )
        self._model = self._model or names[0]
        return self._model

    async def build(self, draft: RequestDraft) -> tuple[inference_pb2.GenerateRequest, tuple[tuple[str, str], ...]]:
        """Returns the message and its metadata."""
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
                content = await self._message_text(message, draft, yielder)
                request.chat.messages.add(role=message.role, content=content)
        elif config.form == "text":
            request.text = " ".join([await self._message_text(message, draft, yielder) for message in turn.messages])
        else:
            for message in turn.messages:
                earlier = _earlier_answer(message, draft)
                if earlier is not None and earlier.ids is not None:
                    request.tokens.ids.extend(earlier.ids)
                    continue
                for piece in message.pieces:
                    request.tokens.ids.extend(self._ids(piece))
                    await yielder.yield_if_due()
        return request, _metadata(draft.key, draft.affinity)

    async def send(
        self, request: tuple[inference_pb2.GenerateRequest, tuple[tuple[str, str], ...]], record: RequestRecord
    ) -> None:
        """Sends the request and fills the record (see LoadClient)."""
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
            error: BatonError = error_from_rpc(e)
            record.fail(f"grpc {e.code().name} {error.kind}", error.message, time.perf_counter())
        except TimeoutError:
            record.fail("timeout", "no complete answer before the timeout", time.perf_counter())
        finally:
            call.cancel()  # no effect on a finished call
            record.ended_s = record.ended_s or time.perf_counter()
            record.tokens = record.tokens or len(record.event_times)

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close(None)

    async def _message_text(self, message: PromptMessage, draft: RequestDraft, yielder: LoopYielder) -> str:
        earlier = _earlier_answer(message, draft)
        if earlier is not None:
            return earlier.text
        parts = []
        for piece in message.pieces:
            parts.append(self._text(piece))
            await yielder.yield_if_due()
        return " ".join(parts)


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


def _earlier_answer(message: PromptMessage, draft: RequestDraft) -> ModelAnswer | None:
    return draft.answers.get(message.answer) if message.answer is not None else None


def _metadata(key: str, affinity: str = "") -> tuple[tuple[str, str], ...]:
    metadata = []
    if key:
        metadata.append(("authorization", f"Bearer {key}"))
    if affinity:
        metadata.append(("x-session-affinity", affinity))
    return tuple(metadata)
