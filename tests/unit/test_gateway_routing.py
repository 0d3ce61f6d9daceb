"""TokenOrder, and the placements of the router with and without an index."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.auth import GATEWAY, Signer
from common.errors import IndexUnavailable, Unavailable
from common.types import FinishReason, PodLoad, Role, SamplingParams, Token, ValidRequest
from gateway.dispatch.token_queue import TokenOrder
from gateway.pods.fitness import OPEN_S
from gateway.pods.info import PodInfo
from gateway.pods.pod import Pod
from gateway.pods.table import PodTable
from gateway.pods.view import PodView
from gateway.routing.router import Router
from gateway.telemetry.metrics import GatewayMetrics
from gateway.telemetry.timeline import RecentTimelines, Timeline
from prefix_index.store import PrefixHits
from tests.rigs.waiting import until

FP = "ab" * 16
SIGNER = Signer(b"secret", GATEWAY, "g", 1)


@given(size=st.integers(1, 12), earlier=st.integers(0, 5), seed=st.integers(0, 2**32))
def test_tokens_in_any_order_and_repetition_are_given_once(size: int, earlier: int, seed: int) -> None:
    """Also after tokens of an earlier attempt, which a pod may send again."""
    rng = random.Random(seed)
    begin = min(earlier, size - 1)
    arrivals = [i for i in range(size) for _ in range(rng.randint(1, 3))]
    rng.shuffle(arrivals)
    order, got, finish = TokenOrder([100 + i for i in range(begin)]), [], None
    for i in arrivals:
        if rng.random() < 0.5 and order.append_if_next(i, 100 + i):
            got.append(Token(i, 100 + i))
        else:
            order.put([Token(i, 100 + i)])
        if i == size - 1:
            order.set_finish(FinishReason.LENGTH)
        tokens, reason = order.take()
        got += tokens
        finish = reason or finish
        if reason is not None:
            assert len(got) == size - begin
    assert [t.index for t in got] == list(range(begin, size))
    assert list(order.ids) == [100 + i for i in range(size)]
    assert finish is FinishReason.LENGTH
    assert order.num_duplicates == len(arrivals) - (size - begin)


def test_append_if_next_takes_only_the_next_token() -> None:
    order = TokenOrder()
    assert not order.append_if_next(1, 5)
    assert order.append_if_next(0, 4)
    assert order.append_if_next(1, 5)
    assert not order.append_if_next(1, 5)
    order.put([Token(3, 7)])
    assert not order.append_if_next(2, 6)  # 3 would stay behind it
    order.put([Token(2, 6)])
    assert not order.append_if_next(4, 8)
    assert order.take() == ([Token(2, 6), Token(3, 7)], None)
    order.set_finish(FinishReason.STOP)
    assert not order.append_if_next(4, 8)
    assert list(order.ids) == [4, 5, 6, 7]


def test_an_end_without_tokens_waits_for_the_first() -> None:
    order = TokenOrder()
    order.set_finish(FinishReason.STOP)
    assert order.take() == ([], None)
    order.put([Token(0, 5)])
    assert order.take() == ([Token(0, 5)], FinishReason.STOP)


class FakeIndex:
    """An index in which no booking can be made, so that the policy alone decides."""

    available = True

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.up = True
        self.returned: list[str] = []  # pods

    async def lookup_tiers(self, scope: str, hashes: list[bytes], pods: list[tuple[str, int]]) -> dict[str, PrefixHits]:
        if not self.up:
            raise IndexUnavailable("away")
        blocks = {name: min(self.held.get(name, 0), len(hashes)) for name, _ in pods}
        return {name: PrefixHits(n, n) for name, n in blocks.items()}

    async def book(self, scope: str, request_id: str, groups: Any) -> Any:
        raise IndexUnavailable("away")

    async def unbook(self, scope: str, pod: str, request_id: str) -> None:
        self.returned.append(pod)

    def is_only_gateway(self, scope: str) -> bool:
        return False


class World:
    def __init__(self, roles: dict[str, Role], index: FakeIndex | None = None) -> None:
        self.index = index
        self.table = PodTable((), index, signer=SIGNER, model="m")  # type: ignore[arg-type]
        self.table.index_up = index is not None
        self.router = Router(self.table, GatewayMetrics(), rng=random.Random(1))
        for i, (name, role) in enumerate(roles.items()):
            pod = Pod(f"127.0.0.1:{i + 1}", SIGNER, model="m", static=True, on_change=self.table.notify_changed)
            pod.info = PodInfo(
                name=name,
                generation=1,
                address=pod.address,
                role=role,
                model="m",
                fingerprint=FP,
                scope=FP[:8],
                block_size=16,
                block_bytes=1 << 20,
                max_model_len=4096,
                num_blocks=1000,
                vocab_size=100,
                ready=True,
                draining=False,
            )
            pod.view = PodView(
                name, address=pod.address, role=role, block_size=16, max_request_tokens=4096, num_blocks=1000
            )
            pod.alive = True
            pod.token_stream_up = role is not Role.PREFILL
            self.table.pods[pod.address] = pod

    def __getitem__(self, name: str) -> PodView:
        view = self.pod(name).view
        assert view is not None
        return view

    def pod(self, name: str) -> Pod:
        return next(p for p in self.table.pods.values() if p.name == name)

    async def place(
        self, length: int, seed: int = 0, avoid: Any = (), tried: Any = (), keep: str = ""
    ) -> tuple[str, str] | None:
        """Returns the names of the decode and the prefill pod. `keep` keeps the bookings, under this request id."""
        plan = await self.router.plan(prompt(length, seed))
        placement = await plan.place(keep or "r", avoid, tried)
        if placement is None:
            return None
        if not keep:
            placement.release()
        return placement.decode.name, placement.prefill.name if placement.prefill else ""

    async def prefill(self, *args: Any, **kwargs: Any) -> str:
        return (await self.place(*args, **kwargs) or ("", ""))[1]

    async def decode(self, *args: Any, **kwargs: Any) -> str:
        return (await self.place(*args, **kwargs) or ("", ""))[0]


def prompt(length: int, seed: int = 0) -> ValidRequest:
    rng = random.Random(seed)
    ids = tuple(rng.randrange(100) for _ in range(length))
    return ValidRequest("r", "m", ids, SamplingParams(max_tokens=16))


TWO_BY_TWO = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}


async def test_the_pod_that_holds_the_prefix_gets_the_request_until_it_is_busy() -> None:
    index = FakeIndex()
    world = World(TWO_BY_TWO, index)
    index.held = {"p1": 60, "d0": 60}
    assert {await world.prefill(1000) for _ in range(20)} == {"p1"}
    assert {await world.decode(1000) for _ in range(20)} == {"d0"}
    world["p1"].prefill_bookings.add("x", 8000, 1.0)
    assert {await world.prefill(1000) for _ in range(20)} == {"p0"}
    world["p1"].prefill_bookings.remove("x")
    assert await world.prefill(1000) == "p1"


async def test_a_pod_reads_what_a_busy_holder_has_written_to_the_shared_tier() -> None:
    index = FakeIndex()
    world = World(TWO_BY_TWO, index)
    index.held = {"p1": 60}
    world["p1"].apply_report(PodLoad(queued_tokens=2_000, prefill_rate=1_000.0), time.monotonic())
    world["p0"].apply_report(PodLoad(prefill_rate=1_000.0, shared_cache=True, shared_rate=9_000.0), time.monotonic())
    assert await world.prefill(1000) == "p1", "it does not write to the shared tier, so no other pod can read there"
    load = PodLoad(queued_tokens=2_000, prefill_rate=1_000.0, shared_cache=True)
    world["p1"].apply_report(load, time.monotonic())
    assert await world.prefill(1000) == "p0"
    placement = await (await world.router.plan(prompt(1000))).place("r", (), ())
    assert placement is not None
    assert placement.predicted_hit_tokens == 960
    placement.release()


async def test_near_ties_are_spread_and_one_common_block_does_not_herd() -> None:
    index = FakeIndex()
    world = World(TWO_BY_TWO, index)
    index.held = {"p0": 1}
    got = Counter([await world.prefill(1000, seed=i, keep=str(i)) for i in range(100)])
    assert min(got.values()) > 35
    assert len({await world.decode(1000, seed=i) for i in range(30)}) == 2


async def test_equal_prompts_share_a_pod_if_waiting_is_cheaper_than_computing_twice() -> None:
    world = World({**TWO_BY_TWO, "p2": Role.PREFILL}, FakeIndex())
    first = await world.prefill(3000, keep="a")
    assert await world.prefill(3000, keep="b") == first
    # A third prompt shares no block with them.
    assert await world.prefill(3000, seed=1, keep="c") != first


async def test_release_returns_all_bookings_in_every_state() -> None:
    index = FakeIndex()
    world = World(TWO_BY_TWO, index)
    for end in ("nothing", "local", "computed"):
        index.returned.clear()
        plan = await world.router.plan(prompt(300))
        placement = await plan.place("r", (), ())
        assert placement is not None
        assert placement.prefill is not None
        booked = sorted([placement.prefill.name, placement.decode.name])
        assert world[placement.prefill.name].prefill_bookings.tokens == 300
        assert len(world[placement.decode.name].decode_bookings) == 1 == len(world.router.inflight)
        if end == "computed":
            placement.on_first_token()
            assert not any(len(world[name].prefill_bookings) for name in TWO_BY_TWO)
        elif end == "local":
            placement.on_local_prefill()
            assert len(world[placement.decode.name].prefill_bookings) == 1
            assert not len(world["p0"].prefill_bookings) + len(world["p1"].prefill_bookings)
        for _ in range(2):
            placement.release()
        assert not any(len(world[name].prefill_bookings) + len(world[name].decode_bookings) for name in TWO_BY_TWO)
        await until(lambda: not world.router._tasks)
        assert sorted(index.returned) == booked, "in the index, once"
    await world.router.stop()


@pytest.mark.parametrize("index", [None, FakeIndex()])
async def test_without_an_index_equal_prompts_get_the_same_pod_and_load_stays_bounded(index: FakeIndex | None) -> None:
    if index is not None:
        index.up = False
    world = World(TWO_BY_TWO, index)
    pods = {seed: await world.prefill(200, seed) for seed in range(40)}
    assert len(set(pods.values())) == 2
    for seed, pod in pods.items():
        assert await world.prefill(200, seed) == pod
    got = Counter([await world.prefill(200, seed=7, keep=str(i)) for i in range(60)])
    assert min(got.values()) >= 20


async def test_without_an_index_the_gateway_remembers_where_it_sent_a_prompt() -> None:
    world = World({f"p{i}": Role.PREFILL for i in range(4)} | {"d0": Role.DECODE})
    pods = {}
    for seed in range(8):
        plan = await world.router.plan(prompt(600, seed))
        avoided = {world.pod(f"p{seed % 4}").address, world.pod(f"p{(seed + 1) % 4}").address}
        placement = await plan.place(f"r{seed}", avoided, ())
        assert placement is not None
        assert placement.prefill is not None
        pods[seed] = placement.prefill.name
        placement.on_first_token()
        placement.release()
    assert {seed: await world.prefill(600, seed) for seed in range(8)} == pods


async def test_failed_pods_are_avoided_while_there_are_others() -> None:
    world = World(TWO_BY_TWO)
    avoid = {world.pod("p0").address}
    assert {await world.prefill(100, s, avoid) for s in range(10)} == {"p1"}
    world.pod("p1").alive = False
    world.table.notify_changed()
    assert await world.prefill(100, 0, avoid) == "p0"


async def test_pods_too_small_for_a_request_are_not_asked() -> None:
    world = World({"d0": Role.BOTH})
    assert await world.place(4080) == ("d0", "")
    assert await world.place(4081) is None


async def test_of_two_addresses_with_one_name_the_later_generation_counts() -> None:
    world = World({"d0": Role.BOTH, "d1": Role.BOTH})
    new = world.pod("d1")
    assert new.info is not None
    new.info = replace(new.info, name="d0", generation=9)
    assert world.table.decode_pods() == [new]


async def test_of_one_name_with_two_layouts_the_later_generation_counts_for_the_limits() -> None:
    world = World(TWO_BY_TWO)
    new = world.pod("p1")
    assert new.info is not None
    new.info = replace(new.info, name="p0", generation=9, fingerprint="cd" * 16)
    assert world.table.decode_pods() == []
    with pytest.raises(Unavailable):
        world.table.limits()


async def test_unmeasured_pods_get_the_rates_of_their_peers() -> None:
    world = World(TWO_BY_TWO)
    world["p0"].apply_report(PodLoad(prefill_rate=500.0, transfer_rate=1e6), 1.0)
    world.table.notify_changed()
    world.table.decode_pods()
    assert (world["p1"].prefill_s_per_token, world["d0"].transfer_s_per_token) == (1 / 500, 1e-6)


def test_only_the_most_recent_timelines_are_kept() -> None:
    ring = RecentTimelines(size=3)
    for i in range(5):
        ring.add(Timeline(f"id{i}", "same", "chat"))
    assert ring.find("id1") is None
    assert ring.find("chatcmpl-id4") is ring.find("id4") is ring.find("same")


async def test_a_prefix_that_only_a_decode_pod_holds_is_pulled() -> None:
    index = FakeIndex()
    world = World({"p0": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}, index)
    index.held = {"d0": 60}
    world["p0"].apply_report(PodLoad(free_blocks=1000, prefill_rate=1000.0, pull_s=0.01), 1.0)
    world["d0"].pair_rates = {"p0": 1e9}
    plan = await world.router.plan(prompt(1000))
    placement = await plan.place("r", (), ())
    assert placement is not None
    assert placement.pull_offer is None  # p0 does not report that it can pull
    placement.release()
    world["p0"].pulls = True
    placement = await plan.place("r", (), ())
    assert placement is not None
    assert placement.pull_offer is not None
    assert (placement.pull_offer.holder, placement.pull_offer.tokens, placement.predicted_hit_tokens) == (
        "d0",
        960,
        960,
    )
    holder = plan.find_holder("d0")
    assert holder is not None
    assert holder.address == world["d0"].address
    remote_cost = placement.remote_prefill_cost()
    assert remote_cost is not None
    assert remote_cost.compute_s == pytest.approx(0.04 + placement.pull_offer.predicted_s)
    assert remote_cost.queue_s == 0.0  # its own booking is not ahead of it
    assert not remote_cost.same_processor  # no pod has told its processor
    for pods, same in (("p0 d0 d1", True), ("p0", False)):
        for name in ("p0", "d0", "d1"):
            world[name].processor = "GPU-1" if name in pods else "GPU-2"
        remote_cost = placement.remote_prefill_cost()
        assert remote_cost is not None
        assert remote_cost.same_processor == same
    placement.release()
    scored = replace(prompt(1000), sampling=SamplingParams(max_tokens=16, prompt_logprobs=0))
    placement = await (await world.router.plan(scored)).place("r", (), ())
    assert placement is not None
    assert placement.pull_offer is None  # prompt log-probabilities need the whole prompt computed


async def test_a_hand_off_after_the_answer_closes_the_breaker_of_the_prefill_pod() -> None:
    world = World({"p": Role.PREFILL, "d": Role.DECODE})
    breaker = world["p"].breaker
    for number in range(4):
        breaker.on_failure(f"f{number}", time.monotonic() - OPEN_S)
    placement = await (await world.router.plan(prompt(100))).place("r", (), ())
    assert placement is not None
    assert placement.prefill is not None
    placement.prefill_outlives = True
    placement.release()
    placement.record_success(placement.prefill)
    assert breaker.closed


async def test_broken_pods_serve_a_request_that_no_other_pod_can_take() -> None:
    world = World({"small": Role.BOTH, "large": Role.BOTH})
    world["small"].max_request_tokens = 200
    breaker = world["large"].breaker
    for number in range(4):
        breaker.on_failure(f"f{number}", time.monotonic())
    short = await (await world.router.plan(prompt(100))).place("short", (), ())
    long = await (await world.router.plan(prompt(300))).place("long", (), ())
    assert short is not None
    assert short.decode.name == "small"
    assert long is not None
    assert long.decode.name == "large"
