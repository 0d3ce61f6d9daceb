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
import string
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

from common.pb import decode_pb2, prefill_pb2, types_pb2
from common.types import Role
from tests.rigs.pods.fake_pods import LAYOUT, FakeCluster, FakePod

MAX_MODEL_LEN = 1 << 17


@dataclass
class StepSequence:
    gateway_id: str
    request_id: str
    max_tokens: int
    generated: int = 1  # Tokens sent, with the first token, which prefill sends.
    #: time.monotonic() at which the pod gave token 1, 2, ... to its stream.
    sent: array[float] = field(default_factory=lambda: array("d"))


class StepDecode(FakePod):
    """A decode pod.

    Args:
        phase: start of its steps, as a share of a step.
        ids: token ids that it sends in turn.
        stall: send no tokens.
    """

    def __init__(
        self, cluster: FakeCluster, name: str, step_s: float, phase: float, ids: list[int], *, stall: bool
    ) -> None:
        super().__init__(cluster, name, Role.DECODE)
        self.max_model_len, self.num_blocks = MAX_MODEL_LEN, 1 << 24
        self._step_s = step_s
        self._phase = phase
        self._ids = ids
        self._stall = stall
        self._reserved: dict[str, StepSequence] = {}
        self._decoding: dict[str, StepSequence] = {}
        self._streams: dict[str, asyncio.Queue[list[StepSequence]]] = {}
        self._minted = 0
        self.ended: list[StepSequence] = []

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:
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

    async def Abort(self, request: Any, context: Any) -> decode_pb2.DecodeAbortResponse:
        self._reserved.pop(request.request_id, None)
        self._decoding.pop(request.request_id, None)
        return decode_pb2.DecodeAbortResponse()

    def start_decoding(self, request_id: str) -> None:
        """Completes the hand-off: the sequence decodes from the next step on."""
        sequence = self._reserved.pop(request_id, None)
        if sequence is not None and sequence.max_tokens > 1:
            self._decoding[request_id] = sequence

    async def Tokens(self, request_iterator: Any, context: Any) -> AsyncIterator[decode_pb2.TokenBatch]:
        hello = await anext(request_iterator)
        queue = self._streams[hello.gateway_id] = asyncio.Queue()
        acks = asyncio.create_task(self._read_acks(request_iterator))
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
            del self._decoding[sequence.request_id]
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
                batch = [s for s in self._decoding.values() if s.gateway_id == gateway_id]
                if batch and queue.empty():
                    queue.put_nowait(batch)


class StepPrefill(FakePod):
    """The prefill pod. It sends the first token immediately, and its hand-off moves no KV."""

    def __init__(self, cluster: FakeCluster, first_id: int) -> None:
        super().__init__(cluster, "prefill-0", Role.PREFILL)
        self.max_model_len, self.num_blocks = MAX_MODEL_LEN, 1 << 24
        self._first_id = first_id

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        valid = request.request
        first = prefill_pb2.FirstToken(token=types_pb2.Token(index=0, id=self._first_id), queue_s=0.001, compute_s=0.01)
        if valid.sampling.max_tokens == 1:
            first.finish_reason = types_pb2.FINISH_REASON_LENGTH
        yield prefill_pb2.PrefillEvent(first_token=first)
        decode = self._cluster.pods[request.target.address]
        assert isinstance(decode, StepDecode)
        decode.start_decoding(valid.request_id)
        done = prefill_pb2.HandedOff(blocks=len(request.target.blocks), bytes=1, transport="loopback")
        yield prefill_pb2.PrefillEvent(handed_off=done)


async def serve(args: argparse.Namespace) -> None:
    """Runs the pods until SIGTERM."""
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    ids = [tokenizer.token_to_id(letter) for letter in string.ascii_lowercase]
    cluster, n, step_s = FakeCluster(), args.decodes, args.step_ms / 1e3
    decodes = [StepDecode(cluster, f"decode-{i}", step_s, i / n, ids, stall=args.stall) for i in range(n)]
    for pod in (StepPrefill(cluster, ids[0]), *decodes):
        pod.tls_dir = args.certs and str(args.certs / pod.role.value)
        await pod.start()
    print(json.dumps(cluster.addresses), flush=True)
    steps = [asyncio.create_task(pod.run()) for pod in decodes]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    for task in steps:
        task.cancel()
    if args.emitted:  # by the gateway's request id
        times = {s.request_id.split("-", 1)[0]: list(s.sent) for pod in decodes for s in pod.ended}
        args.emitted.write_text(json.dumps(times))
    await cluster.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decodes", type=int, default=8)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--stall", action="store_true", help="send no tokens after the first")
    parser.add_argument("--model", type=Path, required=True, help="directory with tokenizer.json")
    parser.add_argument("--certs", type=Path, help="directory of `baton certs` for TLS")
    parser.add_argument("--emitted", type=Path, help="file for the times at which tokens were sent")
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
