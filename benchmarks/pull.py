"""Measures pulling cached KV blocks from another pod.

    python benchmarks/pull.py --out benchmarks/results/pull-cpu.json
    python benchmarks/pull.py --device cuda --out benchmarks/results/pull-h200.json

With one GPU all processes share it, so KV is read from and written to the same memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support import local_stack, report
from benchmarks.support.pd_stack import CONFIGS, make_model, prompts
from benchmarks.support.report import ms, percentiles_ms, spread
from benchmarks.support.transfer_peer import FreePin, TransferPeer, answer_lines, other_process, transfer_peer
from cli.gpus import visible_gpus
from common.auth import GATEWAY, Signer, sign_calls
from common.kv_layout import KVLayout
from common.pb import prefill_pb2, prefill_pb2_grpc, transfer_pb2, transfer_pb2_grpc
from common.rpc import open_channel
from common.types import Role, SamplingParams, ValidRequest
from common.wire import request_to_pb
from kv_transfer.messages import WantedBlocks

METRICS = """
`bare`: two processes with the pods' transfer code (TransferNode, gRPC between them) and scattered blocks. A pull is
measured at the puller, from the call until its blocks may be published: the median of --repeats after a first one.

- push_ms_N: N blocks over the default transport. On a CPU blocks have the size of SmolLM2 in float32 (720 KiB, 16
  tokens) and go over CMA. On a GPU they have the size of an 8B model in bfloat16 (2 MiB) and go over cuda_ipc.
- push_gb_s: the rate of the largest pull. first_push_ms: a pull with handshake, connection and probe.
- The rows have blocks of 64 KiB too, and TCP on a CPU.

`pods` (on a CPU only with --only): two prefill pods that get requests directly. The holder has the prefix, the puller
pulls it. Times are from sending a prompt of N + 16 tokens to its first token, on the client's clock, median of
--pod-repeats new prompts.

- ttft_computed_ms_N: the holder computes the whole prompt.
- ttft_push_ms_N: the puller gets the hint that the holder has the first N tokens.
- ttft_cached_ms_N: the puller has the prefix in its cache. A pull takes the difference to ttft_push_ms_N.
"""

SMALL = KVLayout("small", "r0", num_layers=4, num_kv_heads=2, head_dim=64, block_size=16, dtype="float32")
SMOLLM2 = KVLayout("smollm2-shape", "r0", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32")
LLAMA_8B = KVLayout("8b-shape", "r0", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}


@dataclass(frozen=True)
class PullSizes:
    """Sizes for one kind of device. The metrics are of the first layout and the first transport."""

    layouts: tuple[KVLayout, ...]
    counts: tuple[int, ...]  # Numbers of blocks.
    transports: dict[str, dict[str, str]]  # Environment variables of each transport.
    shape: str  # Shape of the pods' model.
    kv_memory: str  # The pods' --kv-memory.

    @property
    def pool_blocks(self) -> int:
        """Blocks of a bare process's pool: twice the largest pull, so that blocks can be scattered."""
        return 2 * max(self.counts) + 8


PLANS = {
    "cpu": PullSizes((SMOLLM2, SMALL), (1, 8, 64, 256), {"default": {}, "tcp": TCP}, "tiny", "64M"),
    "cuda": PullSizes((LLAMA_8B, SMALL), (1, 8, 64, 256, 512), {"default": {}}, "llama-3.1-8b", "6G"),
}
PREFIXES = {"llama-3.1-8b": (1024, 4096, 8192), "tiny": (64, 512)}
SUFFIX = 16  # Tokens after the prefix.
PACKAGES = ("torch", "nixl-cu13", "grpcio")
CONNECTS = 10  # Tries until a pull succeeds. The first pull may need longer to connect than the pod's time limit.


def content(number: int) -> bytes:
    """Returns the bytes that lent block `number` repeats. They are never zero, the content of unwritten blocks."""
    return (number + 1).to_bytes(4, "big")


def lent_blocks(plan: PullSizes) -> list[int]:
    """Returns the scattered blocks that the holder lends: block i of every chain is number i of them."""
    return random.Random(1).sample(range(0, plan.pool_blocks, 2), max(plan.counts))


