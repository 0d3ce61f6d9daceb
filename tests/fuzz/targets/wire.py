"""Bytes on the wire between services: protobuf messages with their conversions, and notifications over NIXL.

An input of `wire` is the number of a conversion and a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from google.protobuf.message import DecodeError, Message

from common import wire
from common.errors import BatonError
from common.kv_layout import KVLayout
from common.pb import transfer_pb2, types_pb2
from common.types import (
    Grammar,
    KvTarget,
    PodLoad,
    PromptLogprobs,
    SamplingParams,
    Token,
    TokenLogprob,
    TransferId,
    ValidRequest,
)
from gateway.api.http.json import error_body, error_headers
from gateway.pods.info import PodActivity, PodInfo
from tests.fuzz.mutators import bent_message, mutate
from tests.fuzz.target import FuzzTarget

_SAMPLING = SamplingParams(max_tokens=4, stop_token_ids=(1,), logprobs=2, logit_bias=((5, 1.0),), bad_words=((1, 2),))
_REQUEST = ValidRequest("r", "m", (1, 2, 3), _SAMPLING, grammar=Grammar("{}", "f"))
_LAYOUT = KVLayout("m", "r0", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
_SCORES = PromptLogprobs(1, (-1.0,), (2,), (3,), (-0.5,))


def _info(pb: transfer_pb2.InfoResponse) -> Any:
    return PodInfo.from_pb(pb, "h:1"), PodActivity.from_pb(pb)


_INFO = transfer_pb2.InfoResponse(pod="d", role=transfer_pb2.ROLE_DECODE, layout=wire.layout_to_pb(_LAYOUT))
_TARGET = KvTarget(TransferId(5, 1), "d", "h:1", 0, (1, 2), "f")

#: Conversion from a message, the way back if there is one, and a valid message.
CONVERSIONS: list[tuple[Callable[[Any], Any], Callable[[Any], Message] | None, Message]] = [
    (wire.request_from_pb, wire.request_to_pb, wire.request_to_pb(_REQUEST)),
    (wire.kv_target_from_pb, wire.kv_target_to_pb, wire.kv_target_to_pb(_TARGET)),
    (wire.token_from_pb, wire.token_to_pb, wire.token_to_pb(Token(0, 5, -0.5, (TokenLogprob(5, -0.5),)))),
    (wire.error_from_pb, wire.error_to_pb, types_pb2.Error(kind="Unavailable", message="m", retry_after_s=1.0)),
    (wire.layout_from_pb, None, wire.layout_to_pb(_LAYOUT)),  # a layout of an unknown dtype has no size
    (wire.load_from_pb, wire.load_to_pb, wire.load_to_pb(PodLoad(3, 1))),
    (wire.prompt_logprobs_from_pb, wire.prompt_logprobs_to_pb, wire.prompt_logprobs_to_pb(_SCORES)),
    (wire.transfer_id_from_pb, wire.transfer_id_to_pb, types_pb2.TransferId(generation=5, number=1)),
    (_info, None, _INFO),
]


class Wire(FuzzTarget):
    """Protobuf messages of all kinds, and their conversions to values and back."""

    def seeds(self) -> Sequence[bytes]:
        return [bytes([i]) + message.SerializeToString() for i, (_, _, message) in enumerate(CONVERSIONS)]

    def make(self, corpus: Sequence[bytes], rng: Random) -> bytes:
        data = rng.choice(corpus)
        if rng.random() < 0.4:
            return mutate(data, rng, (), corpus)
        number = data[0] % len(CONVERSIONS) if data else 0
        message = type(CONVERSIONS[number][2])()
        try:
            message.ParseFromString(data[1:])
        except DecodeError:
            message = CONVERSIONS[number][2]
        return bytes([number]) + bent_message(message, rng).SerializeToString()

    def run(self, data: bytes) -> str:
        number = data[0] % len(CONVERSIONS) if data else 0
        from_pb, to_pb, example = CONVERSIONS[number]
        message = type(example)()
        try:
            message.ParseFromString(data[1:])
        except DecodeError:
            return f"{number} no message"
        try:
            value = from_pb(message)
        except BatonError as error:
            return f"{number} {error.kind} {error.field}"
        repr(value)
        if isinstance(value, BatonError):
            error_headers(value), error_body(value)
        if to_pb is not None:
            again = to_pb(value)
            assert to_pb(from_pb(again)).SerializeToString(deterministic=True) == again.SerializeToString(
                deterministic=True
            )
        return f"{number} converted"
