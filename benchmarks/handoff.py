"""What the hand-over of KV costs: one prefill and one decode pod, each on a GPU of its own.

    python benchmarks/handoff.py --out benchmarks/results/handoff-h100x2.json

Through the real gateway, one request at a time, unique prompts, clocks at the client:

- handover_ms_N: from the first token, which prefill sends, to the second, decode's first own; median.
- exposed_ms_8192: from the end of the last chunk's compute to the acknowledged commit, by prefill's clock; median.
- decode_step_ratio_while_receiving: mean time of a step of 16 sequences while a second stream of prompts, which end
  with their first token, is computed and handed over, to the mean of the steps before and after. The prompts follow
  each other without a pause, so KV comes at the rate of one prefill (received_gb_s).

Between two processes that run what pods run for transfers (TransferNode) over pools of their own, 2 GiB at a time:

- payload_gb_s: blocks of 2 MiB of which no two are neighbours, from the push to the last write's end; median.
- payload_gb_s_8mib: the same in runs of 4 blocks. rows has other runs, and other sizes of the pieces that are posted.

Rows have exposed_parts, see kv_transfer.messages.ExposedParts. ends: the end of a hand-over of a single block between
the two bare processes, with the commit as a note and as a call; on a CPU the two differ with UCX_TLS=tcp only.

`--shape tiny --device cpu` is for a CPU: it shows that the script works, not how fast anything is.
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

SECRET = b"one benchmark"
MIB = 1 << 20
END_REPEATS = 50


@dataclass(frozen=True)
class HandoffSizes:
    """Sizes of one shape: prompts of the idle hand-overs, and what decodes while KV comes."""

    layout: KVLayout
    total_blocks: int  # moved at a time
    handover: tuple[int, ...]
    exposed: int
    repeats: int
    rows: int
    context: int
    window_s: float
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
    """Blocks that nobody else uses."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self.blocks = blocks

    def release(self, blocks: Sequence[int] | None = None) -> None:
        """Nothing is to be given up."""


@asynccontextmanager
async def node(
    plan: HandoffSizes,
    role: Role,
    device: str,
    pieces: WriteLimits | None = None,
    *,
    allow_tcp: bool = False,
    notes: bool = True,
) -> AsyncIterator[TransferNode]:
    """A transfer node with a pool of its own. Its address is in its KvTargets and in `info`."""
    total = 2 * plan.total_blocks + 2
    make = host_pool if device == "cpu" else device_pool
    memory = make(total, plan.layout.block_bytes)
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
    made = TransferNode(
        backend=NixlBackend(),
        memory=memory,
        info=lambda: info,
        signer=Signer(SECRET, info.pod, generation),
        address=lambda: address[0],
        write_limits=pieces,
        allow_tcp=allow_tcp,
        commit_notifications=notes,
    )
    server.add_servicer(transfer_pb2_grpc.add_TransferServicer_to_server, made.servicer, "baton.v1.Transfer")
    await made.start()
    address[0] = f"127.0.0.1:{await server.start()}"
    info.served_name = address[0]  # how `receive` tells it
    try:
        yield made
    finally:
        await made.stop(1.0)
        await server.stop(0)


async def receive(plan: HandoffSizes, device: str) -> None:
    """The other process: reserves the blocks that each line of stdin names and prints the target."""
    async with node(plan, Role.DECODE, device) as here:
        info = await here.servicer.Info(transfer_pb2.InfoRequest(), None)  # type: ignore[arg-type]
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)

            def ignore(_: Commit | BatonError) -> None:
                """The sender knows."""

            transfer_id = here.expect_transfer(
                request_id=asked["request"],
                first_block=0,
                blocks=asked["blocks"],
                pin=UnsharedBlocks(asked["blocks"]),
                deadline_s=60.0,
                on_ready=ignore,
                on_failed=ignore,
            )
            target = {"generation": transfer_id.generation, "number": transfer_id.number}
            print(json.dumps(target | {"pod": info.pod, "address": info.served_name}), flush=True)


