"""Recorded traces: arrival time, lengths and shared prompt blocks of each request.

Formats: Mooncake's JSON lines (`timestamp` ms, `input_length`, `output_length`, `hash_ids`: prefix-chained ids of
512-token blocks) and Azure's CSV (`TIMESTAMP,ContextTokens,GeneratedTokens`, no prefix information).
"""

from __future__ import annotations

import csv
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

from common.block_hash import matchable_blocks
from common.errors import ConfigError, describe

MOONCAKE_BLOCK_SIZE = 512
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    arrival_s: float  # Seconds since the start of the trace.
    prompt_len: int  # Tokens.
    output_len: int  # Tokens, at least 1.
    block_hashes: tuple[bytes, ...]  # Prefix-chained hashes of the prompt's full blocks, in order.
    partial_block_hash: bytes = b""  # Of the partial last block, if known. Only prompts that end with it share it.


@dataclass(frozen=True, slots=True)
class WorkloadTrace:
    """Requests in order of arrival."""

    name: str
    block_size: int
    requests: tuple[WorkloadRequest, ...]

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.requests) / max(self.duration_s, 1e-9)

    @property
    def prompt_tokens(self) -> int:
        return sum(r.prompt_len for r in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(r.output_len for r in self.requests)

    def sped_up(self, factor: float) -> WorkloadTrace:
        """Returns the same requests at `factor` times the rate."""
        return replace(self, requests=tuple(replace(r, arrival_s=r.arrival_s / factor) for r in self.requests))

    def first(self, count: int) -> WorkloadTrace:
        return replace(self, requests=self.requests[:count])

    def repeated(self, count: int) -> WorkloadTrace:
        """Returns `count` requests: the first ones, or all, again and again.

        Each repetition follows after a mean gap. It has block hashes of its own, so it shares no prompt with another.
        """
        if count <= len(self.requests):
            return self.first(count)
        period_s = self.duration_s + 1 / self.rate
        requests = list(self.requests)
        for round_ in range(1, -(-count // len(self.requests))):
            mark = round_.to_bytes(4, "big")
            requests += [
                replace(
                    r,
                    arrival_s=r.arrival_s + round_ * period_s,
                    block_hashes=tuple(mark + name[len(mark) :] for name in r.block_hashes),
                    partial_block_hash=mark + r.partial_block_hash if r.partial_block_hash else b"",
                )
                for r in self.requests
            ]
        return replace(self, requests=tuple(requests[:count]))

    def ideal_hit_rate(self) -> float:
        """Returns the share of prompt tokens that a single unlimited prefix cache would hit."""
        seen, hits = set[bytes](), 0
        for r in self.requests:
            usable = r.block_hashes[: matchable_blocks(r.prompt_len, self.block_size)]
            hits += sum(1 for _ in takewhile(seen.__contains__, usable))
            seen.update(r.block_hashes)
        return hits * self.block_size / self.prompt_tokens


def load_trace(path: Path) -> WorkloadTrace:
    """Reads a trace. The suffix .jsonl or .csv selects the format. Raises ConfigError with the line number."""
    if not path.is_file():
        raise _error(f"there is no file {path}")
    if path.suffix not in (".jsonl", ".csv"):
        raise _error(f"{path.name} is neither .jsonl (Mooncake) nor .csv (Azure)")
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            requests = sorted(_read(path, lines), key=lambda r: r.arrival_s)
    except (OSError, UnicodeDecodeError) as e:
        raise _error(f"{path} cannot be read: {describe(e)}") from e
    if len(requests) < 2 or requests[0].arrival_s == requests[-1].arrival_s:
        raise _error(f"{path.name} needs two requests at different times")
    start = requests[0].arrival_s
    shifted = tuple(replace(r, arrival_s=r.arrival_s - start) for r in requests)
    return WorkloadTrace(path.stem, MOONCAKE_BLOCK_SIZE, shifted)


def synthetic_block_hash(*parts: object) -> bytes:
    """Returns a 16-byte block hash for an identifier that consists of `parts`."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def _read(path: Path, lines: Iterable[str]) -> Iterator[WorkloadRequest]:
    """Yields the requests of the lines or rows that are not empty."""
    entries: Iterable[tuple[int, Any]] = enumerate(map(str.strip, lines), 1)
    parse: Callable[[str, int, Any], WorkloadRequest] = _mooncake
    if path.suffix == ".csv":
        rows = csv.reader(lines)
        if [column.strip() for column in next(rows, [])] != list(AZURE_COLUMNS):
            raise _error(f"{path.name}, line 1: the columns must be {','.join(AZURE_COLUMNS)}")
        entries, parse = enumerate(rows, 2), _azure
    for number, entry in entries:
        try:
            if entry:
                yield parse(path.name, number, entry)
        except ValueError as e:
            raise _error(f"{path.name}, line {number}: {e}") from e


_hash_of = functools.lru_cache(1 << 20)(synthetic_block_hash)


def _mooncake(name: str, number: int, line: str) -> WorkloadRequest:
    try:
        raw = json.loads(line)
    except ValueError as e:
        raise ValueError(f"not JSON: {e}") from e
    if not isinstance(raw, dict):
        raise ValueError("not an object")
    prompt, output = _count(raw, "input_length", 1), _count(raw, "output_length", 0)
    at, ids = raw.get("timestamp"), raw.get("hash_ids")
    if not isinstance(at, int | float) or isinstance(at, bool) or not 0 <= at < 1e13:
        raise ValueError(f"timestamp must be milliseconds, not {at!r}")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError("hash_ids must be a list of integers")
    if len(ids) != -(-prompt // MOONCAKE_BLOCK_SIZE):
        raise ValueError(f"{len(ids)} hash_ids for {prompt} tokens in blocks of {MOONCAKE_BLOCK_SIZE}")
    names = tuple(_hash_of("mooncake", i) for i in ids)
    full = prompt // MOONCAKE_BLOCK_SIZE  # a partial last block has no hash in block_hashes
    return WorkloadRequest(at / 1e3, prompt, max(1, output), names[:full], b"".join(names[full:]))


def _azure(name: str, number: int, row: Sequence[str]) -> WorkloadRequest:
    if len(row) != len(AZURE_COLUMNS):
        raise ValueError(f"{len(row)} columns instead of {len(AZURE_COLUMNS)}")
    counts = dict(zip(AZURE_COLUMNS[1:], map(int, row[1:]), strict=True))
    prompt, output = _count(counts, "ContextTokens", 1), _count(counts, "GeneratedTokens", 0)
    unshared = tuple(synthetic_block_hash(name, number, i) for i in range(prompt // MOONCAKE_BLOCK_SIZE))
    return WorkloadRequest(_seconds(row[0]), prompt, max(1, output), unshared)


def _seconds(raw: str) -> float:
    """Parses an Azure time. It has seven digits of a second, and datetime accepts six."""
    head, _, fraction = raw.strip().partition(".")
    return datetime.fromisoformat(head + "+00:00").timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


def _count(raw: Mapping[str, Any], field: str, lowest: int) -> int:
    value = raw.get(field)
    if type(value) is not int or not lowest <= value <= 10_000_000:
        raise ValueError(f"{field} must be a whole number from {lowest} on, not {value!r}")
    return value


def _error(fault: str) -> ConfigError:
    return ConfigError(f"--trace: {fault}", field="trace")
