"""Measures the hand-over of KV between one prefill and one decode pod, each on its own GPU.

    python benchmarks/handoff.py --out benchmarks/results/handoff-h100x2.json

`--shape tiny --device cpu` checks on a CPU that the script works.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support import report
from benchmarks.support.pd_stack import (
    CONFIGS,
    FLAGS,
    StackClient,
    TimedAnswer,
    flags_of,
    ms,
    prompts,
    running,
    spread,
    transport_of,
)
from cli.gpus import visible_gpus
from common.auth import Signer
from common.errors import BatonError
from common.kv_layout import KVLayout
from common.pb import transfer_pb2, transfer_pb2_grpc
from common.process.lifecycle import host_boot_id
from common.rpc import RpcServer
from common.types import KvTarget, Role, TransferId
from common.wire import PROTOCOL_VERSION, layout_to_pb, role_to_pb
from kv_transfer.backend.nixl import NixlBackend
from kv_transfer.memory import device_pool, host_pool
from kv_transfer.messages import Commit, ExposedParts, TransferReport
from kv_transfer.node import TransferNode
from kv_transfer.sender.transfers import DEFAULT_WRITE_LIMITS, WriteLimits

METRICS = """
Through the real gateway, one request at a time, with unique prompts and the client's clock:

- handover_ms_N: from the first token, which prefill sends, to the second token, the first of decode; median.
- exposed_ms_8192: from the end of the last chunk's compute to the acknowledged commit, on prefill's clock; median.
- decode_step_ratio_while_receiving: mean time of a decode step of 16 sequences while KV arrives, over the mean of the
  steps before and after. The KV is from other prompts, which end with their first token and follow each other without
  a pause, so it arrives at the rate of one prefill (received_gb_s).

Between two processes with the pods' transfer code (TransferNode) over their own pools, 2 GiB at a time:

- payload_gb_s: scattered blocks of 2 MiB, from the push to the end of the last write; median.
- payload_gb_s_8mib: the same in runs of 4 neighbouring blocks. The rows have other runs and write sizes.

Rows have exposed_parts (kv_transfer.messages.ExposedParts). The rows in `ends` are hand-overs of one block between the
two processes, with the commit as a notification and as a call. On a CPU the two differ only with UCX_TLS=tcp.
"""

SECRET = b"one benchmark"
MIB = 1 << 20
END_REPEATS = 50


@dataclass(frozen=True)
class HandoffSizes:
    """Sizes of one shape."""

    layout: KVLayout
    #: Blocks of one transfer between the two processes.
    total_blocks: int
    #: Prompt lengths of handover_ms_N.
    handover: tuple[int, ...]
    #: Prompt length of exposed_ms_N.
    exposed: int
    repeats: int
    #: Sequences that decode while KV arrives, and their context.
    rows: int
    context: int
    #: Seconds of each of the periods before, while and after KV arrives.
    window_s: float
    #: Length of the prompts whose KV arrives, and how many run concurrently.
    arriving: int
    concurrent: int


def layout(layers: int, heads: int, dim: int, size: int, dtype: str) -> KVLayout:
    return KVLayout("bench", "r0", num_layers=layers, num_kv_heads=heads, head_dim=dim, block_size=size, dtype=dtype)


PLANS = {
    "llama-3.1-8b": HandoffSizes(
        layout(32, 8, 128, 16, "bfloat16"), 1024, (4096, 15000), 8192, 12, 16, 2048, 5.0, 4096, 3
    ),
    "tiny": HandoffSizes(layout(2, 2, 32, 16, "float32"), 32, (40, 90), 60, 2, 2, 32, 0.5, 48, 1),
}


class UnsharedBlocks:
    """Pinned blocks without an owner."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self.blocks = blocks

    def release(self, blocks: Sequence[int] | None = None) -> None:
        """Does nothing: the benchmark reuses blocks itself."""


