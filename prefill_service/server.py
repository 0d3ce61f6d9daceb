"""The prefill pod's process: builds the pod, serves until it is told to leave."""

from __future__ import annotations

from common.settings.configs import PodConfig
from common.types import Role
from pod.runtime import PodRuntime
from prefill_service.servicer import PrefillServicer


async def serve(config: PodConfig) -> None:
    """Runs until SIGTERM and the drain after it. Raises ConfigError; SystemExit, see PodRuntime.run."""
    if config.role is not Role.PREFILL:
        raise ValueError(f"prefill_service serves role prefill, not {config.role}")
    pod = await PodRuntime.create(config)
    await pod.run(PrefillServicer(pod))
