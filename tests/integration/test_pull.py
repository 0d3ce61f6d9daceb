"""Prefill pods pull prefixes from other pods: the tokens are the same for every outcome of the pull."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.errors import BatonError, DeadlineExceeded
from common.types import Role, ValidRequest
from engine.llm import LLM
from kv_transfer.backend.loopback import LoopbackFault
from kv_transfer.messages import PullResult, WantedBlocks
from prefill_service import prefix_pull
from prefill_service.hand_off import PrefillHandOff
from tests.rigs.pods.harness import BLOCK, CHUNK, Cluster, Pod, expected, prompt_of, request
from tests.rigs.waiting import until

PREFIX = 12 * BLOCK  # tokens that two prompts share


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the time limits, so that a busy machine still pulls."""
    monkeypatch.setattr(prefix_pull, "UNKNOWN_TIME_S", 20.0)
    monkeypatch.setattr(prefix_pull, "MIN_TIME_S", 20.0)
    monkeypatch.setattr(prefix_pull, "MAX_TIME_S", 20.0)


def follow_up(tokens: int = 2 * BLOCK + 1, **more: object) -> ValidRequest:
    """Another prompt with the same prefix."""
    return request([*prompt_of(PREFIX, seed=9), *prompt_of(tokens, seed=3)], 6, **more)


async def with_prefix(cluster: Cluster, holder: Pod) -> None:
    """Makes a prefill pod compute the prefix."""
    await cluster.generate(request([*prompt_of(PREFIX, seed=9), 7], 2), prefill=holder)
    await holder.settled()


def computed(pod: Pod) -> int:
    return pod.runtime.computed_tokens["prefill"]


