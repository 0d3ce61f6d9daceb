"""Starts `baton` processes quickly: a fork server imports their code once, and each process is a fork of it.

    harness --> fork server (imports once) --fork--> prefill-0, decode-0, ...

A new Python process imports torch for seconds. Two cores have no time for that, because seven processes die and start
again and again. A forked process has its own pid, session, environment and log, and runs the command as `python -m cli`
does. All forked processes end with the fork server. The fork server ends with the thread that started it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cli.stack.supervisor import ChildProcess
from common.process.tether import PR_SET_PDEATHSIG, tether_command

REPLY_S = 120.0  #: Longest wait for an answer of a fork server. The first answer waits for its imports.
POLL_S = 0.01  #: Pause between two looks whether a process has ended.


class ForkServer:
    """A process that imports `modules` and forks. Calls block; any thread may make them."""

    def __init__(self, modules: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(REPLY_S)
        command = [sys.executable, "-P", "-m", "tests.rigs.chaos.fork_server", str(theirs.fileno()), *modules]
        root = str(Path(__file__).resolve().parents[3])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": root}
        self._process = subprocess.Popen(tether_command(command), env=env, pass_fds=[theirs.fileno()])
        theirs.close()
        self._socket, self._stream, self._lock = ours, ours.makefile("rw"), threading.Lock()

    def ask(self, **message: Any) -> Any:
        """Sends a command to the process and returns the answer. See `serve`."""
        with self._lock:
            self._stream.write(json.dumps(message) + "\n")
            self._stream.flush()
            line = self._stream.readline()
        assert line, "the fork server has ended"
        return json.loads(line)

    def close(self) -> None:
        """Kills the fork server. All its processes end with it."""
        self._process.kill()
        self._process.wait()
        self._stream.close()
        self._socket.close()


class ForkedProcess(ChildProcess):
    """A ChildProcess that a fork server starts. In `argv` the words behind "cli" are the command."""

    def __init__(
        self, server: ForkServer, name: str, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None
    ) -> None:
        super().__init__(name, argv, log=log, env=env)
        self._server = server
        self._pid: int | None = None
        self._code: int | None = None

    def start(self) -> None:
        assert not self.alive, f"{self.name} is running"
        words = self.argv[self.argv.index("cli") + 1 :]
        self._pid = self._server.ask(do="fork", argv=words, env=self.env, log=str(self.log))
        self._code = None

    @property
    def pid(self) -> int | None:
        return self._pid

    @property
    def alive(self) -> bool:
        return self._pid is not None and self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        if self._code is None and self._pid is not None:
            self._code = self._server.ask(do="poll", pid=self._pid)
        return self._code

    def send(self, number: signal.Signals) -> None:
        if self._pid is not None and self.alive:  # the pid of a process that ended after this check is still reserved
            os.kill(self._pid, number)

    def wait(self, timeout_s: float) -> int:
        assert self._pid is not None
        end = time.monotonic() + timeout_s
        while (code := self.exit_code) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(list(self.argv), timeout_s)
            time.sleep(POLL_S)
        return code

    def kill(self, timeout_s: float = 10.0) -> None:
        self.send(signal.SIGKILL)
        if self._pid is not None:
            self.wait(timeout_s)


def _run(message: dict[str, Any], server: int) -> NoReturn:
    """Makes this fork the process of a command: with its session, log, environment and death signal."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != server:
            os._exit(1)
        os.setsid()
        log = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.closerange(3, 1024)  # the fork server's socket too
        if message["env"] is not None:
            os.environ.clear()
            os.environ.update(message["env"])
        sys.argv = ["baton", *message["argv"]]
        from cli import main

        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve(fd: int, modules: Sequence[str]) -> None:
    """Runs in the fork server. Answers the commands that come as JSON lines over the socket `fd`, until it closes.

    {"do": "fork", "argv", "env", "log"}    starts a process; the answer is its pid
    {"do": "poll", "pid"}                   the answer is the process's exit code, null while it runs
    """
    for module in modules:
        importlib.import_module(module)
    pid, ends = os.getpid(), dict[int, int]()
    with socket.socket(fileno=fd) as connection, connection.makefile("rw") as stream:
        for line in stream:
            message = json.loads(line)
            answer: int | None
            if message["do"] == "fork":
                answer = os.fork()
                if not answer:
                    _run(message, pid)
                ends.pop(answer, None)  # the kernel gives a pid again after some time
            else:
                child = message["pid"]
                if child not in ends:
                    found, status = os.waitpid(child, os.WNOHANG)
                    if found:
                        ends[child] = os.waitstatus_to_exitcode(status)
                answer = ends.get(child)
            stream.write(json.dumps(answer) + "\n")
            stream.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
