"""The embedded Valkey: start, stop, death with its parent, and ports that other servers use."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from redis.exceptions import AuthenticationError

from cli.probes import redis_ready
from cli.stack import valkey as valkey_module
from cli.stack.valkey import EmbeddedValkey
from common.errors import Unavailable
from common.redis.client import connect_redis
from common.redis.url import RedisUrl

ROOT = Path(__file__).parents[2]


async def test_the_server_answers_until_stop(tmp_path: Path) -> None:
    valkey = EmbeddedValkey(0, tmp_path / "new" / "directory")
    url = await valkey.start()
    pid = valkey.pid
    assert pid is not None
    async with connect_redis(url, timeout_s=5.0) as client:
        assert await client.ping()
    await valkey.stop()
    await valkey.stop()
    assert valkey.pid is None
    assert not psutil.pid_exists(pid)


async def test_the_server_needs_a_password_that_is_in_no_command_line(tmp_path: Path) -> None:
    valkey = EmbeddedValkey(0, tmp_path)
    url = await valkey.start()
    try:
        password, address = RedisUrl.parse(url).password, str(RedisUrl.parse(url))
        assert password
        assert len(password) >= 32
        assert valkey.pid is not None
        assert not any(password in word for word in psutil.Process(valkey.pid).cmdline())
        assert stat.S_IMODE((tmp_path / valkey_module.CONFIG_FILE).stat().st_mode) == 0o600
        for wrong in (address, address.replace("redis://", "redis://:guess@")):
            async with connect_redis(wrong, timeout_s=5.0) as client:
                with pytest.raises(AuthenticationError):
                    await client.ping()
        port = RedisUrl.parse(url).nodes[0][1]
        assert await redis_ready("127.0.0.1", port, password)
        assert not await redis_ready("127.0.0.1", port, "guess")
    finally:
        await valkey.stop()


async def test_a_port_in_use_is_an_error_and_the_other_server_keeps_running(tmp_path: Path) -> None:
    first = EmbeddedValkey(0, tmp_path / "a")
    url = await first.start()
    try:
        port = int(url.split(":")[-1].split("/")[0])
        with pytest.raises(Unavailable):
            await EmbeddedValkey(port, tmp_path / "b").start()
        async with connect_redis(url, timeout_s=5.0) as client:
            assert await client.ping()
    finally:
        await first.stop()


async def test_a_free_port_that_another_process_takes_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def chat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x00\x12\x04")  # as an HTTP/2 server greets
        await reader.read()
        writer.close()

    other = await asyncio.start_server(chat, "127.0.0.1", 0)
    async with other:
        taken = other.sockets[0].getsockname()[1]
        free = valkey_module._free_port()
        picks = iter([taken, free])
        monkeypatch.setattr(valkey_module, "_free_port", lambda: next(picks))
        valkey = EmbeddedValkey(0, tmp_path)
        try:
            assert str(RedisUrl.parse(await valkey.start())) == f"redis://127.0.0.1:{free}"
        finally:
            await valkey.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_the_server_dies_with_its_parent(tmp_path: Path) -> None:
    code = f"""
import asyncio
from pathlib import Path
from cli.stack.valkey import EmbeddedValkey
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
    psutil.wait_procs([server], timeout=60)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
