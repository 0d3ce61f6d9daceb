"""One child process: started tethered to us, logged to a file, ended by us; and the ports it may listen on.

A process can be started again under the same name, command and port after it ended; its log is appended to.
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
from types import TracebackType
from typing import Self

from common.errors import ConfigError
from common.process.tether import tether_command


class PortLease:
    """A loopback TCP port kept for our children: bound here but never listened on, and leased by nobody else.

    The kernel gives a port bound this way to nobody who asks for any free one, while a server that sets SO_REUSEADDR
    (gRPC, uvicorn, Valkey all do) may bind and listen on it, again and again. So may another lease of a fixed port:
    what keeps leases apart is a name of their own, which the kernel frees with its holder. Close it to give the port
    up.
    """

    def __init__(self, port: int = 0, *, field: str = "port") -> None:
        """port 0 takes any free one; ConfigError, naming the setting `field`, when the given one is in use."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._name: socket.socket | None = None
        self.port = port
        try:
            # A fixed port may still have connections of a former server in TIME_WAIT: only a listener is in the way.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port != 0))
            self._socket.bind(("127.0.0.1", port))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.port = self._socket.getsockname()[1]
            if sys.platform == "linux":  # abstract socket names belong to the network namespace, as ports do
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
        """Gives the port up; idempotent."""
        if self._name is not None:
            self._name.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ChildProcess:
    """A command under a stable name. Its own session, so that a terminal's Ctrl-C reaches only the parent.

    Start it from a thread that outlives it: the tie is to the thread (see prctl(2), PR_SET_PDEATHSIG).
    """

    def __init__(self, name: str, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> None:
        """argv[0] is an absolute path; env is the whole environment (None: ours); log gets stdout and stderr."""
        self.name = name
        self.argv = tuple(argv)
        self.log = log
        self.env = None if env is None else dict(env)
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it; a process of this name must not be running."""
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
        """None while it runs or before its first start; -9 after SIGKILL."""
        return self._popen.poll() if self._popen else None

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; nothing happens when it is not running."""
        if self._popen is not None:
            self._popen.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """Exit code; subprocess.TimeoutExpired when it still runs after timeout_s."""
        assert self._popen is not None
        return self._popen.wait(timeout_s)

    def kill(self, timeout_s: float = 10.0) -> None:
        """SIGKILL, and waits until it is gone."""
        self.send(signal.SIGKILL)
        if self._popen is not None:
            self._popen.wait(timeout_s)

    def tail(self, lines: int = 12) -> list[str]:
        """The last lines of its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 65536))
                return [line.decode(errors="replace").rstrip() for line in deque(file, maxlen=lines)]
        except FileNotFoundError:
            return []
