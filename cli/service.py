"""Runs a pod, a worker or the gateway in this process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from cli import exits
from cli.gpus import run_on
from common.settings.configs import GatewayConfig, PodConfig, WorkerConfig

_Settings = TypeVar("_Settings", PodConfig, WorkerConfig, GatewayConfig)


def run(settings: _Settings, serve: Callable[[_Settings], Coroutine[Any, Any, None]]) -> NoReturn:
    """Runs `serve(settings)`, then ends the process. `serve` imports the service's code."""
    # These handlers hold until Lifecycle installs its own. Without them, a container's first process ignores SIGTERM,
    # torch's import of NumPy swallows KeyboardInterrupt, and Ctrl-C waits for a model that is being loaded.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, exits.at_once)
    from common.logs import setup_logs

    setup_logs(settings.log_level, settings.log_format)
    if not isinstance(settings, GatewayConfig) and settings.cpus is not None:
        run_on(settings.cpus)
    code: int | str | None = 0
    try:
        with asyncio.Runner(loop_factory=fast_loop() if isinstance(settings, GatewayConfig) else None) as runner:
            runner.run(serve(settings))
    except SystemExit as end:
        code = end.code
    _end(code if isinstance(code, int) else exits.FAILED)


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop, which handles sockets in a third of the time; None if it is not installed (Windows)."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _end(code: int) -> NoReturn:
    """Exits at once, after everything is freed: the exit handlers of torch and NIXL take seconds."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
