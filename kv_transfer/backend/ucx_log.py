"""Reads the log of UCX: its warnings become log lines of this process, and its tables name the transport of writes.

UCX writes its log to the file that UCX_LOG_FILE names. Baton names an anonymous file in memory, and a thread reads the
file once a second. UCX never waits for this reader, as it could with a pipe. The memory of read lines is freed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
from dataclasses import dataclass
from typing import Self

from common.errors import describe
from kv_transfer.memory import MemoryKind

_log = logging.getLogger("ucx")

NAME_CHARS = 31  #: UCX cuts the agent's name to this length.
REPORT_S = 1.0
MAX_LINES = 20  #: Lines of one report; more are only counted. A broken link can cause thousands of lines a second.
KEPT_BYTES = 1 << 20  #: Length of the file's end that stays in memory, because `transport` reads it.
MAX_BYTES = 4 << 20  #: When more than this is stored, all but KEPT_BYTES is freed.
_PUNCH_HOLE, _KEEP_SIZE = 2, 1  #: Flags of fallocate(2).

_LINE = re.compile(r"^\[[^]]*\] \[[^]]*\]\s*(.*?)\s*$")
_HEAD = re.compile(r"^\| (?P<agent>\S+) (?P<where>self|intra-node|inter-node)\b[^|]* cfg#\d+\s*\|(?P<rest>.*)$")
#: Example: "remote memory write by ucp_put* from host memory to cuda". The local memory comes first.
_WRITE = re.compile(r"^\|?\s*remote memory write by ucp_put\b.*? from (?P<own>\w+)")
_ROW = re.compile(r"^\|\s*(?P<low>\d+)(?P<unit>[KMG]?)\.\.\S+\s*\|[^|]*\|\s*(?P<config>[^|]+?)\s*\|$")
#: Example: "[1764459900.123456] [host:4242 :0]        tcp_ep.c:1234 UCX  ERROR the text".
_MESSAGE = re.compile(
    r"^\[[^]]*\] \[[^]]*\]\s*(?P<where>\S+\.\w+:\d+)?\s*UCX\s+(?P<level>FATAL|ERROR|WARN)\s+(?P<text>.*)$"
)
_LEVELS = {"FATAL": logging.ERROR, "ERROR": logging.ERROR, "WARN": logging.WARNING}
_UNIT = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
#: Transport -> texts that name it in a configuration. The first transport with a match counts.
_MARKS = {
    "cuda_ipc": ("cuda_ipc",),
    "cuda": ("gdr_copy", "cuda_copy"),
    "cma": ("cma/",),
    "shm": ("xpmem/", "posix/", "sysv/", "knem/"),
    "rdma": ("rc_", "dc_", "ud_", "srd/"),
    "tcp": ("tcp/",),
}


@dataclass(frozen=True, slots=True)
class UcxMessage:
    """A warning or an error of UCX."""

    level: int  #: Level of `logging`.
    text: str
    where: str  #: File and line of UCX's source; "" if unknown.


class UcxLog:
    """Reads the UCX log of this process. `open` makes a reader, `close` ends it. Each transfer agent has its own.

    With UCX_PROTO_INFO=y UCX prints a table per endpoint configuration. The head has the first NAME_CHARS characters of
    the agent's name; the purpose of the table stands beside or below it. Tables of writes from host memory occur even
    if all writes of the agent are from a GPU. UCX reads both variables when its library loads, so `open` must run
    before the first agent of the process. If the user has set UCX_LOG_FILE, Baton leaves it and knows no transports.
    The last lines of a process that UCX ends are lost; UCX_LOG_FILE=/path keeps them.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        #: Offset behind the last reported line. Lines of earlier agents are not reported again.
        self._read = os.fstat(fd).st_size
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ucx-log", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls) -> Self | None:
        """Sends the UCX log of this process to an anonymous file. Returns None if the user has set UCX_LOG_FILE."""
        mine = f"/proc/{os.getpid()}/fd/"
        path = os.environ.get("UCX_LOG_FILE", "")
        if path.startswith(mine):
            return cls(int(path.removeprefix(mine)))
        if path and not path.startswith("/proc/"):
            return None
        os.environ.setdefault("UCX_PROTO_INFO", "y")
        fd = os.memfd_create("ucx-log")  # never closed: UCX writes to it until the process ends
        os.environ["UCX_LOG_FILE"] = f"{mine}{fd}"
        return cls(fd)

    def close(self) -> None:
        """Reports the last lines and ends the thread. Idempotent."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(REPORT_S):
            self.report()
        self.report()

    def transport(self, agent: str, block_bytes: int, kind: MemoryKind, *, same_host: bool) -> str | None:
        """Returns the transport of `agent`'s writes of block_bytes bytes from this kind of memory.

        same_host: the peers are on this host, else on other hosts. Returns None if their configurations name no
        transport or different ones, or if UCX_PROTO_INFO is not "y".
        """
        if os.environ.get("UCX_PROTO_INFO") != "y":
            return None
        _flush()
        size = os.fstat(self._fd).st_size
        log = self._text(max(0, size - MAX_BYTES), size)
        names = parse_transports(log, agent, block_bytes, kind, same_host=same_host)
        if len(names) == 1:
            return names.pop()
        found = (names or "nothing", kind, agent, log[-4000:])
        _log.warning("UCX names %s for writes of %s memory by %s; its tables: %s", *found)
        return None

    def report(self) -> None:
        """Logs the warnings and errors since the last report. Any thread. Raises nothing."""
        try:
            with self._lock:
                messages = parse_messages(self._new_lines())
        except OSError as error:
            _log.warning("the log of UCX cannot be read: %s", describe(error))
            return
        for message in messages[:MAX_LINES]:
            extra = {"source": message.where} if message.where else {}
            _log.log(message.level, "UCX: %s", message.text, extra=extra)
        if len(messages) > MAX_LINES:
            _log.warning("UCX: %d more messages within %g s", len(messages) - MAX_LINES, REPORT_S)

    def _new_lines(self) -> list[str]:
        """Returns the complete lines since the last call, and frees memory of the file."""
        _flush()
        size = os.fstat(self._fd).st_size
        if size == self._read:
            return []
        self._read = max(self._read, size - MAX_BYTES)
        text = os.pread(self._fd, size - self._read, self._read)
        end = text.rfind(b"\n") + 1
        self._read += end
        if os.fstat(self._fd).st_blocks * 512 > MAX_BYTES:
            libc, off_t = ctypes.CDLL(None), ctypes.c_long
            libc.fallocate(self._fd, _PUNCH_HOLE | _KEEP_SIZE, off_t(0), off_t(max(1, self._read - KEPT_BYTES)))
        return text[:end].decode(errors="replace").splitlines()

    def _text(self, start: int, end: int) -> str:
        return os.pread(self._fd, end - start, start).decode(errors="replace")


def _flush() -> None:
    """Flushes the buffers of the C library, through which UCX writes."""
    ctypes.CDLL(None).fflush(None)


def parse_messages(lines: list[str]) -> list[UcxMessage]:
    """Returns the warnings and errors among lines of UCX's log."""
    found = (match for line in lines if (match := _MESSAGE.match(line)))
    return [UcxMessage(_LEVELS[match["level"]], match["text"].strip(), match["where"] or "") for match in found]


def parse_transports(log: str, agent: str, block_bytes: int, kind: MemoryKind, *, same_host: bool) -> set[str]:
    """Returns the transports in the tables of `log` for `agent`'s writes of block_bytes bytes from this kind of memory.

    Tables for peers on this host (or other hosts) count first, then those for any peer, then those for the agent.
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
