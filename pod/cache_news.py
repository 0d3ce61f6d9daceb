"""The way from the prefix cache to the index: the engine is made before the pod can enter the index."""

from __future__ import annotations

from common.prefix_index import PodIndex, Tier


class CacheNews:
    """Passes what the prefix cache gained and lost to the index, once there is one. Called under the pool's lock."""

    def __init__(self) -> None:
        self.index: PodIndex | None = None

    def stored(self, hashes: list[bytes]) -> None:
        if self.index is not None:
            self.index.stored(hashes)

    def evicted(self, hashes: list[bytes]) -> None:
        if self.index is not None:
            self.index.evicted(hashes)

    def host_stored(self, hashes: list[bytes]) -> None:
        if self.index is not None:
            self.index.stored(hashes, Tier.HOST)

    def host_evicted(self, hashes: list[bytes]) -> None:
        if self.index is not None:
            self.index.evicted(hashes, Tier.HOST)