def scattered(total: int, run: int, rng: random.Random) -> list[int]:
    """`total` blocks of a pool twice as large, in runs of so many neighbours."""
    starts = list(range(0, 2 * total, run + 1))[: total // run]
    rng.shuffle(starts)
    return [start + i for start in starts for i in range(run)]


@dataclass(frozen=True)
class ReceiverProcess:
    """The process that receives."""

    plan: HandoffSizes
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader

    async def reserve(self, request: str, blocks: list[int]) -> KvTarget:
        self.stdin.write(json.dumps({"request": request, "blocks": blocks}).encode() + b"\n")
        told = json.loads(await self.stdout.readline())
        transfer_id, fingerprint = TransferId(told["generation"], told["number"]), self.plan.layout.fingerprint
        return KvTarget(transfer_id, told["pod"], told["address"], 0, tuple(blocks), fingerprint)


@asynccontextmanager
async def receiver(plan: HandoffSizes, device: str) -> AsyncIterator[ReceiverProcess]:
    """On the last GPU; this process keeps the first."""
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
    """GB/s of each size of runs and of pieces."""
    plan = child.plan
    usual = DEFAULT_WRITE_LIMITS["DRAM" if device == "cpu" or not visible_gpus() else "VRAM"]
    cuts = [usual, *(WriteLimits(size * MIB, size * MIB, usual.max_in_flight) for size in (32, 128))]
    rows: list[dict[str, Any]] = []
    rng = random.Random(0)
    for cut in cuts:
        async with node(plan, Role.PREFILL, device, cut, allow_tcp=allow_tcp) as here:
            for run in (1, 4, 16, plan.total_blocks) if cut is usual else (1, 4):
                times, exposed = [], []
                for repeat in range(plan.repeats + 1):
                    local, remote = (scattered(plan.total_blocks, run, rng) for _ in range(2))
                    request = f"{cut.first_bytes}-{cut.max_bytes}-{run}-{repeat}"
                    took, commit_s, _ = await move(here, await child.reserve(request, remote), request, local)
                    if repeat:  # the first connects
                        times.append(took)
                        exposed.append(commit_s)
                size = plan.total_blocks * plan.layout.block_bytes
                peer = here.stats().peers[0]
                rows.append(
                    {
                        "run_blocks": run,
                        "run_mib": run * plan.layout.block_bytes / MIB,
                        "piece_mib": cut.max_bytes // MIB,
                        "first_mib": cut.first_bytes // MIB,
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
    """What the end of a hand-over of one block takes, with commits as notes and as calls: all but the bytes."""
    rows: list[dict[str, Any]] = []
    for notes in (True, False):
        reports: list[TransferReport] = []
        async with node(child.plan, Role.PREFILL, device, allow_tcp=allow_tcp, notes=notes) as here:
            for repeat in range(END_REPEATS + 2):
                request = f"end-{notes}-{repeat}"
                *_, report = await move(here, await child.reserve(request, [repeat]), request, [repeat])
                reports.append(report)
        rows.append({"notes": notes, "exposed": spread([r.exposed_s for r in reports[2:]])})
        rows[-1] |= exposed_parts([asdict(r.parts) for r in reports[2:]])
        print(rows[-1], flush=True)
    return rows


def exposed_parts(parts: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """What the exposed time was, in milliseconds from the end of the last chunk's compute; medians."""
    names = [field.name for field in fields(ExposedParts)]
    medians = {name.removesuffix("_s"): ms(statistics.median(p.get(name, 0.0) for p in parts)) for name in names}
    return {"exposed_parts": medians}


async def move(
    here: TransferNode, target: KvTarget, request: str, local: list[int]
) -> tuple[float, float, TransferReport]:
    """Seconds from the push to the last write's end, and from there on to the acknowledged commit; the report."""
    ended: list[float] = []
    transfer = here.start_transfer(target, request, len(local), 60.0)
    transfer.on_progress = lambda _: ended.append(time.perf_counter())
    await asyncio.sleep(0.05)  # opened by then, as it is under the first chunk of a prompt
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
    """Idle requests one after another, with what the gateway noted; two more than that come first and do not count."""
    answers, notes = [], []
    for prompt in prompts(shape, repeats + 2, length, seed=1):
        answers.append(await client.ask(prompt, 8))
        await asyncio.sleep(0.05)  # the hand-off's report may come after the last token
        notes.append(await client.timeline(answers[-1]))
    return answers[2:], notes[2:]


async def receiving(client: StackClient, shape: str, plan: HandoffSizes, block_bytes: int) -> dict[str, Any]:
    """Step times of a decoding batch before, while and after KV arrives."""
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
            except RuntimeError as e:  # a machine with few cores may have no room now
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
    answers = [a for a in client.asked if a.due < marks[0] and len(a.at) > 8]
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
                answers, notes = await handovers(client, shape, length, plan.repeats)
                handed = [n["handed_off"] for n in notes]
                row = {
                    "prompt": length,
                    "ttft": spread([a.ttft_s for a in answers]),
                    "handover": spread([a.gap12_s for a in answers]),
                    "exposed": spread([h["exposed_s"] for h in handed]),
                    **exposed_parts([h["parts"] for h in handed]),
                    "compute": spread([n["first_token"]["compute_s"] for n in notes]),
                    "later_tokens": spread([gap for a in answers for gap in a.gaps_s]),
                    "timeline_ms": {
                        name: ms(statistics.median(n[name]["t"] for n in notes))
                        for name in notes[0]
                        if name in notes[-1]
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
        rate = {row["run_blocks"]: row["gb_s"] for row in reversed(more["rows"])}  # the first are as pods have them
        metrics |= {"payload_gb_s": rate[1], "payload_gb_s_8mib": rate[4]}
    return metrics, more


def write(args: argparse.Namespace, metrics: dict[str, float], more: dict[str, Any]) -> None:
    """The result so far."""
    report.write(args.out, "handoff", metrics, "torch", "triton", "nixl-cu13", "grpcio", shape=args.shape, **more)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shape", choices=PLANS, default="llama-3.1-8b")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--allow-tcp", action="store_true", help="whatever carries the KV")
    parser.add_argument("--flags", nargs="+", default=[], metavar="NAME=VALUE", help="of the pods: chunk-graphs=8192")
    parser.add_argument("--only", choices=("pods", "payload"), nargs="+", default=["pods", "payload"])
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
