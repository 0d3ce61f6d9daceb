"""Channels to other pods: one per address, closed after a long time without a call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from common.auth import Signer
from common.pb import transfer_pb2
from kv_transfer.peers import rpc_client
from kv_transfer.peers.rpc_client import PeerRpcClient


class Channel:
    def __init__(self, address: str) -> None:
        self.address = address
        self.closed = False

    def unary_unary(self, *_: object, **__: object) -> Callable[..., Awaitable[transfer_pb2.InfoResponse]]:
        async def call(*_: object, **__: object) -> transfer_pb2.InfoResponse:
            assert not self.closed
            return transfer_pb2.InfoResponse(pod=self.address)

        return call

    async def close(self, grace: Any) -> None:
        self.closed = True


async def test_unused_channels_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Channel] = []

    def channel(address: str, tls: None) -> Channel:
        made.append(Channel(address))
        return made[-1]

    monkeypatch.setattr(rpc_client, "open_channel", channel)
    rpc = PeerRpcClient(Signer(b"secret", "prefill", "prefill-0", 1), transfer_pb2.InfoResponse, lambda: "")
    for address in ("gone", "used", "used"):
        assert (await rpc.info(address, 1.0)).pod == address
    for address in ("gone", "used"):
        rpc._used[address] -= rpc_client.UNUSED_S + 1.0
    await rpc.info("used", 1.0)
    await rpc.info("new", 1.0)
    assert [(one.address, one.closed) for one in made] == [("gone", True), ("used", False), ("new", False)]
    await rpc.info("gone", 1.0)
    assert len(made) == 4
    await rpc.close()
    assert all(one.closed for one in made)
