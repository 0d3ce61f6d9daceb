"""Measures the time in which the gateway checks a request body, before and after a change.

    git worktree add /tmp/before COMMIT
    python benchmarks/validation.py --before /tmp/before --out benchmarks/results/validation.json

A chat with 6 messages, 2 tools and sampling parameters, and a completion with sampling parameters go through the
functions that the endpoints call (`parse_chat`, `parse_completion`), from parsed JSON to the checked request. Each
checkout is measured in processes of its own, in turn. The metrics are the least time of all rounds:

- us_per_request_before, us_per_request_after: mean of the two requests.
- chat_us_*, completion_us_*: each request.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support import report

LOOPS, CALLS = 200, 50
_TEXT = "The quick brown fox jumps over the lazy dog. " * 10
_SAMPLING: dict[str, Any] = {
    "model": "bench",
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "seed": 7,
    "stop": ["\n\n", "User:"],
    "stream": True,
    "stream_options": {"include_usage": True},
}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Oslo"}'}}
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT: dict[str, Any] = {
    **_SAMPLING,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": _TEXT},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "-4 degrees"},
        {"role": "assistant", "content": _TEXT},
        {"role": "user", "content": [{"type": "text", "text": _TEXT}]},
    ],
    "max_completion_tokens": 256,
    "tools": [
        {"type": "function", "function": {"name": name, "description": "Returns a fact.", "parameters": _CITY}}
        for name in ("look_up", "remember")
    ],
    "tool_choice": "auto",
}
COMPLETION: dict[str, Any] = {**_SAMPLING, "prompt": _TEXT, "max_tokens": 256, "logprobs": 1}


def measure(checkout: Path) -> dict[str, float]:
    """Returns microseconds per request of a checkout, which this process imports."""
    sys.path.insert(0, str(checkout))
    from gateway.api.openai import requests

    assert Path(requests.__file__).is_relative_to(checkout), requests.__file__
    return {
        "chat_us": _us_per_call(requests.parse_chat, CHAT),
        "completion_us": _us_per_call(requests.parse_completion, COMPLETION),
    }


def _us_per_call(parse: Callable[[object], object], body: dict[str, Any]) -> float:
    """Returns the least mean of several short loops; the parsers do not change the body."""
    return round(1e6 * min(timeit.repeat(lambda: parse(body), repeat=LOOPS, number=CALLS)) / CALLS, 2)


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--before", type=Path, help="checkout to compare with; none: only this checkout is measured")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # what a measured process does
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args.measure.resolve())))
        return
    checkouts = {"after": report.ROOT, **({"before": args.before.resolve()} if args.before else {})}
    rows = []
    for _ in range(args.rounds):
        for name, checkout in checkouts.items():
            argv = [sys.executable, str(Path(__file__).resolve()), "--measure", str(checkout)]
            took = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True, cwd=checkout).stdout)
            rows.append({"checkout": name, **took})
    metrics = {}
    for name in checkouts:
        least = {key: min(row[key] for row in rows if row["checkout"] == name) for key in ("chat_us", "completion_us")}
        metrics[f"us_per_request_{name}"] = round(sum(least.values()) / len(least), 2)
        metrics |= {f"{key}_{name}": us for key, us in least.items()}
    report.show(metrics)
    report.write(args.out, "validation", metrics, "pydantic", "pydantic-core")


if __name__ == "__main__":
    main()
