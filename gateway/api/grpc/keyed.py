"""Calls of Generate with an idempotency key. The answer is written once, and each call with its key gets it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from common.errors import Cancelled, DeadlineExceeded, Unavailable
from common.pb import inference_pb2 as pb
from common.rpc import CALLER_DISCONNECTED
from gateway.admission.api_keys import Caller
from gateway.api.http.endpoint import SEND_GRACE_S
from gateway.serving.answer_keys import digest, parse_key
from gateway.serving.gateway import Gateway
from gateway.serving.request import AnswerIdentity
from gateway.serving.shared_answer import SharedAnswer

Metadata = tuple[tuple[str, str | bytes], ...]

MAX_CLIENT_ID = 128  #: A client's own request id is cut to this many characters.
REPLAYED = "idempotent-replayed"  #: Initial metadata of an answer that an earlier call computes or has computed.


class GrpcAnswer(SharedAnswer[Metadata | pb.GenerateResponse]):
    """An answer as initial metadata and messages. A servicer writes to it as to the context of a call."""

    def __init__(self) -> None:
        super().__init__()
        self._num_messages = 0
        self.trailing: Metadata = ()

    @property
    def begun(self) -> bool:
        """See SharedAnswer. Initial metadata are sent before the request is checked, so they do not count."""
        return self._num_messages > 0

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Adds the first item."""
        self.add(metadata, 0)

    async def write(self, message: pb.GenerateResponse) -> None:
        """Adds a message."""
        self._num_messages += 1
        self.add(message, message.ByteSize())

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        """Sets the trailing metadata."""
        self.trailing = metadata


async def serve_keyed(
    gateway: Gateway,
    caller: Caller,
    key: str | bytes,
    request: pb.GenerateRequest,
    context: grpc.aio.ServicerContext[Any, Any],
    compute: Callable[[AnswerIdentity, GrpcAnswer], Coroutine[Any, Any, None]],
) -> None:
    """Answers a call with an idempotency key. Raises BatonError."""
    if gateway.draining:
        raise Unavailable("the gateway is stopping", retry_after_s=1.0)
    content = digest("generate", _without_id(request).SerializeToString(deterministic=True))
    limit_s, left = gateway.settings.request_timeout_s, context.time_remaining()
    deadline = time.monotonic() + (limit_s if left is None else min(limit_s, left))
    with gateway.answer_keys.read(caller, parse_key(key), content, GrpcAnswer, compute) as (answer, reader, joined):
        if joined and request.request_id:
            reader.set_client_id(request.request_id[:MAX_CLIENT_ID])
        try:
            async with asyncio.timeout(deadline + SEND_GRACE_S - time.monotonic()):
                while items := await reader.next():
                    for item in items:
                        if isinstance(item, tuple):
                            await context.send_initial_metadata((*item, *(((REPLAYED, "true"),) if joined else ())))
                        else:
                            await context.write(item)
        except TimeoutError as e:
            raise DeadlineExceeded("the request's time is over") from e
        except CALLER_DISCONNECTED as e:
            raise Cancelled("the client disconnected") from e
        finally:
            context.set_trailing_metadata(answer.trailing)


def _without_id(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """Returns the request without the client's own id, which a retry may change."""
    copied = pb.GenerateRequest()
    copied.CopyFrom(request)
    copied.ClearField("request_id")
    return copied
