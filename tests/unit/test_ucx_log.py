"""UCX's log: transports in each layout of its tables, and its warnings as log lines of the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from kv_transfer.backend import ucx_log
from kv_transfer.backend.ucx_log import UcxLog, parse_transports
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


WARNING = "[1764459900.123456] [vm:4242 :0]        tcp_ep.c:1234 UCX  WARN  ep 0x1: the peer is silent\n"
ERROR = "[1764459900.123457] [vm:4242 :a]         ucp_ep.c:99   UCX  ERROR failed to create ep\n"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[UcxLog, int]]:
    """The log of a process, and the file that UCX would write to."""
    monkeypatch.delenv("UCX_LOG_FILE", raising=False)
    monkeypatch.setattr(ucx_log, "REPORT_S", 3600.0)
    opened = UcxLog.open()
    assert opened is not None
    file = os.open(os.environ["UCX_LOG_FILE"], os.O_WRONLY)
    yield opened, file
    opened.close()
    os.close(file)


def test_warnings_of_ucx_become_log_lines_once(log: tuple[UcxLog, int], caplog: pytest.LogCaptureFixture) -> None:
    opened, file = log
    os.write(file, f"{LINE}{BELOW.splitlines()[1]}\n{WARNING}{ERROR}{WARNING[:60]}".encode())
    opened.report()
    opened.report()
    assert [(r.name, r.levelname, r.getMessage(), r.source) for r in caplog.records] == [  # type: ignore[attr-defined]
        ("ucx", "WARNING", "UCX: ep 0x1: the peer is silent", "tcp_ep.c:1234"),
        ("ucx", "ERROR", "UCX: failed to create ep", "ucp_ep.c:99"),
    ]
    os.write(file, WARNING[60:].encode())
    opened.close()
    assert len(caplog.records) == 3, (
        "a line that was incomplete is reported when it is complete, at the latest at the end"
    )
    other = UcxLog.open()
    assert other is not None
    other.close()
    assert len(caplog.records) == 3, "the next agent of the process does not report the lines again"


def test_a_storm_of_warnings_is_counted_and_its_memory_is_freed(
    log: tuple[UcxLog, int], caplog: pytest.LogCaptureFixture
) -> None:
    opened, file = log
    lines = 2 * ucx_log.MAX_BYTES // len(ERROR)
    for _ in range(3):
        os.write(file, (ERROR * lines).encode())
        caplog.clear()
        opened.report()
        assert len(caplog.records) == ucx_log.MAX_LINES + 1
        assert "more messages" in caplog.records[-1].getMessage()
        assert os.fstat(file).st_blocks * 512 <= ucx_log.MAX_BYTES
    os.write(file, "".join(f"{LINE}{line}\n" for line in BELOW.splitlines()).encode())
    assert opened.transport("agent-1", 2 << 20, "DRAM", same_host=True) == "cma"


def test_a_foreign_log_file_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_LOG_FILE", "/tmp/ucx.log")
    assert UcxLog.open() is None
    assert os.environ["UCX_LOG_FILE"] == "/tmp/ucx.log"


def test_the_reader_ends_with_its_agent(log: tuple[UcxLog, int]) -> None:
    opened, _ = log
    opened.close()
    opened.close()
    assert "ucx-log" not in {thread.name for thread in threading.enumerate()}
