"""What UCX itself says about the protocol that it chose, read from its log: the honest source for "which transport".

UCX prints a table per endpoint configuration when UCX_PROTO_INFO=y, headed by the first 31 characters of the agent's
name and, beside or below it, by what the table is about: also by writes from host memory where all of ours are from a
GPU. Its log goes into an anonymous file of this process. Both settings are read when the library loads, so
open() must come before the first agent of the process; a second agent finds the file by the environment. Somebody
else's UCX_LOG_FILE or UCX_PROTO_INFO is left alone, and then nothing is known.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from pathlib import Path
from typing import Self

from kv_transfer.memory import MemoryKind

_log = logging.getLogger(__name__)

NAME_CHARS = 31  # of an agent that UCX keeps

_LINE = re.compile(r"^\[[^]]*\] \[[^]]*\]\s*(.*?)\s*$")
_HEAD = re.compile(r"^\| (?P<agent>\S+) (?P<where>self|intra-node|inter-node)\b[^|]* cfg#\d+\s*\|(?P<rest>.*)$")
# "remote memory write by ucp_put* from host memory to cuda": ours comes first
_WRITE = re.compile(r"^\|?\s*remote memory write by ucp_put\b.*? from (?P<own>\w+)")
_ROW = re.compile(r"^\|\s*(?P<low>\d+)(?P<unit>[KMG]?)\.\.\S+\s*\|[^|]*\|\s*(?P<config>[^|]+?)\s*\|$")
_COMPLAINT = re.compile(r"\b(?:ERROR|WARN|FATAL)\b")
_UNIT = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_NAMES = (
    ("cuda_ipc", "cuda_ipc"),
    ("gdr_copy", "cuda"),
    ("cuda_copy", "cuda"),
    ("cma/", "cma"),
    ("xpmem/", "shm"),
    ("posix/", "shm"),
    ("sysv/", "shm"),
    ("knem/", "shm"),
    ("rc_", "rdma"),
    ("dc_", "rdma"),
    ("ud_", "rdma"),
    ("srd/", "rdma"),
    ("tcp/", "tcp"),
)


class UcxLog:
    """The process's UCX log as a readable file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    @classmethod
    def open(cls) -> Self | None:
        """Sends UCX's log of this process to an anonymous file; None when the environment says otherwise."""
        mine = f"/proc/{os.getpid()}/fd/"
        path = os.environ.get("UCX_LOG_FILE", "")
        if path.startswith(mine):
            return cls(Path(path))
        if path and not path.startswith("/proc/"):
            return None
        if os.environ.setdefault("UCX_PROTO_INFO", "y") != "y":
            return None
        path = f"{mine}{os.memfd_create('ucx-log')}"  # lives as long as the process: UCX writes to it until the end
        os.environ["UCX_LOG_FILE"] = path
        return cls(Path(path))

    def transport(self, agent: str, block_bytes: int, kind: MemoryKind, *, same_host: bool) -> str | None:
        """What carries `agent`'s writes of block_bytes bytes from that memory to peers on this host, or on others, when
        all its configurations for them agree on one transport.
        """
        _flush()
        log = self._path.read_text(errors="replace")
        names = parse_transports(log, agent, block_bytes, kind, same_host=same_host)
        if len(names) == 1:
            return names.pop()
        _log.warning(
            "UCX names %s for writes of %s memory by %s; its tables: %s", names or "nothing", kind, agent, log[-4000:]
        )
        return None

    def new_warnings(self) -> list[str]:
        """Warnings and errors since the last call: they would otherwise stay in the file."""
        _flush()
        with self._path.open(errors="replace") as log:
            log.seek(self._read)
            lines = log.readlines()
            self._read = log.tell()
        return [line.strip() for line in lines if _COMPLAINT.search(line)]


def _flush() -> None:
    """UCX writes through the C library's buffers: what it said last would not be in the file yet."""
    ctypes.CDLL(None).fflush(None)


def parse_transports(log: str, agent: str, block_bytes: int, kind: MemoryKind, *, same_host: bool) -> set[str]:
    """Transports that the tables of `log` name for writes of block_bytes bytes by `agent` from that memory to such
    peers; those to itself, or to whomever, count when there is no better table.
    """
    memory = "host" if kind == "DRAM" else "cuda"
    wanted = "intra-node" if same_host else "inter-node"
    tables: list[tuple[str, str]] = []  # where the peer is, what carries so much there
    where, inside = "", False
    for raw in log.splitlines():
        line = match.group(1) if (match := _LINE.match(raw)) else raw.strip()
        if head := _HEAD.match(line):
            where, inside = (head["where"] if head["agent"] == agent[:NAME_CHARS] else ""), False
            line = head["rest"]
        if write := _WRITE.match(line):
            inside = bool(where) and write["own"] == memory
            if inside:
                tables.append((where, ""))
        elif inside and (row := _ROW.match(line)) and int(row["low"]) * _UNIT[row["unit"]] <= block_bytes:
            tables[-1] = (where, _name(row["config"]))
    named = [(where, name) for where, name in tables if name]
    return (
        {name for where, name in named if where == wanted}
        or {name for where, name in named if where != "self"}
        or {name for _, name in named}
    )


def _name(config: str) -> str:
    return next((name for mark, name in _NAMES if mark in config), config.partition("/")[0])
