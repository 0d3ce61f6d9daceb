"""Transports parsed from UCX's log, in each layout of its tables."""

from __future__ import annotations

import pytest

from kv_transfer.backend.nixl import parse_transports
from kv_transfer.memory import MemoryKind

LINE = "[1795874705.979111] [vm:20451:0]   "
BELOW = """\
+--------+-------------+-----------------------------------+
| agent-1 intra-node cfg#1                                 |
| remote memory write by ucp_put* from host memory to host |
+--------+-------------+-----------------------------------+
| Range  | Description |              Config               |
+--------+-------------+-----------------------------------+
| 0..inf | zero-copy   | cma/memory                        |
+--------+-------------+-----------------------------------+
| agent-1 intra-node cfg#1                         |
| active message by ucp_am_send* from host memory  |
+------------+--------------------+----------------+
|          0 | short              | tcp/lo         |
|   1..16515 | zero-copy          | tcp/lo         |
"""
BESIDE = """\
+---------------------------+-------------------------------------------------------------------------+
| agent-1 intra-node cfg#2  | remote memory write by ucp_put*(fast-completion) from host memory to cuda/dev[0] |
+---------------------------+------------------------------------+------------------------------------+
|                    0..inf | software emulation                 | tcp/eth0                           |
+---------------------------+------------------------------------+------------------------------------+
| agent-1 intra-node cfg#2  | remote memory write by ucp_put* from cuda/GPU0 to cuda/dev[0]           |
+---------------------------+------------------------------------+------------------------------------+
|                    0..inf | zero-copy                          | cuda_ipc/cuda                      |
+---------------------------+------------------------------------+------------------------------------+
| agent-1 intra-node cfg#2  | remote memory read by ucp_get* into cuda/GPU0 from cuda/dev[0]          |
|                    0..inf | zero-copy                          | gdr_copy/cuda                      |
"""
RAILS = """\
| agent-1 inter-node cfg#3  | remote memory write by ucp_put*(multi) from cuda/GPU0 to cuda           |
|                     0..2K | short                              | tcp/eth0                           |
|                 2049..inf | zero-copy                          | rc_mlx5/mlx5_0:1 50% on path0 and 50% on path1 |
"""


@pytest.mark.parametrize(
    ("log", "kind", "same_host", "found"),
    [
        (BELOW, "DRAM", True, {"cma"}),
        (BELOW, "VRAM", True, set()),
        (BESIDE, "VRAM", True, {"cuda_ipc"}),
        (BESIDE, "DRAM", True, {"tcp"}),
        (BELOW + BESIDE, "VRAM", True, {"cuda_ipc"}),
        (BELOW + BESIDE, "DRAM", True, {"cma", "tcp"}),
        (BESIDE + RAILS, "VRAM", False, {"rdma"}),
        (BESIDE + RAILS, "VRAM", True, {"cuda_ipc"}),
    ],
)
def test_the_transport_of_writes_from_each_kind_of_memory(
    log: str, kind: MemoryKind, same_host: bool, found: set[str]
) -> None:
    lines = "".join(f"{LINE}{line}\n" for line in log.splitlines())
    assert parse_transports(lines, "agent-1", 2 << 20, kind, same_host=same_host) == found
    assert parse_transports(lines, "agent-12", 2 << 20, kind, same_host=same_host) == set()
    cut = lines.replace("agent-1 ", "prefill-a-name-with-more-letter ")
    whole = "prefill-a-name-with-more-letters-1795875125505"
    assert parse_transports(cut, whole, 2 << 20, kind, same_host=same_host) == found
