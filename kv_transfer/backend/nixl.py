"""Backend over NIXL with the UCX plugin: one agent, owned by the transfer thread.

Facts about NIXL 1.5 that this module relies on:
- transfer() and check_xfer_state() may copy inline. Errors are exceptions.
- A notification leaves only while the initiator polls. Without a progress thread, which spins on a core, a target
  receives only while it polls.
- release() of an active handle does not stop it, so only terminal handles are released.
- NIXL serialises descriptors with pickle, so descriptors are exchanged as numbers.
- The whole pool is one strided row (address, length, device, stride, count) per side. NIXL merges neighbouring
  indices into one descriptor where both sides are neighbours.
Copies between GPUs are posted with the CUDA context of this thread.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import itertools
import logging
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from common.errors import TransferFailed
from kv_transfer.backend.interface import Notification, Transport, WriteState
from kv_transfer.memory import MemoryKind, PeerMemory, PoolMemory

_log = logging.getLogger(__name__)

_MODULES = ("nixl_cu13._api", "nixl_cu12._api", "nixl._api")
_STATES = {"DONE": WriteState.DONE, "PROC": WriteState.PENDING}
NAME_CHARS = 31  # UCX cuts the agent's name to this length
LAST_CONNECTIONS_S = 0.05  # a connection takes some milliseconds

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


@dataclass(slots=True)
class _NixlTransfer:
    handle: Any
    state: WriteState = WriteState.PENDING
    error: str = ""


@dataclass(slots=True)
class _NixlAgent:
    """Objects that exist from start to close."""

    nixl: Any
    memory: PoolMemory
    registered: Any
    blocks: Any
    peers: dict[str, Any] = field(default_factory=dict)  # Block lists of connected peers
    notified_peers: dict[str, bytes] = field(default_factory=dict)  # Peers of add_peer, with their metadata


class NixlBackend:
    """One NIXL agent. net_devices: value for UCX_NET_DEVICES; None leaves the environment as it is."""

    def __init__(self, net_devices: str | None = None) -> None:
        self._net_devices = net_devices
        self._name = ""
        self._agent: _NixlAgent | None = None
        self._writes: dict[int, _NixlTransfer] = {}
        self._numbers = itertools.count(1)
        self._ucx_log: UcxLog | None = None

    def start(self, name: str, memory: PoolMemory) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        if self._net_devices is not None:
            os.environ["UCX_NET_DEVICES"] = self._net_devices
        if memory.kind == "VRAM":
            set_primary_context(memory.device)
        self._ucx_log = UcxLog.open()
        api = nixl_api()
        sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        config = api.nixl_agent_config(enable_prog_thread=False, sync_mode=sync, backends=["UCX"])
        try:
            nixl = api.nixl_agent(name, config)
            size = memory.total_blocks * memory.block_bytes
            registered = nixl.register_memory([(memory.base, size, memory.device, "")], memory.kind)
            blocks = nixl.prep_xfer_dlist("NIXL_INIT_AGENT", _descriptor_row(memory), memory.kind)
        except Exception as e:  # NIXL's exceptions have no common base class
            raise TransferFailed(f"NIXL agent {name} cannot start: {e}") from e
        self._name, self._agent = name, _NixlAgent(nixl, memory, registered, blocks)

    def metadata(self) -> bytes:
        return bytes(self._started.nixl.get_agent_metadata())

    def connect(self, peer: str, metadata: bytes, memory: PeerMemory) -> None:
        agent = self._started
        if (known := agent.notified_peers.get(peer)) != metadata:  # NIXL accepts an agent only once
            self.remove_peer(peer)
            self._load(peer, metadata)
            if known is not None:
                agent.notified_peers[peer] = metadata
        try:
            agent.peers[peer] = agent.nixl.prep_xfer_dlist(peer, _descriptor_row(memory), memory.kind)
        except Exception as e:
            if peer not in agent.notified_peers:
                agent.nixl.remove_remote_agent(peer)
            raise TransferFailed(f"the pool of {peer} is not in its metadata: {e}") from e

    def _load(self, peer: str, metadata: bytes) -> None:
        nixl = self._started.nixl
        try:
            loaded = nixl.add_remote_agent(metadata)
        except Exception as e:
            raise TransferFailed(f"NIXL refused the metadata of {peer}: {e}") from e
        name = loaded.decode() if isinstance(loaded, bytes) else loaded
        if name != peer:
            if name not in self._started.peers and name not in self._started.notified_peers:
                nixl.remove_remote_agent(name)
            raise TransferFailed(f"the metadata belongs to {name}, not to {peer}")

    def disconnect(self, peer: str) -> None:
        agent = self._started
        connected = agent.peers.pop(peer, None)
        if connected is None:
            return
        try:
            connected.release()
            agent.nixl.remove_remote_agent(peer)
            if peer in agent.notified_peers:  # remove_remote_agent ended notifications too
                self._load(peer, agent.notified_peers[peer])
        except Exception as e:
            agent.notified_peers.pop(peer, None)
            _log.warning("agent %s could not be removed: %s", peer, e)

    def add_peer(self, peer: str, metadata: bytes) -> None:
        agent = self._started
        if peer not in agent.peers and agent.notified_peers.get(peer) != metadata:
            self.remove_peer(peer)
            self._load(peer, metadata)
        agent.notified_peers[peer] = metadata

    def remove_peer(self, peer: str) -> None:
        agent = self._started
        if agent.notified_peers.pop(peer, None) is None or peer in agent.peers:
            return
        try:
            agent.nixl.remove_remote_agent(peer)
        except Exception as e:
            _log.warning("agent %s could not be removed: %s", peer, e)

    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], notification: bytes) -> int:
        agent, number = self._started, next(self._numbers)
        write = self._writes[number] = _NixlTransfer(None)
        known = agent.peers.get(peer)
        if known is None:
            write.state, write.error = WriteState.FAILED, f"agent {peer} is not connected"
            return number
        mine, theirs = np.asarray(local, dtype=np.int32), np.asarray(remote, dtype=np.int32)
        try:
            write.handle = agent.nixl.make_prepped_xfer("WRITE", agent.blocks, mine, known, theirs, notification)
            self._set_state(write, agent.nixl.transfer(write.handle))
        except Exception as e:
            self._set_failed(write, e)
        return number

    def notify(self, peer: str, payload: bytes) -> None:
        if peer not in self._started.peers and peer not in self._started.notified_peers:
            raise TransferFailed(f"agent {peer} is not connected")
        try:
            self._started.nixl.send_notif(peer, payload)
        except Exception as e:
            raise TransferFailed(f"{type(e).__name__}: {e}") from e

    def poll(self, handle: int) -> WriteState:
        write = self._writes[handle]
        if write.state is WriteState.PENDING:
            try:
                self._set_state(write, self._started.nixl.check_xfer_state(write.handle))
            except Exception as e:
                self._set_failed(write, e)
        return write.state

    def error(self, handle: int) -> str:
        return self._writes[handle].error

    def release(self, handle: int) -> None:
        write = self._writes.pop(handle)
        assert write.state is not WriteState.PENDING, "a pending write was released"
        if write.handle is not None:
            try:
                write.handle.release()
            except Exception as e:
                _log.warning("a terminal handle could not be released: %s", e)

    def notifications(self) -> list[Notification]:
        arrived = self._started.nixl.get_new_notifs()
        return [
            Notification(peer.decode() if isinstance(peer, bytes) else peer, bytes(payload))
            for peer, payloads in arrived.items()
            for payload in payloads
        ]

    def transport(self, peer: str, *, same_host: bool) -> Transport:
        connected = self._started.peers.get(peer)
        if self._ucx_log is not None and connected is not None:
            memory = self._started.memory
            name = self._ucx_log.transport(self._name, memory.block_bytes, memory.kind, same_host=same_host)
            if name is not None:
                return Transport(name, "reported")
        allowed = os.environ.get("UCX_TLS", "all").split(",")
        if "all" in allowed or any(tls in allowed for tls in ("cma", "shm", "sm")):
            return Transport("cma" if same_host and self._started.memory.kind == "DRAM" else "unknown", "derived")
        return Transport("tcp" if "tcp" in allowed else "unknown", "derived")

    def close(self) -> None:
        agent, self._agent = self._agent, None
        if agent is None:
            return
        if any(write.state is WriteState.PENDING for write in self._writes.values()):
            # An active handle must not be released, and its agent and buffers must outlive it: leak them on purpose.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((agent, self._writes)))
            return
        for handle in list(self._writes):
            self.release(handle)
        _let_peers_connect(agent.nixl)
        for blocks in agent.peers.values():
            blocks.release()
        for peer in {*agent.peers, *agent.notified_peers}:
            agent.nixl.remove_remote_agent(peer)
        agent.blocks.release()
        agent.nixl.deregister_memory(agent.registered)

    @property
    def _started(self) -> _NixlAgent:
        assert self._agent is not None, "the backend is not started"
        return self._agent

    def _set_state(self, write: _NixlTransfer, state: str) -> None:
        write.state = _STATES.get(state, WriteState.FAILED)
        write.error = "" if state in _STATES else f"NIXL reports {state}"

    def _set_failed(self, write: _NixlTransfer, error: Exception) -> None:
        write.state, write.error = WriteState.FAILED, f"{type(error).__name__}: {error}"
        for line in self._ucx_log.new_warnings() if self._ucx_log is not None else ():
            _log.warning("UCX: %s", line)


def _let_peers_connect(nixl: Any) -> None:
    """Accepts connections that peers began. UCX accepts only in a poll.

    Over TCP, UCX 1.21 aborts the peer's process if a connection ends unaccepted (uct_tcp_ep_pending_purge).
    """
    end = time.monotonic() + LAST_CONNECTIONS_S
    while time.monotonic() < end:
        nixl.get_new_notifs()
        time.sleep(LAST_CONNECTIONS_S / 20)


def nixl_api() -> Any:
    """Returns NIXL's Python API from the installed distribution. Raises TransferFailed.

    The CUDA-numbered packages are tried first, because the `nixl` meta package imports torch.
    """
    for module in _MODULES:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            try:
                return importlib.import_module(module)
            except ImportError as e:
                _log.warning("%s is installed but does not load: %s", module, e)
    raise TransferFailed("NIXL is not installed; install nixl-cu13")


def _descriptor_row(memory: PoolMemory | PeerMemory) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Returns a pool as one strided descriptor row, uint64 [1, 5]."""
    row = [memory.base, memory.block_bytes, memory.device, memory.block_bytes, memory.total_blocks]
    return np.array([row], dtype=np.uint64)


