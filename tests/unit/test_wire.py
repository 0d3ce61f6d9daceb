"""Every wire conversion is a round trip; errors keep what they are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import wire
from common.errors import BatonError, InternalError, InvalidRequest
from common.kv_layout import KVLayout
from common.pb import decode_pb2, types_pb2
from common.types import (
    FinishReason,
    Grammar,
    KvTarget,
    PoolCounts,
    PromptLogprobs,
    Role,
    SamplingParams,
    Token,
    TokenLogprob,
    TransferId,
    ValidRequest,
)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
F32 = st.floats(width=32, allow_nan=False)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)

SAMPLING = st.builds(
    SamplingParams,
    temperature=F32,
    top_k=U32,
    top_p=F32,
    min_p=F32,
    repetition_penalty=F32,
    presence_penalty=F32,
    frequency_penalty=F32,
    logit_bias=st.lists(st.tuples(U32, F32), max_size=3).map(tuple),
    seed=U64,
    max_tokens=U32,
    min_tokens=U32,
    stop_token_ids=st.lists(U32, max_size=4).map(tuple),
    logprobs=st.none() | U32,
    n=U32,
    allowed_token_ids=st.lists(U32, max_size=4).map(tuple),
    bad_words=st.lists(st.lists(U32, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    prompt_logprobs=st.none() | U32,
)
REQUESTS = st.builds(
    ValidRequest,
    request_id=TEXT.filter(bool),
    model=TEXT,
    prompt_ids=st.lists(U32, min_size=1, max_size=50).map(tuple),
    sampling=SAMPLING,
    cache_salt=TEXT,
    priority=st.integers(-(2**31), 2**31 - 1),
    grammar=st.none() | st.builds(Grammar, text=TEXT, field=TEXT),
)
PROMPT_LOGPROBS = st.builds(
    PromptLogprobs,
    first=U32,
    logprobs=st.tuples(F32, F32),
    ranks=st.tuples(U32, U32),
    top_ids=st.just(()) | st.tuples(*[U32] * 4),
    top_logprobs=st.just(()) | st.tuples(*[F32] * 4),
)
TRANSFERS = st.builds(TransferId, generation=U64, number=U64)
TARGETS = st.builds(
    KvTarget,
    transfer_id=TRANSFERS,
    pod=TEXT,
    address=TEXT,
    first_block=U32,
    blocks=st.lists(U32, max_size=20).map(tuple),
    fingerprint=TEXT,
)
TOKENS = st.builds(
    Token,
    index=U32,
    id=U32,
    logprob=st.none() | F32,
    top=st.lists(st.builds(TokenLogprob, token=U32, logprob=F32), max_size=3).map(tuple),
)
LAYOUTS = st.builds(
    KVLayout,
    model=TEXT,
    revision=TEXT,
    num_layers=st.integers(1, 100),
    num_kv_heads=st.integers(1, 64),
    head_dim=st.integers(1, 256),
    block_size=st.integers(1, 128),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    version=U32,
)


@given(REQUESTS)
def test_requests(request: ValidRequest) -> None:
    raw = wire.request_to_pb(request).SerializeToString()
    assert wire.request_from_pb(types_pb2.ValidRequest.FromString(raw)) == request


@given(TARGETS)
def test_targets(target: KvTarget) -> None:
    assert wire.kv_target_from_pb(wire.kv_target_to_pb(target)) == target


@given(TOKENS)
def test_tokens(token: Token) -> None:
    assert wire.token_from_pb(wire.token_to_pb(token)) == token


@given(PROMPT_LOGPROBS)
def test_prompt_logprobs(found: PromptLogprobs) -> None:
    assert wire.prompt_logprobs_from_pb(wire.prompt_logprobs_to_pb(found)) == found


def test_alternatives_of_a_prompt_position() -> None:
    found = PromptLogprobs(5, (-1.0, -2.0), (1, 3), (7, 8, 9, 10), (-1.0, -1.5, -0.5, -0.7))
    assert found.top(1) == (TokenLogprob(9, -0.5), TokenLogprob(10, -0.7))
    assert PromptLogprobs(5, (-1.0, -2.0), (1, 3)).top(0) == ()


@given(TRANSFERS, LAYOUTS, st.builds(PoolCounts, free=U32, cached=U32, leased=U32, quarantined=U32))
def test_ids_layouts_and_counts(transfer: TransferId, layout: KVLayout, counts: PoolCounts) -> None:
    assert wire.transfer_id_from_pb(wire.transfer_id_to_pb(transfer)) == transfer
    assert wire.layout_from_pb(wire.layout_to_pb(layout)) == layout
    pb = wire.pool_counts_to_pb(counts)
    assert PoolCounts(pb.free, pb.cached, pb.leased, pb.quarantined) == counts
    assert wire.pool_counts_to_pb(PoolCounts(-1, 0, 2, 0)) == wire.pool_counts_to_pb(PoolCounts(0, 0, 2, 0))


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reasons(reason: FinishReason | None) -> None:
    assert wire.finish_reason_from_pb(wire.finish_reason_to_pb(reason)) is reason


def test_roles() -> None:
    assert [wire.role_from_pb(wire.role_to_pb(r)) for r in Role] == list(Role)
    with pytest.raises(InvalidRequest):
        wire.role_from_pb(0)


def subclasses(cls: type[BatonError]) -> list[type[BatonError]]:
    return [cls, *(d for c in cls.__subclasses__() for d in subclasses(c))]


@pytest.mark.parametrize(
    "cls", [c for c in subclasses(BatonError) if c is not BatonError and c.__module__ == "common.errors"]
)
def test_every_error_keeps_its_class(cls: type[BatonError]) -> None:
    assert BatonError.by_kind[cls.__name__] is cls
    error = wire.error_from_pb(wire.error_to_pb(cls("why", field="f", retry_after_s=1.5)))
    assert (type(error), error.message, error.field, error.retry_after_s) == (cls, "why", "f", 1.5)
    bare = wire.error_from_pb(wire.error_to_pb(cls("why")))
    assert (bare.field, bare.retry_after_s) == (None, None)


def test_an_unknown_kind_is_internal() -> None:
    assert type(wire.error_from_pb(types_pb2.Error(kind="Tomorrow", message="m"))) is InternalError


@pytest.mark.parametrize("field", ["request_id", "prompt_ids", "sampling"])
def test_a_missing_part_is_named(field: str) -> None:
    pb: Any = wire.request_to_pb(ValidRequest("r", "m", (1,), SamplingParams()))
    pb.ClearField(field)
    with pytest.raises(InvalidRequest) as e:
        wire.request_from_pb(pb)
    assert e.value.field == field


def test_a_request_inside_a_request_keeps_presence() -> None:
    pb = decode_pb2.ReserveRequest(request=wire.request_to_pb(ValidRequest("r", "m", (1,), SamplingParams(logprobs=0))))
    assert wire.request_from_pb(pb.request).sampling.logprobs == 0
