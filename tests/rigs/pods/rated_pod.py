"""A fake prefill pod that takes time: it computes one prompt after another, at a rate that it reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from common.pb import prefill_pb2, transfer_pb2
from common.types import PodLoad, ValidRequest
from common.wire import load_to_pb, request_from_pb
from tests.rigs.pods.fake_pods import FakePod


class RatedPod(FakePod):
    """A prefill pod with a queue. Blocks of earlier prompts are cached and take no time."""

    #: Prompt tokens per second; reported after the first prompt.
    rate = 2000.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turn = asyncio.Lock()
        self._queued = 0
        #: Cached prefixes of whole blocks.
        self._blocks: set[tuple[int, ...]] = set()
        #: Prompt tokens computed.
        self.computed = 0

    async def Info(self, request: transfer_pb2.InfoRequest, context: Any) -> transfer_pb2.InfoResponse:
        info = await super().Info(request, context)
        rate = self.rate if self.computed else 0.0
        info.load.CopyFrom(load_to_pb(PodLoad(queued_tokens=self._queued, prefill_rate=rate)))
        return info

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        valid = request_from_pb(request.request)
        waiting = valid.prompt_len - self._held(valid)
        self._queued += waiting
        try:
            async with self._turn:
                held = self._held(valid)
                await asyncio.sleep((valid.prompt_len - held) / self.rate)
                self.computed += valid.prompt_len - held
                size = self.layout.block_size
                self._blocks |= {valid.prompt_ids[:end] for end in range(size, valid.prompt_len, size)}
        finally:
            self._queued -= waiting
        self.cached_tokens = held
        async for event in super().Prefill(request, context):
            yield event

    def _held(self, valid: ValidRequest) -> int:
        size = self.layout.block_size
        ends = range(size * ((valid.prompt_len - 1) // size), 0, -size)
        return next((end for end in ends if valid.prompt_ids[:end] in self._blocks), 0)