@asynccontextmanager
async def node(
    plan: HandoffSizes,
    role: Role,
    device: str,
    write_limits: WriteLimits | None = None,
    *,
    allow_tcp: bool = False,
    commit_notifications: bool = True,
) -> AsyncIterator[TransferNode]:
    """Runs a transfer node with its own pool. Its address is in its KvTargets and in `info.served_name`."""
    total = 2 * plan.total_blocks + 2
    make_pool = host_pool if device == "cpu" else device_pool
    memory = make_pool(total, plan.layout.block_bytes)
    generation = time.time_ns() // MIB
    server = RpcServer("127.0.0.1", 0)
    info = transfer_pb2.InfoResponse(
        protocol_version=PROTOCOL_VERSION,
        pod=f"bench-{role.value}-{os.getpid()}",
        generation=generation,
        role=role_to_pb(role),
        layout=layout_to_pb(plan.layout),
        fingerprint=plan.layout.fingerprint,
        num_blocks=total,
        pid=os.getpid(),
        boot_id=host_boot_id(),
    )
    address = [""]
    transfer_node = TransferNode(
        backend=NixlBackend(),
        memory=memory,
        info=lambda: info,
        signer=Signer(SECRET, info.pod, generation),
        address=lambda: address[0],
        write_limits=write_limits,
        allow_tcp=allow_tcp,
        commit_notifications=commit_notifications,
    )
    server.add_servicer(transfer_pb2_grpc.add_TransferServicer_to_server, transfer_node.servicer, "baton.v1.Transfer")
    await transfer_node.start()
    address[0] = f"127.0.0.1:{await server.start()}"
    info.served_name = address[0]  # read by `receive`
    try:
        yield transfer_node
    finally:
        await transfer_node.stop(1.0)
        await server.stop(0)


async def receive(plan: HandoffSizes, device: str) -> None:
    """Main function of the receiving process: expects a transfer for each line of stdin and prints its target."""
    async with node(plan, Role.DECODE, device) as local_node:
        info = await local_node.servicer.Info(transfer_pb2.InfoRequest(), None)  # type: ignore[arg-type]
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)

            def ignore(_: Commit | BatonError) -> None:
                """Does nothing: the sender measures the transfer and sees its errors."""

            transfer_id = local_node.expect_transfer(
                request_id=order["request"],
                first_block=0,
                blocks=order["blocks"],
                pin=UnsharedBlocks(order["blocks"]),
                deadline_s=60.0,
                on_ready=ignore,
                on_failed=ignore,
            )
            target = {"generation": transfer_id.generation, "number": transfer_id.number}
            print(json.dumps(target | {"pod": info.pod, "address": info.served_name}), flush=True)


def scattered(total: int, run: int, rng: random.Random) -> list[int]:
    """Returns `total` blocks of a pool of twice the size, in scattered runs of `run` neighbours."""
    starts = list(range(0, 2 * total, run + 1))[: total // run]
    rng.shuffle(starts)
    return [start + i for start in starts for i in range(run)]


@dataclass(frozen=True)
class ReceiverProcess:
    """The receiving process, seen from the sending one."""

    plan: HandoffSizes
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader

    async def reserve(self, request: str, blocks: list[int]) -> KvTarget:
        self.stdin.write(json.dumps({"request": request, "blocks": blocks}).encode() + b"\n")
        target = json.loads(await self.stdout.readline())
        transfer_id, fingerprint = TransferId(target["generation"], target["number"]), self.plan.layout.fingerprint
        return KvTarget(transfer_id, target["pod"], target["address"], 0, tuple(blocks), fingerprint)


@asynccontextmanager
async def receiver(plan: HandoffSizes, device: str) -> AsyncIterator[ReceiverProcess]:
    """Runs the receiving process on the last GPU. This process keeps the first GPU."""
    gpus = visible_gpus() if device != "cpu" else ()
    env = dict(os.environ)
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = gpus[-1].id
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[0].id
    argv = [sys.executable, __file__, "--receive", "--shape", plan_name(plan), "--device", device]
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, env=env)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        if await child.stdout.readline() != b"ready\n":
            raise SystemExit("the receiving process did not start")
        yield ReceiverProcess(plan, child.stdin, child.stdout)
        child.stdin.close()
        await asyncio.wait_for(child.wait(), 30)
    finally:
        if child.returncode is None:
            child.kill()


async def payload(child: ReceiverProcess, device: str, *, allow_tcp: bool) -> list[dict[str, Any]]:
    """Measures GB/s for each length of runs and each write size."""
    plan = child.plan
    default = DEFAULT_WRITE_LIMITS["DRAM" if device == "cpu" or not visible_gpus() else "VRAM"]
    rows: list[dict[str, Any]] = []
    rng = random.Random(0)
    for limits in [default, *(WriteLimits(size * MIB, size * MIB, default.max_in_flight) for size in (32, 128))]:
        async with node(plan, Role.PREFILL, device, limits, allow_tcp=allow_tcp) as local_node:
            for run in (1, 4, 16, plan.total_blocks) if limits is default else (1, 4):
                times, exposed = [], []
                for repeat in range(plan.repeats + 1):
                    local, remote = (scattered(plan.total_blocks, run, rng) for _ in range(2))
                    request = f"{limits.first_bytes}-{limits.max_bytes}-{run}-{repeat}"
                    write_s, commit_s, _ = await move(local_node, await child.reserve(request, remote), request, local)
                    if repeat:  # the first one connects
                        times.append(write_s)
                        exposed.append(commit_s)
                size = plan.total_blocks * plan.layout.block_bytes
                peer = local_node.stats().peers[0]
                rows.append(
                    {
                        "run_blocks": run,
                        "run_mib": run * plan.layout.block_bytes / MIB,
                        "piece_mib": limits.max_bytes // MIB,
                        "first_mib": limits.first_bytes // MIB,
                        "gb_s": round(size / statistics.median(times) / 1e9, 1),
                        "gb_s_best": round(size / min(times) / 1e9, 1),
                        "to_commit_ms": ms(statistics.median(exposed)),
                        "transport": peer.transport,
                        "probe_gb_s": round(peer.gb_s, 1),
                    }
                )
                print(rows[-1], flush=True)
    return rows


