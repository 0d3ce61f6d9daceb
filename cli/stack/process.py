"""A child process that dies with this process and logs to a file; and leases of the ports for children.

After its end, a child can be started again with the same name, command and port; its log is appended to.
"""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from common.errors import ConfigError
from common.process.tether import tether_command


class PortLease:
    """A loopback TCP port reserved for children of this process, until close().

    The port is bound here without listening. The kernel then never assigns it as a free port, but a server that sets
    SO_REUSEADDR (gRPC, uvicorn, Valkey) can bind and listen on it repeatedly. Another lease of the same fixed port
    could bind it too. An abstract socket name per port excludes that; the kernel frees it with its process.
    """

    def __init__(self, port: int = 0, *, field: str = "port") -> None:
        """Port 0 is any free one. Raises ConfigError (for the setting `field`) if the port is in use."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._name: socket.socket | None = None
        self.port = port
        try:
            # Connections of a former server in TIME_WAIT must not block a fixed port; only a listener does.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port != 0))
            self._socket.bind(("127.0.0.1", port))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.port = self._socket.getsockname()[1]
            if sys.platform == "linux":  # abstract socket names are per network namespace, like ports
                self._name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._name.bind(f"\0baton-port-{self.port}")
        except OSError as error:
            self.close()
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            raise ConfigError(f"{field}: {self.port} {why}", field=field) from error

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        """Frees the port. Idempotent."""
        if self._name is not None:
            self._name.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ChildProcess:
    """A command with a stable name. It has a session of its own, so a terminal's Ctrl-C reaches only the parent.

    The child dies with the thread that started it (prctl(2), PR_SET_PDEATHSIG): start it from a long-lived thread.
    """

    def __init__(self, name: str, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> None:
        """argv[0] is an absolute path; env is the whole environment (None: inherited); log gets stdout and stderr."""
        self.name = name
        self.argv = tuple(argv)
        self.log = log
        self.env = None if env is None else dict(env)
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process; it must not be running."""
        assert not self.alive, f"{self.name} is running"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._popen = subprocess.Popen(
                tether_command(self.argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        return self._popen.pid if self._popen else None

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def exit_code(self) -> int | None:
        """None before the first start and while the process runs; -9 after SIGKILL."""
        return self._popen.poll() if self._popen else None

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; has no effect if the process is not running."""
        if self._popen is not None:
            self._popen.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """Waits for the exit code. Raises subprocess.TimeoutExpired after timeout_s."""
        assert self._popen is not None
        return self._popen.wait(timeout_s)

    def kill(self, timeout_s: float = 10.0) -> None:
        """Sends SIGKILL and waits for the end."""
        self.send(signal.SIGKILL)
        if self._popen is not None:
            self._popen.wait(timeout_s)

    def tail(self, lines: int = 12) -> list[str]:
        """The last lines of the log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 65536))
                return [line.decode(errors="replace").rstrip() for line in deque(file, maxlen=lines)]
        except FileNotFoundError:
            return []
