"""Simulates one prefill pod and several decode pods over real gRPC, without computing anything.

It prints one JSON line with the pods' addresses, steps until SIGTERM, and writes the time at which each token was sent.
A decode pod sends one message per step for all its sequences, as a real pod does. The steps of different pods are
spread evenly over the duration of a step. Every token is one ASCII letter, so the number of characters of an answer is
its number of tokens.

    python benchmarks/support/step_pods.py --decodes 8 --step-ms 20 --model DIR --emitted FILE
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.kv_layout import KVLayout
from common.pb import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
    types_pb2,
)
from common.rpc import RpcServer
from common.types import Role
from common.wire import PROTOCOL_VERSION, layout_to_pb, role_to_pb

LAYOUT = KVLayout("none", "r0", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
MAX_MODEL_LEN = 1 << 17
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letters(model: Path) -> list[int]:
    """Returns the ids of the tokens a to z."""
    raw = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [raw.token_to_id(letter) for letter in LETTERS]


@dataclass
class StepSequence:
    """One decoding request."""

    gateway_id: str
    request_id: str
    max_tokens: int
    generated: int = 1  # Tokens sent, with the first token, which prefill sends.
    #: time.monotonic() at which the pod gave token 1, 2, ... to its stream.
    sent: array[float] = field(default_factory=lambda: array("d"))


class _Pod(transfer_pb2_grpc.TransferServicer):
    """Common part of the pods: a gRPC server that answers Info."""

    def __init__(self, name: str, role: Role) -> None:
        self.name = name
        self._role = role
        self.address = ""
        self._server = RpcServer("127.0.0.1", 0)

    async def start(self) -> None:
        self._server.add_servicer(transfer_pb2_grpc.add_TransferServicer_to_server, self, "baton.v1.Transfer")
        self.address = f"127.0.0.1:{await self._server.start()}"

    async def stop(self) -> None:
        await self._server.stop(0)

    async def Info(self, request: transfer_pb2.InfoRequest, context: Any) -> transfer_pb2.InfoResponse:  # type: ignore[override]
        return transfer_pb2.InfoResponse(
            protocol_version=PROTOCOL_VERSION,
            pod=self.name,
            generation=1,
            role=role_to_pb(self._role),
            layout=layout_to_pb(LAYOUT),
            fingerprint=LAYOUT.fingerprint,
            max_model_len=MAX_MODEL_LEN,
            num_blocks=1 << 24,
            vocab_size=49152,
            ready=True,
        )


class StepDecode(_Pod, decode_pb2_grpc.DecodeServicer):
    """A decode pod.

    Args:
        phase: start of its steps, as a share of a step.
        ids: token ids that it sends in turn.
        stall: send no tokens.
    """

    def __init__(self, name: str, step_s: float, phase: float, ids: list[int], *, stall: bool) -> None:
        super().__init__(name, Role.DECODE)
        self._step_s = step_s
        self._phase = phase
        self._ids = ids
        self._stall = stall
        self._reserved: dict[str, StepSequence] = {}
        self._running: dict[str, StepSequence] = {}
        self._streams: dict[str, asyncio.Queue[list[StepSequence]]] = {}
        self._minted = 0
        self.ended: list[StepSequence] = []
        self._server.add_servicer(decode_pb2_grpc.add_DecodeServicer_to_server, self, "baton.v1.Decode")

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:  # type: ignore[override]
        valid = request.request
        self._minted += 1
        self._reserved[valid.request_id] = StepSequence(request.gateway_id, valid.request_id, valid.sampling.max_tokens)
        target = types_pb2.KvTarget(
            transfer_id=types_pb2.TransferId(generation=1, number=self._minted),
            pod=self.name,
            address=self.address,
            blocks=range(-(-len(valid.prompt_ids) // LAYOUT.block_size)),
            fingerprint=LAYOUT.fingerprint,
        )
        return decode_pb2.ReserveResponse(target=target)

    async def Abort(  # type: ignore[override]
        self, request: decode_pb2.DecodeAbortRequest, context: Any
    ) -> decode_pb2.DecodeAbortResponse:
        self._reserved.pop(request.request_id, None)
        self._running.pop(request.request_id, None)
        return decode_pb2.DecodeAbortResponse()

    def commit(self, request_id: str) -> None:
        """Completes the hand-off: the sequence decodes from the next step on."""
        sequence = self._reserved.pop(request_id, None)
        if sequence is not None and sequence.max_tokens > 1:
            self._running[request_id] = sequence

    async def Tokens(self, request_iterator: Any, context: Any) -> AsyncIterator[decode_pb2.TokenBatch]:  # type: ignore[override]
        hello = await anext(request_iterator)
        queue = self._streams[hello.gateway_id] = asyncio.Queue()
        acks = asyncio.create_task(_drop(request_iterator))
        number = 0
        try:
            await context.send_initial_metadata(())
            while True:
                batch = await queue.get()
                number += 1
                message = decode_pb2.TokenBatch(number=number, deltas=[self._delta(s) for s in batch])
                now = time.monotonic()
                for sequence in batch:
                    sequence.sent.append(now)
                yield message
        finally:
            acks.cancel()
            del self._streams[hello.gateway_id]

    def _delta(self, sequence: StepSequence) -> decode_pb2.SequenceDelta:
        index = sequence.generated
        sequence.generated += 1
        token = types_pb2.Token(index=index, id=self._ids[index % len(self._ids)])
        delta = decode_pb2.SequenceDelta(request_id=sequence.request_id, tokens=[token])
        if sequence.generated == sequence.max_tokens:
            delta.finish_reason = types_pb2.FINISH_REASON_LENGTH
            del self._running[sequence.request_id]
            self.ended.append(sequence)
        return delta

    async def run(self) -> None:
        """Steps at fixed times. A step that is missed is skipped."""
        begin = time.monotonic() + self._phase * self._step_s
        number = 0
        while True:
            number = max(number + 1, int((time.monotonic() - begin) / self._step_s))
            await asyncio.sleep(begin + number * self._step_s - time.monotonic())
            if self._stall:
                continue
            for gateway_id, queue in self._streams.items():
                batch = [s for s in self._running.values() if s.gateway_id == gateway_id]
                if batch and queue.empty():
                    queue.put_nowait(batch)


class StepPrefill(_Pod, prefill_pb2_grpc.PrefillServicer):
    """The prefill pod. It sends the first token immediately, and its hand-off moves no KV."""

    def __init__(self, name: str, ids: list[int]) -> None:
        super().__init__(name, Role.PREFILL)
        self._ids = ids
        self.decodes: dict[str, StepDecode] = {}
        self._server.add_servicer(prefill_pb2_grpc.add_PrefillServicer_to_server, self, "baton.v1.Prefill")

    async def Prefill(  # type: ignore[override]
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        valid = request.request
        first = prefill_pb2.FirstToken(token=types_pb2.Token(index=0, id=self._ids[0]), queue_s=0.001, compute_s=0.01)
        if valid.sampling.max_tokens == 1:
            first.finish_reason = types_pb2.FINISH_REASON_LENGTH
        yield prefill_pb2.PrefillEvent(first_token=first)
        self.decodes[request.target.address].commit(valid.request_id)
        done = prefill_pb2.HandedOff(blocks=len(request.target.blocks), bytes=1, transport="loopback")
        yield prefill_pb2.PrefillEvent(handed_off=done)

    async def Abort(  # type: ignore[override]
        self, request: prefill_pb2.PrefillAbortRequest, context: Any
    ) -> prefill_pb2.PrefillAbortResponse:
        return prefill_pb2.PrefillAbortResponse()


async def _drop(messages: Any) -> None:
    async for _ in messages:
        pass


async def serve(args: argparse.Namespace) -> None:
    """Runs the pods until SIGTERM."""
    ids = letters(args.model)
    n, step_s = args.decodes, args.step_ms / 1e3
    decodes = [StepDecode(f"decode-{i}", step_s, i / n, ids, stall=args.stall) for i in range(n)]
    prefill = StepPrefill("prefill-0", ids)
    pods: list[_Pod] = [prefill, *decodes]
    for pod in pods:
        await pod.start()
    prefill.decodes = {pod.address: pod for pod in decodes}
    print(json.dumps([pod.address for pod in pods]), flush=True)
    steps = [asyncio.create_task(pod.run()) for pod in decodes]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    for task in steps:
        task.cancel()
    if args.emitted:  # by the gateway's request id
        times = {s.request_id.split("-", 1)[0]: list(s.sent) for pod in decodes for s in pod.ended}
        args.emitted.write_text(json.dumps(times))
    for pod in pods:
        await pod.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decodes", type=int, default=8)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--stall", action="store_true", help="send no tokens after the first")
    parser.add_argument("--model", type=Path, required=True, help="directory with tokenizer.json")
    parser.add_argument("--emitted", type=Path, help="file for the times at which tokens were sent")
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