async def ends(child: ReceiverProcess, device: str, *, allow_tcp: bool) -> list[dict[str, Any]]:
    """Measures hand-overs of one block, with the commit as a notification and as a call."""
    rows: list[dict[str, Any]] = []
    for by_note in (True, False):
        reports: list[TransferReport] = []
        async with node(
            child.plan, Role.PREFILL, device, allow_tcp=allow_tcp, commit_notifications=by_note
        ) as local_node:
            for repeat in range(END_REPEATS + 2):
                request = f"end-{by_note}-{repeat}"
                *_, report = await move(local_node, await child.reserve(request, [repeat]), request, [repeat])
                reports.append(report)
        rows.append({"notes": by_note, "exposed": spread([r.exposed_s for r in reports[2:]])})
        rows[-1] |= exposed_parts([asdict(r.parts) for r in reports[2:]])
        print(rows[-1], flush=True)
    return rows


def exposed_parts(parts: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Returns the median parts of the exposed time, in milliseconds from the end of the last chunk's compute."""
    names = [field.name for field in fields(ExposedParts)]
    medians = {name.removesuffix("_s"): ms(statistics.median(p.get(name, 0.0) for p in parts)) for name in names}
    return {"exposed_parts": medians}


async def move(
    local_node: TransferNode, target: KvTarget, request: str, local: list[int]
) -> tuple[float, float, TransferReport]:
    """Runs one transfer.

    Returns the seconds from the push to the end of the last write, the seconds from there to the acknowledged commit,
    and the report.
    """
    ended: list[float] = []
    transfer = local_node.start_transfer(target, request, len(local), 60.0)
    transfer.on_progress = lambda _: ended.append(time.perf_counter())
    await asyncio.sleep(0.05)  # the transfer opens in this time, as it does during the first chunk of a prompt
    began = time.perf_counter()
    transfer.push(0, local, UnsharedBlocks(local))
    transfer.finish([1], [None])
    done = await transfer.done()
    assert done.blocks == len(local)
    return ended[-1] - began, time.perf_counter() - ended[-1], done


def plan_name(plan: HandoffSizes) -> str:
    return next(name for name, known in PLANS.items() if known is plan)


async def handovers(
    client: StackClient, shape: str, length: int, repeats: int
) -> tuple[list[TimedAnswer], list[dict[str, Any]]]:
    """Runs requests one after another. Returns their answers and timelines; two warm-up requests are not counted."""
    answers, timelines = [], []
    for prompt in prompts(shape, repeats + 2, length, seed=1):
        answers.append(await client.ask(prompt, 8))
        await asyncio.sleep(0.05)  # the report of the hand-off may arrive after the last token
        timelines.append(await client.timeline(answers[-1]))
    return answers[2:], timelines[2:]


async def receiving(client: StackClient, shape: str, plan: HandoffSizes, block_bytes: int) -> dict[str, Any]:
    """Measures the step times of a decoding batch before, while and after KV arrives."""
    steps = min(CONFIGS[shape]["max_position_embeddings"] - plan.context - 1, 12000)
    streams = [asyncio.create_task(client.ask(p, steps)) for p in prompts(shape, plan.rows, plan.context, seed=2)]
    await asyncio.sleep(2 * plan.window_s)
    marks = [time.perf_counter()]
    await asyncio.sleep(plan.window_s)
    marks.append(time.perf_counter())
    arriving = iter(prompts(shape, 4096 if shape == "tiny" else 400, plan.arriving, seed=3))
    moved: list[float] = []
    until = time.perf_counter() + 2 * plan.window_s

    async def feed() -> None:
        while time.perf_counter() < until:
            try:
                await client.ask(next(arriving), 1)
            except RuntimeError as e:  # on a machine with few cores the pods may be overloaded
                print(e, flush=True)
                await asyncio.sleep(0.1)
            else:
                moved.append(time.perf_counter())

    await asyncio.gather(*(feed() for _ in range(plan.concurrent)))
    marks.append(time.perf_counter())
    await asyncio.sleep(plan.window_s)
    marks.append(time.perf_counter())
    for stream in streams:
        if not stream.done():
            stream.cancel()
    done = await asyncio.gather(*streams, return_exceptions=True)
    answers = [a for a in client.answers if a.due < marks[0] and len(a.at) > 8]
    assert len(answers) >= plan.rows, [repr(d) for d in done if isinstance(d, Exception)]
    means: list[float] = []
    tails: list[dict[str, float]] = []
    for begin, end in itertools.pairwise(marks):
        inside = [[at for at in a.at if begin <= at < end] for a in answers]
        times = [b - a for at in inside for a, b in itertools.pairwise(at)]
        means.append(statistics.fmean((at[-1] - at[0]) / (len(at) - 1) for at in inside if len(at) > 1))
        tails.append(spread(times))
    before, during, after = means
    return {
        "rows": plan.rows,
        "before_ms": ms(before),
        "during_ms": ms(during),
        "after_ms": ms(after),
        "ratio": round(during / statistics.fmean((before, after)), 4),
        "received_gb_s": round(len(moved) * plan.arriving * block_bytes / 16 / (marks[2] - marks[1]) / 1e9, 3),
        "steps": dict(zip(("before", "during", "after"), tails, strict=True)),
    }


async def measure(args: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    shape: str = args.shape
    plan = PLANS[shape]
    metrics: dict[str, float] = {}
    more: dict[str, Any] = {}
    if "pods" in args.only:
        flags = FLAGS | flags_of(args.flags)
        async with running(shape, args.device, allow_tcp=args.allow_tcp, flags=flags) as (stack, client):
            more["idle"] = []
            for length in sorted({*plan.handover, plan.exposed}):
                answers, timelines = await handovers(client, shape, length, plan.repeats)
                handed = [events["handed_off"] for events in timelines]
                row = {
                    "prompt": length,
                    "ttft": spread([a.ttft_s for a in answers]),
                    "handover": spread([a.gap12_s for a in answers]),
                    "exposed": spread([h["exposed_s"] for h in handed]),
                    **exposed_parts([h["parts"] for h in handed]),
                    "compute": spread([events["first_token"]["compute_s"] for events in timelines]),
                    "later_tokens": spread([gap for a in answers for gap in a.gaps_s]),
                    "timeline_ms": {
                        name: ms(statistics.median(events[name]["t"] for events in timelines))
                        for name in timelines[0]
                        if name in timelines[-1]
                    },
                    "blocks": handed[-1]["blocks"],
                    "blocks_before_last_chunk": handed[-1]["blocks_before_last_chunk"],
                    "transport": handed[-1]["transport"],
                }
                more["idle"].append(row)
                print(row, flush=True)
                if length in plan.handover:
                    metrics[f"handover_ms_{length}"] = row["handover"]["p50"]
                if length == plan.exposed:
                    metrics[f"exposed_ms_{length}"] = row["exposed"]["p50"]
            more["connections"] = transport_of(stack)
            print(*more["connections"], sep="\n", flush=True)
            more["receiving"] = await receiving(client, shape, plan, plan.layout.block_bytes)
            print(more["receiving"], flush=True)
            metrics["decode_step_ratio_while_receiving"] = more["receiving"]["ratio"]
        write(args, metrics, more)
    if "payload" in args.only:
        async with receiver(plan, args.device) as child:
            more["ends"] = await ends(child, args.device, allow_tcp=args.allow_tcp)
            more["rows"] = await payload(child, args.device, allow_tcp=args.allow_tcp)
        # Reversed, because the first rows have the pods' default write limits.
        rate = {row["run_blocks"]: row["gb_s"] for row in reversed(more["rows"])}
        metrics |= {"payload_gb_s": rate[1], "payload_gb_s_8mib": rate[4]}
    return metrics, more


def write(args: argparse.Namespace, metrics: dict[str, float], more: dict[str, Any]) -> None:
    """Writes the result so far."""
    report.write(args.out, "handoff", metrics, "torch", "triton", "nixl-cu13", "grpcio", shape=args.shape, **more)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=METRICS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--shape", choices=PLANS, default="llama-3.1-8b")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--allow-tcp", action="store_true", help="accept TCP as transport of the KV")
    parser.add_argument(
        "--flags", nargs="+", default=[], metavar="NAME=VALUE", help="flags of the pods, for example chunk-graphs=8192"
    )
    parser.add_argument(
        "--only", choices=("pods", "payload"), nargs="+", default=["pods", "payload"], help="parts to run"
    )
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.receive:
        asyncio.run(receive(PLANS[args.shape], args.device))
        return
    metrics, more = asyncio.run(measure(args))
    for name, value in metrics.items():
        print(f"{name:36} {value}")
    write(args, metrics, more)


if __name__ == "__main__":
    main()
