"""Embeddings of a pod: a prompt is computed like any other, and its last token's state is the answer.

A request is known here from its call until the engine has let go of its sequence, which may be after the call's end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import torch.nn.functional as F

from common.errors import BatonError, Cancelled, DeadlineExceeded, InternalError, InvalidRequest
from common.pb import control_pb2, control_pb2_grpc, embedding_pb2, embedding_pb2_grpc
from common.rpc import remaining_s
from common.types import ValidRequest
from common.wire import request_from_pb
from engine.engine import Engine
from engine.kv.blocks import BlockPool
from engine.loop import EngineLoop
from engine.schedule.outputs import SequenceOutput, StepResult
from engine.schedule.sequence import Sequence
from pod.requests import RequestRegistry
from prefix_index.publisher import IndexPublisher

DEFAULT_DEADLINE_S = 600.0  # for callers without a gRPC timeout


class _EmbeddingRequest:
    """One prompt. vector: of length 1, once it is there."""

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self.vector: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()


class Embedder(embedding_pb2_grpc.EmbeddingServicer):
    """Serves Embedding of one pod; on_step and refusals come from the engine's thread, the rest is on the event loop.

    check: raises what makes a request impossible now, given the prompt tokens that wait here.
    """

    def __init__(self, engine: Engine, loop: EngineLoop, check: Callable[[ValidRequest, int, float], None]) -> None:
        self._engine = engine
        self._loop = loop
        self._check = check
        self._aio = asyncio.get_running_loop()
        self._work: RequestRegistry[_EmbeddingRequest] = RequestRegistry()

    async def Embed(
        self, request: embedding_pb2.EmbedRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> embedding_pb2.EmbedResponse:
        """See embedding.proto."""
        valid, left = request_from_pb(request.request), remaining_s(context, DEFAULT_DEADLINE_S)
        self._check(valid, self.queued_tokens, left)
        if valid.request_id in self._work:
            raise InvalidRequest(f"request {valid.request_id} is already here", field="request_id")
        work = _EmbeddingRequest(self._engine.new_sequence(valid, hand_off=True, wants_embedding=True))
        self._work.add(valid.request_id, work)
        self._loop.add(work.seq, lambda error: self._on_refused(work, error))
        try:
            async with asyncio.timeout(left):
                vector = await asyncio.shield(work.vector)
        except TimeoutError as e:
            raise DeadlineExceeded("the request's time is over") from e
        finally:
            if not work.vector.done():
                work.vector.cancel()
                self._loop.abort(valid.request_id)
        return embedding_pb2.EmbedResponse(values=vector, cached_tokens=work.seq.cached_tokens)

    def _on_refused(self, work: _EmbeddingRequest, error: BatonError) -> None:
        """The engine did not take it (any thread)."""
        self._aio.call_soon_threadsafe(self._end, work, None, error)

    def on_step(self, result: StepResult) -> None:
        """Engine thread, after each step."""
        for output in result.outputs:
            if output.seq.wants_embedding and output.ended:
                vector, error = self._outcome(output)
                self._aio.call_soon_threadsafe(self._end_sequence, output.seq, vector, error)

    def _outcome(self, output: SequenceOutput) -> tuple[list[float] | None, BatonError | None]:
        state = output.seq.embedding
        if output.error is not None or not output.tokens or state is None:
            return None, output.error or Cancelled("the request was aborted")
        try:
            vector: list[float] = F.normalize(state.float(), dim=0).tolist()
        except Exception as error:  # the step's other sequences go on
            return None, InternalError(f"{type(error).__name__}: {error}")
        return vector, None

    def _end_sequence(self, seq: Sequence, vector: list[float] | None, error: BatonError | None) -> None:
        work = self._work.get(seq.request_id)
        if work is not None and work.seq is seq:
            self._end(work, vector, error)

    def _end(self, work: _EmbeddingRequest, vector: list[float] | None, error: BatonError | None) -> None:
        self._work.remove(work.seq.request_id, work)
        if work.vector.done():
            return
        if vector is None:
            work.vector.set_exception(error or InternalError("no vector"))
        else:
            work.vector.set_result(vector)

    @property
    def num_active(self) -> int:
        """Requests that the engine still knows."""
        return len(self._work)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait for compute."""
        return sum(work.seq.prompt_len - work.seq.computed for work in self._work.values())

    async def wait_idle(self) -> None:
        """Returns once the engine knows none."""
        await self._work.wait_idle()

    def abort_all(self, error: BatonError) -> None:
        """Ends every request (the pod stops)."""
        for work in self._work.values():
            self._loop.abort(work.seq.request_id)
            self._end(work, None, error)


INDEX_POLLS, POLL_S = 100, 0.01  # how long an answer waits for the index


class ControlServicer(control_pb2_grpc.ControlServicer):
    """Serves Control of one pod on its event loop. index: the pod's entry in the prefix index, once it has one."""

    def __init__(self, pool: BlockPool, index: Callable[[], IndexPublisher | None]) -> None:
        self._pool = pool
        self._index = index

    async def ResetPrefixCache(
        self, request: control_pb2.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> control_pb2.ResetPrefixCacheResponse:
        """See control.proto."""
        cleared = await asyncio.to_thread(self._pool.reset_prefix_cache)  # it may wait for a copy to the host
        kept = len(self._pool.cached_hashes())
        index = self._index()
        for _ in range(INDEX_POLLS):
            if index is None or index.up_to_date:
                break
            await asyncio.sleep(POLL_S)
        indexed = index is None or index.up_to_date
        return control_pb2.ResetPrefixCacheResponse(cleared=cleared, kept=kept, indexed=indexed)
