"""What pods with their KV on a GPU need of their process, beyond the engine."""

from __future__ import annotations

import os
from collections.abc import Mapping

from common.config import PodConfig
from common.errors import ConfigError
from common.types import Role

# How long a thread that computes keeps the interpreter from one that waits for it: Python's 5 ms are most of a decode
# step, and the engine's thread has to launch the next one in time. The end of a hand-over passes through three threads
# on either pod, and each may wait so long.
SWITCH_S = 0.0001

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def require_shared_memory(config: PodConfig, env: Mapping[str, str] = os.environ) -> None:
    """Other processes have to be able to map the KV pool. Raises ConfigError where torch would allocate it in a way
    that they cannot: KV would silently travel over TCP.
    """
    if config.role is Role.BOTH or config.allow_tcp:
        return
    for name in _ALLOCATOR:
        if "expandable_segments:true" in env.get(name, "").lower().replace(" ", ""):
            raise ConfigError(
                f"{name}: memory in expandable segments cannot be mapped by other pods; unset it, or give --allow-tcp",
                field="allow_tcp",
            )
