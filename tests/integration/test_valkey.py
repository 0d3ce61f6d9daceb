"""The embedded Valkey: starts, stops, ends with its killed parent, and does not take another server for its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from common.errors import Unavailable
from common.index_store import connect
from common.valkey import EmbeddedValkey

ROOT = Path(__file__).parents[2]


async def test_it_answers_until_it_is_stopped(tmp_path: Path) -> None:
    valkey = EmbeddedValkey(0, tmp_path / "new" / "directory")
    url = await valkey.start()
    pid = valkey.pid
    assert pid is not None
    async with connect(url, timeout_s=5.0) as client:
        assert await client.ping()
    await valkey.stop()
    await valkey.stop()
    assert valkey.pid is None
    assert not psutil.pid_exists(pid)


async def test_a_taken_port_is_an_error_and_the_other_server_is_left_alone(tmp_path: Path) -> None:
    first = EmbeddedValkey(0, tmp_path / "a")
    url = await first.start()
    try:
        port = int(url.split(":")[-1].split("/")[0])
        with pytest.raises(Unavailable):
            await EmbeddedValkey(port, tmp_path / "b").start()
        async with connect(url, timeout_s=5.0) as client:
            assert await client.ping()
    finally:
        await first.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_it_ends_with_its_killed_parent(tmp_path: Path) -> None:
    code = f"""
import asyncio
from pathlib import Path
from common.valkey import EmbeddedValkey
async def main():
    valkey = EmbeddedValkey(0, Path({str(tmp_path)!r}))
    await valkey.start()
    print(valkey.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    server = psutil.Process(int(parent.stdout.readline()))
    assert "valkey" in server.name()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([server], timeout=10)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
