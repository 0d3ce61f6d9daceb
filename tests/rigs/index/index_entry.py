"""A fake pod's entry in the prefix index, published by the real IndexPublisher."""

from __future__ import annotations

import asyncio

from common.block_hash import hash_blocks
from common.types import PodLoad
from prefix_index.publisher import IndexPublisher
from prefix_index.reader import IndexReader
from prefix_index.store import PodRecord
from tests.rigs.pods.fake_pods import FakePod


class IndexEntry:
    """Publishes the blocks of the prompt that hold() was last called with."""

    def __init__(self, url: str, pod: FakePod, model: str = "smol") -> None:
        layout = pod.layout
        self.pod = pod
        self._url = url
        self.hashes: list[bytes] = []
        record = PodRecord(
            pod.name,
            pod.generation,
            pod.address,
            pod.role,
            model,
            layout.scope,
            layout.fingerprint,
            layout.block_size,
            pod.max_model_len,
            pod.num_blocks,
        )
        self.index = IndexPublisher(url, record, lambda: self.hashes, lambda: PodLoad(free_blocks=pod.num_blocks))

    def hold(self, prompt: list[int]) -> None:
        """Makes the pod hold exactly the full blocks of this prompt."""
        before, layout = self.hashes, self.pod.layout
        self.hashes = hash_blocks(prompt, fingerprint=layout.fingerprint, block_size=layout.block_size)
        self.index.evicted([h for h in before if h not in self.hashes])
        self.index.stored(self.hashes)

    async def shown(self) -> None:
        """Waits until the index has the prompt for the pod."""
        wanted = {self.pod.name: len(self.hashes)}
        async with asyncio.timeout(30):
            while True:
                reader = IndexReader(self._url, timeout_s=5.0)  # a new reader, because answers are cached
                found = await reader.lookup(self.pod.layout.scope, self.hashes, [(self.pod.name, self.pod.generation)])
                await reader.close()
                if found == wanted:
                    return
                await asyncio.sleep(0.05)
