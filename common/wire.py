"""Conversion between the types of common/types.py and their protobuf messages, in both directions.

A field of a dataclass becomes the message's field of the same name, so a new field needs no code in this module. Floats
have 32 bits on the wire. Pods use the rounded values, so all see the same request. A message
without a required part raises InvalidRequest with the name of this part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from common.errors import BatonError, InternalError, InvalidRequest
from common.kv_layout import KVLayout, LayerGroup
from common.pb import control_pb2, transfer_pb2, types_pb2
from common.types import (
    AdapterEntry,
    FinishReason,
    Grammar,
    KvTarget,
    PodLoad,
    PoolCounts,
    PromptLogprobs,
    Role,
    SamplingParams,
    Token,
    TokenLogprob,
    TransferId,
    ValidRequest,
)

PROTOCOL_VERSION = 1  #: Major version of the protocol; pods and gateways of different versions do not talk.

_Data = TypeVar("_Data")
_Pb = TypeVar("_Pb", bound=Message)


class _SameFields(Generic[_Data, _Pb]):
    """Copies the fields of a dataclass that its message has too, except for those in `others`."""

    def __init__(self, data: type[_Data], message: type[_Pb], *others: str) -> None:
        self._data, self._message = data, message
        described, empty = message.DESCRIPTOR.fields_by_name, message()
        self._names = [f.name for f in dataclasses.fields(data) if f.name not in others]  # type: ignore[arg-type]
        self._optional = frozenset(name for name in self._names if described[name].has_presence)
        scalars = (int, float, str, bytes)
        self._repeated = frozenset(name for name in self._names if not isinstance(getattr(empty, name), scalars))

    def to_pb(self, data: _Data, **others: Any) -> _Pb:
        """Returns the message; a value of None leaves its field unset."""
        return self._message(**{name: getattr(data, name) for name in self._names}, **others)

    def from_pb(self, pb: _Pb, **others: Any) -> _Data:
        """Returns the dataclass; an unset optional field becomes None, a repeated one a tuple."""
        values: dict[str, Any] = {}
        for name in self._names:
            value: Any = getattr(pb, name) if name not in self._optional or pb.HasField(name) else None
            values[name] = tuple(value) if name in self._repeated else value
        return self._data(**values, **others)


_REQUEST = _SameFields(ValidRequest, types_pb2.ValidRequest, "sampling", "grammar")
_GRAMMAR = _SameFields(Grammar, types_pb2.Grammar)
_SAMPLING = _SameFields(SamplingParams, types_pb2.SamplingParams, "logit_bias", "bad_words")
_PROMPT_LOGPROBS = _SameFields(PromptLogprobs, types_pb2.PromptLogprobs)
_TRANSFER_ID = _SameFields(TransferId, types_pb2.TransferId)
_KV_TARGET = _SameFields(KvTarget, types_pb2.KvTarget, "transfer_id")
_LAYOUT = _SameFields(KVLayout, transfer_pb2.Layout, "tensor_parallel", "groups", "kv_order")
_POOL_COUNTS = _SameFields(PoolCounts, transfer_pb2.PoolCounts)
_ADAPTER = _SameFields(AdapterEntry, control_pb2.Adapter)
_LOAD = _SameFields(PodLoad, transfer_pb2.Load, "draining", "warm_adapters", "adapter_copies")

prompt_logprobs_to_pb, prompt_logprobs_from_pb = _PROMPT_LOGPROBS.to_pb, _PROMPT_LOGPROBS.from_pb
adapter_to_pb, adapter_from_pb = _ADAPTER.to_pb, _ADAPTER.from_pb
transfer_id_to_pb, transfer_id_from_pb = _TRANSFER_ID.to_pb, _TRANSFER_ID.from_pb

_FINISH_TO_PB: dict[FinishReason | None, types_pb2.FinishReason.ValueType] = {
    None: types_pb2.FINISH_REASON_UNSPECIFIED,
    **{reason: types_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason},
}
_FINISH_FROM_PB = {pb: reason for reason, pb in _FINISH_TO_PB.items()}

_ROLE_TO_PB = {role: transfer_pb2.Role.Value(f"ROLE_{role.name}") for role in Role}
_ROLE_FROM_PB = {pb: role for role, pb in _ROLE_TO_PB.items()}


def request_to_pb(request: ValidRequest) -> types_pb2.ValidRequest:
    sampling = _SAMPLING.to_pb(
        request.sampling,
        logit_bias=[types_pb2.LogitBias(token=token, bias=bias) for token, bias in request.sampling.logit_bias],
        bad_words=[types_pb2.TokenSequence(ids=ids) for ids in request.sampling.bad_words],
    )
    grammar = None if request.grammar is None else _GRAMMAR.to_pb(request.grammar)
    return _REQUEST.to_pb(request, sampling=sampling, grammar=grammar)


def request_from_pb(pb: types_pb2.ValidRequest) -> ValidRequest:
    """Returns the validated request of a message. Raises InvalidRequest if its id, prompt or sampling is missing."""
    if not pb.request_id:
        raise InvalidRequest("request_id is missing", field="request_id")
    if not pb.prompt_ids:
        raise InvalidRequest("the prompt is empty", field="prompt_ids")
    if not pb.HasField("sampling"):
        raise InvalidRequest("sampling is missing", field="sampling")
    sampling = _SAMPLING.from_pb(
        pb.sampling,
        logit_bias=tuple((entry.token, entry.bias) for entry in pb.sampling.logit_bias),
        bad_words=tuple(tuple(word.ids) for word in pb.sampling.bad_words),
    )
    grammar = _GRAMMAR.from_pb(pb.grammar) if pb.HasField("grammar") else None
    return _REQUEST.from_pb(pb, sampling=sampling, grammar=grammar)


def finish_reason_to_pb(reason: FinishReason | None) -> types_pb2.FinishReason.ValueType:
    """Returns the enum value of a finish reason; None means that the sequence has not ended."""
    return _FINISH_TO_PB[reason]


def finish_reason_from_pb(pb: types_pb2.FinishReason.ValueType) -> FinishReason | None:
    """Returns the finish reason of an enum value. An unknown one, of a newer peer, ends the sequence as STOP."""
    return _FINISH_FROM_PB.get(pb, FinishReason.STOP)


def role_to_pb(role: Role) -> transfer_pb2.Role.ValueType:
    return _ROLE_TO_PB[role]


def role_from_pb(pb: transfer_pb2.Role.ValueType) -> Role:
    """Returns the role of an enum value. Raises InvalidRequest if it is unset or unknown."""
    if pb not in _ROLE_FROM_PB:
        raise InvalidRequest(f"unknown role {pb}", field="role")
    return _ROLE_FROM_PB[pb]


def token_to_pb(token: Token) -> types_pb2.Token:
    return types_pb2.Token(
        index=token.index,
        id=token.id,
        logprob=token.logprob,
        top=[types_pb2.TokenLogprob(token=t.token, logprob=t.logprob) for t in token.top],
        child=token.child,
    )


def token_from_pb(pb: types_pb2.Token) -> Token:
    logprob = pb.logprob if pb.HasField("logprob") else None
    top = tuple([TokenLogprob(t.token, t.logprob) for t in pb.top]) if pb.top else ()
    return Token(pb.index, pb.id, logprob, top, pb.child)


def tokens_from_pb(pbs: Sequence[types_pb2.Token]) -> list[Token]:
    return [token_from_pb(pb) for pb in pbs]


def tokens_without_logprobs_from_pb(pbs: Sequence[types_pb2.Token]) -> list[Token]:
    """Returns the generated tokens of messages, for requests with n = 1 and without log-probabilities."""
    # One token is the usual case. Iterating a repeated field ends with an IndexError, which costs more than a token.
    if len(pbs) == 1:
        pb = pbs[0]
        return [Token(pb.index, pb.id)]
    return [Token(pb.index, pb.id) for pb in pbs]


def kv_target_to_pb(target: KvTarget) -> types_pb2.KvTarget:
    return _KV_TARGET.to_pb(target, transfer_id=transfer_id_to_pb(target.transfer_id))


def kv_target_from_pb(pb: types_pb2.KvTarget) -> KvTarget:
    """Returns the KV target of a message. Raises InvalidRequest if its transfer id is missing."""
    if not pb.HasField("transfer_id"):
        raise InvalidRequest("transfer_id is missing", field="target.transfer_id")
    return _KV_TARGET.from_pb(pb, transfer_id=transfer_id_from_pb(pb.transfer_id))


def error_to_pb(error: BatonError) -> types_pb2.Error:
    """Returns the message of an error: class, message, field and retry time."""
    return types_pb2.Error(
        kind=error.kind,
        message=error.message,
        field=error.field or "",
        retryable=error.retryable,
        retry_after_s=error.retry_after_s or 0.0,
    )


def error_from_pb(pb: types_pb2.Error) -> BatonError:
    """Returns the error of a message; an unknown kind, of a newer peer, becomes InternalError."""
    cls = BatonError.by_kind.get(pb.kind, InternalError)
    retry_after_s = pb.retry_after_s if 0 < pb.retry_after_s < math.inf else None
    return cls(pb.message, field=pb.field or None, retry_after_s=retry_after_s)


def layout_to_pb(layout: KVLayout) -> transfer_pb2.Layout:
    groups = [transfer_pb2.LayerGroup(window=group.window, layers=group.layers) for group in layout.groups]
    others = {"tensor_parallel": layout.tensor_parallel, "kv_order": layout.kv_order, "groups": groups}
    return _LAYOUT.to_pb(layout, block_bytes=layout.block_bytes, **others)


def layout_from_pb(pb: transfer_pb2.Layout) -> KVLayout:
    """Returns the KV layout of a message. block_bytes is ignored: it follows from the other fields."""
    groups = tuple(LayerGroup(group.window, tuple(group.layers)) for group in pb.groups)
    others = {"tensor_parallel": pb.tensor_parallel or 1, "kv_order": pb.kv_order or "layers", "groups": groups}
    return _LAYOUT.from_pb(pb, **others)


def pool_counts_to_pb(counts: PoolCounts) -> transfer_pb2.PoolCounts:
    """Returns the message of block counts. An inconsistent pool may have negative counts; they become 0."""
    return _POOL_COUNTS.to_pb(PoolCounts(*(max(0, count) for count in dataclasses.astuple(counts))))


def load_to_pb(load: PodLoad) -> transfer_pb2.Load:
    """Returns the message of a pod's load. `draining` is a field beside it. Negative counts become 0."""
    queued_tokens, free_blocks = max(0, load.queued_tokens), max(0, load.free_blocks)
    return _LOAD.to_pb(dataclasses.replace(load, queued_tokens=queued_tokens, free_blocks=free_blocks))


def load_from_pb(pb: transfer_pb2.Load, *, draining: bool = False) -> PodLoad:
    return _LOAD.from_pb(pb, draining=draining)
