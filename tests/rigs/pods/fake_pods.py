"""Fake pods for tests of the gateway: real gRPC servers with scripted tokens and faults.

The tokens of a request are `script(request)`, cut at max_tokens and after the first stop token. A request that
continues after some output gets the tokens of the script from there on, whatever the output is.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from common.auth import CallGuard, Signer
from common.errors import BatonError, Unavailable
from common.kv_layout import KVLayout
from common.pb import (
    control_pb2,
    control_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    embedding_pb2,
    embedding_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
    types_pb2,
)
from common.rpc import RpcServer
from common.settings.process import DEFAULT_SECRET
from common.tls import TlsFiles
from common.types import FinishReason, Role, Token, ValidRequest
from common.wire import (
    PROTOCOL_VERSION,
    error_to_pb,
    finish_reason_to_pb,
    layout_to_pb,
    request_from_pb,
    role_to_pb,
    token_to_pb,
)
from tests.rigs.pods.scripted import Faults, Script, Seen, counting, outcome

LAYOUT = KVLayout("fake", "r0", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")


class FakePod(
    control_pb2_grpc.ControlServicer,
    decode_pb2_grpc.DecodeServicer,
    embedding_pb2_grpc.EmbeddingServicer,
    prefill_pb2_grpc.PrefillServicer,
    transfer_pb2_grpc.TransferServicer,
):
    """One fake pod. It finds the other pods by its cluster, so that a prefill can commit to a decode pod."""

    def __init__(self, cluster: FakeCluster, name: str, role: Role, *, port: int = 0, generation: int = 1) -> None:
        self._cluster = cluster
        self.name = name
        self.role = role
        self.generation = generation
        self.port = port
        self.faults = Faults()
        self.load: transfer_pb2.Load | None = None
        self.pulls = False
        self.late_targets = False
        self.seen = Seen()
        self.ready = True
        self.draining = False
        self.tls_dir: str | None = None
        self.layout = LAYOUT
        self.protocol_version = PROTOCOL_VERSION
        self.served_name = ""  # as older pods report it
        #: Requests that a decode pod takes at once.
        self.capacity = 1 << 30
        self.max_model_len = 2048
        self.num_blocks = 512
        self.cached_tokens = 0
        #: Draft tokens proposed and accepted, reported with every decoded token.
        self.drafts: tuple[int, int] | None = None
        self.blocks = transfer_pb2.PoolCounts(free=512)
        self.activity = transfer_pb2.Activity()
        #: Engine steps that Info reports; None as older pods.
        self.steps: int | None = None
        #: Which loop is stuck; then the pod is not ready.
        self.stuck = ""
        self.pairs: list[transfer_pb2.Pair] = []
        self.embeds = True
        self.gives_logits = True  # older pods answer with an embedding
        self._queues: dict[str, asyncio.Queue[decode_pb2.TokenBatch | None]] = {}
        self._numbers: dict[str, int] = {}
        self._running: dict[str, tuple[ValidRequest, str]] = {}
        self._targets: dict[str, asyncio.Future[types_pb2.KvTarget]] = {}
        #: Running sequences by request id.
        self._children: dict[str, set[int]] = {}
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._server: RpcServer | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def idle(self) -> bool:
        """The pod holds no request."""
        return not self._running

    async def start(self) -> None:
        signer = Signer(DEFAULT_SECRET.encode(), self.role.value, self.name, self.generation)
        tls = TlsFiles.of_directory(self.tls_dir, self.role.value)
        self._server = RpcServer("127.0.0.1", self.port, tls=tls, interceptors=(CallGuard(signer),))
        self._server.add_servicer(decode_pb2_grpc.add_DecodeServicer_to_server, self, "baton.v1.Decode")
        self._server.add_servicer(prefill_pb2_grpc.add_PrefillServicer_to_server, self, "baton.v1.Prefill")
        if self.role is not Role.DECODE and self.embeds:
            self._server.add_servicer(embedding_pb2_grpc.add_EmbeddingServicer_to_server, self, "baton.v1.Embedding")
        self._server.add_servicer(control_pb2_grpc.add_ControlServicer_to_server, self, "baton.v1.Control")
        self._server.add_servicer(transfer_pb2_grpc.add_TransferServicer_to_server, self, "baton.v1.Transfer")
        self.port = await self._server.start()
        self._cluster.pods[self.address] = self

    async def stop(self) -> None:
        """Ends the pod at once, like a crash."""
        for task in list(self._tasks.values()):
            task.cancel()
        self._running.clear()
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)

    async def restart(self) -> FakePod:
        """Starts the next generation under the same name, on the same port."""
        await self.stop()
        pod = FakePod(self._cluster, self.name, self.role, port=self.port, generation=self.generation + 1)
        await pod.start()
        return pod

    # -- Transfer

    async def Info(self, request: transfer_pb2.InfoRequest, context: Any) -> transfer_pb2.InfoResponse:
        self.seen.infos += 1
        await asyncio.sleep(self.faults.info_delay_s)
        activity = transfer_pb2.Activity(steps=self.steps)
        activity.MergeFrom(self.activity)
        return transfer_pb2.InfoResponse(
            protocol_version=self.protocol_version,
            pod=self.name,
            generation=self.generation,
            role=role_to_pb(self.role),
            layout=layout_to_pb(self.layout),
            fingerprint=self.layout.fingerprint,
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            vocab_size=49152,
            ready=self.ready and not self.stuck,
            stuck=self.stuck,
            draining=self.draining,
            load=self.load,
            pulls=self.pulls,
            late_targets=self.late_targets,
            served_name=self.served_name,
            blocks=self.blocks,
            activity=activity,
            pairs=self.pairs,
        )

    # -- Control

    async def ResetPrefixCache(self, request: Any, context: Any) -> control_pb2.ResetPrefixCacheResponse:
        if self.faults.reset_error is not None:
            raise self.faults.reset_error
        self.seen.resets += 1
        return control_pb2.ResetPrefixCacheResponse(cleared=7, kept=2, indexed=True)

    # -- Embedding

    async def Embed(self, request: embedding_pb2.EmbedRequest, context: Any) -> embedding_pb2.EmbedResponse:
        valid = request_from_pb(request.request)
        self.seen.embedded.append(valid)
        await asyncio.sleep(self.faults.embed_delay_s)
        if self.faults.embed_error is not None:
            raise self.faults.embed_error
        if request.logit_ids and self.gives_logits:
            self.seen.logit_ids.append(tuple(request.logit_ids))
            # The first token is likelier after longer prompts.
            return embedding_pb2.EmbedResponse(logits=[valid.prompt_len / 100, 0.5][: len(request.logit_ids)])
        length = math.hypot(3.0, 4.0, valid.prompt_len)
        return embedding_pb2.EmbedResponse(values=[3.0 / length, 4.0 / length, valid.prompt_len / length])

    # -- Decode

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:
        valid = request_from_pb(request.request)
        self.seen.reserved.append(valid)
        if request.HasField("remote"):
            self.seen.remote_costs.append(request.remote)
        self.seen.timeouts.append(context.time_remaining())
        await asyncio.sleep(self.faults.reserve_delay_s)
        await self.faults.before_reserve(valid)
        if self.faults.reserve_error is not None:
            raise self.faults.reserve_error
        if request.gateway_id not in self._queues:
            raise Unavailable("no token stream")
        if self.faults.reject or len(self._running) >= self.capacity:
            self.faults.reject = max(0, self.faults.reject - 1)
            return decode_pb2.ReserveResponse(rejected=decode_pb2.Rejected(reason="full", retry_after_s=2.5))
        self._running[valid.request_id] = (valid, request.gateway_id)
        self._children[valid.request_id] = set(valid.child_indices)
        if self.role is Role.BOTH or self.faults.local_after_s is not None:
            for child in valid.child_indices:
                self._spawn(valid.request_id, child, self._generate(valid.request_id, child, 0))
            await asyncio.sleep(self.faults.local_after_s or 0.0)
            return decode_pb2.ReserveResponse(local=decode_pb2.LocalPrefill(), cached_tokens=self.cached_tokens)
        blocks = -(-valid.context_len // self.layout.block_size)
        target = types_pb2.KvTarget(
            transfer_id=types_pb2.TransferId(generation=self.generation, number=len(self.seen.reserved)),
            pod=self.name,
            address=self.address,
            blocks=list(range(blocks)),
            fingerprint=self.layout.fingerprint,
        )
        return decode_pb2.ReserveResponse(target=target)

    async def Abort(self, request: Any, context: Any) -> Any:
        """Abort of both services; the type of the message says which."""
        if isinstance(request, prefill_pb2.PrefillAbortRequest):
            return prefill_pb2.PrefillAbortResponse()
        if self.faults.abort_errors:
            self.faults.abort_errors -= 1
            raise Unavailable("the abort is lost")
        ended = set(self._children.get(request.request_id, ()))
        if request.HasField("child"):
            self.seen.child_aborts.append((request.request_id, request.child))
            ended &= {request.child}
        else:
            self.seen.decode_aborts.append(request.request_id)
        for child in ended:
            self._ended(request.request_id, child)
            task = self._tasks.pop((request.request_id, child), None)
            if task is not None:
                task.cancel()
        return decode_pb2.DecodeAbortResponse()

    def _ended(self, request_id: str, child: int) -> None:
        left = self._children.get(request_id, set())
        left.discard(child)
        if not left:
            self._children.pop(request_id, None)
            self._running.pop(request_id, None)

    async def Tokens(self, request_iterator: Any, context: Any) -> AsyncIterator[decode_pb2.TokenBatch]:
        hello = await anext(request_iterator)
        queue: asyncio.Queue[decode_pb2.TokenBatch | None] = asyncio.Queue()
        self._queues[hello.gateway_id], self._numbers[hello.gateway_id] = queue, 0
        reader = asyncio.create_task(self._read_acks(request_iterator))
        try:
            await context.send_initial_metadata(())
            while (batch := await queue.get()) is not None:
                yield batch
        finally:
            reader.cancel()
            if self._queues.get(hello.gateway_id) is queue:
                del self._queues[hello.gateway_id]

    async def _read_acks(self, requests: Any) -> None:
        async for message in requests:
            self.seen.acked = message.acked

    def cut_streams(self) -> None:
        """Ends every gateway's token stream. The pod goes on."""
        for queue in self._queues.values():
            queue.put_nowait(None)

    def commit(self, request_id: str, finishes: list[FinishReason | None]) -> None:
        """Takes the prompt's KV and first tokens, and decodes the sequences that have not finished."""
        if request_id not in self._running:
            return
        for child, finish in zip(self._running[request_id][0].child_indices, finishes, strict=True):
            if child not in self._children.get(request_id, ()):
                continue
            if finish is not None:
                self._ended(request_id, child)
            else:
                self._spawn(request_id, child, self._generate(request_id, child, 1))

    def _spawn(self, request_id: str, child: int, work: Any) -> None:
        self._tasks[request_id, child] = asyncio.get_running_loop().create_task(work)

    async def _generate(self, request_id: str, child: int, start: int) -> None:
        valid, gateway_id = self._running[request_id]
        tokens, finish = outcome(valid, self._cluster.script, child)
        if self.faults.decode_error is not None and self.faults.decode_errors > 0:
            self.faults.decode_errors -= 1
            await asyncio.sleep(self.faults.token_delay_s)
            await self.faults.before_decode_error(valid)
            self._emit(gateway_id, request_id, [], FinishReason.ERROR, error=self.faults.decode_error, child=child)
            self._ended(request_id, child)
            return
        groups = [[t] for t in tokens[len(valid.output_ids) + start :]]
        if self.faults.reorder:
            groups = [g for i in range(0, len(groups) - 1, 2) for g in (groups[i + 1], groups[i])] + (
                groups[-1:] if len(groups) % 2 else []
            )
            groups.append([])
        for i, group in enumerate(groups):
            await asyncio.sleep(self.faults.token_delay_s)
            if self.faults.stall_after is not None and i >= self.faults.stall_after:
                self.seen.stalls.append(request_id)
                await asyncio.Event().wait()
            last = i == len(groups) - 1
            cached = self.cached_tokens if start == 0 and i == 0 else None
            for repeat in range(2 if self.faults.duplicate else 1):
                done = finish if last and repeat == int(self.faults.duplicate) else None
                self._emit(gateway_id, request_id, group, done, cached=cached, child=child)
        self._ended(request_id, child)

    def _emit(
        self,
        gateway_id: str,
        request_id: str,
        tokens: list[Token],
        finish: FinishReason | None,
        *,
        cached: int | None = None,
        error: BatonError | None = None,
        child: int = 0,
    ) -> None:
        queue = self._queues.get(gateway_id)
        if queue is None:
            return
        delta = decode_pb2.SequenceDelta(
            request_id=request_id,
            child=child,
            tokens=[token_to_pb(t) for t in tokens],
            finish_reason=finish_reason_to_pb(finish),
            cached_tokens=cached,
            error=error_to_pb(error) if error else None,
        )
        if self.drafts is not None:
            delta.speculation.proposed, delta.speculation.accepted = self.drafts
        self._numbers[gateway_id] += 1
        queue.put_nowait(decode_pb2.TokenBatch(number=self._numbers[gateway_id], deltas=[delta]))

    # -- Prefill

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        valid = request_from_pb(request.request)
        self.seen.prefilled.append(valid)
        if request.HasField("pull"):
            self.seen.pull_hints.append(request.pull)
        self._running[valid.request_id] = (valid, "")
        faults = self.faults
        done = False
        target = self._targets[valid.request_id] = asyncio.get_running_loop().create_future()
        if request.HasField("target"):
            target.set_result(request.target)
        try:
            await asyncio.sleep(faults.prefill_delay_s)
            await faults.before_prefill(valid)
            if faults.prefill_error is not None and faults.prefill_errors > 0:
                faults.prefill_errors -= 1
                raise faults.prefill_error
            outcomes = [outcome(valid, self._cluster.script, child) for child in valid.child_indices]
            first_index = len(valid.output_ids)
            ends = [finish if len(tokens) == first_index + 1 else None for tokens, finish in outcomes]
            progress = prefill_pb2.PrefillProgress(computed_tokens=valid.context_len, cached_tokens=self.cached_tokens)
            yield prefill_pb2.PrefillEvent(progress=progress)
            if faults.decode_before_first or faults.lose_first_tokens:
                self._cluster.pods[(await target).address].commit(valid.request_id, ends)
                await asyncio.sleep(0.05)
            if faults.lose_first_tokens:
                faults.lose_first_tokens -= 1
                return
            for child, (tokens, _), end in zip(valid.child_indices, outcomes, ends, strict=True):
                first = prefill_pb2.FirstToken(
                    token=token_to_pb(tokens[first_index]),
                    finish_reason=finish_reason_to_pb(end),
                    cached_tokens=self.cached_tokens,
                    queue_s=0.001,
                    compute_s=0.01,
                    child=child,
                )
                yield prefill_pb2.PrefillEvent(first_token=first)
            if faults.drop_prefill_after_first:
                faults.drop_prefill_after_first -= 1
                return
            if faults.hand_off_error is not None and faults.hand_off_errors > 0:
                faults.hand_off_errors -= 1
                done = True
                yield prefill_pb2.PrefillEvent(failed=error_to_pb(faults.hand_off_error))
                return
            if not faults.decode_before_first:
                self._cluster.pods[(await target).address].commit(valid.request_id, ends)
            self.seen.hand_offs.append(valid.request_id)
            done = True
            yield prefill_pb2.PrefillEvent(
                handed_off=prefill_pb2.HandedOff(
                    blocks=len((await target).blocks),
                    bytes=1,
                    transport="loopback",
                    exposed_s=0.001,
                    pushes=[prefill_pb2.Push(blocks=len((await target).blocks), start_s=0.009, end_s=0.01)],
                )
            )
        except (asyncio.CancelledError, GeneratorExit):
            if not done:
                self.seen.prefill_cancels.append(valid.request_id)
            raise
        finally:
            self._running.pop(valid.request_id, None)
            del self._targets[valid.request_id]

    async def SetTarget(self, request: prefill_pb2.SetTargetRequest, context: Any) -> prefill_pb2.SetTargetResponse:
        self.seen.late_targets.append(request.request_id)
        if self.faults.target_error is not None:
            raise self.faults.target_error
        if request.request_id not in self._targets:
            raise Unavailable("no such request")
        self._targets[request.request_id].set_result(request.target)
        return prefill_pb2.SetTargetResponse()


