"""Measures the hand-over of KV between one prefill and one decode pod, each on its own GPU.

    python benchmarks/handoff.py --out benchmarks/results/handoff-h100x2.json

`--shape tiny --device cpu` checks on a CPU that the script works.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support import pd_stack, report
from benchmarks.support.pd_stack import CONFIGS, FLAGS, StackClient, TimedAnswer, prompts, transport_of
from benchmarks.support.report import ms, spread
from benchmarks.support.transfer_peer import FreePin, TransferPeer, answer_lines, other_process, transfer_peer
from cli.gpus import visible_gpus
from common.errors import BatonError
from common.kv_layout import KVLayout
from common.pb import types_pb2
from common.types import Role
from common.wire import kv_target_from_pb, kv_target_to_pb
from kv_transfer.messages import Commit, ExposedParts, TransferReport
from kv_transfer.node import TransferNode
from kv_transfer.sender.write_limits import DEFAULT_WRITE_LIMITS, WriteLimits

METRICS = """
Through the real gateway, one request at a time, with unique prompts and the client's clock:

- handover_ms_N: from the first token, which prefill sends, to the second token, the first of decode; median.
- exposed_ms_8192: from the end of the last chunk's compute to the acknowledged commit, on prefill's clock; median.
- decode_step_ratio_while_receiving: mean time of a decode step of 16 sequences while KV of other prompts arrives at the
  rate of one prefill (received_gb_s), over the mean of the steps before and after.

Between two processes with the pods' transfer code (TransferNode) over their own pools, 2 GiB at a time:

- payload_gb_s: scattered blocks of 2 MiB, from the push to the end of the last write; median.
- payload_gb_s_8mib: the same in runs of 4 neighbouring blocks. The rows have other runs and write sizes.

The rows in `ends` are hand-overs of one block between the two processes, with the commit as a notification and as a
call. On a CPU the two differ only with UCX_TLS=tcp.
"""

MIB = 1 << 20
END_REPEATS = 50


@dataclass(frozen=True)
class HandoffSizes:
    layout: KVLayout
    total_blocks: int  # Blocks of one transfer between the two processes.
    handover: tuple[int, ...]  # Prompt lengths of handover_ms_N.
    exposed: int  # Prompt length of exposed_ms_N.
    repeats: int
    rows: int  # Sequences that decode while KV arrives.
    context: int  # Their context.
    window_s: float  # Seconds of each of the periods before, while and after KV arrives.
    arriving: int  # Length of the prompts with the KV that arrives.
    concurrent: int  # How many of these prompts run concurrently.

    @property
    def pool_blocks(self) -> int:
        """Blocks of a process's pool: twice the blocks of a transfer, so that they can be scattered."""
        return 2 * self.total_blocks + 2


def layout(layers: int, heads: int, dim: int, size: int, dtype: str) -> KVLayout:
    return KVLayout("bench", "r0", num_layers=layers, num_kv_heads=heads, head_dim=dim, block_size=size, dtype=dtype)


PLANS = {
    "llama-3.1-8b": HandoffSizes(
        layout(32, 8, 128, 16, "bfloat16"), 1024, (4096, 15000), 8192, 12, 16, 2048, 5.0, 4096, 3
    ),
    "tiny": HandoffSizes(layout(2, 2, 32, 16, "float32"), 32, (40, 90), 60, 2, 2, 32, 0.5, 48, 1),
}


async def receive(plan: HandoffSizes, device: str) -> None:
    """Main function of the receiving process: expects a transfer for each question and answers with its target."""

    def ignore(_: Commit | BatonError) -> None:
        """Does nothing: the sender measures the transfer and sees its errors."""

    async with transfer_peer(Role.DECODE, plan.layout, plan.pool_blocks, device) as peer:

        def expect(order: dict[str, Any]) -> str:
            target = peer.node.expect_transfer(
                request_id=order["request"],
                first_block=0,
                blocks=order["blocks"],
                pin=FreePin(order["blocks"]),
                deadline_s=60.0,
                on_ready=ignore,
                on_failed=ignore,
            )
            return base64.b64encode(kv_target_to_pb(target).SerializeToString()).decode()

        await answer_lines(None, expect)


