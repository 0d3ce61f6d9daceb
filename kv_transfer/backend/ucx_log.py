"""Transport that UCX chose, as UCX reports it in its log.

With UCX_PROTO_INFO=y UCX prints a table per endpoint configuration. The head has the first 31 characters of the agent's
name and the purpose of the table, beside or below it. Tables of writes from host memory occur even where all our writes
are from a GPU. The log goes to an anonymous file of this process.

UCX reads both settings when the library loads, so open() must run before the first agent of the process. A second agent
finds the file by the environment. A foreign UCX_LOG_FILE or UCX_PROTO_INFO is kept, and then nothing is known.
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

NAME_CHARS = 31  # UCX cuts the agent's name to this length

_LINE = re.compile(r"^\[[^]]*\] \[[^]]*\]\s*(.*?)\s*$")
_HEAD = re.compile(r"^\| (?P<agent>\S+) (?P<where>self|intra-node|inter-node)\b[^|]* cfg#\d+\s*\|(?P<rest>.*)$")
#: "remote memory write by ucp_put* from host memory to cuda": the local memory comes first.
_WRITE = re.compile(r"^\|?\s*remote memory write by ucp_put\b.*? from (?P<own>\w+)")
_ROW = re.compile(r"^\|\s*(?P<low>\d+)(?P<unit>[KMG]?)\.\.\S+\s*\|[^|]*\|\s*(?P<config>[^|]+?)\s*\|$")
_WARNING = re.compile(r"\b(?:ERROR|WARN|FATAL)\b")
_UNIT = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
#: Transport -> marks in a configuration; the first mark counts.
_MARKS = {
    "cuda_ipc": ("cuda_ipc",),
    "cuda": ("gdr_copy", "cuda_copy"),
    "cma": ("cma/",),
    "shm": ("xpmem/", "posix/", "sysv/", "knem/"),
    "rdma": ("rc_", "dc_", "ud_", "srd/"),
    "tcp": ("tcp/",),
}


class UcxLog:
    """The UCX log of this process as a readable file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    @classmethod
    def open(cls) -> Self | None:
        """Sends the UCX log of this process to an anonymous file. None if the environment has other settings."""
        mine = f"/proc/{os.getpid()}/fd/"
        path = os.environ.get("UCX_LOG_FILE", "")
        if path.startswith(mine):
            return cls(Path(path))
        if path and not path.startswith("/proc/"):
            return None
        if os.environ.setdefault("UCX_PROTO_INFO", "y") != "y":
            return None
        path = f"{mine}{os.memfd_create('ucx-log')}"  # never closed: UCX writes to it until the process ends
        os.environ["UCX_LOG_FILE"] = path
        return cls(Path(path))

    def transport(self, agent: str, block_bytes: int, kind: MemoryKind, *, same_host: bool) -> str | None:
        """Returns the transport of `agent`'s writes of block_bytes bytes from this kind of memory.

        same_host: to peers on this host, else on other hosts. None unless all configurations for these peers name the
        same transport.
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
        """Returns the warnings and errors since the last call. They are only in the file."""
        _flush()
        with self._path.open(errors="replace") as log:
            log.seek(self._read)
            lines = log.readlines()
            self._read = log.tell()
        return [line.strip() for line in lines if _WARNING.search(line)]


def _flush() -> None:
    """Flushes the buffers of the C library, through which UCX writes."""
    ctypes.CDLL(None).fflush(None)


def parse_transports(log: str, agent: str, block_bytes: int, kind: MemoryKind, *, same_host: bool) -> set[str]:
    """Returns the transports in the tables of `log` for `agent`'s writes of block_bytes bytes from this kind of memory.

    Tables for peers on this host (or other hosts) count first, then tables for any peer, then tables for the
    agent itself.
    """
    memory = "host" if kind == "DRAM" else "cuda"
    peer_place = "intra-node" if same_host else "inter-node"
    tables: list[tuple[str, str]] = []  # place of the peer, transport for this size
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
        {name for where, name in named if where == peer_place}
        or {name for where, name in named if where != "self"}
        or {name for _, name in named}
    )


def _name(config: str) -> str:
    found = (name for name, marks in _MARKS.items() if any(mark in config for mark in marks))
    return next(found, config.partition("/")[0])
