"""`baton plan` runs the capacity planner, `baton plan fit` says what a model needs; both print a table or JSON."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import exits
from cli.options import SectionedCommand, opt, takes_text
from common.errors import ConfigError

if TYPE_CHECKING:  # imported only when the command runs
    from loadtest.workload.trace import WorkloadTrace
    from simulator.hardware_rates import HardwareRates
    from simulator.setup_search import CapacityPlan, MeasuredSetup
    from simulator.spec import Slo

DEFAULT_RATES = "h100-8b"
DEFAULT_REQUESTS = 1500
DEFAULT_CONTEXT = 32768
BURSTS = 0.1  # Share of requests that arrive together with another one, above which a note is printed.
STEADY_S = 60.0  # A shorter replay does not show a steady state: queues may still grow at its end.
ROUNDS = 4  # Max replays with more and more requests, until one lasts STEADY_S.
MARGIN = 1.1  # Factor for the requests of the next replay, because a longer replay has a lower goodput.


#: name, metavar and help of the options with text.
OPTIONS = (
    ("trace", "FILE", "Requests: Mooncake's .jsonl or Azure's .csv."),
    ("slo", "TIMES", "SLO of a request, as in ttft=2s,itl=50ms."),
    (
        "rates",
        "R",
        "h100-8b (default), h100-8b-fp8, h100-8b-int4, h100-8b-rdma, flat-8k, or a JSON file (benchmarks/engine.py).",
    ),
    ("gpus", "N", "Number of GPUs; default: any number."),
    ("attainment", "X", "Share of requests that keep the SLO (default 0.9)."),
    ("requests", "N", "Requests of the trace to replay; default: 1500, or as many as last a minute."),
    ("chunks", "N,..", "Chunk sizes to try (default 512,1024,2048,4096,8192)."),
)


plan = typer.Typer()


@plan.callback(invoke_without_command=True)
@takes_text({"Options": OPTIONS})
def simulate(
    flags: dict[str, Any],
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Prints JSON instead of a table.")] = False,
) -> None:
    """Simulates a trace to find the number of pods of each role.

    Finds the prefill:decode ratio, chunk size and number of GPUs with the highest goodput per GPU. The command `fit`
    says whether a model fits on a card.
    """
    if ctx.invoked_subcommand is not None:
        if given := [name for name, value in flags.items() if value is not None]:
            raise ConfigError(f"--{given[0]} is no option of baton plan {ctx.invoked_subcommand}", field=given[0])
        return
    raise typer.Exit(run(**flags, as_json=as_json))


#: Options of `baton plan fit`.
FIT_OPTIONS = (
    ("model", "DIR", "Model directory, or a model of the hub; only its configuration is read."),
    ("gpu", "CARD", "Card by name (h200, h100, b200, a100-80gb, l40s, ...), or a file of baton doctor --measure."),
    ("context", "N", "Longest prompt and answer together, like 32k; default: the model's, at most 32k."),
    ("prompt", "N", "Tokens of a prompt, for the time to the first token; default: the context."),
    ("users", "N", "Answers at the same time; default: 64."),
    ("gpus", "N", "Cards of a pod (tensor parallelism); default: as few as hold all users."),
    ("share", "X", "Share of the card's memory, as --gpu-memory-utilization; default: 0.9."),
    ("max_adapters", "N", "LoRA adapters on the card at once, as the setting of this name; default: none."),
    ("max_adapter_rank", "N", "Largest rank of an adapter; default: 16."),
)


@plan.command(name="fit", cls=SectionedCommand, short_help="Says whether a model fits on a card.")
@takes_text({"Options": FIT_OPTIONS})
def fit(
    flags: dict[str, Any],
    as_json: Annotated[bool, opt("Prints JSON instead of a table.", "--json")] = False,
) -> None:
    """Says whether a model fits on a card, how many users it holds, how fast it will be, and which flags to use.

    Reads no weights and needs no GPU. Exit code 1 if no setup holds all users.
    """
    raise typer.Exit(run_fit(**flags, as_json=as_json))


def run_fit(*, as_json: bool, **flags: str | None) -> int:
    """Runs `baton plan fit` with the flags as typed; returns 0, or 1 if some users do not fit. Raises ConfigError."""
    from cli.fit.cards import load_card
    from cli.fit.estimate import DEFAULT_SHARE, PlannedLoad, best_of, candidates, sizes_of
    from cli.fit.table import document, show
    from common.model.directory import resolve_model
    from engine.model_size import model_size

    model, gpu, context, prompt, users, gpus, share, adapters, rank = (flags[name] for name, *_ in FIT_OPTIONS)
    if model is None or gpu is None:
        raise ConfigError("--model DIR and --gpu CARD are needed", field="gpu" if model else "model")
    card = load_card(gpu)
    path = Path(model)
    directory = path if path.is_dir() else resolve_model(model, tokenizer=False, weights=False)
    slots = _whole("max-adapters", adapters or "0", 0, 1024)
    largest = _whole("max-adapter-rank", rank or "16", 1, 256)
    sizes = sizes_of(model_size, directory, card.dtype, max_adapters=slots, max_adapter_rank=largest)
    ranks = None if gpus is None else _whole("gpus", gpus, 1, 64)
    part = _number("share", share, DEFAULT_SHARE)
    if not 0 < part <= 1:
        raise ConfigError(f"--share must be above 0 and at most 1, not {part:g}", field="share")
    longest = sizes().shape.max_position
    length = min(longest, DEFAULT_CONTEXT) if context is None else _tokens("context", context, longest)
    load = PlannedLoad(
        context=length,
        prompt=length if prompt is None else _tokens("prompt", prompt, length),
        users=_whole("users", users or "64", 1, 65536),
    )
    found = candidates(sizes, card, load, part, ranks)
    if as_json:
        print(json.dumps(document(found, card, load), indent=2))  # noqa: T201
    else:
        show(found, card, load, sizes(), directory)
    return 0 if best_of(found).fits else exits.FAILED


def _tokens(name: str, text: str, highest: int) -> int:
    """Parses a number of tokens, like 4096 or 32k (k is 1024)."""
    digits, factor = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    value = int(digits) * factor if digits.isdecimal() and len(digits) < 10 else 0
    if not 1 <= value <= highest:
        raise ConfigError(f"--{name} must be a number from 1 to {highest}, like 4096 or 32k, not {text!r}", field=name)
    return value


def run(*, as_json: bool, **flags: str | None) -> int:
    """Runs the command with the flags as typed; returns 0, or 1 if no setup keeps the SLO. Raises ConfigError."""
    from rich.console import Console

    from loadtest.workload.trace import load_trace
    from simulator.hardware_rates import load_rates
    from simulator.setup_search import CHUNKS, SetupSearch
    from simulator.spec import MAX_PODS, Slo

    trace, slo, rates, gpus, attainment, requests, chunks = (flags[name] for name, *_ in OPTIONS)
    if trace is None or slo is None:
        raise ConfigError("--trace FILE and --slo ttft=TIME,itl=TIME are needed", field="trace" if slo else "slo")
    wanted = Slo.parse(slo, _number("attainment", attainment, 0.9))
    model = load_rates(rates or DEFAULT_RATES)
    pods = None if gpus is None else _whole("gpus", gpus, 2, MAX_PODS)
    count = _whole("requests", requests or str(DEFAULT_REQUESTS), 10, 1_000_000)
    sizes = CHUNKS if chunks is None else tuple(_whole("chunks", part, 16, 65_536) for part in chunks.split(","))
    recorded = load_trace(Path(trace))
    used = recorded.first(count)
    if used.duration_s <= 0:
        raise ConfigError(f"--requests: the first {count} requests all arrive at the same time", field="requests")
    console = Console(stderr=True)
    status = console.status("simulating") if console.is_terminal and not as_json else None

    def say(measured: MeasuredSetup) -> None:
        if status is not None:
            status.update(f"simulating; {_short(measured)}")

    with status or contextlib.nullcontext():
        for _ in range(ROUNDS):
            plan = SetupSearch(used, wanted, model, chunks=sizes, on_measured=say).plan(pods)
            needed = int(MARGIN * STEADY_S * plan.best.goodput)
            if requests is not None or needed <= len(used.requests):
                break
            used = recorded.repeated(needed)
    notes = assumptions(recorded, used, wanted, model, pods)
    if plan.best.goodput and (lasted := len(used.requests) / plan.best.goodput) < STEADY_S:
        notes.append(
            f"At {plan.best.goodput:.0f} requests/s these {len(used.requests)} last only {lasted:.0f} s, within which "
            "queues may still grow. More --requests, or none, give a lower, steadier figure."
        )
    if as_json:
        print(json.dumps(_document(plan, used, notes), indent=2))  # noqa: T201
    else:
        _show(plan, used, wanted, pods, notes)
    return 0 if plan.best.goodput > 0 else 1


def assumptions(
    recorded: WorkloadTrace, used: WorkloadTrace, slo: Slo, rates: HardwareRates, gpus: int | None
) -> list[str]:
    """The assumptions behind the figures, one note each."""
    from simulator.setup_search import RATIO_GPUS

    pool, count = rates.pool_blocks(used.block_size), len(used.requests)
    moments = len({request.arrival_s for request in used.requests})
    bursts = f"The {count} requests arrive at {moments} times: a recorded burst remains a burst at any speed."
    together = [bursts] if moments <= count * (1 - BURSTS) else []
    return [
        f"Trace {recorded.name}: {_which(count, len(recorded.requests))}, "
        f"{used.prompt_tokens / count:.0f} prompt and {used.output_tokens / count:.0f} output tokens in the mean, "
        f"recorded at {used.rate:.2f} requests/s, sped up or slowed down; caches start empty. "
        f"An unlimited cache would supply {used.ideal_hit_rate():.1%} of the prompt tokens.",
        *together,
        f"A request is good with its first token within {slo.ttft_s:g} s and its tokens {slo.itl_s * 1e3:g} ms apart "
        f"in the mean, the gap of the hand-off included; goodput is the rate at which {slo.attainment:.0%} are good. A "
        "refused request (no decode pod has room) is not.",
        f"Rates {rates.name}: {rates.source}. One GPU a pod, {rates.kv_bytes / 1024:.0f} KiB of KV a token, "
        f"{pool} blocks of {used.block_size} tokens in a pod, KV moves at {rates.link_byte_s / 1e9:.0f} GB/s.",
        "The gateway's own cost policy, the engine's own chunk scheduler and block cache; one gateway, which adds "
        "1 ms; pods report every 0.5 s, the prefix index is 30 ms late, nothing fails.",
        "Decode has at most 256 sequences a pod and room for a request's whole answer from the start; no speculation, "
        "and no local prefill on decode pods.",
        f"The ratio was searched with {gpus} GPUs."
        if gpus
        else f"The ratio was searched with {RATIO_GPUS} GPUs; other numbers keep it as nearly as they can.",
    ]


def _which(count: int, recorded: int) -> str:
    """The requests of a trace that were replayed."""
    if count <= recorded:
        return f"the first {count} of {recorded} requests"
    return f"{count} requests: the {recorded} recorded ones, repeated with new prompts each time"


def _show(plan: CapacityPlan, trace: WorkloadTrace, slo: Slo, gpus: int | None, notes: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=False)
    table = Table(title=f"Goodput with TTFT {slo.ttft_s:g} s and ITL {slo.itl_s * 1e3:g} ms for {slo.attainment:.0%}")
    for name in ("P:D", "chunk", "req/s", "per GPU", "TTFT s", "ITL ms", "hits", "busy P:D"):
        table.add_column(name, justify="right")
    table.caption = "TTFT and ITL are p50 / p99 at that rate; busy is the share of time that pods compute"
    for measured in plan.measured:
        table.add_row(*_cells(measured), style="bold" if measured is plan.best and measured.goodput else None)
    console.print(table)
    if not plan.best.goodput:
        console.print("No setup keeps this SLO, however slow the requests come: the times ask for faster GPUs.")
    elif plan.needed is not None and gpus is None:
        need = plan.needed.setup
        console.print(
            f"The trace as recorded ({trace.rate:.2f} requests/s) needs {need.gpus} GPUs: {need.prefill} prefill and "
            f"{need.decode} decode, chunks of {need.chunk_tokens} tokens."
        )
    elif gpus is not None:
        verb = "serve" if plan.needed is not None else "do not serve"
        console.print(f"{gpus} GPUs {verb} the trace as recorded ({trace.rate:.2f} requests/s).")
    console.print("\nAssumed:")
    for note in notes:
        console.print(f"- {note}")


def _cells(measured: MeasuredSetup) -> list[str]:
    setup, summary = measured.setup, measured.summary
    cells = [f"{setup.prefill}:{setup.decode}", str(setup.chunk_tokens)]
    if summary is None:
        return [*cells, "0", "0", *["-"] * 4]
    return [
        *cells,
        f"{measured.goodput:.2f}",
        f"{measured.per_gpu:.3f}",
        f"{summary.ttft_p50_s:.2f} / {summary.ttft_p99_s:.2f}",
        f"{summary.gap_p50_s * 1e3:.1f} / {summary.gap_p99_s * 1e3:.1f}",
        f"{summary.hit_rate:.0%}",
        f"{measured.prefill_busy:.0%}:{measured.decode_busy:.0%}",
    ]


def _short(measured: MeasuredSetup) -> str:
    setup = measured.setup
    return f"{setup.prefill}:{setup.decode}, chunks of {setup.chunk_tokens}: {measured.per_gpu:.3f} requests/s per GPU"


def _document(plan: CapacityPlan, trace: WorkloadTrace, notes: list[str]) -> dict[str, Any]:
    def row(measured: MeasuredSetup) -> dict[str, Any]:
        return {
            **asdict(measured.setup),
            "gpus": measured.setup.gpus,
            "goodput_req_s": measured.goodput,
            "goodput_req_s_per_gpu": measured.per_gpu,
            "prefill_busy": measured.prefill_busy,
            "decode_busy": measured.decode_busy,
            "at_goodput": None if measured.summary is None else asdict(measured.summary),
        }

    return {
        "best": row(plan.best),
        "needed_for_trace": None if plan.needed is None else row(plan.needed),
        "trace_req_s": trace.rate,
        "tried": [row(measured) for measured in plan.measured],
        "simulations": plan.runs,
        "assumptions": notes,
    }


def _whole(name: str, text: str, lowest: int, highest: int) -> int:
    value = int(text) if text.strip().isdecimal() else -1
    if not lowest <= value <= highest:
        raise ConfigError(f"--{name} must be a whole number from {lowest} to {highest}, not {text!r}", field=name)
    return value


def _number(name: str, text: str | None, default: float) -> float:
    try:
        return default if text is None else float(text)
    except ValueError as e:
        raise ConfigError(f"--{name} must be a number, not {text!r}", field=name) from e
