"""Compares routing policies on simulated pods, with a recorded and a generated trace.

    python benchmarks/routing/sim.py --out benchmarks/results/routing_sim.json --plot docs/routing.svg

A pod computes 8,000 prompt tokens per second and caches 4,000 blocks of 512. Cost policy, scheduler and block cache are
the product's code. `fifo` pods compute one prompt after another ("metrics" are of these); `chunked` pods share steps
among prompts as the engine's scheduler does, which helps round robin most.

- hit_rate_cost, ttft_p50_ratio_vs_rr, ttft_p99_ratio_vs_rr: `cost` with 8 pods; ratios to round robin.
  hit_rate_stale10: changes reach the index 10 s late. hit_rate_unlimited: caches without a limit.
- rows: all policies, both traces, 4 to 64 pods with the same load per pod; 256 and 1,024 pods with the generated trace.
- faults: pods that die and restart with the same name, and an index that is not available.
- herd: 64 equal requests at once to two gateways; prompts of the fullest pod over its fair share.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support import report
from common.errors import ConfigError
from loadtest.workload.trace import WorkloadRequest, WorkloadTrace, load_trace, synthetic_block_hash
from simulator.agent_workload import AgentWorkload
from simulator.cluster import SimulatedCluster, SimulationResult
from simulator.hardware_rates import FLAT_8K
from simulator.spec import ClusterSpec, RunSummary, SimulatedFault

DEFAULT_TRACE = Path(__file__).resolve().parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"
PODS = 8  # Number of pods at the trace's own rate.
BLOCKS, UNLIMITED = 4_000, 200_000
POLICIES = ("round_robin", "least_loaded", "cost")
SIZES = (4, 8, 16, 64)
LARGE = ((256, 90.0), (1024, 30.0))  # Pods, and seconds of the generated trace.
#: Requests per second and pod of the generated trace. They are as much work as those of the recorded trace.
AGENT_REQUESTS = 0.9
FLAT_BLOCK = 512
KINDS = {"fifo": 1, "chunked": 64}  # Sequences that share the steps of a pod.

# The plot.
PANEL_W, PANEL_H = 400, 300
LEFT, TOP, GAP, BOTTOM, RIGHT = 70, 92, 90, 66, 150
INK, SOFT = "#292524", "#57534e"
COLOURS = {"round_robin": "#c2410c", "least_loaded": "#7c6f9f", "cost": "#0f766e"}
SHARES = {"ttft_p50_s": ("median", ""), "ttft_p99_s": ("99th percentile", ' stroke-dasharray="5 4"')}
SUBTITLE = "simulated pods of 8,000 tokens/s and 4,000 cached blocks of 512 tokens; the same load on each pod"


@dataclass(frozen=True)
class Bench:
    """Runs simulations and collects their rows."""

    trace: WorkloadTrace
    rows: list[dict[str, object]]

    def run(
        self, trace: WorkloadTrace, label: str, pods: int, policy: str, kind: str = "fifo", **more: object
    ) -> SimulationResult:
        """Runs one simulation and adds its row."""
        spec = replace(spec_of(pods, policy, kind), **more)  # type: ignore[arg-type]
        cluster = SimulatedCluster(spec, trace)
        result = cluster.run()
        cluster.check()
        self.rows.append(row_of(label, kind, spec, result))
        return result


def spec_of(pods: int, policy: str, kind: str) -> ClusterSpec:
    return ClusterSpec(rates=FLAT_8K, prefill=pods, policy=policy, prefill_blocks=BLOCKS, prefill_seqs=KINDS[kind])


def rounded(summary: RunSummary, *names: str) -> dict[str, float]:
    return {name: round(getattr(summary, name), 4) for name in names}


def row_of(label: str, kind: str, spec: ClusterSpec, result: SimulationResult) -> dict[str, object]:
    """Prints the row of a simulation and returns it for the result file."""
    s = result.summary
    busy = sum(result.busy.values()) / len(result.busy)
    row = {
        "trace": label,
        "pods": spec.prefill,
        "kind": kind,
        "policy": spec.policy,
        "gateways": spec.gateways,
        "blocks": spec.prefill_blocks,
        "lag_s": spec.lag_s,
        "requests": s.requests,
        "refused": s.refused,
        "retried": s.retried,
        **rounded(s, "hit_rate", "promised_rate", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "ttft_mean_s"),
        "busy": round(busy, 4),
        "imbalance": round(s.imbalance, 3),
        "cpu_us_per_request": round(s.cpu_s / s.requests * 1e6, 1),
    }
    print(
        f"{label:38} {spec.prefill:5} {kind:8} {spec.policy:13} hits {s.hit_rate:6.2%}  "
        f"TTFT p50 {s.ttft_p50_s:8.3f}  p99 {s.ttft_p99_s:9.3f}  busy {busy:4.0%}  ({s.cpu_s:.0f} s)",
        flush=True,
    )
    return row


def acceptance(bench: Bench) -> dict[str, float]:
    """Runs the simulations of the metrics. Returns the metrics."""
    trace = bench.trace
    metrics: dict[str, float] = {"ideal_hit_rate": round(trace.ideal_hit_rate(), 4)}
    for kind in KINDS:
        suffix = "" if kind == "fifo" else f"_{kind}"
        summaries = {policy: bench.run(trace, trace.name, PODS, policy, kind).summary for policy in POLICIES}
        rr, cost = summaries["round_robin"], summaries["cost"]
        metrics |= {
            f"hit_rate_cost{suffix}": round(cost.hit_rate, 4),
            f"hit_rate_rr{suffix}": round(rr.hit_rate, 4),
            f"ttft_p50_ratio_vs_rr{suffix}": round(cost.ttft_p50_s / rr.ttft_p50_s, 4),
            f"ttft_p99_ratio_vs_rr{suffix}": round(cost.ttft_p99_s / rr.ttft_p99_s, 4),
        }
    stale = bench.run(trace, f"{trace.name}, index 10 s late", PODS, "cost", lag_s=10.0).summary
    unlimited = bench.run(trace, f"{trace.name}, unlimited", PODS, "cost", prefill_blocks=UNLIMITED).summary
    two = bench.run(trace, f"{trace.name}, 2 gateways", PODS, "cost", gateways=2).summary
    return metrics | {
        "hit_rate_stale10": round(stale.hit_rate, 4),
        "hit_rate_unlimited": round(unlimited.hit_rate, 4),
        "hit_rate_two_gateways": round(two.hit_rate, 4),
        "herd_max_share": round(herd(), 4),
    }


def herd(gateways: int = 2, burst: int = 64) -> float:
    """Sends equal requests at once to several gateways. Returns the prompts of the fullest of 8 pods over its share."""
    requests = [
        WorkloadRequest(1.0, 2_000, 1, tuple(synthetic_block_hash("herd", i, j) for j in range(3)))
        for i in range(burst)
    ]
    trace = WorkloadTrace("herd", FLAT_BLOCK, tuple(requests))
    cluster = SimulatedCluster(replace(spec_of(PODS, "cost", "fifo"), gateways=gateways), trace)
    cluster.run()
    prompts = [pod.prompts for pod in cluster.pods]
    return max(prompts) * PODS / burst


def grow(bench: Bench, large: Iterable[tuple[int, float]]) -> None:
    """Runs more pods with the same load per pod, on both traces; the sizes `large` on the generated trace only."""
    trace = bench.trace
    for pods in SIZES:
        faster = trace.sped_up(pods / PODS)
        for policy in POLICIES:
            if pods != PODS:
                bench.run(faster, trace.name, pods, policy)
    small = [(pods, min(1_800.0, trace.duration_s) if pods <= 2 * PODS else 600.0) for pods in SIZES]
    for pods, seconds in (*small, *large):
        generated = AgentWorkload(rate=pods * AGENT_REQUESTS, seconds=seconds).trace()
        for policy in POLICIES:
            bench.run(generated, generated.name, pods, policy, warm_s=seconds / 2)


def collapse(bench: Bench) -> None:
    """Runs routing by the longest match alone. All prompts of the recorded trace share one block, so it collapses."""
    head = bench.trace.first(2_000)
    for policy in ("prefix_only", *POLICIES):
        bench.run(head, f"{head.name}, first {len(head.requests)}", PODS, policy)


def faults(bench: Bench) -> list[dict[str, object]]:
    """Runs the first half of the trace with and without each fault. Returns a row for each fault."""
    head = bench.trace.first(len(bench.trace.requests) // 2)
    end = head.duration_s
    cases = {
        "none": (),
        "a pod dies for 60 s": (SimulatedFault(end * 0.3, 60.0, "prefill-3"),),
        "half of the pods restart one by one": tuple(
            SimulatedFault(end * (0.3 + 0.05 * i), 5.0, f"prefill-{i}") for i in range(4)
        ),
        "the index is away for 300 s": (SimulatedFault(end * 0.3, 300.0),),
        "the index is never there": (SimulatedFault(0.0, end * 2),),
    }
    rows: list[dict[str, object]] = []
    for name, planned in cases.items():
        s = bench.run(head, f"fault: {name}", PODS, "cost", faults=planned, gateways=2).summary
        rows.append({"fault": name, **rounded(s, "refused", "retried", "hit_rate", "ttft_p50_s", "ttft_p99_s")})
    return rows


def drawn(rows: Sequence[dict[str, Any]]) -> str:
    """Draws TTFT by policy for growing numbers of pods, as SVG with one panel per trace."""
    traces = [name for name in dict.fromkeys(r["trace"] for r in rows) if "," not in name and ":" not in name]
    width, height = LEFT + len(traces) * (PANEL_W + GAP) - GAP + RIGHT, TOP + PANEL_H + BOTTOM
    x, y, parts = width - RIGHT + 18, TOP + 14, []
    for policy, colour in COLOURS.items():
        name = policy.replace("_", " ") + (" (default)" if policy == "cost" else "")
        parts += [_line(x, x + 24, y, colour, ' stroke-width="2.5"'), _text(x + 32, y + 4, name)]
        y += 26
    for name, dash in SHARES.values():
        y += 26
        parts += [_line(x, x + 24, y - 16, SOFT, f' stroke-width="2"{dash}'), _text(x + 32, y - 12, name)]
    for i, trace in enumerate(traces):
        shown = [r for r in rows if r["trace"] == trace and r["kind"] == "fifo" and r["policy"] in COLOURS]
        parts += _panel(LEFT + i * (PANEL_W + GAP), trace, shown)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="13">'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        + _text(LEFT - 44, 30, "Time to first token by routing policy, as pods grow", more=' font-size="18"')
        + f"{_text(LEFT - 44, 52, SUBTITLE, colour=SOFT)}{''.join(parts)}</svg>\n"
    )


def _panel(x: int, trace: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    pods = sorted({r["pods"] for r in rows})
    values = [r[key] for r in rows for key in SHARES]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    first, last = math.log2(pods[0]), math.log2(pods[-1])

    def px(count: int) -> float:
        return x + PANEL_W * (math.log2(count) - first) / max(1e-9, last - first)

    def py(seconds: float) -> float:
        return TOP + PANEL_H * (1 - (math.log10(seconds) - low) / (high - low))

    parts = [_text(x, TOP - 14, f"{trace} trace", more=' font-weight="600"')]
    for power in range(low, high + 1):
        for step in range(1, 10 if power < high else 2):
            parts.append(_line(x, x + PANEL_W, py(10.0**power * step), "#d6d3d1" if step == 1 else "#f0eeec"))
        parts.append(_text(x - 8, py(10.0**power) + 4, f"{10.0**power:g} s", "end", SOFT))
    parts += [_text(px(count), TOP + PANEL_H + 20, str(count), "middle", SOFT) for count in pods]
    parts.append(_text(x + PANEL_W / 2, TOP + PANEL_H + 44, "prefill pods", "middle"))
    for policy, colour in COLOURS.items():
        for key, (_, dash) in SHARES.items():
            points = sorted((r["pods"], r[key]) for r in rows if r["policy"] == policy)
            line = " ".join(f"{px(count):.1f},{py(seconds):.1f}" for count, seconds in points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.2"{dash}/>')
            dot = f'r="3.4" fill="{"#ffffff" if dash else colour}" stroke="{colour}" stroke-width="1.8"'
            parts += [f'<circle cx="{px(count):.1f}" cy="{py(seconds):.1f}" {dot}/>' for count, seconds in points]
    return parts


def _line(x1: float, x2: float, y: float, colour: str, more: str = "") -> str:
    return f'<line x1="{x1}" x2="{x2}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}"{more}/>'


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = INK, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{more}>{escape(text)}</text>'


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE, help="Mooncake's .jsonl (default: %(default)s)")
    parser.add_argument(
        "--requests", type=int, default=1_000_000, help="number of requests from the start of the trace"
    )
    parser.add_argument("--small", action="store_true", help="skip the rows for 256 and 1,024 pods")
    parser.add_argument("--plot", type=Path, help="SVG file for TTFT by policy and number of pods")
    args = parser.parse_args()
    try:
        trace = load_trace(args.trace).first(args.requests)
    except ConfigError as error:
        parser.error(f"{error.message}; give a trace with --trace (kvcache-ai/Mooncake, FAST25-release/traces)")
    bench = Bench(trace, [])
    metrics = acceptance(bench)
    grow(bench, () if args.small else LARGE)
    collapse(bench)
    fault_rows = faults(bench)
    report.show(metrics)
    report.write(args.out, "routing_sim", metrics, rows=bench.rows, faults=fault_rows)
    if args.plot is not None:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        args.plot.write_text(drawn(bench.rows))


if __name__ == "__main__":
    main()
