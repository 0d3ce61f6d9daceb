"""Calls to other pods' Transfer service: one channel per address, every call but Info signed, errors as BatonError."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from common.auth import Signer
from common.errors import DeadlineExceeded
from common.pb import transfer_pb2
from common.rpc import channel, error_from_rpc

SERVICE = "baton.v1.Transfer"

_Response = TypeVar("_Response", bound=Message)


def method(name: str) -> str:
    """Full name of a method, as signatures cover it."""
    return f"/{SERVICE}/{name}"


class PeerRpc:
    """Owned by the event loop."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def info(self, address: str, timeout_s: float) -> transfer_pb2.InfoResponse:
        """Who answers at `address`."""
        return await self._send(address, "Info", transfer_pb2.InfoRequest(), transfer_pb2.InfoResponse, timeout_s, ())

    async def call(
        self, address: str, name: str, request: Message, response: type[_Response], timeout_s: float
    ) -> _Response:
        """A signed call. Raises the peer's BatonError, Unavailable or DeadlineExceeded."""
        return await self._send(
            address, name, request, response, timeout_s, self._signer.metadata(method(name), request)
        )

    async def _send(
        self,
        address: str,
        name: str,
        request: Message,
        response: type[_Response],
        timeout_s: float,
        metadata: tuple[tuple[str, str | bytes], ...],
    ) -> _Response:
        if timeout_s <= 0:
            raise DeadlineExceeded(f"no time left for {name}")
        if address not in self._channels:
            self._channels[address] = channel(address)
        call = self._channels[address].unary_unary(
            method(name), request_serializer=type(request).SerializeToString, response_deserializer=response.FromString
        )
        try:
            answer: _Response = await call(request, timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as e:
            raise error_from_rpc(e) from e
        return answer

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(one.close(None) for one in channels))
