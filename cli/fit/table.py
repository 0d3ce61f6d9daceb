"""Prints what `baton plan fit` found."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from cli.fit.cards import Card
from cli.fit.estimate import Fit, PlannedLoad, best_of

if TYPE_CHECKING:  # it loads torch
    from engine.model_size import ModelSize


def document(found: list[Fit], card: Card, load: PlannedLoad) -> dict[str, Any]:
    """Returns the content of --json."""
    return {
        "card": asdict(card),
        "load": asdict(load),
        "best": asdict(best_of(found)),
        "tried": [asdict(setup) for setup in found],
    }


def show(found: list[Fit], card: Card, load: PlannedLoad, size: ModelSize, model_dir: Path) -> None:
    """Prints the setups as a table, the one to use, and the assumptions."""
    console, best = Console(highlight=False), best_of(found)
    shape = size.shape
    windows = sum(window is not None for window in shape.windows)
    parts = [
        f"{shape.architecture}, {shape.num_layers} layers",
        f"{size.num_experts} experts, {size.top_k} for each token" if size.num_experts else "",
        f"{windows} layers with a window" if windows else "",
        f"weights {size.weights_text}" if size.weights_text else "",
        f"{size.max_adapters} adapters of rank {size.max_adapter_rank}" if size.max_adapters else "",
    ]
    console.print(f"{model_dir.name}: {', '.join(filter(None, parts))}", soft_wrap=True)
    title = f"{load.users} users with up to {load.context} tokens on {card.name}"
    table = Table(title=title, box=None, padding=(0, 1, 0, 0))  # all figures fit in 80 columns
    columns = ("cards", "settings", "weights", "KV/token", "pool", "batch", "TTFT", "ITL 1", "ITL", "")
    for name in columns:
        is_text = name == "settings"
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for setup in found:
        table.add_row(*_cells(setup), style="bold" if setup is best else None)
    console.print(table)
    console.print(
        f"batch: answers of {load.context} tokens that the pool holds. TTFT: one prompt of {load.prompt} tokens on an "
        f"idle pod, without a cache hit. ITL: with {load.users} answers, or as many as fit; ITL 1: with one.",
        soft_wrap=True,
    )
    console.print(f"\n{_verdict(best, load)}", style="bold", soft_wrap=True)
    console.print(
        f"\nCard {card.name}: {card.source}. Weights, KV and pool are per card"
        f"{_beside_text(best)}; activations and graphs are estimates, "
        "and the pod logs the real pool at its start. The figures are for one pod that does nothing else: with "
        "--role both, prompts lengthen the steps of decodes.",
        soft_wrap=True,
    )


def _beside_text(setup: Fit) -> str:
    if setup.num_states:
        return f", beside {setup.state_bytes / 2**30:.2g} GiB for {setup.num_states} recurrent states"
    return f", beside {setup.adapter_bytes / 2**30:.2g} GiB for adapters" if setup.adapter_bytes else ""


def _verdict(best: Fit, load: PlannedLoad) -> str:
    if best.fits:
        return (
            f"Use {' '.join(best.flags)}. {load.users} users at full length get {load.users / best.itl_s:.0f} output "
            f"tokens/s together; one pod computes {best.prompts_s:.3g} prompts/s."
        )
    if best.pool_bytes <= 0:
        return "The weights do not fit: take a larger card, a quantised checkpoint or more cards."
    if best.largest_batch == 0:
        return f"The weights fit, but no answer of {load.context} tokens does: lower --context, or take more cards."
    pods = -(-load.users // best.largest_batch)
    return f"One pod holds {best.largest_batch} users. {pods} pods with {' '.join(best.flags)} hold all."


def _cells(setup: Fit) -> list[str]:
    #: Other lines have them.
    common = "--max-model-len", "--max-adapter", "--max-seqs", "--tensor-parallel-size", "--kv-groups"
    names = [flag.removeprefix("--") for flag in setup.flags if not flag.startswith(common)]
    memory = [f"{setup.weight_bytes / 2**30:.1f} GiB", f"{setup.kv_token_bytes / 1024:.1f} KiB"]
    if setup.pool_bytes <= 0:
        return [str(setup.ranks), "\n".join(names), *memory, f"{setup.pool_bytes / 2**30:.1f} GiB", *["-"] * 4, "no"]
    return [
        str(setup.ranks),
        "\n".join(names),
        *memory,
        f"{setup.pool_bytes / 2**30:.1f} GiB",
        str(setup.largest_batch),
        f"{setup.ttft_s * 1e3:.0f} ms",
        f"{setup.idle_itl_s * 1e3:.1f} ms",
        f"{setup.itl_s * 1e3:.1f} ms",
        "fits" if setup.fits else "",
    ]
