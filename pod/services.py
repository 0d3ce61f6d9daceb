"""gRPC services of every pod: Embedding (refused in the role decode) and Control.

An embedding is made of the states of a prompt that is computed like any other. The pod knows a request until the
engine has released its sequence, which may be after the end of the call.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import torch.nn.functional as F

from common.errors import BatonError, Cancelled, DeadlineExceeded, InternalError, InvalidRequest, NotServed, describe
from common.pb import control_pb2, control_pb2_grpc, embedding_pb2, embedding_pb2_grpc
from common.rpc import remaining_s
from common.types import Role, ValidRequest
from common.wire import adapter_from_pb, adapter_to_pb, request_from_pb, role_from_pb, role_to_pb
from engine.engine import Engine
from engine.kv.blocks import BlockPool
from engine.loop import EngineLoop
from engine.schedule.outputs import SequenceOutput, StepResult
from engine.schedule.sequence import Sequence
from pod.adapters import PodAdapters
from pod.requests import DEFAULT_DEADLINE_S, RequestRegistry, retry_while
from pod.role import RoleSwitchReport
from prefix_index.publisher import IndexPublisher


class _EmbeddingRequest:
    """One prompt. The event loop owns it."""

    num_sequences = 1

    def __init__(self, loop: EngineLoop, seq: Sequence) -> None:
        self.seq = seq
        #: The embedding, or the logits that were asked for.
        self.vector: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._loop = loop
        self._released = asyncio.Event()

    @property
    def queued_tokens(self) -> int:
        return self.seq.prompt_len - self.seq.computed

    def end(self, outcome: list[float] | BatonError) -> None:
        """Called when the engine released the sequence."""
        self._released.set()
        if isinstance(outcome, BatonError):
            self._refuse(outcome)
        elif not self.vector.done():
            self.vector.set_result(outcome)

    def _refuse(self, error: BatonError) -> None:
        if not self.vector.done():
            self.vector.set_exception(error)

    def fail(self, error: BatonError) -> None:
        self._loop.abort(self.seq.request_id)
        self._refuse(error)

    async def drained(self) -> None:
        await self._released.wait()


@dataclass(eq=False)
class Embedder(embedding_pb2_grpc.EmbeddingServicer):
    """Serves Embedding. on_step and refusals run on the engine's thread, the rest on the event loop."""

    engine: Engine
    loop: EngineLoop
    #: Raises if the pod cannot serve a request now. Its arguments: request, queued prompt tokens of embeddings, seconds
    #: until the deadline.
    check: Callable[[ValidRequest, int, float], None]

    def __post_init__(self) -> None:
        self._aio = asyncio.get_running_loop()
        self.requests = RequestRegistry[_EmbeddingRequest]()

    async def Embed(
        self, request: embedding_pb2.EmbedRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> embedding_pb2.EmbedResponse:
        """Implements Embed of embedding.proto."""
        valid, left = request_from_pb(request.request), remaining_s(context, DEFAULT_DEADLINE_S)
        self.check(valid, self.requests.queued_tokens, left)
        if valid.request_id in self.requests:
            raise InvalidRequest(f"request {valid.request_id} is already running on this pod", field="request_id")
        logit_ids, pooling = tuple(request.logit_ids), None if request.logit_ids else self.engine.pooling
        if pooling is not None and pooling.refusal:
            raise NotServed(f"embeddings of this model are not served: {pooling.refusal}")
        seq = self.engine.new_sequence(valid, hand_off=True, pooling=pooling, logit_ids=logit_ids)
        pending = _EmbeddingRequest(self.loop, seq)
        self.requests.add(valid.request_id, pending)
        self.loop.add(pending.seq, partial(self._end, pending))
        try:
            async with asyncio.timeout(left):
                vector = await asyncio.shield(pending.vector)
        except TimeoutError as e:
            raise DeadlineExceeded("the request's deadline passed") from e
        finally:
            if not pending.vector.done():
                pending.vector.cancel()
                self.loop.abort(valid.request_id)
        answer = {"logits" if logit_ids else "values": vector}
        return embedding_pb2.EmbedResponse(**answer, cached_tokens=pending.seq.cached_tokens)

    def _end(self, pending: _EmbeddingRequest, outcome: list[float] | BatonError) -> None:
        """Called when the engine released the sequence, or did not accept it. Any thread."""
        self._aio.call_soon_threadsafe(pending.end, outcome)

    def on_step(self, result: StepResult) -> None:
        """Ends the embedding requests that ended in a step. Engine thread."""
        for output in result.outputs:
            pending = self.requests.get(output.seq.request_id)
            if pending is not None and pending.seq is output.seq and output.ended:
                self._end(pending, _result_of(output))


def _result_of(output: SequenceOutput) -> list[float] | BatonError:
    """Returns the embedding or the logits, or why there are none."""
    seq = output.seq
    result = seq.logits if seq.pooling is None else seq.pooled
    if output.error is not None or not output.tokens or result is None:
        return output.error or Cancelled("the request was aborted")
    try:
        if seq.pooling is not None:
            result = result / len(seq.pooling.tokens(seq.prompt_len))
            result = F.normalize(result, dim=0) if seq.pooling.normalize else result
        vector: list[float] = result.tolist()
    except Exception as error:  # must not end the step's other sequences
        return InternalError(describe(error))
    return vector


INDEX_WAIT_S = 1.0  # An answer waits at most this long for the index


@dataclass(eq=False)
class ControlServicer(control_pb2_grpc.ControlServicer):
    """Serves Control."""

    pool: BlockPool
    index: Callable[[], IndexPublisher | None]  # Returns the pod's publisher, once the pod joined the index
    #: Changes the role; its second argument is the drain time in seconds, 0 for that of the settings.
    switch_role: Callable[[Role, float], Awaitable[RoleSwitchReport]]
    adapters: PodAdapters

    async def ResetPrefixCache(
        self, request: control_pb2.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> control_pb2.ResetPrefixCacheResponse:
        """Implements ResetPrefixCache of control.proto."""
        cleared = await asyncio.to_thread(self.pool.reset_prefix_cache)  # it may wait for a copy to the host
        kept, index = len(self.pool.cached_hashes()), self.index()
        indexed = await retry_while(lambda: index is None or index.up_to_date, lambda done: not done, INDEX_WAIT_S)
        return control_pb2.ResetPrefixCacheResponse(cleared=cleared, kept=kept, indexed=indexed)

    async def SwitchRole(
        self, request: control_pb2.SwitchRoleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> control_pb2.SwitchRoleResponse:
        """Implements SwitchRole of control.proto. The switch goes on if the caller leaves."""
        role = role_from_pb(request.role)
        if not 0 <= request.drain_s < math.inf:
            raise InvalidRequest(f"drain_s is {request.drain_s:g}; expected at least 0 s", field="drain_s")
        report = await asyncio.shield(asyncio.ensure_future(self.switch_role(role, request.drain_s)))
        return control_pb2.SwitchRoleResponse(
            former=role_to_pb(report.former), moved=report.moved, drained_s=report.drained_s, ready_s=report.ready_s
        )

    async def LoadAdapter(
        self, request: control_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> control_pb2.LoadAdapterResponse:
        """Implements LoadAdapter of control.proto."""
        entry = await self.adapters.load(adapter_from_pb(request.adapter))
        return control_pb2.LoadAdapterResponse(adapter=adapter_to_pb(entry))

    async def UnloadAdapter(
        self, request: control_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> control_pb2.UnloadAdapterResponse:
        """Implements UnloadAdapter of control.proto."""
        self.adapters.unload(request.name, request.version)
        return control_pb2.UnloadAdapterResponse()

    async def ListAdapters(
        self, request: control_pb2.ListAdaptersRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> control_pb2.ListAdaptersResponse:
        """Implements ListAdapters of control.proto."""
        entries, version = self.adapters.entries()
        evicted = self.adapters.evicted()
        return control_pb2.ListAdaptersResponse(adapters=map(adapter_to_pb, entries), version=version, evicted=evicted)