def hand_offs(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> list[PrefillHandOff]:
    """Collects the hand-offs that start on the pod from now on."""
    begun: list[PrefillHandOff] = []
    add = pod.service.requests.add

    def noted(request_id: str, hand_off: PrefillHandOff) -> None:
        begun.append(hand_off)
        add(request_id, hand_off)

    monkeypatch.setattr(pod.service.requests, "add", noted)
    return begun


class TestHit:
    @pytest.mark.parametrize("kind", ["prefill", "decode"])
    async def test_a_prefix_is_pulled_from_the_pod_that_holds_it(
        self, model_dir: Path, llm: LLM, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with Cluster.start(model_dir, prefill=2, decode=2) as cluster:
            first, second = cluster.prefills
            await with_prefix(cluster, first)
            holder = first if kind == "prefill" else cluster.decode
            r = follow_up()
            before, begun = computed(second), hand_offs(second, monkeypatch)
            answer = await cluster.generate(
                r, prefill=second, decode=cluster.decodes[1], pull=holder.holds(PREFIX // BLOCK)
            )
            assert answer.ids == expected(llm, r)
            assert answer.cached_tokens == PREFIX
            assert computed(second) - before == r.prompt_len - PREFIX
            assert second.counted("pulls") == {("done", "all"): 1}
            assert [one.pulled_from is not None and one.pulled_from[0] for one in begun] == [holder.runtime.name]
            assert second.counted("pulled_blocks") == {(): PREFIX // BLOCK}
            assert holder.counted("lent_blocks") == {(): PREFIX // BLOCK}
            pair = next(p for p in (await holder.info()).pairs if p.pod == second.runtime.name)
            assert (pair.pulls, pair.blocks) == (1, PREFIX // BLOCK)
            assert (await second.info()).load.pull_s > 0

    async def test_only_what_is_missing_is_pulled_and_the_second_prompt_pulls_nothing(
        self, model_dir: Path, llm: LLM
    ) -> None:
        async with Cluster.start(model_dir, prefill=2) as cluster:
            first, second = cluster.prefills
            await with_prefix(cluster, first)
            await cluster.generate(request([*prompt_of(PREFIX, seed=9)[: 5 * BLOCK], 3], 2), prefill=second)
            for n in range(2):
                r = follow_up(BLOCK + n)
                answer = await cluster.generate(r, prefill=second, pull=first.holds(PREFIX // BLOCK))
                assert answer.ids == expected(llm, r)
                assert answer.cached_tokens == PREFIX
            assert second.counted("pulls") == {("done", "all"): 1, ("skipped", "held"): 1}
            assert second.counted("pulled_blocks") == {(): PREFIX // BLOCK - 5}

    async def test_prompts_with_the_same_prefix_share_one_pull(self, model_dir: Path, llm: LLM) -> None:
        async with Cluster.start(model_dir, prefill=2) as cluster:
            first, second = cluster.prefills
            await with_prefix(cluster, first)
            requests = [follow_up(BLOCK + n) for n in range(4)]
            answers = await asyncio.gather(
                *(cluster.generate(r, prefill=second, pull=first.holds(PREFIX // BLOCK)) for r in requests)
            )
            for r, answer in zip(requests, answers, strict=True):
                assert answer.ids == expected(llm, r)
            assert second.counted("pulled_blocks") == {(): PREFIX // BLOCK}

    async def test_salts_keep_tenants_apart(self, model_dir: Path, llm: LLM) -> None:
        async with Cluster.start(model_dir, prefill=2) as cluster:
            first, second = cluster.prefills
            await with_prefix(cluster, first)
            plain = follow_up()
            r = ValidRequest(plain.request_id, plain.model, plain.prompt_ids, plain.sampling, cache_salt="theirs")
            answer = await cluster.generate(r, prefill=second, pull=first.holds(PREFIX // BLOCK))
            assert answer.ids == expected(llm, plain)
            assert answer.cached_tokens == 0
            assert second.counted("pulls") == {("refused", "absent"): 1}


class TestMiss:
    async def test_a_holder_without_the_last_blocks_sends_the_others(self, model_dir: Path, llm: LLM) -> None:
        """The index lists more blocks than the holder has, because the last blocks are evicted first."""
        async with Cluster.start(model_dir, prefill=2) as cluster:
            first, second = cluster.prefills
            await with_prefix(cluster, first)
            r = follow_up(6 * BLOCK)
            answer = await cluster.generate(r, prefill=second, pull=first.holds(PREFIX // BLOCK + 4))
            assert answer.ids == expected(llm, r)
            assert answer.cached_tokens == PREFIX
            assert second.counted("pulls") == {("done", "part"): 1}

    @pytest.mark.parametrize("what", ["lost", "other generation", "gone", "broken link", "frozen", "late"])
    async def test_the_prompt_is_computed_when_the_pull_fails(
        self, model_dir: Path, llm: LLM, what: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            prefix_pull, "UNKNOWN_TIME_S", 0.5 if what in ("frozen", "late", "gone", "broken link") else 20.0
        )
        async with Cluster.start(model_dir, prefill=2) as cluster:
            first, second = cluster.prefills
            await with_prefix(cluster, first)
            await first.runtime.transfer_node.connect(second.runtime.address, second.runtime.name)
            await second.runtime.transfer_node.connect(first.runtime.address, first.runtime.name)
            hint = first.holds(PREFIX // BLOCK)
            if what == "lost":
                first.runtime.engine.pool.reset_prefix_cache()
            elif what == "other generation":
                hint.generation -= 1
            elif what == "gone":
                cluster.prefills.remove(first)
                await first.close()
            elif what == "broken link":
                cluster.fabric.on_write = lambda source, _p, n: LoopbackFault(
                    fail="broken" if source == first.agent and n == PREFIX // BLOCK else None
                )
            elif what == "frozen":
                cluster.fabric.freeze(second.agent)
            elif what == "late":
                cluster.fabric.on_write = lambda source, _p, n: LoopbackFault(
                    delay_s=2.0 if source == first.agent and n == PREFIX // BLOCK else 0.0
                )
            r = follow_up()
            running = asyncio.create_task(cluster.generate(r, prefill=second, pull=hint))
            if what == "frozen":
                await until(lambda: bool(second.counted("pulls")))  # the pull ran into its limit
                cluster.fabric.thaw(second.agent)
            answer = await running
            assert answer.ids == expected(llm, r)
            (outcome, _), *_ = second.counted("pulls")
            if what == "lost":
                assert outcome == "refused"
            elif what != "other generation":  # the holder pushes regardless of the generation in the hint
                assert outcome == "failed"

    async def test_a_pod_with_pull_off_and_prompts_that_cannot_use_a_prefix(
        self, model_dir: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with Cluster.start(model_dir, prefill=2, prefill_config={"pull": "off"}) as cluster:
            first, second = cluster.prefills
            await with_prefix(cluster, first)
            assert not (await second.info()).pulls
            r = follow_up()
            answer = await cluster.generate(r, prefill=second, pull=first.holds(PREFIX // BLOCK))
            assert answer.ids == expected(llm, r)
            assert answer.cached_tokens == 0
            assert second.counted("pulls") == {("skipped", "off"): 1}
        async with Cluster.start(model_dir, prefill=2) as cluster:
            first, second = cluster.prefills
            await with_prefix(cluster, first)
            assert (await second.info()).pulls
            begun = hand_offs(second, monkeypatch)
            scored = follow_up(prompt_logprobs=0)
            assert (await cluster.generate(scored, prefill=second, pull=first.holds(12))).cached_tokens == 0
            assert second.counted("pulls") == {("skipped", "useless"): 1}
            assert [one.pulled_from for one in begun] == [None]  # the trace has no pull

    async def test_a_full_pod_computes(self, model_dir: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        async with Cluster.start(model_dir, prefill=1) as cluster:
            small = await cluster.add(Role.PREFILL, num_blocks=20)
            await with_prefix(cluster, cluster.prefill)
            pool = small.runtime.engine.pool
            taken = pool.lease([], 12)
            assert taken is not None
            r, begun = follow_up(), hand_offs(small, monkeypatch)
            running = asyncio.create_task(cluster.generate(r, prefill=small, pull=cluster.prefill.holds(12)))
            async with asyncio.timeout(30):
                while small.counted("pulls") != {("skipped", "no_room"): 1}:
                    await asyncio.sleep(0.005)
            taken.finish("enough")
            assert (await running).ids == expected(llm, r)
            assert [one.pulled_from for one in begun] == [None], "no holder was asked"


async def test_a_pull_gets_as_long_as_computing_would_take(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_pull, "MIN_TIME_S", 0.0)
    async with Cluster.start(model_dir, prefill=2) as cluster:
        first, second = cluster.prefills
        await with_prefix(cluster, first)
        monkeypatch.setattr(second.runtime.rates, "prefill_s", lambda tokens: tokens * 0.01)
        limits: list[float] = []

        async def pull(_address: str, _holder: str, wanted: WantedBlocks) -> PullResult:
            limits.append(wanted.timeout_s)
            wanted.pin.release()
            raise DeadlineExceeded("too late")

        monkeypatch.setattr(second.runtime.transfer_node, "pull", pull)
        await cluster.generate(follow_up(), prefill=second, pull=first.holds(PREFIX // BLOCK))
        assert len(limits) == 1
        assert 0 < limits[0] <= PREFIX * 0.01
        assert second.counted("pulls") == {("failed", "DeadlineExceeded"): 1}
        assert (await second.info()).load.pull_s > 0, "routing gets the time of the failed pull"


async def test_a_pod_without_a_prefix_cache_pulls_nothing(model_dir: Path, llm: LLM) -> None:
    async with Cluster.start(model_dir) as cluster:
        first = cluster.prefills[0]
        second = await cluster.add(Role.PREFILL, prefix_cache=False)
        await with_prefix(cluster, first)
        assert not (await second.info()).pulls
        r = follow_up()
        answer = await cluster.generate(r, prefill=second, pull=first.holds(PREFIX // BLOCK))
        assert answer.ids == expected(llm, r)
        assert second.counted("pulls") == {("skipped", "off"): 1}


async def test_an_abort_during_a_pull_ends_the_request_and_gives_all_back(model_dir: Path) -> None:
    async with Cluster.start(model_dir, prefill=2) as cluster:
        first, second = cluster.prefills
        await with_prefix(cluster, first)
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(source: str, _peer: str, blocks: int) -> LoopbackFault:
            if source == first.agent and blocks == PREFIX // BLOCK:
                loop.call_soon_threadsafe(started.set)
                return LoopbackFault(delay_s=600.0)
            return LoopbackFault()

        cluster.fabric.on_write = slow
        r = follow_up()
        running = asyncio.create_task(cluster.generate(r, prefill=second, pull=first.holds(PREFIX // BLOCK)))
        await asyncio.wait_for(started.wait(), 30)
        before = computed(second)
        await cluster.abort(r.request_id)
        with pytest.raises(BatonError):
            await running
        cluster.fabric.on_write = lambda *_: LoopbackFault()
        cluster.clock.ahead_s = 600.0
        await second.settled()
        assert computed(second) == before  # the engine never got the prompt


async def test_a_pull_does_not_change_running_prompts(model_dir: Path, llm: LLM) -> None:
    """Small pools, with pulls and prompts at the same time: a pulled block never lands in another request's block."""
    async with Cluster.start(
        model_dir,
        prefill=2,
        decode=2,
        prefill_config={"num_blocks": 40},
        decode_config={"num_blocks": 200},
    ) as cluster:
        first, second = cluster.prefills
        await with_prefix(cluster, first)
        requests = []
        for n in range(24):
            r = follow_up(1 + n % 9) if n % 2 else request(prompt_of(3 * CHUNK - n, seed=n), 5)
            requests.append(r)
        answers = await asyncio.gather(
            *(
                cluster.generate(
                    r,
                    prefill=(second, first)[n % 3 == 0],
                    decode=cluster.decodes[n % 2],
                    pull=(first, second)[n % 3 == 0].holds(PREFIX // BLOCK) if n % 2 else None,
                )
                for n, r in enumerate(requests)
            )
        )
        for r, answer in zip(requests, answers, strict=True):
            assert answer.ids == expected(llm, r)
