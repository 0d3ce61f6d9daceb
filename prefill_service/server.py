"""Process of a prefill pod: builds the pod and serves until a signal ends it."""

from __future__ import annotations

from common.settings.configs import PodConfig
from common.types import Role
from pod.runtime import PodRuntime
from prefill_service.servicer import PrefillServicer


async def serve(config: PodConfig) -> None:
    """Runs until SIGTERM and the drain after it. Raises ConfigError, and SystemExit like PodRuntime.run."""
    if config.role is not Role.PREFILL:
        raise ValueError(f"prefill_service serves role prefill, not {config.role}")
    pod = await PodRuntime.create(config)
    await pod.run(PrefillServicer(pod))
