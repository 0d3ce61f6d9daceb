"""The n samples of one request, as a gateway receives them from a prefill and a decode pod."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from common.pb import prefill_pb2
from common.rpc import translate_rpc_errors
from common.types import FinishReason, ValidRequest
from common.wire import finish_reason_from_pb, request_to_pb
from tests.rigs.pods.harness import TIMEOUT_S, Cluster


class Samples:
    """What a gateway receives of the children of one request. on_tokens(samples, child) is called for each message."""

    def __init__(self, on_tokens: Callable[[Samples, int], Any] | None = None) -> None:
        self.tokens: dict[int, dict[int, int]] = defaultdict(dict)
        self.finish: dict[int, FinishReason] = {}
        self.firsts: list[int] = []
        self.blocks = 0
        self.local = False
        self.on_tokens = on_tokens

    def ids(self, child: int) -> list[int]:
        assert sorted(self.tokens[child]) == list(range(len(self.tokens[child])))
        return [self.tokens[child][i] for i in range(len(self.tokens[child]))]

    def put(self, child: int, tokens: Any, finish: Any) -> None:
        for token in tokens:
            assert token.child == child
            assert token.index not in self.tokens[child]
            self.tokens[child][token.index] = token.id
        if (reason := finish_reason_from_pb(finish)) is not None:
            assert child not in self.finish
            self.finish[child] = reason

    async def run(self, cluster: Cluster, valid: ValidRequest, *, without: int = 0, remote: bool = True) -> Samples:
        """Runs until all but `without` children have ended."""
        inbox = cluster.stream_of(cluster.decode).expect(valid.request_id)
        reply = await cluster.reserve(valid, remote_only=remote)
        assert not reply.HasField("rejected"), reply
        self.local = reply.HasField("local")
        if not self.local:
            message = prefill_pb2.PrefillRequest(request=request_to_pb(valid), target=reply.target)
            with translate_rpc_errors():
                async for event in cluster.prefill.prefill.Prefill(message, timeout=TIMEOUT_S):
                    if event.HasField("first_token"):
                        self.firsts.append(event.first_token.child)
                        self.put(event.first_token.child, [event.first_token.token], event.first_token.finish_reason)
                    elif event.HasField("handed_off"):
                        self.blocks = event.handed_off.blocks
        while len(self.finish) < valid.sampling.n - without:
            async with asyncio.timeout(TIMEOUT_S):
                delta = await inbox.get()
            assert not delta.HasField("error"), delta
            self.put(delta.child, delta.tokens, delta.finish_reason)
            if self.on_tokens is not None:
                await self.on_tokens(self, delta.child)
        return self
