"""Whole pods in one process: a tiny random Llama, the loopback fabric, gRPC on 127.0.0.1, and a client as the gateway.

    async with Cluster.start(model_dir, decode=2) as cluster:
        answer = await cluster.generate(request(prompt, max_tokens=8))

At the end of the context every pod is checked: no block is leased or quarantined, and the pool is consistent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
import torch

from common.auth import GATEWAY, Signer, sign_calls
from common.errors import BatonError, Overloaded
from common.pb import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, transfer_pb2, transfer_pb2_grpc
from common.rpc import open_channel, translate_rpc_errors
from common.settings.pod import PodConfig
from common.settings.process import DEFAULT_SECRET
from common.tls import TlsFiles
from common.types import FinishReason, KvTarget, Role, SamplingParams, Token, ValidRequest
from common.wire import (
    error_from_pb,
    finish_reason_from_pb,
    kv_target_from_pb,
    kv_target_to_pb,
    request_to_pb,
    token_from_pb,
)
from decode_service.servicer import DecodeServicer
from engine.llm import LLM
from kv_transfer.backend.interface import Backend
from kv_transfer.backend.loopback import LoopbackBackend, LoopbackFabric
from pod.runtime import PodRuntime
from prefill_service.servicer import PrefillServicer
from tests.rigs.waiting import Clock

BLOCK = 4
CHUNK = 16
MAX_LEN = 128
VOCAB = 256
TIMEOUT_S = 30.0

_ids = itertools.count(1)


def tiny_llama(directory: Path, *, max_len: int = MAX_LEN) -> Path:
    """Saves a random Llama (2 layers, hidden 64, vocabulary 256). Its greedy output does not repeat one token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_len,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")  # pods never read it, but a model directory has one
    return directory


def request(prompt: Sequence[int], max_tokens: int = 8, **sampling: Any) -> ValidRequest:
    """Returns a greedy request for `prompt` with a new id."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **sampling})
    return ValidRequest(f"r{next(_ids)}", "tiny", tuple(prompt), params)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Returns a reproducible random prompt."""
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()


def oracle(model_dir: Path, **engine: Any) -> LLM:
    """Returns the same engine in this process, without transfers; it gives the expected tokens."""
    return LLM(
        model_dir, block_size=BLOCK, num_blocks=256, max_model_len=MAX_LEN, chunk_tokens=CHUNK, threads=1, **engine
    )


def expected(llm: LLM, r: ValidRequest) -> list[int]:
    """Returns the tokens of a request that runs to max_tokens."""
    return llm.generate([r.prompt_ids], r.sampling, ignore_eos=True)[0].ids


def gateway_channel(
    address: str, pod: str, gateway_id: str = "gw", *, secret: str = DEFAULT_SECRET, tls: TlsFiles | None = None
) -> grpc.aio.Channel:
    """Opens a channel to `pod` that signs its calls as this gateway."""
    return sign_calls(open_channel(address, tls), Signer(secret.encode(), GATEWAY, gateway_id, 1), lambda: pod)


@contextlib.asynccontextmanager
async def gateway_client(pod: PodRuntime, gateway_id: str) -> AsyncIterator[PodClient]:
    """Yields the stubs of a pod for another gateway."""
    client = PodClient(gateway_channel(pod.address, pod.name, gateway_id))
    try:
        yield client
    finally:
        await client.channel.close()


@dataclass
class PodClient:
    """The RPC stubs of a pod."""

    channel: grpc.aio.Channel

    @property
    def decode(self) -> decode_pb2_grpc.DecodeAsyncStub:
        return decode_pb2_grpc.DecodeStub(self.channel)  # type: ignore[return-value]

    @property
    def prefill(self) -> prefill_pb2_grpc.PrefillAsyncStub:
        return prefill_pb2_grpc.PrefillStub(self.channel)  # type: ignore[return-value]

    async def info(self) -> transfer_pb2.InfoResponse:
        return await transfer_pb2_grpc.TransferStub(self.channel).Info(transfer_pb2.InfoRequest())


