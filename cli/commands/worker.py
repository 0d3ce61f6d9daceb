"""`baton worker`: adds this machine's devices to a pod of another machine."""

from __future__ import annotations

from typing import Any

from cli import service
from cli.options import Config, load, takes_settings
from common.settings.configs import WorkerConfig


@takes_settings(WorkerConfig)
def worker(flags: dict[str, Any], config: Config = None) -> None:
    """Adds this machine's devices to a pod of another machine.

    For tensor parallelism over several machines.
    """
    service.run(load(WorkerConfig, config, flags), _serve)


async def _serve(settings: WorkerConfig) -> None:
    from pod.worker import serve

    await serve(settings)
