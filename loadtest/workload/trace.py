"""Recorded traces: arrival time, lengths and shared prompt blocks of each request.

Formats: Mooncake's JSON lines (`timestamp` ms, `input_length`, `output_length`, `hash_ids`: prefix-chained ids of
512-token blocks) and Azure's CSV (`TIMESTAMP,ContextTokens,GeneratedTokens`, no prefix information).
"""

from __future__ import annotations

import csv
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

from common.block_hash import matchable_blocks
from common.errors import ConfigError

MOONCAKE_BLOCK_SIZE = 512
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a trace."""

    arrival_s: float  # Seconds since the start of the trace.
    prompt_len: int  # Tokens.
    output_len: int  # Tokens, at least 1.
    block_hashes: tuple[bytes, ...]  # Prefix-chained hashes of the prompt's full blocks, in order.
    #: Hash of the partial last block; b"" if the trace has none. Only prompts that end with this block share it.
    partial_block_hash: bytes = b""


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
        """Returns the first `count` requests."""
        return replace(self, requests=self.requests[:count])

    def ideal_hit_rate(self) -> float:
        """Returns the share of prompt tokens that a single unlimited prefix cache would hit."""
        seen: set[bytes] = set()
        hits = 0
        for r in self.requests:
            usable = r.block_hashes[: matchable_blocks(r.prompt_len, self.block_size)]
            hits += sum(1 for _ in takewhile(seen.__contains__, usable))
            seen.update(r.block_hashes)
        return hits * self.block_size / self.prompt_tokens


def load_trace(path: Path) -> WorkloadTrace:
    """Reads a trace. The suffix .jsonl or .csv selects the format. Raises ConfigError with the line number."""
    if not path.is_file():
        raise ConfigError(f"--trace: there is no file {path}", field="trace")
    read = {".jsonl": _mooncake, ".csv": _azure}.get(path.suffix)
    if read is None:
        raise ConfigError(f"--trace: {path.name} is neither .jsonl (Mooncake) nor .csv (Azure)", field="trace")
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            requests = sorted(read(path.name, lines), key=lambda r: r.arrival_s)
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--trace: {path} cannot be read: {e}", field="trace") from e
    if len(requests) < 2 or requests[0].arrival_s == requests[-1].arrival_s:
        raise ConfigError(f"--trace: {path.name} needs two requests at different times", field="trace")
    start = requests[0].arrival_s
    return WorkloadTrace(
        path.stem, MOONCAKE_BLOCK_SIZE, tuple(replace(r, arrival_s=r.arrival_s - start) for r in requests)
    )


def synthetic_block_hash(*parts: object) -> bytes:
    """Returns a 16-byte block hash for an identifier that consists of `parts`."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


@functools.lru_cache(1 << 20)
def _mooncake_hash(block_id: int) -> bytes:
    return synthetic_block_hash("mooncake", block_id)


def _mooncake(name: str, lines: Iterable[str]) -> Iterator[WorkloadRequest]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
        except ValueError as e:
            raise _line_error(name, number, f"not JSON: {e}") from e
        if not isinstance(raw, dict):
            raise _line_error(name, number, "not an object")
        prompt, output = _count(name, number, raw, "input_length"), _count(name, number, raw, "output_length")
        at, ids = raw.get("timestamp"), raw.get("hash_ids")
        if not isinstance(at, int | float) or isinstance(at, bool) or not 0 <= at < 1e13:
            raise _line_error(name, number, f"timestamp must be milliseconds, not {at!r}")
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise _line_error(name, number, "hash_ids must be a list of integers")
        if len(ids) != -(-prompt // MOONCAKE_BLOCK_SIZE):
            fault = f"{len(ids)} hash_ids for {prompt} tokens in blocks of {MOONCAKE_BLOCK_SIZE}"
            raise _line_error(name, number, fault)
        names = tuple(_mooncake_hash(i) for i in ids)
        full = prompt // MOONCAKE_BLOCK_SIZE  # a partial last block has no hash in block_hashes
        yield WorkloadRequest(at / 1e3, prompt, max(1, output), names[:full], b"".join(names[full:]))


def _azure(name: str, lines: Iterable[str]) -> Iterator[WorkloadRequest]:
    rows = csv.reader(lines)
    header = next(rows, [])
    if [column.strip() for column in header] != list(AZURE_COLUMNS):
        raise _line_error(name, 1, f"the columns must be {','.join(AZURE_COLUMNS)}")
    for number, row in enumerate(rows, 2):
        if not row:
            continue
        if len(row) != len(AZURE_COLUMNS):
            raise _line_error(name, number, f"{len(row)} columns instead of {len(AZURE_COLUMNS)}")
        raw = dict(zip(AZURE_COLUMNS, row, strict=True))
        try:
            at = _seconds(raw["TIMESTAMP"])
            counts: dict[str, Any] = {c: int(raw[c]) for c in AZURE_COLUMNS[1:]}
        except ValueError as e:
            raise _line_error(name, number, str(e)) from e
        prompt = _count(name, number, counts, "ContextTokens")
        output = _count(name, number, counts, "GeneratedTokens")
        unshared = tuple(synthetic_block_hash(name, number, i) for i in range(prompt // MOONCAKE_BLOCK_SIZE))
        yield WorkloadRequest(at, prompt, max(1, output), unshared)


def _seconds(raw: str) -> float:
    """Parses an Azure time. It has seven digits of a second, and datetime accepts six."""
    head, _, fraction = raw.strip().partition(".")
    return datetime.fromisoformat(head + "+00:00").timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


def _count(name: str, number: int, raw: dict[str, Any], field: str) -> int:
    value = raw.get(field)
    lowest = 0 if field in ("output_length", "GeneratedTokens") else 1
    if type(value) is not int or not lowest <= value <= 10_000_000:
        raise _line_error(name, number, f"{field} must be a whole number from {lowest} on, not {value!r}")
    return value


def _line_error(name: str, number: int, fault: str) -> ConfigError:
    return ConfigError(f"--trace: {name}, line {number}: {fault}", field="trace")
