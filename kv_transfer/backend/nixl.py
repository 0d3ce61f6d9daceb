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
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.errors import TransferFailed, describe, first_line
from common.kv_slices import BlockSpan
from kv_transfer.backend.interface import Notification, Transport, WriteState
from kv_transfer.backend.ucx_log import UcxLog
from kv_transfer.memory import PeerMemory, PoolMemory, whole_checksums

_log = logging.getLogger(__name__)

_MODULES = ("nixl_cu13._api", "nixl_cu12._api", "nixl._api")
#: Status of NIXL -> its meaning.
_STATUS_WORDS = {
    "NIXL_ERR_REMOTE_DISCONNECT": "the peer ended the connection",
    "NIXL_ERR_BACKEND": "the transport failed",
    "NIXL_ERR_CANCELED": "the transport was cancelled",
    "NIXL_ERR_NOT_FOUND": "NIXL does not know the peer",
    "NIXL_ERR_NOT_ALLOWED": "NIXL does not allow it",
    "NIXL_ERR_INVALID_PARAM": "NIXL refuses the arguments",
    "NIXL_ERR_MISMATCH": "the memory is not registered",
}
_STATES = {"DONE": WriteState.DONE, "PROC": WriteState.PENDING}
LAST_CONNECTIONS_S = 0.05  #: Wait of `close` for connections that begin; one takes some milliseconds.
#: A TCP connection ends when the peer's kernel acknowledges nothing for this long. Linux waits 15 minutes for data on a
#: connection that a firewall dropped, and a connection cannot be made again while a write to the peer is pending.
TCP_SILENCE_S = 10


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
    #: Block lists of this pod and of the peer, which belong together, of each connected peer.
    peers: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    spans: dict[tuple[int, int], Any] = field(default_factory=dict)  #: Lists of parts of this pod's blocks.
    notified_peers: dict[str, bytes] = field(default_factory=dict)  #: Peers of add_peer, with their metadata.
    loaded: dict[str, bytes] = field(default_factory=dict)  #: Peers that NIXL knows, with the metadata it got.


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
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # it writes text to stderr; its failures are exceptions here
        if self._net_devices is not None:
            os.environ["UCX_NET_DEVICES"] = self._net_devices
        if memory.kind == "VRAM":
            set_primary_context(memory.device)
        os.environ.setdefault("UCX_TCP_USER_TIMEOUT", f"{TCP_SILENCE_S}s")
        self._ucx_log = UcxLog.open()
        try:
            nixl, registered, blocks = self._make_agent(name, memory)
        except TransferFailed:
            self._close_log()
            raise
        self._name, self._agent = name, _NixlAgent(nixl, memory, registered, blocks)

    def _make_agent(self, name: str, memory: PoolMemory) -> tuple[Any, Any, Any]:
        """Returns an agent, its registered pool and the list of its blocks. Raises TransferFailed."""
        api = nixl_api()
        sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        config = api.nixl_agent_config(enable_prog_thread=False, sync_mode=sync, backends=["UCX"])
        try:
            nixl = api.nixl_agent(name, config)
            size = memory.total_blocks * memory.block_bytes
            registered = nixl.register_memory([(memory.base, size, memory.device, "")], memory.kind)
            blocks = nixl.prep_xfer_dlist("NIXL_INIT_AGENT", _descriptor_row(memory), memory.kind)
        except Exception as e:  # NIXL's exceptions have no common base class
            more = "; NIXL says more with NIXL_LOG_LEVEL=WARN"
            raise TransferFailed(f"NIXL agent {name} cannot start: {_reason(e)}{more}") from e
        return nixl, registered, blocks

    def metadata(self) -> bytes:
        return bytes(self._started.nixl.get_agent_metadata())

    def connect(self, peer: str, metadata: bytes, memory: PeerMemory, span: BlockSpan | None = None) -> None:
        agent = self._started
        self._load(peer, metadata)
        if peer in agent.notified_peers:
            agent.notified_peers[peer] = metadata
        try:
            row = _descriptor_row(memory) if span is None else _descriptor_row(memory, span.target, span.nbytes)
            agent.peers[peer] = self._blocks_of(span), agent.nixl.prep_xfer_dlist(peer, row, memory.kind)
        except Exception as e:
            if peer not in agent.notified_peers:
                self._unload(peer)
            raise TransferFailed(f"the pool of {peer} is not in its metadata: {_reason(e)}") from e

    def _blocks_of(self, span: BlockSpan | None) -> Any:
        """Returns the list of this pod's blocks, or of their parts."""
        agent = self._started
        if span is None:
            return agent.blocks
        part = span.source, span.nbytes
        if part not in agent.spans:
            row = _descriptor_row(agent.memory, *part)
            agent.spans[part] = agent.nixl.prep_xfer_dlist("NIXL_INIT_AGENT", row, agent.memory.kind)
        return agent.spans[part]

    def _load(self, peer: str, metadata: bytes) -> None:
        """Makes NIXL know the peer. NIXL accepts an agent only once, so other metadata replaces the former."""
        agent = self._started
        if agent.loaded.get(peer) == metadata:
            return
        self._unload(peer)
        try:
            loaded = agent.nixl.add_remote_agent(metadata)
        except Exception as e:
            self._log_warnings()
            raise TransferFailed(f"NIXL refused the metadata of {peer}: {_reason(e)}") from e
        name = loaded.decode() if isinstance(loaded, bytes) else loaded
        if name != peer:
            if name not in agent.loaded:
                agent.nixl.remove_remote_agent(name)
            raise TransferFailed(f"the metadata belongs to {name}, not to {peer}")
        agent.loaded[peer] = metadata

    def _unload(self, peer: str) -> None:
        """Makes NIXL forget the peer, with its connection."""
        agent = self._started
        if agent.loaded.pop(peer, None) is None:
            return
        try:
            agent.nixl.remove_remote_agent(peer)
        except Exception as e:
            _log.warning("agent %s could not be removed: %s", peer, _reason(e))

    def disconnect(self, peer: str) -> None:
        agent = self._started
        connected = agent.peers.pop(peer, None)
        if connected is None:
            return
        try:
            connected[1].release()
        except Exception as e:
            _log.warning("the blocks of agent %s could not be released: %s", peer, _reason(e))
        self._unload(peer)  # `notify` loads it again: the peer may be dead, and NIXL reports a dead peer's metadata

    def add_peer(self, peer: str, metadata: bytes) -> None:
        agent = self._started
        if peer not in agent.peers:
            self._load(peer, metadata)
        agent.notified_peers[peer] = metadata

    def remove_peer(self, peer: str) -> None:
        agent = self._started
        if agent.notified_peers.pop(peer, None) is not None and peer not in agent.peers:
            self._unload(peer)

    def staging_metadata(self) -> bytes:
        return b""

    def connect_staged(self, peer: str, metadata: bytes) -> None:
        raise TransferFailed("this pod does not stage KV in host memory")

    def accept_staged(self, peer: str, metadata: bytes) -> None:
        raise TransferFailed("this pod does not stage KV in host memory")

    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], notification: bytes) -> int:
        agent, number = self._started, next(self._numbers)
        write = self._writes[number] = _NixlTransfer(None)
        known = agent.peers.get(peer)
        if known is None:
            write.state, write.error = WriteState.FAILED, f"agent {peer} is not connected"
            return number
        mine, theirs = np.asarray(local, dtype=np.int32), np.asarray(remote, dtype=np.int32)
        try:
            write.handle = agent.nixl.make_prepped_xfer("WRITE", known[0], mine, known[1], theirs, notification)
            self._set_state(write, agent.nixl.transfer(write.handle))
        except Exception as e:
            self._set_failed(write, e)
        return number

    def notify(self, peer: str, payload: bytes) -> None:
        agent = self._started
        if peer in agent.notified_peers and peer not in agent.peers:
            self._load(peer, agent.notified_peers[peer])
        if peer not in agent.loaded:
            raise TransferFailed(f"agent {peer} is not connected")
        try:
            agent.nixl.send_notif(peer, payload)
        except Exception as e:
            raise TransferFailed(_reason(e)) from e

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
                _log.warning("a terminal handle could not be released: %s", _reason(e))

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        return whole_checksums(self._started.memory, blocks)

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
        try:
            self._close_agent(agent)
        finally:
            self._close_log()

    def _close_agent(self, agent: _NixlAgent) -> None:
        if any(write.state is WriteState.PENDING for write in self._writes.values()):
            # An active handle must not be released, and its agent and buffers must outlive it: leak them on purpose.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((agent, self._writes)))
            return
        for handle in list(self._writes):
            self.release(handle)
        _let_peers_connect(agent.nixl)
        for blocks in (*(theirs for _, theirs in agent.peers.values()), *agent.spans.values()):
            blocks.release()
        for peer in agent.loaded:
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
        write.state, write.error = WriteState.FAILED, _reason(error)
        self._log_warnings()

    def _log_warnings(self) -> None:
        if self._ucx_log is not None:
            self._ucx_log.report()

    def _close_log(self) -> None:
        ucx_log, self._ucx_log = self._ucx_log, None
        if ucx_log is not None:
            ucx_log.close()


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
                _log.warning("%s is installed but does not load: %s", module, describe(e))
    raise TransferFailed("NIXL is not installed; install nixl-cu13")


def _reason(error: Exception) -> str:
    """Returns why NIXL failed, in words, with its status."""
    text = first_line(error)
    words = next((words for status, words in _STATUS_WORDS.items() if status in text), "")
    return f"{words} ({text})" if words else f"NIXL reports {text}" if text else describe(error)


def _descriptor_row(
    memory: PoolMemory | PeerMemory, offset: int = 0, nbytes: int | None = None
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Returns a pool, or `nbytes` from `offset` of each block, as one strided descriptor row, uint64 [1, 5]."""
    size = memory.block_bytes if nbytes is None else nbytes
    row = [memory.base + offset, size, memory.device, memory.block_bytes, memory.total_blocks]
    return np.array([row], dtype=np.uint64)


def set_primary_context(device: int) -> None:
    """Makes the primary CUDA context of a visible device current on this thread. Raises TransferFailed."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise TransferFailed(f"the KV pool is on a GPU, but the CUDA driver does not load: {describe(e)}") from e
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
