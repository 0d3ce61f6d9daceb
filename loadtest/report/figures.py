"""Computes the figures of a finished run: the document for JSON files, comparisons and reports.

Latencies are in ms from the time of sending. The `_intended` latencies start at the intended time, so a delay of the
generator or of max_concurrency is included (coordinated omission: Tene, "How NOT to measure latency").

- ttft: to the first text; itl: between two events with text; e2e: to the end of the answer.
- tpot: mean time per token after the first of one request, with the server's token count.
- A request is good if its answer is complete and every objective is met. The ttft and e2e objectives use the intended
  time, itl is the request's tpot (as in `baton plan`), gap its longest pause. goodput: good requests per second.
- Failed and aborted requests count in no latency.
- Rates cover the time from the start of the run (or the end of settling) to the end of the last counted answer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from common.errors import ConfigError
from loadtest.run import LoadRun, RequestRecord
from loadtest.slo import percentile_of_sorted

FORMAT = 1
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
MAX_BINS = 240
BINS_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
CURVE = (*(i / 100 for i in range(100)), 0.995, 0.999, 0.9999, 1.0)
MESSAGES = 3  # Messages per kind of error in the document.
LATE_MS = 5.0  # The report warns if the p99 of the lag is above this.
BUSY = 0.9  # The report warns if the generator used more than this share of a core.
#: The attribute of a record that each objective limits.
OBJECTIVES = {"ttft": "ttft_intended_s", "itl": "tpot_s", "gap": "longest_gap_s", "e2e": "e2e_intended_s"}
#: Latencies of answered requests with one value per request.
PER_REQUEST = ("ttft", "ttft_intended", "tpot", "e2e", "e2e_intended")


def meets_slo(record: RequestRecord, slo: Mapping[str, float]) -> bool:
    """Returns whether the answer is complete and meets every objective.

    An itl or gap objective is met by an answer of one token. A ttft objective is not met without a first token.
    """
    if not record.ok or ("ttft" in slo and record.ttft_s is None):
        return False
    return all((value := getattr(record, OBJECTIVES[name])) is None or value <= most for name, most in slo.items())


def build_document(run: LoadRun, version: str) -> dict[str, Any]:
    """Returns all figures of a run as JSON values."""
    records = sorted((r for r in run.records if r.counted), key=lambda r: r.intended_s)
    zero = run.began + run.config.settle_s
    end = max((r.ended_s for r in records), default=zero)
    seconds = max(end - zero, 1e-9)
    answered = [r for r in records if r.ok]
    latencies = {name: _sorted_ms(getattr(r, f"{name}_s") for r in answered) for name in PER_REQUEST}
    latencies["itl"] = _sorted_ms(gap for r in answered for gap in r.gaps())
    latencies["lag"] = _sorted_ms(r.lag_s for r in records)
    return {
        "format": FORMAT,
        "kind": "baton loadtest",
        "version": version,
        "began_at": run.began_at,
        "model": run.model,
        "config": run.config.described(),
        "seconds": seconds,
        "stopped": run.stopped,
        "requests": {
            "sent": len(records),
            "answered": len(answered),
            "failed": sum(bool(r.error) for r in records),
            "aborted": sum(r.aborted for r in records),
            "not_counted": len(run.records) - len(records),
            "unfinished": run.unfinished,
            "skipped": run.skipped,
            "left_out": run.skipped_too_long,
        },
        "rates": {
            "intended_per_s": _per_s([r.intended_s for r in records]),
            "sent_per_s": _per_s([r.sent_s for r in records]),
            "answered_per_s": len(answered) / seconds,
            "output_tokens_per_s": sum(r.tokens for r in records) / seconds,
            "prompt_tokens_per_s": sum(_prompt(r) for r in answered) / seconds,
            "mean_running": sum(r.e2e_s for r in records) / seconds,
        },
        "latencies_ms": {name: _figures(values) for name, values in latencies.items()},
        "goodput": _goodput(records, answered, run.config.slo, seconds),
        "errors": _errors(records),
        "tokens": _tokens(answered),
        "generator": {"cpu_share": run.cpu_s / max(run.ended - run.began, 1e-9)},
        "curves_ms": {name: _curve(values) for name, values in latencies.items()},
        "series": _series(records, zero, seconds),
        "records": _columns(records, run.began),
    }


def warnings(document: Mapping[str, Any]) -> list[str]:
    """Returns warnings about the validity of the figures, for example a busy generator."""
    requests, config, late_ms = document["requests"], document["config"], document["latencies_ms"]["lag"]["p99"] or 0.0
    busy, short = document["generator"]["cpu_share"], document["tokens"]["short_answers"]
    too_long, skipped, advice = requests["left_out"], requests["skipped"], "read the rows 'intended'"
    reason = " (--max-concurrency holds requests back)" if config["max_concurrency"] else ""
    possible = (
        (document["stopped"], f"Stopped early: {requests['unfinished']} requests were in flight and are not counted."),
        (too_long, f"{too_long} requests of the trace are longer than --max-input-tokens and were not sent."),
        (skipped, f"{skipped} later turns were not sent, because their conversation had failed."),
        (busy > BUSY, f"The generator used {busy:.0%} of its core: it may have been the limit."),
        (late_ms > LATE_MS, f"One request in a hundred left {late_ms:.0f} ms late or more{reason}: {advice}."),
        (short and config["ignore_eos"], f"{short} answers have fewer tokens than were asked for."),
    )
    return [message for applies, message in possible if applies]


def _per_s(times: Sequence[float]) -> float:
    """Returns the rate of the times, which are in order of the intended times; 0.0 for fewer than two."""
    return (len(times) - 1) / (times[-1] - times[0]) if times and times[-1] > times[0] else 0.0


def _goodput(
    records: Sequence[RequestRecord], answered: Sequence[RequestRecord], slo: Mapping[str, float], seconds: float
) -> dict[str, Any] | None:
    """Returns goodput. `share` is relative to requests without intended aborts, `kept` to answered requests."""
    if not slo:
        return None
    asked = sum(not r.aborted for r in records)
    kept = sum(meets_slo(r, slo) for r in records)
    each = {name: sum(meets_slo(r, {name: most}) for r in answered) for name, most in slo.items()}
    return {
        "per_s": kept / seconds,
        "share": kept / asked if asked else 0.0,
        "kept": {name: number / max(1, len(answered)) for name, number in each.items()},
    }


def _errors(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """Returns the kinds of errors with count and example messages, most frequent first."""
    kinds = Counter(r.error for r in records if r.error)
    messages: dict[str, dict[str, None]] = {kind: {} for kind in kinds}
    for r in records:
        if r.error and r.message and len(messages[r.error]) < MESSAGES:
            messages[r.error][r.message] = None
    return [{"kind": kind, "count": n, "messages": list(messages[kind])} for kind, n in kinds.most_common()]


def _tokens(answered: Sequence[RequestRecord]) -> dict[str, Any]:
    with_cache_counts = [r for r in answered if r.prompt_tokens is not None and r.cached_tokens is not None]
    prompt = sum(_prompt(r) for r in with_cache_counts)
    return {
        "prompt": sum(_prompt(r) for r in answered),
        "output": sum(r.tokens for r in answered),
        "cached_share": sum(r.cached_tokens or 0 for r in with_cache_counts) / prompt if prompt else None,
        "finish": dict(Counter(r.finish for r in answered).most_common()),
        "short_answers": sum(r.tokens < r.planned_output for r in answered),
    }


def _prompt(record: RequestRecord) -> int:
    return record.planned_input if record.prompt_tokens is None else record.prompt_tokens


def _sorted_ms(seconds: Any) -> list[float]:
    return sorted(1e3 * s for s in seconds if s is not None)


def _figures(values: Sequence[float]) -> dict[str, float | int | None]:
    """Returns count, mean, percentiles and maximum of sorted values."""
    if not values:
        return {"count": 0, "mean": None, **dict.fromkeys(PERCENTILES), "max": None}
    figures = {name: percentile_of_sorted(values, share) for name, share in PERCENTILES.items()}
    return {"count": len(values), "mean": math.fsum(values) / len(values), **figures, "max": values[-1]}


def _curve(values: Sequence[float]) -> list[float]:
    """Returns the quantiles of CURVE for sorted values."""
    return [round(percentile_of_sorted(values, share), 4) for share in CURVE] if values else []


def _series(records: Sequence[RequestRecord], zero: float, seconds: float) -> dict[str, Any]:
    """Returns time series in equal bins: requests sent, answered, failed, mean requests in flight, and tokens."""
    bin_s = next((b for b in BINS_S if seconds / b <= MAX_BINS), seconds / MAX_BINS)
    bins = math.ceil(seconds / bin_s)
    sent, ended, failed = ([0] * bins for _ in range(3))
    tokens, running = ([0.0] * bins for _ in range(2))

    def at(time: float) -> int:
        return min(bins - 1, max(0, int((time - zero) / bin_s)))

    for r in records:
        sent[at(r.sent_s)] += 1
        (failed if r.error else ended)[at(r.ended_s)] += 1
        moments = r.event_times or (r.ended_s,)
        for moment in moments:
            tokens[at(moment)] += r.tokens / len(moments)
        for i in range(at(r.sent_s), at(r.ended_s) + 1):
            low, high = zero + i * bin_s, zero + (i + 1) * bin_s
            running[i] += max(0.0, min(r.ended_s, high) - max(r.sent_s, low)) / bin_s
    return {"bin_s": bin_s, "sent": sent, "ended": ended, "failed": failed, "tokens": tokens, "running": running}


def _columns(records: Sequence[RequestRecord], began: float) -> dict[str, list[Any]]:
    """Returns one list per field with a value per request. Times are seconds since the start, latencies ms."""

    def plain(*names: str) -> dict[str, list[Any]]:
        return {name: [getattr(r, name) for r in records] for name in names}

    times = plain("lag_s", "ttft_s", "tpot_s", "longest_gap_s", "e2e_s")
    return {
        **plain("request_id", "session", "turn"),
        "intended_s": [round(r.intended_s - began, 6) for r in records],
        **{f"{k[:-1]}ms": [None if s is None else round(1e3 * s, 4) for s in times[k]] for k in times},
        **plain("prompt_tokens", "cached_tokens"),
        "output_tokens": [r.tokens for r in records],
        **plain("finish", "error", "aborted"),
    }


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a document. Raises ConfigError if the file cannot be written."""
    write_text(path, dumps(document) + "\n")


def dumps(document: Mapping[str, Any]) -> str:
    """Returns the document as JSON. NaN becomes null."""
    return orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()


def write_text(path: Path, text: str) -> None:
    """Writes a text file and creates its folder. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path} cannot be written: {e.strerror}") from e


def read(path: Path) -> dict[str, Any]:
    """Reads a document. Raises ConfigError if the file is unreadable, not a document or of another format version."""
    try:
        document = orjson.loads(path.read_bytes())
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise ConfigError(f"{path} is not JSON: {e}") from e
    if not isinstance(document, dict) or document.get("kind") != "baton loadtest":
        raise ConfigError(f"{path} is not the result of a load test")
    if (found := document.get("format")) != FORMAT:
        raise ConfigError(f"{path} has format {found}, expected {FORMAT}: another version of Baton wrote it")
    return document
