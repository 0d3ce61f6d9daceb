"""The simulated cluster: every request ends once, caches are bounded, and equal seeds give equal runs."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import ConfigError, IndexUnavailable
from loadtest.workload.trace import WorkloadRequest, WorkloadTrace, synthetic_block_hash
from simulator.agent_workload import AgentWorkload
from simulator.clock import VirtualClock
from simulator.cluster import SimulatedCluster, SimulationResult
from simulator.hardware_rates import FLAT_8K, H100_8B, HardwareRates
from simulator.index import SimIndex
from simulator.policies import POLICIES
from simulator.spec import ClusterSpec, SimulatedFault

BLOCK = 16
RATES = replace(
    FLAT_8K,
    name="test",
    prefill_tok_s=((1, 1000.0),),
    kv_bytes=1.0,
    kv_read_byte_s=1e12,
    kv_pool_bytes=64.0 * BLOCK,
    decode_row_s=((1, 0.01), (8, 0.03)),
    link_byte_s=1e4,
    link_latency_s=0.005,
)


def request(at: float, *branches: int, tail: int = 1, output: int = 1) -> WorkloadRequest:
    """Returns a prompt of one full block per branch and `tail` more tokens. Equal leading branches share blocks."""
    chain = tuple(synthetic_block_hash(branches[: i + 1]) for i in range(len(branches)))
    return WorkloadRequest(at, len(branches) * BLOCK + tail, output, chain)


def run(trace: WorkloadTrace, **spec: Any) -> tuple[SimulationResult, SimulatedCluster]:
    cluster = SimulatedCluster(ClusterSpec(**{"rates": RATES, "block_size": BLOCK, "overhead_s": 0.0, **spec}), trace)
    return cluster.run(), cluster


def of(*requests: WorkloadRequest) -> WorkloadTrace:
    return WorkloadTrace("test", BLOCK, requests)


requests = st.builds(
    request,
    st.floats(0, 5),
    *[st.integers(0, 2)] * 3,
    tail=st.integers(1, 3 * BLOCK),
    output=st.integers(1, 40),
)
traces = st.lists(requests, min_size=2, max_size=30).map(lambda r: of(*sorted(r, key=lambda r: r.arrival_s)))
faults = st.lists(
    st.builds(
        SimulatedFault,
        st.floats(0.01, 4),
        st.floats(0.01, 3),
        st.sampled_from(["", "prefill-0", "prefill-1", "decode-0"]),
    ),
    max_size=3,
    unique_by=lambda f: f.pod,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    trace=traces,
    faults=faults,
    decode=st.sampled_from([0, 1, 2]),
    gateways=st.integers(1, 3),
    policy=st.sampled_from(tuple(POLICIES)),
    chunk=st.sampled_from([BLOCK, 5 * BLOCK]),
    blocks=st.integers(9, 24),
    seqs=st.integers(1, 4),
    lag=st.sampled_from([0.0, 0.5]),
    pull=st.booleans(),
)
def test_every_request_ends_once_and_no_block_stays_leased(
    trace: WorkloadTrace,
    faults: list[SimulatedFault],
    decode: int,
    gateways: int,
    policy: str,
    chunk: int,
    blocks: int,
    seqs: int,
    lag: float,
    pull: bool,
) -> None:
    planned = tuple(f for f in faults if not (f.pod.startswith("decode") and decode == 0))
    result, cluster = run(
        trace,
        prefill=2,
        decode=decode,
        gateways=gateways,
        policy=policy,
        chunk_tokens=chunk,
        prefill_blocks=blocks,
        decode_blocks=2 * blocks,
        prefill_seqs=seqs,
        decode_seqs=seqs,
        lag_s=lag,
        faults=planned,
        pull=pull,
    )
    cluster.check()
    assert len(result.outcomes) == len(trace.requests)
    for asked, o in zip(trace.requests, result.outcomes, strict=True):
        assert o.arrival_s == asked.arrival_s
        assert o.done != o.refused
        assert 0 <= o.hit_tokens < asked.prompt_len + asked.output_len
        assert o.hit_tokens % BLOCK == 0
        if o.done:
            assert o.ttft_s is not None
            if o.attempts == 1:  # uncached tokens take at least the pod's time
                assert o.ttft_s >= (asked.prompt_len - o.hit_tokens) / 1000.0 - 1e-9
        if not planned and decode == 0:
            assert o.done
    for pod in cluster.pods:
        counts = pod.process.pool.counts()
        assert counts.free + counts.cached + counts.leased == pod.process.pool.num_blocks
    if not planned:
        computed = sum(o.prompt_len - o.hit_tokens for o in result.outcomes if o.done)
        assert result.summary.computed_tokens == computed


@settings(max_examples=25, deadline=None)
@given(trace=traces, seed=st.integers(0, 5))
def test_the_same_seed_gives_the_same_run(trace: WorkloadTrace, seed: int) -> None:
    first, second = (
        run(trace, prefill=3, decode=1, gateways=2, seed=seed, faults=(SimulatedFault(1.0, 1.0, "prefill-1"),))[0]
        for _ in range(2)
    )
    assert first.outcomes == second.outcomes
    assert replace(first.summary, cpu_s=0.0) == replace(second.summary, cpu_s=0.0) or "nan" in str(first.summary)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 3)), max_size=20))
def test_time_never_goes_back_and_equal_times_keep_their_order(events: list[tuple[float, float]]) -> None:
    clock, seen = VirtualClock(), []

    def fire(i: int, again: float) -> None:
        seen.append((clock.now, i))
        if again:
            clock.call_after(-again, lambda: seen.append((clock.now, i)))  # the past is now

    for i, (at, again) in enumerate(events):
        clock.call_at(at, lambda i=i, again=again: fire(i, again))  # type: ignore[misc]
    clock.run(lambda: False)
    assert all(a[0] <= b[0] for a, b in pairwise(seen))
    assert len(seen) == sum(2 if again else 1 for _, again in events)
    first = [i for at, i in seen[: len(seen)] if events[i][0] == at and not events[i][1]]
    assert first == sorted(first, key=lambda i: (events[i][0], i))


def test_the_times_of_a_prefill_queue() -> None:
    """A pod of 1,000 tokens/s computes one prompt after another: 33 and 17 tokens, then 33 with 32 cached."""
    trace = of(request(0.0, 1, 2), request(0.0, 3), request(1.0, 1, 2))
    result, _ = run(trace, prefill=1, prefill_seqs=1)
    assert [o.ttft_s for o in result.outcomes] == pytest.approx([0.033, 0.050, 0.001])
    assert [o.hit_tokens for o in result.outcomes] == [0, 0, 32]
    assert result.summary.hit_rate == pytest.approx(32 / 83)


def test_the_times_of_a_hand_off_and_a_decode() -> None:
    """33 tokens in two chunks: KV of the first is sent while the second is computed, so only the rest is exposed."""
    trace = of(request(0.0, 1, 2, output=11), request(9.0, 1, 2, output=11))
    result, _ = run(trace, prefill=1, decode=1, chunk_tokens=32)
    first, second = result.outcomes
    assert first.ttft_s == pytest.approx(0.033)
    assert first.mean_itl_s == pytest.approx((1 / 1e4 + 0.0032 - 0.001 + 0.005 + 10 * 0.01) / 10, rel=1e-3)
    # The decode pod holds both blocks: one token and the latency are left.
    assert second.mean_itl_s == pytest.approx((1 / 1e4 + 0.005 + 10 * 0.01) / 10, rel=1e-3)


def test_decode_steps_take_longer_with_more_sequences() -> None:
    alone, _ = run(of(request(0.0, 1, output=30)), prefill=1, decode=1)
    crowd, _ = run(of(*[request(0.0, i, output=30) for i in range(8)]), prefill=8, decode=1)
    assert alone.outcomes[0].mean_itl_s == pytest.approx(0.01, abs=0.001)
    assert crowd.summary.gap_p50_s == pytest.approx(0.03, rel=0.1)


def test_a_full_decode_pod_refuses() -> None:
    trace = of(*[request(0.0, i, tail=16, output=64) for i in range(4)])
    result, cluster = run(trace, prefill=1, decode=1, decode_blocks=7)  # of six blocks each
    cluster.check()
    assert [o.refused for o in result.outcomes] == [False, True, True, True]


def test_the_cache_is_limited_and_the_index_knows_what_is_evicted() -> None:
    trace = of(*[request(float(i), i % 5, tail=15 * BLOCK) for i in range(40)])
    small, cluster = run(trace, prefill=1, prefill_blocks=18)
    large, _ = run(trace, prefill=1, prefill_blocks=200)
    assert small.summary.hit_rate < large.summary.hit_rate
    assert small.summary.promised_rate == pytest.approx(small.summary.hit_rate)
    assert cluster.index.blocks.size() <= 18


def test_a_restarted_pod_has_no_hits_of_its_earlier_process() -> None:
    trace = of(request(0.0, 1, 2), request(1.0, 1, 2), request(6.0, 1, 2))
    result, _ = run(trace, prefill=1, faults=(SimulatedFault(2.0, 1.0, "prefill-0"),))
    assert [o.expected_hit_tokens for o in result.outcomes] == [0, 32, 0]
    assert [o.hit_tokens for o in result.outcomes] == [0, 32, 0]


def test_a_dead_pod_does_not_lose_requests() -> None:
    trace = of(*[request(i * 0.01, i, i, tail=60, output=20) for i in range(40)])
    result, cluster = run(
        trace,
        prefill=2,
        decode=2,
        decode_blocks=400,
        faults=(SimulatedFault(0.2, 50.0, "prefill-0"), SimulatedFault(0.3, 50.0, "decode-1")),
    )
    cluster.check()
    assert all(o.done for o in result.outcomes)
    assert result.summary.retried > 0


def test_without_an_index_the_gateway_uses_its_own_memory() -> None:
    trace = of(*[request(float(i), i % 7, i % 7, i % 7, tail=64) for i in range(60)])
    with_index, _ = run(trace, prefill=3)
    without, _ = run(trace, prefill=3, faults=(SimulatedFault(0.0, 1e9),))
    blind, _ = run(trace, prefill=3, policy="round_robin")
    assert all(o.done for o in without.outcomes)
    assert blind.summary.hit_rate < without.summary.hit_rate <= with_index.summary.hit_rate + 1e-9


def test_a_late_index_underestimates_the_hits() -> None:
    trace = of(*[request(i * 0.5, 1, 2, 3) for i in range(20)])
    late, _ = run(trace, prefill=1, lag_s=4.0)
    assert late.summary.promised_rate < late.summary.hit_rate


def test_pods_publish_again_after_an_outage_of_the_index() -> None:
    clock = VirtualClock()
    index = SimIndex(clock)
    publisher = index.publisher("p", 1)
    held = [synthetic_block_hash(i) for i in range(3)]
    publisher.start(lambda: list(held))
    clock.run(lambda: clock.now > 1)
    assert index.reader().lookup(held, [("p", 1)]) == {"p": 3}
    index.unreachable = True
    clock.run(lambda: clock.now > 5)
    held.append(synthetic_block_hash(3))
    publisher.stored(held[3:])
    with pytest.raises(IndexUnavailable):
        index.reader().lookup(held, [("p", 1)])
    index.unreachable = False
    clock.run(lambda: clock.now > 15)
    assert index.reader().lookup(held, [("p", 1)]) == {"p": 4}


def test_two_gateways_do_not_herd() -> None:
    burst = of(*[request(1.0, 7, 7, tail=40) for _ in range(64)])
    _, cluster = run(burst, prefill=8, gateways=2, prefill_seqs=1)
    assert max(pod.prompts for pod in cluster.pods) <= 1.25 * 64 / 8


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"prefill": 0}, "prefill"),
        ({"prefill": 1000, "decode": 25}, "prefill"),
        ({"policy": "best"}, "policy"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"faults": (SimulatedFault(0.0, 1.0, "prefill-9"),)}, "faults"),
        ({"block_size": 32}, "block_size"),
    ],
)
def test_an_invalid_cluster_is_refused_by_field(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        run(of(request(0.0, 1), request(1.0, 1)), **{"prefill": 1, **wrong})
    assert error.value.field == field


def test_the_synthetic_trace_has_the_requested_shape() -> None:
    agents = AgentWorkload(rate=4.0, seconds=300.0, seed=3, tenants=20)
    trace = agents.trace()
    assert trace == agents.trace()
    assert trace != replace(agents, seed=4).trace()
    assert 0.7 < trace.rate / 4.0 < 1.3
    assert 0.5 < trace.ideal_hit_rate() < 0.95
    for r in trace.requests:
        assert len(r.block_hashes) == r.prompt_len // trace.block_size
    # Every prompt of a tenant begins with its system prompt.
    assert len({r.block_hashes[0] for r in trace.requests if r.block_hashes}) <= 20


def test_the_h100_preset_in_both_roles() -> None:
    """On idle pods TTFT and decode steps are those of the rates."""
    size = 512
    chain = tuple(synthetic_block_hash(i) for i in range(8))
    trace = WorkloadTrace(
        "one", size, (WorkloadRequest(0.0, 4096, 128, chain), WorkloadRequest(60.0, 4097, 128, chain))
    )
    cluster = SimulatedCluster(ClusterSpec(rates=H100_8B, prefill=1, decode=1), trace)
    result = cluster.run()
    cold, warm = result.outcomes
    assert cold.ttft_s == pytest.approx(H100_8B.prompt_s(4096, 2048) + 0.001, rel=1e-6)
    assert 0.08 < (cold.ttft_s or 0) < 0.12
    assert warm.hit_tokens == 4096
    assert (warm.ttft_s or 0) < 0.01
    assert cold.mean_itl_s == pytest.approx(H100_8B.decode_s(1, 4160), rel=0.02)


def test_rates_add_up() -> None:
    whole = H100_8B.prefill_s([(0, 8192)])
    chunks = sum(H100_8B.prefill_s([(start, 2048)]) for start in range(0, 8192, 2048))
    assert 0.8 < whole / chunks < 1.25
    assert H100_8B.prefill_s([(4096, 2048)]) > H100_8B.prefill_s([(0, 2048)])
    assert H100_8B.decode_s(64, 64 * 2048) == pytest.approx(0.0121, rel=0.05)
    assert asdict(H100_8B)["kv_bytes"] == 131072
    assert isinstance(H100_8B, HardwareRates)


def test_a_pod_that_becomes_ten_times_slower_gets_few_prompts_until_it_is_fast_again() -> None:
    trace = of(*[request(0.05 * i, i, output=1) for i in range(2000)])
    spec: dict[str, Any] = {"prefill": 4, "prefill_blocks": 64, "policy": "cost"}
    _, usual = run(trace, **spec)
    fault = SimulatedFault(at_s=10.0, for_s=60.0, pod="prefill-0", slower=10.0)
    result, cluster = run(trace, faults=(fault,), **spec)
    slow, *others = [pod.prompts for pod in cluster.pods]
    assert slow < 0.6 * usual.pods[0].prompts
    assert min(others) > slow
    assert result.summary.refused == 0
    assert result.summary.ttft_p90_s < 1.0
