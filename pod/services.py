"""gRPC services of every pod: Embedding (not on decode pods) and Control.

An embedding is the last token's state of a prompt that is computed like any other. The pod knows a request until the
engine has released its sequence, which may be after the end of the call.
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

#: Deadline of callers without a gRPC timeout.
DEFAULT_DEADLINE_S = 600.0


class _EmbeddingRequest:
    """One prompt."""

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        #: The embedding, of length 1.
        self.vector: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()


class Embedder(embedding_pb2_grpc.EmbeddingServicer):
    """Serves Embedding. on_step and refusals run on the engine's thread, the rest on the event loop.

    check: raises if the pod cannot serve a request now. Its arguments: request, queued prompt tokens of embeddings,
    seconds until the deadline.
    """

    def __init__(self, engine: Engine, loop: EngineLoop, check: Callable[[ValidRequest, int, float], None]) -> None:
        self._engine = engine
        self._loop = loop
        self._check = check
        self._aio = asyncio.get_running_loop()
        self._requests: RequestRegistry[_EmbeddingRequest] = RequestRegistry()

    async def Embed(
        self, request: embedding_pb2.EmbedRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> embedding_pb2.EmbedResponse:
        """Implements Embed of embedding.proto."""
        valid, left = request_from_pb(request.request), remaining_s(context, DEFAULT_DEADLINE_S)
        self._check(valid, self.queued_tokens, left)
        if valid.request_id in self._requests:
            raise InvalidRequest(f"request {valid.request_id} is already running on this pod", field="request_id")
        pending = _EmbeddingRequest(self._engine.new_sequence(valid, hand_off=True, wants_embedding=True))
        self._requests.add(valid.request_id, pending)
        self._loop.add(pending.seq, lambda error: self._on_refused(pending, error))
        try:
            async with asyncio.timeout(left):
                vector = await asyncio.shield(pending.vector)
        except TimeoutError as e:
            raise DeadlineExceeded("the request's deadline passed") from e
        finally:
            if not pending.vector.done():
                pending.vector.cancel()
                self._loop.abort(valid.request_id)
        return embedding_pb2.EmbedResponse(values=vector, cached_tokens=pending.seq.cached_tokens)

    def _on_refused(self, pending: _EmbeddingRequest, error: BatonError) -> None:
        """Handles that the engine did not accept the sequence. Any thread."""
        self._aio.call_soon_threadsafe(self._end, pending, None, error)

    def on_step(self, result: StepResult) -> None:
        """Ends the embedding requests that ended in a step. Engine thread."""
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
        except Exception as error:  # must not end the step's other sequences
            return None, InternalError(f"{type(error).__name__}: {error}")
        return vector, None

    def _end_sequence(self, seq: Sequence, vector: list[float] | None, error: BatonError | None) -> None:
        pending = self._requests.get(seq.request_id)
        if pending is not None and pending.seq is seq:
            self._end(pending, vector, error)

    def _end(self, pending: _EmbeddingRequest, vector: list[float] | None, error: BatonError | None) -> None:
        self._requests.remove(pending.seq.request_id, pending)
        if pending.vector.done():
            return
        if vector is None:
            pending.vector.set_exception(error or InternalError("no vector"))
        else:
            pending.vector.set_result(vector)

    @property
    def num_active(self) -> int:
        """Requests that the engine still knows."""
        return len(self._requests)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are not computed yet."""
        return sum(pending.seq.prompt_len - pending.seq.computed for pending in self._requests.values())

    async def wait_idle(self) -> None:
        """Returns once no request is active."""
        await self._requests.wait_idle()

    def abort_all(self, error: BatonError) -> None:
        """Ends every request with `error`, because the pod stops."""
        for pending in self._requests.values():
            self._loop.abort(pending.seq.request_id)
            self._end(pending, None, error)


#: An answer waits at most 1 s for the index.
INDEX_POLLS, POLL_S = 100, 0.01


class ControlServicer(control_pb2_grpc.ControlServicer):
    """Serves Control.

    Args:
        index: returns the pod's publisher, once the pod joined the index.
    """

    def __init__(self, pool: BlockPool, index: Callable[[], IndexPublisher | None]) -> None:
        self._pool = pool
        self._index = index

    async def ResetPrefixCache(
        self, request: control_pb2.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> control_pb2.ResetPrefixCacheResponse:
        """Implements ResetPrefixCache of control.proto."""
        cleared = await asyncio.to_thread(self._pool.reset_prefix_cache)  # it may wait for a copy to the host
        kept = len(self._pool.cached_hashes())
        index = self._index()
        for _ in range(INDEX_POLLS):
            if index is None or index.up_to_date:
                break
            await asyncio.sleep(POLL_S)
        indexed = index is None or index.up_to_date
        return control_pb2.ResetPrefixCacheResponse(cleared=cleared, kept=kept, indexed=indexed)
