"""Calls to the Transfer service of other pods: one channel per address, every call but Info signed, errors as
BatonError.

gRPC keeps dialling an address where no pod answers, so channels without a call for UNUSED_S seconds are closed.
"""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from common.auth import Signer
from common.errors import DeadlineExceeded
from common.pb import transfer_pb2
from common.rpc import open_channel, translate_rpc_errors

SERVICE = "baton.v1.Transfer"
#: Longer than any call.
UNUSED_S = 600.0

_Response = TypeVar("_Response", bound=Message)


def method_path(name: str) -> str:
    """Returns the full name of a method, as signatures cover it."""
    return f"/{SERVICE}/{name}"


class PeerRpcClient:
    """Owned by the event loop."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self._channels: dict[str, grpc.aio.Channel] = {}
        #: Time of the last call, by address.
        self._used: dict[str, float] = {}

    async def info(self, address: str, timeout_s: float) -> transfer_pb2.InfoResponse:
        """Calls Info of the pod at `address`."""
        return await self._send(address, "Info", transfer_pb2.InfoRequest(), transfer_pb2.InfoResponse, timeout_s, ())

    async def call(
        self, address: str, name: str, request: Message, response: type[_Response], timeout_s: float
    ) -> _Response:
        """Makes a signed call. Raises the peer's BatonError, Unavailable or DeadlineExceeded."""
        return await self._send(
            address, name, request, response, timeout_s, self._signer.sign(method_path(name), request)
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
        unused: list[grpc.aio.Channel] = []
        if address not in self._channels:
            unused, self._channels[address] = self._take_unused(), open_channel(address)
        self._used[address] = time.monotonic()
        call = self._channels[address].unary_unary(
            method_path(name),
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        for one in unused:
            await one.close(None)
        with translate_rpc_errors():
            answer: _Response = await call(request, timeout=timeout_s, metadata=metadata)
        return answer

    def _take_unused(self) -> list[grpc.aio.Channel]:
        """Removes and returns the channels that were not used for UNUSED_S seconds."""
        since = time.monotonic() - UNUSED_S
        old = [address for address, used in self._used.items() if used < since]
        for address in old:
            del self._used[address]
        return [self._channels.pop(address) for address in old]

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(one.close(None) for one in channels))
