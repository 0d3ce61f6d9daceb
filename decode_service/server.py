"""The decode pod's process (and the aggregated pod's): builds the pod, serves until it is told to leave."""

from __future__ import annotations

from common.settings.configs import PodConfig
from common.types import Role
from decode_service.servicer import DecodeServicer
from pod.runtime import PodRuntime


async def serve(config: PodConfig) -> None:
    """Runs until SIGTERM and the drain after it. Raises ConfigError; SystemExit, see PodRuntime.run."""
    if config.role is Role.PREFILL:
        raise ValueError("decode_service serves the roles decode and both, not prefill")
    pod = await PodRuntime.create(config)
    await pod.run(DecodeServicer(pod))