async def hold(plan: PullSizes, layout: KVLayout, device: str) -> None:
    """Main function of the holding process: lends blocks, each with its number, until stdin ends."""
    blocks = lent_blocks(plan)

    def lend(hashes: Sequence[bytes], first: int) -> FreePin:
        return FreePin(blocks[first : len(hashes)])

    async with transfer_peer(Role.DECODE, layout, plan.pool_blocks, device, lend=lend, allow_tcp=True) as peer:
        for number, block in enumerate(blocks):
            peer.memory.write_block(block, content(number) * (layout.block_bytes // len(content(number))))
        await answer_lines({"pod": peer.name, "address": peer.address})


async def pull(peer: TransferPeer, holder: tuple[str, str], blocks: list[int]) -> float:
    """Pulls the first blocks of a chain into `blocks` and checks their content. Returns the seconds."""
    for block in (blocks[0], blocks[-1]):
        peer.memory.write_block(block, bytes(peer.memory.block_bytes))
    hashes = [i.to_bytes(16, "big") for i in range(1, len(blocks) + 1)]
    wanted = WantedBlocks(
        request_id="r", hashes=hashes, first_block=0, blocks=blocks, pin=FreePin(blocks), timeout_s=60.0
    )
    began = time.perf_counter()
    result = await peer.node.pull(*holder, wanted)
    seconds = time.perf_counter() - began
    assert result.blocks == len(blocks), result
    for number in (0, len(blocks) - 1):
        data = peer.memory.read_block(blocks[number])
        if not data[:4] == data[-4:] == content(number):
            raise RuntimeError(f"block {number} of {len(blocks)} arrived as {data[:4].hex()}...{data[-4:].hex()}")
    return seconds


async def measure(layout: KVLayout, device: str, repeats: int) -> list[dict[str, Any]]:
    """Measures one pair of processes. Returns a row for each number of blocks."""
    plan, rows = PLANS[device], []
    free = [block + 1 for block in lent_blocks(plan)]
    async with (
        other_process(__file__, "--hold", layout.model, device=device) as (greeting, _),
        transfer_peer(Role.PREFILL, layout, plan.pool_blocks, device, allow_tcp=True) as peer,  # slow transports too
    ):
        holder = greeting["address"], greeting["pod"]
        first_s = await pull(peer, holder, free[:1])
        for count in plan.counts:
            seconds = [await pull(peer, holder, free[:count]) for _ in range(repeats)]
            row = {"block_kib": layout.block_bytes >> 10, "blocks": count, "first_ms": ms(first_s)}
            row |= {"median_ms": ms(statistics.median(seconds)), "p90_ms": percentiles_ms(seconds, "p90")["p90"]}
            rows.append(row | {"gb_s": round(count * layout.block_bytes / statistics.median(seconds) / 1e9, 3)})
        carried_by = (await peer.node.connect(*holder)).transport
    return [{**row, "carried_by": carried_by} for row in rows]


def of_transport(name: str, device: str, repeats: int) -> list[dict[str, Any]]:
    """Measures one transport in a child process, because UCX reads its settings when a process starts."""
    argv = [sys.executable, __file__, "--device", device, "--rows", "--repeats", str(repeats)]
    env = {**os.environ, **PLANS[device].transports[name]}
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return [{"transport": name, **row} for row in json.loads(done.stdout.splitlines()[-1])]


class PodCaller:
    """Sends prompts to one prefill pod. Each ends with its first token, so its KV is not handed off."""

    def __init__(self, pod: local_stack.BarePod) -> None:
        self.pod = pod
        signer = Signer(pod.secret.encode(), GATEWAY, "bench", 1)
        self._channel = sign_calls(open_channel(pod.address), signer, lambda: pod.name)
        self._calls = 0

    async def holds(self, tokens: int) -> prefill_pb2.PullHint:
        """Returns the hint that this pod has a prefix of `tokens` tokens."""
        info = await transfer_pb2_grpc.TransferStub(self._channel).Info(transfer_pb2.InfoRequest())
        blocks = tokens // info.layout.block_size
        return prefill_pb2.PullHint(pod=info.pod, generation=info.generation, address=self.pod.address, blocks=blocks)

    async def ttft(self, prompt: Sequence[int], hint: prefill_pb2.PullHint | None = None) -> tuple[float, int]:
        """Returns the seconds to the first token, and the number of prompt tokens that were not computed."""
        self._calls += 1
        params = SamplingParams(temperature=0.0, max_tokens=1)
        request = request_to_pb(ValidRequest(f"{self.pod.name}-{self._calls}", "bench", tuple(prompt), params))
        began = time.perf_counter()
        stub = prefill_pb2_grpc.PrefillStub(self._channel)
        call = stub.Prefill(prefill_pb2.PrefillRequest(request=request, pull=hint), timeout=60.0)
        try:
            async for event in call:
                if event.HasField("first_token"):
                    return time.perf_counter() - began, event.first_token.cached_tokens
        finally:
            call.cancel()
        raise RuntimeError(f"{self.pod.name} sent no token")

    async def aclose(self) -> None:
        await self._channel.close()


async def every_way(holder: PodCaller, puller: PodCaller, prefix: list[int], shape: str, seed: str) -> dict[str, Any]:
    """Gets this prefix in every way. Returns the seconds and the cached tokens of each way."""
    tails = prompts(shape, 3, SUFFIX, seed)
    hint = await holder.holds(len(prefix))
    return {
        "computed": await holder.ttft([*prefix, *tails[0]]),
        "push": await puller.ttft([*prefix, *tails[1]], hint),
        "cached": await puller.ttft([*prefix, *tails[2]]),
    }


async def measure_pods(pods: dict[str, local_stack.BarePod], shape: str, repeats: int) -> list[dict[str, Any]]:
    """Measures all prefix lengths in all ways. Returns a row for each length and way."""
    rows: list[dict[str, Any]] = []
    async with aclosing(PodCaller(pods["holder"])) as holder, aclosing(PodCaller(pods["puller"])) as puller:
        for seed in (f"connect-{attempt}" for attempt in range(CONNECTS)):
            (prefix,) = prompts(shape, 1, PREFIXES[shape][0], seed)
            if (await every_way(holder, puller, prefix, shape, seed))["push"][1]:
                break
        for length in PREFIXES[shape]:
            times: dict[str, list[float]] = {}
            for number, prefix in enumerate(prompts(shape, repeats + 1, length, "measured")):
                results = await every_way(holder, puller, prefix, shape, f"{length}-{number}")
                for way, (seconds, cached) in results.items():
                    expected = 0 if way == "computed" else length
                    if cached != expected:
                        raise RuntimeError(f"{way}: {cached} of {length} tokens were cached, expected {expected}")
                    if number:  # the first prompt of a length warms up
                        times.setdefault(way, []).append(seconds)
            rows += [{"prefix": length, "way": way, "ttft": spread(seconds)} for way, seconds in times.items()]
    return rows


def pod_rows(device: str, shape: str, repeats: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Measures two pods. Returns the rows and the pods' log lines about connections."""
    limit = min(CONFIGS[shape]["max_position_embeddings"], max(PREFIXES[shape]) + 1024)
    flags = {"role": "prefill", "served-name": "bench", "load-format": "dummy", "max-seqs": "16", "host-cache": "0"}
    flags |= {"kv-memory": PLANS[device].kv_memory, "max-model-len": str(limit)}
    with tempfile.TemporaryDirectory(prefix="baton-model-") as folder:
        make_model(Path(folder), shape)
        with local_stack.running_pods(Path(folder), {"holder": flags, "puller": flags}, device=device) as pods:
            rows = asyncio.run(measure_pods(pods, shape, repeats))
            return rows, [
                f"{pod.name} {line}" for pod in pods.values() for line in local_stack.connections(pod.process)
            ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.arguments(__doc__, METRICS)
    parser.add_argument("--device", choices=PLANS, default="cpu")
    parser.add_argument("--only", choices=("bare", "pods"), nargs="+", help="parts (default: bare, on a GPU both)")
    parser.add_argument("--shape", choices=PREFIXES, help="model of the pods; default: 8B on a GPU, else tiny")
    parser.add_argument("--repeats", type=int, default=30, help="pulls between the bare processes")
    parser.add_argument("--pod-repeats", type=int, default=7, help="prompts of each length and way")
    parser.add_argument("--hold", metavar="LAYOUT", help=argparse.SUPPRESS)
    parser.add_argument("--rows", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    plan = PLANS[args.device]
    if args.hold:
        asyncio.run(hold(plan, next(layout for layout in plan.layouts if layout.model == args.hold), args.device))
        return
    if args.rows:
        rows = [row for layout in plan.layouts for row in asyncio.run(measure(layout, args.device, args.repeats))]
        print(json.dumps(rows))
        return
    only = args.only or (["bare"] if args.device == "cpu" else ["bare", "pods"])
    metrics: dict[str, float] = {}
    more: dict[str, Any] = {} if args.device == "cpu" else {"gpus": len(visible_gpus())}
    if "bare" in only:
        more["rows"] = [row for name in plan.transports for row in of_transport(name, args.device, args.repeats)]
        kib = plan.layouts[0].block_bytes >> 10
        for row in more["rows"]:
            print(json.dumps(row), flush=True)
            if row["transport"] == "default" and row["block_kib"] == kib:
                metrics[f"push_ms_{row['blocks']}"] = row["median_ms"]
                metrics |= {"push_gb_s": row["gb_s"], "first_push_ms": row["first_ms"]}
        report.write(args.out, f"pull-{args.device}", metrics, *PACKAGES, **more)
    if "pods" in only:
        shape = args.shape or plan.shape
        rows, connections = pod_rows(args.device, shape, args.pod_repeats)
        more["pods"] = {"shape": shape, "rows": rows, "connections": connections}
        for row in rows:
            print(json.dumps(row), flush=True)
            metrics[f"ttft_{row['way']}_ms_{row['prefix']}"] = row["ttft"]["p50"]
        print(*connections, sep="\n", flush=True)
        report.write(args.out, f"pull-{args.device}", metrics, *PACKAGES, **more)
    report.show(metrics)


if __name__ == "__main__":
    main()
