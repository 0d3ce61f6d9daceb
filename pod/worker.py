"""`baton worker`: the ranks of one machine for a tensor-parallel pod on another machine.

    starting: ranks join the pod and load --> ready: each has its part of the KV --> ended: one rank ends, then all do

The pod drives the ranks. This process owns them, answers health probes, and runs as long as its ranks. On SIGTERM it
waits for the pod, which gets the signal at the same time and has requests to finish.
"""

from __future__ import annotations

import asyncio
import logging
import os

from common.errors import ConfigError
from common.process.lifecycle import Lifecycle
from common.process.tether import tether_command
from common.process.watchdog import Watchdog
from common.rpc import RpcServer
from common.settings.pod import WorkerConfig
from common.tls import TlsFiles
from engine.parallel.rank_group import SECRET_VARIABLE, STOP_S
from pod.rank import rank_command

_log = logging.getLogger(__name__)

EXIT_BROKEN = 4


class Worker:
    """The ranks of this machine."""

    def __init__(self, config: WorkerConfig) -> None:
        if config.tensor_parallel_node == 0:
            raise ConfigError("tensor_parallel_node: 0 is the pod's own machine", field="tensor_parallel_node")
        self._config = config
        self._server = RpcServer(config.host, config.port, tls=TlsFiles.of_directory(config.tls_dir, "worker"))
        self._lifecycle = Lifecycle(self._wait_for_pod, drain_s=config.drain_s)
        self._over = asyncio.Event()
        self._watchdog = Watchdog(config.stuck_step_s)

    async def run(self) -> None:
        """Runs until a rank has ended. Raises SystemExit if it ended without a signal to this process."""
        self._lifecycle.install_signals()
        await self._server.start()
        self._watchdog.watch_event_loop()
        self._watchdog.start()
        ranks = [await self._start(rank) for rank in self._config.ranks]
        fds = [fd for _, fd in ranks]
        ready = asyncio.create_task(self._ready(fds))
        waits = [asyncio.create_task(process.wait()) for process, _ in ranks]
        ends = dict(zip(waits, self._config.ranks, strict=True))
        stopped = asyncio.create_task(self._lifecycle.wait_stopped())
        try:
            await asyncio.wait({*ends, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for task, rank in ends.items():
                if task.done():
                    _log.info("rank %d has ended with exit code %d", rank, task.result())
            self._server.set_serving(False)
            if not stopped.done():  # rank 0 ends the other ranks
                await asyncio.wait(ends, timeout=STOP_S)
        finally:
            ready.cancel()
            for process, _ in ranks:
                if process.returncode is None:
                    process.kill()
            await asyncio.gather(ready, *ends, return_exceptions=True)
            self._over.set()
            self._watchdog.stop()
            await self._server.stop(0)
        if not self._lifecycle.draining and any(process.returncode for process, _ in ranks):
            raise SystemExit(EXIT_BROKEN)

    async def _start(self, rank: int) -> tuple[asyncio.subprocess.Process, int]:
        """Starts a rank, which ends with this process. Returns it, and the file that gets a byte when it is ready."""
        config = self._config
        reads, writes = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *tether_command(rank_command(config, rank, config.tensor_parallel_master, writes)),
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, SECRET_VARIABLE: config.secret},
                start_new_session=True,
                pass_fds=(writes,),
            )
        finally:
            os.close(writes)
        return process, reads

    async def _ready(self, fds: list[int]) -> None:
        """Makes health report SERVING once every rank is ready."""
        ready = await asyncio.gather(*(_first_byte(fd) for fd in fds))
        if all(ready) and not self._lifecycle.draining:
            _log.info("ranks %s are ready", list(self._config.ranks))
            self._lifecycle.ready()
            self._server.set_serving(True)

    async def _wait_for_pod(self) -> None:
        """Waits until the ranks have ended with the pod."""
        self._server.set_serving(False)
        await self._over.wait()


async def _first_byte(fd: int) -> bool:
    """Returns whether a byte arrived before the end of the file."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
        return bool(os.read(fd, 1))
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def serve(config: WorkerConfig) -> None:
    """Runs until the pod ends. Raises ConfigError, and SystemExit if a rank was lost."""
    await Worker(config).run()
