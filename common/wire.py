"""Conversion between the types of common/types.py and their protobuf messages, in both directions.

Floats have 32 bits on the wire. The rounded values of the first trip count, so all pods see the same request. A message
without a required part raises InvalidRequest with the name of this part.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import BatonError, InvalidRequest, error_class
from common.kv_layout import KVLayout
from common.pb import transfer_pb2, types_pb2
from common.types import (
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

#: Major version of the protocol between pods and gateways. Pods and gateways of different versions do not talk.
PROTOCOL_VERSION = 1

_FINISH_TO_PB = {
    None: types_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: types_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: types_pb2.FINISH_REASON_ERROR,
    FinishReason.TOOL_CALLS: types_pb2.FINISH_REASON_TOOL_CALLS,
}
_FINISH_FROM_PB = {pb: reason for reason, pb in _FINISH_TO_PB.items()}

_ROLE_TO_PB = {
    Role.PREFILL: transfer_pb2.ROLE_PREFILL,
    Role.DECODE: transfer_pb2.ROLE_DECODE,
    Role.BOTH: transfer_pb2.ROLE_BOTH,
}
_ROLE_FROM_PB = {pb: role for role, pb in _ROLE_TO_PB.items()}


def request_to_pb(request: ValidRequest) -> types_pb2.ValidRequest:
    """Returns the message of a validated request."""
    grammar = request.grammar
    return types_pb2.ValidRequest(
        request_id=request.request_id,
        model=request.model,
        prompt_ids=request.prompt_ids,
        sampling=_sampling_to_pb(request.sampling),
        cache_salt=request.cache_salt,
        priority=request.priority,
        grammar=None if grammar is None else types_pb2.Grammar(text=grammar.text, field=grammar.field),
        output_ids=request.output_ids,
        child=request.child,
    )


def request_from_pb(pb: types_pb2.ValidRequest) -> ValidRequest:
    """Returns the validated request of a message. Raises InvalidRequest if its id, prompt or sampling is missing."""
    if not pb.request_id:
        raise InvalidRequest("request_id is missing", field="request_id")
    if not pb.prompt_ids:
        raise InvalidRequest("the prompt is empty", field="prompt_ids")
    if not pb.HasField("sampling"):
        raise InvalidRequest("sampling is missing", field="sampling")
    return ValidRequest(
        request_id=pb.request_id,
        model=pb.model,
        prompt_ids=tuple(pb.prompt_ids),
        sampling=_sampling_from_pb(pb.sampling),
        cache_salt=pb.cache_salt,
        priority=pb.priority,
        grammar=Grammar(pb.grammar.text, pb.grammar.field) if pb.HasField("grammar") else None,
        output_ids=tuple(pb.output_ids),
        child=pb.child,
    )


def _sampling_to_pb(s: SamplingParams) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(
        temperature=s.temperature,
        top_k=s.top_k,
        top_p=s.top_p,
        min_p=s.min_p,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        logit_bias=[types_pb2.LogitBias(token=token, bias=bias) for token, bias in s.logit_bias],
        seed=s.seed,
        max_tokens=s.max_tokens,
        min_tokens=s.min_tokens,
        stop_token_ids=s.stop_token_ids,
        logprobs=s.logprobs,
        n=s.n,
        allowed_token_ids=s.allowed_token_ids,
        bad_words=[types_pb2.TokenSequence(ids=ids) for ids in s.bad_words],
        prompt_logprobs=s.prompt_logprobs,
    )


def _sampling_from_pb(pb: types_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=pb.temperature,
        top_k=pb.top_k,
        top_p=pb.top_p,
        min_p=pb.min_p,
        repetition_penalty=pb.repetition_penalty,
        presence_penalty=pb.presence_penalty,
        frequency_penalty=pb.frequency_penalty,
        logit_bias=tuple((entry.token, entry.bias) for entry in pb.logit_bias),
        seed=pb.seed,
        max_tokens=pb.max_tokens,
        min_tokens=pb.min_tokens,
        stop_token_ids=tuple(pb.stop_token_ids),
        logprobs=pb.logprobs if pb.HasField("logprobs") else None,
        n=pb.n,
        allowed_token_ids=tuple(pb.allowed_token_ids),
        bad_words=tuple(tuple(word.ids) for word in pb.bad_words),
        prompt_logprobs=pb.prompt_logprobs if pb.HasField("prompt_logprobs") else None,
    )


def finish_reason_to_pb(reason: FinishReason | None) -> types_pb2.FinishReason.ValueType:
    """Returns the enum value of a finish reason; None means that the sequence has not ended."""
    return _FINISH_TO_PB[reason]


def finish_reason_from_pb(pb: types_pb2.FinishReason.ValueType) -> FinishReason | None:
    """Returns the finish reason of an enum value. An unknown one, of a newer peer, ends the sequence as STOP."""
    return _FINISH_FROM_PB.get(pb, FinishReason.STOP)


def role_to_pb(role: Role) -> transfer_pb2.Role.ValueType:
    """Returns the enum value of a role."""
    return _ROLE_TO_PB[role]


def role_from_pb(pb: transfer_pb2.Role.ValueType) -> Role:
    """Returns the role of an enum value. Raises InvalidRequest if it is unset or unknown."""
    if pb not in _ROLE_FROM_PB:
        raise InvalidRequest(f"unknown role {pb}", field="role")
    return _ROLE_FROM_PB[pb]


def token_to_pb(token: Token) -> types_pb2.Token:
    """Returns the message of a generated token."""
    return types_pb2.Token(
        index=token.index,
        id=token.id,
        logprob=token.logprob,
        top=[types_pb2.TokenLogprob(token=t.token, logprob=t.logprob) for t in token.top],
        child=token.child,
    )


def token_from_pb(pb: types_pb2.Token) -> Token:
    """Returns the generated token of a message."""
    logprob = pb.logprob if pb.HasField("logprob") else None
    top = tuple([TokenLogprob(t.token, t.logprob) for t in pb.top]) if pb.top else ()
    return Token(pb.index, pb.id, logprob, top, pb.child)


def tokens_from_pb(pbs: Sequence[types_pb2.Token]) -> list[Token]:
    """Returns the generated tokens of messages."""
    return [token_from_pb(pb) for pb in pbs]


def tokens_without_logprobs_from_pb(pbs: Sequence[types_pb2.Token]) -> list[Token]:
    """Returns the generated tokens of messages, for requests with n = 1 and without log-probabilities."""
    # One token is the usual case. Iterating a repeated field ends with an IndexError, which costs more than a token.
    if len(pbs) == 1:
        pb = pbs[0]
        return [Token(pb.index, pb.id)]
    return [Token(pb.index, pb.id) for pb in pbs]


def prompt_logprobs_to_pb(found: PromptLogprobs) -> types_pb2.PromptLogprobs:
    """Returns the message of prompt log-probabilities."""
    return types_pb2.PromptLogprobs(
        first=found.first,
        logprobs=found.logprobs,
        ranks=found.ranks,
        top_ids=found.top_ids,
        top_logprobs=found.top_logprobs,
    )


def prompt_logprobs_from_pb(pb: types_pb2.PromptLogprobs) -> PromptLogprobs:
    """Returns the prompt log-probabilities of a message."""
    return PromptLogprobs(pb.first, tuple(pb.logprobs), tuple(pb.ranks), tuple(pb.top_ids), tuple(pb.top_logprobs))


def transfer_id_to_pb(transfer_id: TransferId) -> types_pb2.TransferId:
    """Returns the message of a transfer id."""
    return types_pb2.TransferId(generation=transfer_id.generation, number=transfer_id.number)


def transfer_id_from_pb(pb: types_pb2.TransferId) -> TransferId:
    """Returns the transfer id of a message."""
    return TransferId(generation=pb.generation, number=pb.number)


def kv_target_to_pb(target: KvTarget) -> types_pb2.KvTarget:
    """Returns the message of a KV target."""
    return types_pb2.KvTarget(
        transfer_id=transfer_id_to_pb(target.transfer_id),
        pod=target.pod,
        address=target.address,
        first_block=target.first_block,
        blocks=target.blocks,
        fingerprint=target.fingerprint,
    )


def kv_target_from_pb(pb: types_pb2.KvTarget) -> KvTarget:
    """Returns the KV target of a message. Raises InvalidRequest if its transfer id is missing."""
    if not pb.HasField("transfer_id"):
        raise InvalidRequest("transfer_id is missing", field="target.transfer_id")
    return KvTarget(
        transfer_id=transfer_id_from_pb(pb.transfer_id),
        pod=pb.pod,
        address=pb.address,
        first_block=pb.first_block,
        blocks=tuple(pb.blocks),
        fingerprint=pb.fingerprint,
    )


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
    return error_class(pb.kind)(pb.message, field=pb.field or None, retry_after_s=pb.retry_after_s or None)


def layout_to_pb(layout: KVLayout) -> transfer_pb2.Layout:
    """Returns the message of a KV layout."""
    return transfer_pb2.Layout(
        version=layout.version,
        model=layout.model,
        revision=layout.revision,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,
        block_bytes=layout.block_bytes,
        draft_layers=layout.draft_layers,
        draft_kv_heads=layout.draft_kv_heads,
        draft_head_dim=layout.draft_head_dim,
        draft_state=layout.draft_state,
        draft_revision=layout.draft_revision,
        tensor_parallel=layout.tensor_parallel,
    )


def layout_from_pb(pb: transfer_pb2.Layout) -> KVLayout:
    """Returns the KV layout of a message. block_bytes is ignored: it follows from the other fields."""
    return KVLayout(
        model=pb.model,
        revision=pb.revision,
        num_layers=pb.num_layers,
        num_kv_heads=pb.num_kv_heads,
        head_dim=pb.head_dim,
        block_size=pb.block_size,
        dtype=pb.dtype,
        version=pb.version,
        draft_layers=pb.draft_layers,
        draft_kv_heads=pb.draft_kv_heads,
        draft_head_dim=pb.draft_head_dim,
        draft_state=pb.draft_state,
        draft_revision=pb.draft_revision,
        tensor_parallel=pb.tensor_parallel or 1,
    )


def pool_counts_to_pb(counts: PoolCounts) -> transfer_pb2.PoolCounts:
    """Returns the message of block counts. An inconsistent pool may have negative counts; they become 0."""
    return transfer_pb2.PoolCounts(
        free=max(0, counts.free),
        cached=max(0, counts.cached),
        leased=max(0, counts.leased),
        quarantined=max(0, counts.quarantined),
    )


def load_to_pb(load: PodLoad) -> transfer_pb2.Load:
    """Returns the message of a pod's load. `draining` is a field beside it. Negative counts become 0."""
    return transfer_pb2.Load(
        queued_tokens=max(0, load.queued_tokens),
        running=load.running,
        waiting=load.waiting,
        reserved=load.reserved,
        free_blocks=max(0, load.free_blocks),
        prefill_rate=load.prefill_rate,
        prefill_overhead_s=load.prefill_overhead_s,
        step_s=load.step_s,
        step_slope_s=load.step_slope_s,
        transfer_rate=load.transfer_rate,
        hand_off_s=load.hand_off_s,
        pull_s=load.pull_s,
    )


def load_from_pb(pb: transfer_pb2.Load, *, draining: bool = False) -> PodLoad:
    """Returns the load of a message."""
    return PodLoad(
        queued_tokens=pb.queued_tokens,
        running=pb.running,
        waiting=pb.waiting,
        reserved=pb.reserved,
        free_blocks=pb.free_blocks,
        draining=draining,
        prefill_rate=pb.prefill_rate,
        prefill_overhead_s=pb.prefill_overhead_s,
        step_s=pb.step_s,
        step_slope_s=pb.step_slope_s,
        transfer_rate=pb.transfer_rate,
        hand_off_s=pb.hand_off_s,
        pull_s=pb.pull_s,
    )
