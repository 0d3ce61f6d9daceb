"""Sequence: prefill, decode and recomputing share one arithmetic; which blocks are matched and published."""

from __future__ import annotations

from typing import Any

import pytest

from common.block_hash import hash_blocks
from common.types import SamplingParams, ValidRequest
from engine.kv.blocks import BlockPool
from engine.schedule.sequence import Sequence

FINGERPRINT = "ab" * 16


def request(prompt_len: int, *, salt: str = "", max_tokens: int = 8) -> ValidRequest:
    return ValidRequest("r", "m", tuple(range(prompt_len)), SamplingParams(max_tokens=max_tokens), cache_salt=salt)


def test_a_new_sequence_waits_for_its_whole_prompt() -> None:
    seq = Sequence(request(9), fingerprint=FINGERPRINT, block_size=4)
    assert (seq.remaining, seq.num_output, seq.allocated, seq.cached_tokens) == (9, 0, 0, 0)
    assert not seq.decoding
    assert seq.max_len == 17
    assert Sequence(request(9), fingerprint=FINGERPRINT, block_size=4, hand_off=True).max_len == 10


def test_given_output_of_a_hand_off_is_computed_in_chunks() -> None:
    """Even a single last token: a chunk writes all layers of the block that is sent, a decode step may not."""
    pool = BlockPool(8, 4)
    given: dict[str, Any] = {"fingerprint": FINGERPRINT, "block_size": 4, "output": [40, 41, 42, 43]}
    seq = Sequence(request(9), hand_off=True, lease=pool.lease([], 4), **given)
    assert (seq.prefill_len, seq.max_len, seq.num_output, seq.num_samples, seq.remaining) == (13, 14, 4, 1, 13)
    assert (seq.recompute_until, len(seq.matchable_hashes())) == (12, 3)
    seq.computed = 12
    assert not seq.decoding
    seq.launch(1, sample=True)
    assert seq.reaches_limit
    moved = Sequence(request(9), **(given | {"output": [40, 41, 42, 43, 44]}), lease=pool.lease([], 4), computed=13)
    assert (moved.decoding, moved.recomputing, moved.max_len) == (True, False, 17)
    again = Sequence(request(9), **given)
    assert (again.prefill_len, again.max_len, again.remaining, again.decoding) == (9, 17, 13, False)


def test_all_blocks_but_that_of_the_last_token_are_matchable() -> None:
    for prompt_len, blocks in ((1, 0), (4, 0), (5, 1), (8, 1), (9, 2)):
        seq = Sequence(request(prompt_len), fingerprint=FINGERPRINT, block_size=4)
        assert len(seq.matchable_hashes()) == blocks


def test_only_full_computed_blocks_are_published_under_the_requests_salt() -> None:
    pool = BlockPool(8, 4)
    seq = Sequence(request(9, salt="tenant"), fingerprint=FINGERPRINT, block_size=4, lease=pool.lease([], 3))
    expected = hash_blocks(range(9), fingerprint=FINGERPRINT, block_size=4, salt="tenant")
    for computed, published in ((3, 0), (4, 1), (7, 1), (9, 2)):
        seq.computed = computed
        seq.publish()
        assert seq.publishable_hashes() == expected[:published]
        assert pool.match_prefix(expected) == published


def test_a_received_prompt_decodes_and_resumes_after_a_preemption() -> None:
    pool = BlockPool(8, 4)
    lease = pool.lease([], 3)
    seq = Sequence(request(9), fingerprint=FINGERPRINT, block_size=4, lease=lease, computed=9, output=[42])
    assert seq.decoding
    seq.computed += 1
    seq.append(43)
    assert (seq.output, seq.num_output, seq.decoding, seq.recomputing) == ([42, 43], 2, True, False)
    seq.draft_lag = 1
    seq.preempt()
    assert seq.draft_lag == 1, "the partial block may come back without the draft model's KV"
    seq.check()
    assert lease is not None
    assert lease.finished
    assert (seq.computed, seq.remaining, seq.recomputing, seq.preemptions) == (0, 11, True, 1)
    seq.computed = 9
    assert seq.recomputing
    seq.computed = 10
    assert seq.decoding
    assert not seq.recomputing
    assert pool.counts().free == 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"computed": -1},
        {"computed": 13},  # the lease has room for 12 tokens
        {"launched": 6},  # more than the tokens that are left
        {"pending": 1},  # without a launched step
        {"num_drafted": 1},  # without a pending token
        {"launched": 1, "pending": 1, "num_drafted": 12},  # past the largest length
        {"draft_lag": 5},  # more than the computed tokens; also, the published block would lag
        {"computed": 3},  # a block of four tokens is published
        {"lease": None},
    ],
)
def test_check_finds_a_broken_invariant(wrong: dict[str, Any]) -> None:
    seq = Sequence(request(9), fingerprint=FINGERPRINT, block_size=4, lease=BlockPool(8, 4).lease([], 3))
    seq.computed = 4
    seq.publish()
    seq.check()
    seq.launch(5, sample=True)
    seq.check()
    seq.finish_step(5, sample=True)
    seq.append(7)
    seq.check()
    seq.computed, seq.tokens = 4, seq.tokens[:9]
    for name, value in wrong.items():
        setattr(seq, name, value)
    with pytest.raises(AssertionError):
        seq.check()


def test_the_tests_check_every_step() -> None:
    assert Sequence.CHECKS