@dataclass
class Pod(PodClient):
    """One pod in this process."""

    runtime: PodRuntime
    service: Any

    @property
    def agent(self) -> str:
        """Name of the pod's agent on the fabric."""
        return f"{self.runtime.config.role}-{self.runtime.name}-{self.runtime.generation}"

    def holds(self, blocks: int) -> prefill_pb2.PullHint:
        """Returns the hint that this pod holds so many leading blocks of a prompt."""
        runtime = self.runtime
        return prefill_pb2.PullHint(
            pod=runtime.name, generation=runtime.generation, address=runtime.address, blocks=blocks
        )

    def counted(self, metric: str) -> dict[tuple[str, ...], float]:
        """Returns the values of a counter by its label values, without zeros."""
        found = next(m for m in self.runtime.metrics.metrics.registry.collect() if m.name == f"baton_{metric}")
        return {tuple(s.labels.values()): s.value for s in found.samples if s.name.endswith("_total") and s.value}

    async def settled(self, timeout_s: float = TIMEOUT_S) -> None:
        """Waits until the pod holds no request and no leased block. Fails after timeout_s or if the pool is wrong."""
        pool = self.runtime.engine.pool
        end = time.monotonic() + timeout_s
        while True:
            counts = pool.counts()
            pool.check_integrity()
            if len(self.service.requests) == 0 and counts.free + counts.cached == counts.total:
                return
            assert time.monotonic() < end, (
                f"{self.runtime.name} still holds {counts}, {len(self.service.requests)} requests"
            )
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.channel.close()
        await self.runtime.stop()


@dataclass
class Answer:
    """The answer to one request."""

    #: In order of arrival.
    tokens: list[Token] = field(default_factory=list)
    finish: FinishReason | None = None
    error: BatonError | None = None
    cached_tokens: int = 0
    target: KvTarget | None = None
    handed_off: prefill_pb2.HandedOff | None = None
    #: Kinds of the prefill events, "local" and "tokens", in order.
    events: list[str] = field(default_factory=list)
    #: Draft tokens proposed and accepted, by message.
    drafts: list[tuple[int, int]] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        assert [t.index for t in self.tokens] == list(range(len(self.tokens))), self.tokens
        return [t.id for t in self.tokens]


class GatewayStream:
    """The gateway's end of one Tokens stream. It acknowledges each batch unless `stalled` is set."""

    def __init__(self, pod: PodClient, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.numbers: list[int] = []
        self.stalled = False
        self._inboxes: dict[str, asyncio.Queue[decode_pb2.SequenceDelta]] = {}
        self._call = pod.decode.Tokens()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> GatewayStream:
        await self._call.write(decode_pb2.TokensRequest(gateway_id=self.gateway_id))
        await self._call.initial_metadata()
        self._task = asyncio.create_task(self._read())
        return self

    def expect(self, request_id: str) -> asyncio.Queue[decode_pb2.SequenceDelta]:
        return self._inboxes.setdefault(request_id, asyncio.Queue())

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for batch in self._call:
                self.numbers.append(batch.number)
                for delta in batch.deltas:
                    self.expect(delta.request_id).put_nowait(delta)
                if not self.stalled:
                    await self._call.write(decode_pb2.TokensRequest(acked=batch.number))

    async def catch_up(self) -> None:
        """Acknowledges all batches, and each later one."""
        self.stalled = False
        await self._call.write(decode_pb2.TokensRequest(acked=self.numbers[-1]))

    async def close(self) -> None:
        self._call.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])


PodT = TypeVar("PodT", bound=PodClient)