class FakeCluster:
    """Fake pods with one script."""

    def __init__(self) -> None:
        self.pods: dict[str, FakePod] = {}  # by address
        self.script: Script = counting
        self.prefills: list[FakePod] = []
        self.decodes: list[FakePod] = []

    async def add(
        self, role: Role, name: str, make: Callable[[FakeCluster, str, Role], FakePod] | None = None
    ) -> FakePod:
        """Starts one more pod."""
        pod = FakePod(self, name, role) if make is None else make(self, name, role)
        await pod.start()
        (self.prefills if role is Role.PREFILL else self.decodes).append(pod)
        return pod

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self.pods)

    def all_idle(self) -> bool:
        """No pod holds a request."""
        return all(pod.idle for pod in self.pods.values())

    async def stop(self) -> None:
        for pod in list(self.pods.values()):
            await pod.stop()


@asynccontextmanager
async def fake_cluster(prefill: int = 1, decode: int = 1, both: int = 0) -> AsyncIterator[FakeCluster]:
    """Runs a cluster of so many pods of each role."""
    cluster = FakeCluster()
    try:
        for i in range(prefill):
            await cluster.add(Role.PREFILL, f"prefill-{i}")
        for i in range(decode):
            await cluster.add(Role.DECODE, f"decode-{i}")
        for i in range(both):
            await cluster.add(Role.BOTH, f"both-{i}")
        yield cluster
    finally:
        await cluster.stop()
