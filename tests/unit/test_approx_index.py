"""ApproxIndex: finds only recorded blocks, evicts ends of chains first, and has a bounded size."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.block_hash import hash_blocks
from gateway.routing.local_index import POINT_STRIDE, ApproxIndex
from tests.rigs.engine.comparisons import shared

FP = "ab" * 16


def chain(*parts: tuple[int, int]) -> list[bytes]:
    """Returns the block hashes of a chain given as (token, repetitions)."""
    tokens = [token for token, count in parts for _ in range(count)]
    return hash_blocks(tokens, fingerprint=FP, block_size=1)


chains = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 30)), min_size=1, max_size=4).map(lambda p: chain(*p))
records = st.tuples(st.sampled_from("abc"), st.integers(1, 3), chains)


@given(st.lists(records, max_size=12), chains)
def test_a_lookup_returns_at_most_the_recorded_blocks_and_little_less(
    past: list[tuple[str, int, list[bytes]]], prompt: list[bytes]
) -> None:
    index = ApproxIndex()
    newest: dict[str, int] = {}
    held: dict[tuple[str, int], int] = {}
    for pod, generation, hashes in past:
        index.record(pod, generation, hashes)
        newest[pod] = max(newest.get(pod, 0), generation)
        held[pod, generation] = max(held.get((pod, generation), 0), shared(hashes, prompt))
    for pod in "abcd":
        for generation in (1, 2, 3):
            said = index.lookup(prompt, [(pod, generation)])[pod]
            truth = held.get((pod, generation), 0) if newest.get(pod) == generation else 0
            assert truth - POINT_STRIDE < said <= truth
    assert index.lookup([], [("a", 1)]) == {"a": 0}


@given(st.lists(records, min_size=1, max_size=12))
def test_the_latest_chain_is_found_completely(past: list[tuple[str, int, list[bytes]]]) -> None:
    index = ApproxIndex()
    for pod, _, hashes in past:
        index.record(pod, 1, hashes)
        assert index.lookup(hashes, [(pod, 1)]) == {pod: len(hashes)}


@settings(max_examples=50)
@given(st.lists(records, min_size=1, max_size=20), st.integers(1, 40))
def test_the_size_is_bounded_and_ends_of_chains_are_evicted_first(
    past: list[tuple[str, int, list[bytes]]], most: int
) -> None:
    small, large = ApproxIndex(max_points=most), ApproxIndex()
    for pod, generation, hashes in past:
        small.record(pod, generation, hashes)
        large.record(pod, generation, hashes)
        assert len(small) <= most
        for name, number, other in past:
            # With a hole in a chain, what a search finds would depend on where it looks.
            found = [small.lookup(other[:n], [(name, number)])[name] for n in range(1, len(other) + 1)]
            full = [large.lookup(other[:n], [(name, number)])[name] for n in range(1, len(other) + 1)]
            assert all(a <= b for a, b in zip(found, full, strict=True))
            best = max(found)
            assert all(found[n] == n + 1 for n in range(min(best, POINT_STRIDE)))


def test_records_end_by_age_by_forget_and_by_a_new_generation() -> None:
    now = 0.0
    index = ApproxIndex(max_age_s=10, clock=lambda: now)
    hashes = chain((1, 20))
    index.record("a", 1, hashes)
    index.record("b", 1, hashes)
    index.record("c", 5, hashes)
    index.record("c", 4, chain((2, 5)))  # a late word about a predecessor
    now = 8.0
    index.record("b", 1, hashes[:9])
    index.forget("c")
    assert index.lookup(hashes, [("a", 1), ("b", 1), ("c", 5)]) == {"a": 20, "b": 20, "c": 0}
    index.record("a", 2, hashes[:3])
    assert index.lookup(hashes, [("a", 1)]) == {"a": 0}
    assert index.lookup(hashes, [("a", 2)]) == {"a": 3}
    now = 11.0
    assert index.lookup(hashes, [("b", 1)]) == {"b": 8}
    now = 19.0
    assert index.lookup(hashes, [("b", 1)]) == {"b": 0}
    index.record("c", 5, hashes)  # the same process again: what was forgotten stays so
    assert index.lookup(hashes, [("c", 5)]) == {"c": 20}
    assert index.lookup(chain((9, 4)), [("c", 5)]) == {"c": 0}