class PlayedGateway(Generic[PodT]):
    """Sends requests to prefill and decode pods, as a gateway does."""

    def __init__(self) -> None:
        self.prefills: list[PodT] = []
        self.decodes: list[PodT] = []
        #: Token streams of `decodes`, in the same order.
        self.streams: list[GatewayStream] = []

    @property
    def pods(self) -> list[PodT]:
        return [*self.prefills, *self.decodes]

    @property
    def prefill(self) -> PodT:
        return self.prefills[0]

    @property
    def decode(self) -> PodT:
        return self.decodes[0]

    def stream_of(self, pod: PodT) -> GatewayStream:
        return self.streams[self.decodes.index(pod)]

    async def reserve(
        self,
        request: ValidRequest,
        pod: PodT | None = None,
        *,
        remote_only: bool = False,
        timeout_s: float = TIMEOUT_S,
        remote_cost: decode_pb2.RemotePrefill | None = None,
    ) -> decode_pb2.ReserveResponse:
        pod = pod or self.decode
        message = decode_pb2.ReserveRequest(
            request=request_to_pb(request),
            gateway_id=self.stream_of(pod).gateway_id,
            remote_only=remote_only,
            remote=remote_cost,
        )
        with translate_rpc_errors():
            return await pod.decode.Reserve(message, timeout=timeout_s)

    async def generate(
        self,
        request: ValidRequest,
        *,
        prefill: PodT | None = None,
        decode: PodT | None = None,
        remote_only: bool = False,
        timeout_s: float = TIMEOUT_S,
        on_event: Callable[[str], None] = lambda _kind: None,
        pull: prefill_pb2.PullHint | None = None,
        remote_cost: decode_pb2.RemotePrefill | None = None,
        late_s: float | None = None,
    ) -> Answer:
        """Runs one request. Errors of either pod are raised as BatonError.

        Args:
            late_s: SetTarget is sent so long after Prefill; None sends the target with Prefill.
        """
        decode = decode or self.decode
        answer = Answer()
        inbox = self.stream_of(decode).expect(request.request_id)
        reply = await self.reserve(
            request, decode, remote_only=remote_only, timeout_s=timeout_s, remote_cost=remote_cost
        )
        if reply.HasField("rejected"):
            raise Overloaded(reply.rejected.reason, retry_after_s=reply.rejected.retry_after_s)
        if reply.HasField("target"):
            answer.target = kv_target_from_pb(reply.target)
            await self.run_prefill(request, answer, prefill or self.prefill, timeout_s, on_event, pull, late_s)
        else:
            answer.events.append("local")
        while answer.finish is None:
            async with asyncio.timeout(timeout_s + TIMEOUT_S):  # the deadline of the pods comes first
                delta = await inbox.get()
            self._take(answer, delta)
            on_event("tokens")
        return answer

    async def run_prefill(
        self,
        request: ValidRequest,
        answer: Answer,
        prefill: PodT,
        timeout_s: float,
        on_event: Callable[[str], None],
        pull: prefill_pb2.PullHint | None = None,
        late_s: float | None = None,
    ) -> None:
        """Makes the Prefill call and reads its events to the end. Raises the error of a Failed event."""
        assert answer.target is not None
        target = kv_target_to_pb(answer.target)
        message = prefill_pb2.PrefillRequest(request=request_to_pb(request), pull=pull)
        if late_s is None:
            message.target.CopyFrom(target)

        async def send_target(after_s: float) -> None:
            await asyncio.sleep(after_s)
            with contextlib.suppress(grpc.aio.AioRpcError):  # the prefill has failed, or fails without a target
                set_target = prefill_pb2.SetTargetRequest(request_id=request.request_id, target=target)
                await prefill.prefill.SetTarget(set_target, timeout=timeout_s)

        async with contextlib.AsyncExitStack() as stack:
            if late_s is not None:
                sending = asyncio.create_task(send_target(late_s))
                stack.callback(sending.cancel)
            stack.enter_context(translate_rpc_errors())
            async for event in prefill.prefill.Prefill(message, timeout=timeout_s):
                kind = event.WhichOneof("event") or ""
                answer.events.append(kind)
                on_event(kind)
                if kind == "first_token":
                    answer.tokens.append(token_from_pb(event.first_token.token))
                    answer.finish = finish_reason_from_pb(event.first_token.finish_reason)
                    answer.cached_tokens = event.first_token.cached_tokens
                elif kind == "handed_off":
                    answer.handed_off = event.handed_off
                elif kind == "failed":
                    raise error_from_pb(event.failed)

    @staticmethod
    def _take(answer: Answer, delta: decode_pb2.SequenceDelta) -> None:
        if delta.HasField("error"):
            raise error_from_pb(delta.error)
        answer.tokens.extend(token_from_pb(t) for t in delta.tokens)
        if delta.HasField("cached_tokens"):
            answer.cached_tokens = delta.cached_tokens
        if delta.HasField("speculation"):
            answer.drafts.append((delta.speculation.proposed, delta.speculation.accepted))
            assert delta.speculation.accepted == len(delta.tokens) - 1
        answer.finish = finish_reason_from_pb(delta.finish_reason)
        answer.events.append("tokens")

    async def abort(self, request_id: str) -> None:
        """Aborts a request on all pods, as a gateway does when its client disconnects."""
        for pod in self.prefills:
            await pod.prefill.Abort(prefill_pb2.PrefillAbortRequest(request_id=request_id))
        for pod in self.decodes:
            await pod.decode.Abort(decode_pb2.DecodeAbortRequest(request_id=request_id))