def set_primary_context(device: int) -> None:
    """Makes the primary CUDA context of a visible device current on this thread. Raises TransferFailed."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise TransferFailed(f"the KV pool is on a GPU, but the CUDA driver does not load: {e}") from e
    number, context = ctypes.c_int(), ctypes.c_void_p()
    calls: dict[str, tuple[Any, ...]] = {
        "cuInit": (0,),
        "cuDeviceGet": (ctypes.byref(number), device),
        "cuDevicePrimaryCtxRetain": (ctypes.byref(context), number),
        "cuCtxSetCurrent": (context,),
    }
    for name, arguments in calls.items():
        if (result := getattr(cuda, name)(*arguments)) != 0:
            raise TransferFailed(f"{name} of GPU {device} failed with CUDA error {result}")


class UcxLog:
    """The UCX log of this process as a readable file: the transport that UCX chose.

    With UCX_PROTO_INFO=y UCX prints a table per endpoint configuration. The head has the first NAME_CHARS characters of
    the agent's name and the purpose of the table, beside or below it. Tables of writes from host memory occur even
    where all our writes are from a GPU. UCX reads both settings when the library loads, so open() must run before the
    first agent of the process. A foreign UCX_LOG_FILE or UCX_PROTO_INFO is kept, and then nothing is known.
    """

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

        same_host: to peers on this host, else on other hosts. None unless all their configurations name the same one.
        """
        _flush()
        log = self._path.read_text(errors="replace")
        names = parse_transports(log, agent, block_bytes, kind, same_host=same_host)
        if len(names) == 1:
            return names.pop()
        found = (names or "nothing", kind, agent, log[-4000:])
        _log.warning("UCX names %s for writes of %s memory by %s; its tables: %s", *found)
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
