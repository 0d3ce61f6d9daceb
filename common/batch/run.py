"""One run of a batch: what is left to do, a bar on a terminal, and at the end what became of all."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from common.batch.records import Answers, Request, Result, check, requests
from common.batch.sender import Sending, base_url, send_all

SYNC_S = 1.0  # what a crash of the machine, not of the process, may cost
MOST_REASONS = 5  # why requests failed, the most frequent ones
REASON_CHARS = 300


@dataclass(slots=True)
class _Count:
    answered: int = 0
    failed: int = 0
    retries: int = 0
    prompt: int = 0
    output: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


async def run(console: Console, source: Path, target: Path, sending: Sending) -> int:
    """Answers what has no answer yet; 0, or 1 when requests failed, now or before. Raises ConfigError, Unavailable."""
    total = check(source)
    base_url(sending.url)
    began, number = time.monotonic(), _Count()
    with Answers(target) as answers, _bar(console) as bar:
        known = frozenset(answers.done)
        before = [answers.done[request.custom_id] for request in requests(source) if request.custom_id in known]
        skipped, failed_before = len(before), sum(before)
        task = bar.add_task("requests", total=total, completed=skipped, errors="")
        synced = began

        def done(request: Request, result: Result) -> None:
            nonlocal synced
            answers.append(request.custom_id, result)
            number.answered += result.answered
            if not result.answered:
                number.failed += 1
                number.reasons[result.reason[:REASON_CHARS]] += 1
            usage = result.body.get("usage") if isinstance(result.body, dict) else None
            if isinstance(usage, dict):
                number.prompt += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
                number.output += usage.get("completion_tokens") or usage.get("output_tokens") or 0
            if time.monotonic() - synced > SYNC_S:
                answers.sync()
                synced = time.monotonic()
            bar.update(task, advance=1, errors=f"{number.failed} failed" if number.failed else "")

        def retried(why: str) -> None:
            if not number.retries:  # it may be a long time until there is anything else to tell
                bar.console.print(f"trying again: {why[:REASON_CHARS]}", markup=False, highlight=False, soft_wrap=True)
            number.retries += 1

        left = (request for request in requests(source) if request.custom_id not in known)
        await send_all(sending, left, done, retried)
    took = max(1e-9, time.monotonic() - began)
    console.print(
        f"{number.answered} answered, {number.failed} failed, {skipped} had answers already"
        f"{f' ({failed_before} of them errors)' if failed_before else ''}; {number.retries} retries; "
        f"{number.prompt} prompt tokens, {number.output} generated ({number.output / took:.1f}/s) in {took:.1f} s; "
        f"{target}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    for reason, times in number.reasons.most_common(MOST_REASONS):
        console.print(f"  {times} failed: {reason}", markup=False, highlight=False, soft_wrap=True)
    return 1 if number.failed or failed_before else 0


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(
        *columns, TimeRemainingColumn(), TextColumn("[red]{task.fields[errors]}"), console=console, transient=True
    )