class Cluster(PlayedGateway[Pod]):
    """Prefill and decode pods on one fabric, or on the backends that `backend` returns, or on their configured ones."""

    def __init__(
        self,
        model_dir: Path,
        backend: Callable[[Role], Backend] | None = None,
        *,
        own_backend: bool = False,
    ) -> None:
        super().__init__()
        self.model_dir = model_dir
        #: The fabric's clock: delayed writes are due by it.
        self.clock = Clock()
        self.fabric = fabric = LoopbackFabric(self.clock)
        self._backend = None if own_backend else backend or (lambda _: LoopbackBackend(fabric))

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls,
        model_dir: Path,
        *,
        prefill: int = 1,
        decode: int = 1,
        role: Role = Role.DECODE,
        prefill_config: Mapping[str, Any] | None = None,
        decode_config: Mapping[str, Any] | None = None,
        backend: Callable[[Role], Backend] | None = None,
        own_backend: bool = False,
        check: bool = True,
    ) -> AsyncIterator[Cluster]:
        """Runs a cluster.

        Args:
            own_backend: Each pod uses the backend of its configuration.
            check: At the end all blocks of every pod must be free or cached.
        """
        cluster = cls(model_dir, backend, own_backend=own_backend)
        try:
            for _ in range(decode):
                await cluster.add(role, **(decode_config or {}))
            for _ in range(prefill):
                await cluster.add(Role.PREFILL, **(prefill_config or {}))
            yield cluster
            if check:
                for pod in cluster.pods:
                    await pod.settled()
        finally:
            for stream in cluster.streams:
                await stream.close()
            for pod in cluster.pods:
                await pod.close()

    async def add(
        self,
        role: Role,
        *,
        num_blocks: int = 64,
        stream: Mapping[str, Any] | None = None,
        gateway_tls: str | None = None,
        **fields: Any,
    ) -> Pod:
        """Starts one more pod. `fields` are of PodConfig, `stream` of DecodeServicer, `gateway_tls` as `tls_dir`."""
        kv_bytes_per_block = 2 * 2 * 2 * BLOCK * 16 * 4
        config = PodConfig(
            **{
                "role": role,
                "model": str(self.model_dir),
                "served_name": "tiny",
                "name": f"{role}-{next(_ids)}",
                "device": "cpu",
                "dtype": "float32",
                "threads": 1,
                "block_size": BLOCK,
                "kv_memory": (num_blocks + 2) * kv_bytes_per_block,
                "max_model_len": MAX_LEN,
                "chunk_tokens": CHUNK,
                "max_seqs": 16,
                "checksums": True,
                **fields,
            }
        )
        make = self._backend
        runtime = await PodRuntime.create(config, backend=None if make is None else lambda _config: make(role))
        services = PrefillServicer(runtime), DecodeServicer(runtime, **(stream or {}))
        service = services[0 if role is Role.PREFILL else 1]
        try:
            await runtime.start(*services)
        except BaseException:
            await runtime.stop()
            raise
        gateway_id = f"gw-{next(_ids)}"
        tls = TlsFiles.of_directory(gateway_tls, GATEWAY)
        pod = Pod(gateway_channel(runtime.address, runtime.name, gateway_id, tls=tls), runtime, service)
        (self.prefills if role is Role.PREFILL else self.decodes).append(pod)
        if role is not Role.PREFILL:
            self.streams.append(await GatewayStream(pod, gateway_id).open())
        return pod