def scattered(total: int, run: int, rng: random.Random) -> list[int]:
    """Returns `total` blocks of a pool of twice the size, in scattered runs of `run` neighbours."""
    starts = list(range(0, 2 * total, run + 1))[: total // run]
    rng.shuffle(starts)
    return [start + i for start in starts for i in range(run)]


@dataclass(frozen=True)
class TransferBench:
    """Measures transfers to the receiving process."""

    plan: HandoffSizes
    device: str
    allow_tcp: bool
    ask: Callable[[object], Awaitable[Any]]

    async def move(self, node: TransferNode, request: str, local: list[int], remote: list[int]) -> TransferReport:
        packed = base64.b64decode(await self.ask({"request": request, "blocks": remote}))
        target = kv_target_from_pb(types_pb2.KvTarget.FromString(packed))
        transfer = node.start_transfer(target, request, len(local), 60.0)
        await asyncio.sleep(0.05)  # the transfer opens in this time, as it does during the first chunk of a prompt
        transfer.push(0, local, FreePin(local))
        transfer.finish([1], [None])
        done = await transfer.done()
        assert done.blocks == len(local)
        return done

    async def payload(self) -> list[dict[str, Any]]:
        """Measures GB/s for each length of runs and each write size."""
        plan, rng, rows = self.plan, random.Random(0), list[dict[str, Any]]()
        default = DEFAULT_WRITE_LIMITS["DRAM" if self.device == "cpu" or not visible_gpus() else "VRAM"]
        size = plan.total_blocks * plan.layout.block_bytes
        for limits in [default, *(WriteLimits(mib * MIB, mib * MIB, default.max_in_flight) for mib in (32, 128))]:
            async with self._sender(write_limits=limits) as sender:
                for run in (1, 4, 16, plan.total_blocks) if limits is default else (1, 4):
                    times, exposed = [], []
                    for repeat in range(plan.repeats + 1):
                        local, remote = (scattered(plan.total_blocks, run, rng) for _ in range(2))
                        request = f"{limits.first_bytes}-{limits.max_bytes}-{run}-{repeat}"
                        done = await self.move(sender.node, request, local, remote)
                        if repeat:  # the first one connects
                            times.append(done.parts.written_s)
                            exposed.append(done.exposed_s - done.parts.written_s)
                    peer = sender.node.stats().peers[0]
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

    async def ends(self) -> list[dict[str, Any]]:
        """Measures hand-overs of one block, with the commit as a notification and as a call."""
        rows: list[dict[str, Any]] = []
        for notes in (True, False):
            async with self._sender(commit_notifications=notes) as sender:
                names = [(f"end-{notes}-{number}", [number]) for number in range(END_REPEATS + 2)]
                reports = [await self.move(sender.node, name, blocks, blocks) for name, blocks in names][2:]
            rows.append({"notes": notes, "exposed": spread([r.exposed_s for r in reports])})
            rows[-1] |= exposed_parts([asdict(r.parts) for r in reports])
            print(rows[-1], flush=True)
        return rows

    def _sender(self, **options: Any) -> AbstractAsyncContextManager[TransferPeer]:
        options |= {"allow_tcp": self.allow_tcp}
        return transfer_peer(Role.PREFILL, self.plan.layout, self.plan.pool_blocks, self.device, **options)


def exposed_parts(parts: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Returns the median parts of the exposed time, in milliseconds from the end of the last chunk's compute."""
    names = [field.name for field in fields(ExposedParts)]
    medians = {name.removesuffix("_s"): ms(statistics.median(p.get(name, 0.0) for p in parts)) for name in names}
    return {"exposed_parts": medians}


async def receiving(client: StackClient, shape: str, plan: HandoffSizes) -> dict[str, Any]:
    """Measures the step times of a decoding batch before, while and after KV arrives."""
    steps = min(CONFIGS[shape]["max_position_embeddings"] - plan.context - 1, 12000)
    streams = [asyncio.create_task(client.ask(p, steps)) for p in prompts(shape, plan.rows, plan.context, seed=2)]
    await asyncio.sleep(2 * plan.window_s)
    marks = [time.perf_counter()]
    await asyncio.sleep(plan.window_s)
    marks.append(time.perf_counter())
    arriving = iter(prompts(shape, 4096 if shape == "tiny" else 400, plan.arriving, seed=3))
    moved, until = 0, time.perf_counter() + 2 * plan.window_s

    async def feed() -> None:
        nonlocal moved
        while time.perf_counter() < until:
            try:
                await client.ask(next(arriving), 1)
                moved += 1
            except RuntimeError as e:  # on a machine with few cores the pods may be overloaded
                print(e, flush=True)
                await asyncio.sleep(0.1)

    await asyncio.gather(*(feed() for _ in range(plan.concurrent)))
    marks.append(time.perf_counter())
    await asyncio.sleep(plan.window_s)
    marks.append(time.perf_counter())
    for stream in streams:
        stream.cancel()
    done = await asyncio.gather(*streams, return_exceptions=True)
    answers = [a for a in client.answers if a.due < marks[0] and len(a.at) > 8]
    assert len(answers) >= plan.rows, [repr(d) for d in done if isinstance(d, Exception)]
    means: list[float] = []
    tails: list[dict[str, float]] = []
    for begin, end in itertools.pairwise(marks):
        inside = [[at for at in a.at if begin <= at < end] for a in answers]
        means.append(statistics.fmean((at[-1] - at[0]) / (len(at) - 1) for at in inside if len(at) > 1))
        tails.append(spread([b - a for at in inside for a, b in itertools.pairwise(at)]))
    before, during, after = means
    moved_bytes = moved * plan.arriving * plan.layout.block_bytes / plan.layout.block_size
    return {
        "rows": plan.rows,
        "before_ms": ms(before),
        "during_ms": ms(during),
        "after_ms": ms(after),
        "ratio": round(during / statistics.fmean((before, after)), 4),
        "received_gb_s": round(moved_bytes / (marks[2] - marks[1]) / 1e9, 3),
        "steps": dict(zip(("before", "during", "after"), tails, strict=True)),
    }


async def idle(client: StackClient, shape: str, length: int) -> dict[str, Any]:
    """Measures requests of one length, one after another. Returns the row. Two warm-up requests are not counted."""
    answers: list[TimedAnswer] = []
    timelines: list[dict[str, dict[str, Any]]] = []
    for prompt in prompts(shape, PLANS[shape].repeats + 2, length, seed=1):
        answers.append(await client.ask(prompt, 8))
        await asyncio.sleep(0.05)  # the report of the hand-off may arrive after the last token
        timelines.append(await client.timeline(answers[-1]))
    answers, timelines = answers[2:], timelines[2:]
    handed = [events["handed_off"] for events in timelines]
    shared = [name for name in timelines[0] if name in timelines[-1]]
    row = {
        "prompt": length,
        "ttft": spread([a.ttft_s for a in answers]),
        "handover": spread([a.gap12_s for a in answers]),
        "exposed": spread([h["exposed_s"] for h in handed]),
        **exposed_parts([h["parts"] for h in handed]),
        "compute": spread([events["first_token"]["compute_s"] for events in timelines]),
        "later_tokens": spread([gap for a in answers for gap in a.gaps_s]),
        "timeline_ms": {name: ms(statistics.median(events[name]["t"] for events in timelines)) for name in shared},
        **{name: handed[-1][name] for name in ("blocks", "blocks_before_last_chunk", "transport")},
    }
    print(row, flush=True)
    return row


async def measure(args: argparse.Namespace) -> None:
    """Measures the chosen parts. Writes the result file after each part."""
    shape: str = args.shape
    plan = PLANS[shape]
    metrics: dict[str, float] = {}
    more: dict[str, Any] = {"shape": shape}
    if "pods" in args.only:
        flags = FLAGS | report.pairs(args.flags)
        async with pd_stack.running(shape, args.device, allow_tcp=args.allow_tcp, flags=flags) as (stack, client):
            more["idle"] = []
            for length in sorted({*plan.handover, plan.exposed}):
                more["idle"].append(row := await idle(client, shape, length))
                if length in plan.handover:
                    metrics[f"handover_ms_{length}"] = row["handover"]["p50"]
                if length == plan.exposed:
                    metrics[f"exposed_ms_{length}"] = row["exposed"]["p50"]
            more["connections"] = transport_of(stack)
            print(*more["connections"], sep="\n", flush=True)
            more["receiving"] = await receiving(client, shape, plan)
            print(more["receiving"], flush=True)
            metrics["decode_step_ratio_while_receiving"] = more["receiving"]["ratio"]
        report.write(args.out, "handoff", metrics, *pd_stack.PACKAGES, **more)
    if "payload" in args.only:
        async with other_process(__file__, "--receive", "--shape", shape, device=args.device) as (_, ask):
            bench = TransferBench(plan, args.device, args.allow_tcp, ask)
            more["ends"] = await bench.ends()
            more["rows"] = await bench.payload()
        # Reversed, because the first rows have the pods' default write limits.
        rate = {row["run_blocks"]: row["gb_s"] for row in reversed(more["rows"])}
        metrics |= {"payload_gb_s": rate[1], "payload_gb_s_8mib": rate[4]}
        report.write(args.out, "handoff", metrics, *pd_stack.PACKAGES, **more)
    report.show(metrics)


def main(argv: Sequence[str] | None = None) -> None:
    parser = pd_stack.arguments(__doc__, METRICS, PLANS)
    parts = ("pods", "payload")
    parser.add_argument("--only", choices=parts, nargs="+", default=list(parts), help="parts to run")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    asyncio.run(receive(PLANS[args.shape], args.device) if args.receive else measure(args))


if __name__ == "__main__":
    main()
