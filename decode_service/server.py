"""Process of a decode pod or an aggregated pod: builds the pod and serves until a signal ends it."""

from __future__ import annotations

from common.settings.configs import PodConfig
from common.types import Role
from decode_service.servicer import DecodeServicer
from pod.runtime import PodRuntime


async def serve(config: PodConfig) -> None:
    """Runs until SIGTERM and the drain after it. Raises ConfigError, and SystemExit like PodRuntime.run."""
    if config.role is Role.PREFILL:
        raise ValueError("decode_service serves the roles decode and both, not prefill")
    pod = await PodRuntime.create(config)
    await pod.run(DecodeServicer(pod))
