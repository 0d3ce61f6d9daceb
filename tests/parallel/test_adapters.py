"""Adapters over a model of several ranks: answers are those of merged models, and ranks hold the same adapters."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import AdapterNotLoaded, InternalError
from common.types import AdapterEntry
from engine.llm import LLM
from engine.parallel import adapters as parallel_adapters
from engine.parallel.adapters import RankAdapters
from kv_transfer.backend.loopback import LoopbackFabric
from tests.lora.lora_rig import ADAPTERS, NAMES, Oracle, answers, make_llm, make_oracle, merge, save_adapter
from tests.lora.test_adapter_pods import load
from tests.rigs.engine.draft_models import draft_settings, tiny_target
from tests.rigs.engine.tiny_models import MOE_CASES, tiny_prompt
from tests.rigs.parallel.thread_ranks import ThreadRanks, thread_ranks
from tests.rigs.pods.harness import Cluster, prompt_of, request
from tests.rigs.waiting import until

torch.set_num_threads(1)
LONG = pytest.mark.long


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Two KV heads, so four ranks share them."""
    return make_oracle(tmp_path_factory.mktemp("lora"), {"model_type": "llama"}, ADAPTERS)


@pytest.fixture(autouse=True)
def ranks() -> Iterator[ThreadRanks]:
    """The ranks of this file's engines and pods are threads."""
    with thread_ranks(LoopbackFabric()) as started:
        yield started


@pytest.fixture
def rank_adapters(monkeypatch: pytest.MonkeyPatch) -> list[RankAdapters]:
    """The adapters of the ranks above 0 that a test starts."""
    made, init = list[RankAdapters](), RankAdapters.__init__

    def remember(self: RankAdapters, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(RankAdapters, "__init__", remember)
    return made


def loads_of(llm: LLM) -> set[int]:
    """Returns the loads of the adapters that have a name."""
    return {adapter.load for adapter in llm.engine.adapters.all().values()}


@pytest.mark.parametrize(
    ("size", "config"),
    [
        (2, {"speculation": "ngram"}),
        (4, {"max_adapters": 2}),  # fewer slots than adapters
        pytest.param(4, {"overlap": True, "host_cache": 1 << 22, "num_blocks": 24}, marks=LONG),  # preemption
        pytest.param(2, {"chunk_tokens": 1024, "block_size": 16}, marks=LONG),
    ],
    ids=["2", "4", "4-overlap", "2-large-steps"],
)
def test_mixed_batches_are_exact(size: int, config: dict[str, Any], oracle: Oracle) -> None:
    """Prompts in chunks, and prefix hits."""
    llm, names = make_llm(oracle, tensor_parallel_size=size, **config), [*NAMES, "all"]
    try:
        prompts = [tiny_prompt(24 if i < 4 else 5, seed=i // 4) for i in range(len(names))]
        for _ in range(2):
            found = answers(llm, names, prompts)
            for name, completion in zip(names, found, strict=True):
                oracle.check(completion, name)
        assert len({tuple(completion.ids) for completion in found}) == len(names), "the adapters change the answers"
        assert config.get("num_blocks") or any(completion.cached_tokens for completion in found)
        llm.engine.pool.check_integrity()
    finally:
        llm.engine.close()


def test_long_prompts_end_with_attention_for_one_row(oracle: Oracle) -> None:
    """The last layer of such a step has the adapters of its result alone."""
    llm = make_llm(oracle, tensor_parallel_size=2, chunk_tokens=256, max_model_len=256)
    try:
        for name in NAMES:
            oracle.check(answers(llm, [name], [tiny_prompt(150, seed=3)], max_tokens=4)[0], name)
    finally:
        llm.engine.close()


FAMILIES: dict[str, dict[str, Any]] = {
    "biases": {"model_type": "qwen2"},
    "partial-rotary-experts": MOE_CASES["glm4-moe"],
    "residual-multiplier": MOE_CASES["granite-moe"],
}


@pytest.mark.parametrize("size", [pytest.param(2, marks=LONG), pytest.param(4, marks=LONG)])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, size: int, tmp_path: Path) -> None:
    family = make_oracle(tmp_path, FAMILIES[name], {"all": {"seed": 1, "modules": ("q_proj", "v_proj", "o_proj")}})
    llm = make_llm(family, tensor_parallel_size=size)
    try:
        names: list[str | None] = [None, "all"]
        for own, completion in zip(names, answers(llm, names, [tiny_prompt(30, seed=1)] * 2), strict=True):
            family.check(completion, own)
    finally:
        llm.engine.close()


def test_a_swap_while_answers_run_and_evictions(oracle: Oracle, rank_adapters: list[RankAdapters]) -> None:
    """Running answers keep their adapter, the name gets another at once, and ranks drop what has no user."""
    llm = make_llm(oracle, tensor_parallel_size=2, max_adapters=1)
    try:
        engine, prompt = llm.engine, tiny_prompt(20, seed=4)
        llm.add_adapter(oracle.adapters["all"], "mine")
        swapped = threading.Event()
        step = engine.step

        def swap_after_three(*args: Any) -> Any:
            result = step(*args)
            if engine.counters.steps >= before + 3 and not swapped.is_set():
                loader = threading.Thread(target=llm.add_adapter, args=(oracle.adapters["some"], "mine"))
                loader.start()
                loader.join(30.0)
                swapped.set()
            return result

        before = engine.counters.steps
        engine.step = swap_after_three  # type: ignore[method-assign]
        (running,) = answers(llm, ["mine"], [prompt], max_tokens=12)
        engine.step = step  # type: ignore[method-assign]
        assert swapped.is_set()
        oracle.check(running, "all")
        (later,) = answers(llm, ["mine"], [prompt])
        oracle.check(later, "some")
        assert later.cached_tokens == 0
        for name in ("all", "some", "mine"):
            llm.remove_adapter(name)
        gc.collect()
        (last,) = answers(llm, ["patterns"], [prompt])  # the one slot is taken from the adapter before
        oracle.check(last, "patterns")
        answers(llm, ["patterns"], [prompt])
        assert [set(rank._held) for rank in rank_adapters] == [loads_of(llm)]
        llm.add_adapter(oracle.adapters["all"], "again")
        oracle.check(answers(llm, ["again"], [prompt])[0], "all")
    finally:
        llm.engine.close()


def fail_unpack(monkeypatch: pytest.MonkeyPatch, failing: Callable[[RankAdapters], Any]) -> None:
    unpack = RankAdapters._unpack

    def unpack_or_fail(self: RankAdapters, message: Any) -> Any:
        failing(self)
        return unpack(self, message)

    monkeypatch.setattr(RankAdapters, "_unpack", unpack_or_fail)


def test_a_rank_that_cannot_hold_an_adapter_refuses_it_for_all(
    oracle: Oracle, rank_adapters: list[RankAdapters], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(dataclasses.replace(oracle, adapters={"some": oracle.adapters["some"]}), tensor_parallel_size=4)
    try:
        prompt, refused = tiny_prompt(9, seed=6), rank_adapters[1]

        def no_memory(rank: RankAdapters) -> None:
            if rank is refused:
                raise MemoryError("no page-locked memory")

        with monkeypatch.context() as patch:
            fail_unpack(patch, no_memory)
            with pytest.raises(AdapterNotLoaded, match=r"not all ranks .* rank [1-3]: .*no page-locked memory"):
                llm.add_adapter(oracle.adapters["all"], "all")
        assert "all" not in llm.engine.adapters.all()
        oracle.check(answers(llm, ["some"], [prompt])[0], "some")
        llm.add_adapter(oracle.adapters["all"], "all")  # its digest is not known from the first try
        assert [set(rank._held) for rank in rank_adapters] == [loads_of(llm)] * 3
        oracle.check(answers(llm, ["all"], [prompt])[0], "all")
    finally:
        llm.engine.close()


def test_a_late_rank_fails_the_load_and_not_the_next_one(
    oracle: Oracle, rank_adapters: list[RankAdapters], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(dataclasses.replace(oracle, adapters={}), tensor_parallel_size=2)
    try:
        late = threading.Event()
        with monkeypatch.context() as patch:
            fail_unpack(patch, lambda _: late.wait(30.0))
            patch.setattr(parallel_adapters, "HOLD_S", 0.1)
            with pytest.raises(AdapterNotLoaded, match="rank 1: no answer within"):
                llm.add_adapter(oracle.adapters["all"], "all")
            with pytest.raises(AdapterNotLoaded, match="ranks 1 are busy with an earlier adapter"):
                llm.add_adapter(oracle.adapters["some"], "some")
        late.set()
        with llm.engine.adapters._channels_lock:  # type: ignore[attr-defined]
            assert llm.engine.adapters._answer(1, 1, time.monotonic() + 30.0) is None  # type: ignore[attr-defined]
        llm.add_adapter(oracle.adapters["all"], "all")
        oracle.check(answers(llm, ["all"], [tiny_prompt(9, seed=6)])[0], "all")
        assert [set(rank._held) for rank in rank_adapters] == [loads_of(llm)]
    finally:
        llm.engine.close()


async def test_a_rank_that_is_lost_ends_a_load_and_the_group(oracle: Oracle, ranks: ThreadRanks) -> None:
    llm = make_llm(dataclasses.replace(oracle, adapters={}), tensor_parallel_size=2)
    try:
        for channel in ranks.channels[0]:
            channel.close()
        for name in ("all", "some"):
            with pytest.raises(InternalError, match="rank 1 is gone"):
                llm.add_adapter(oracle.adapters[name], name)
        assert llm.engine.adapters.all() == {}
        await until(lambda: llm.engine.failure is not None)
        assert "rank 1 is gone" in str(llm.engine.failure)
    finally:
        llm.engine.close()


def test_an_adapter_of_the_head_is_on_rank_0_alone(
    oracle: Oracle, tmp_path: Path, rank_adapters: list[RankAdapters]
) -> None:
    base, names = oracle.models[None], [None, "head"]
    path = save_adapter(tmp_path / "head", base, seed=5, modules=("lm_head",))
    own = Oracle(oracle.directory, {"head": path}, {None: base, "head": merge(base, path)})
    llm = make_llm(own, tensor_parallel_size=2)
    try:
        for name, completion in zip(names, answers(llm, names, [tiny_prompt(9, seed=6)] * 2), strict=True):
            own.check(completion, name)
        assert [len(part.numbers) for part in rank_adapters[0]._held.values()] == [0]
    finally:
        llm.engine.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["draft_model", "eagle", "eagle3"])
def test_drafts(kind: str, tmp_path: Path) -> None:
    """Rank 0 drafts for the base; the ranks verify with the adapters."""
    target = tiny_target(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    path = save_adapter(tmp_path / "weak", model, seed=1, size=0.05)
    own, names = Oracle(target, {"weak": path}, {None: model, "weak": merge(model, path)}), [None, "weak"]
    llm = make_llm(own, tensor_parallel_size=2, **draft_settings(target, tmp_path)[kind])
    try:
        prompts = [[token % 48 for token in tiny_prompt(n, seed=n)] for n in (9, 30)]
        for name, completion in zip(names, answers(llm, names, prompts, max_tokens=16), strict=True):
            own.check(completion, name)
    finally:
        llm.engine.close()


@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((4, 2), marks=LONG), pytest.param((2, 1), marks=LONG)])
async def test_a_hand_off_between_sizes(sizes: tuple[int, int], oracle: Oracle) -> None:
    """Digest and fingerprint do not depend on the number of ranks; LoadAdapter reaches all ranks of a pod."""
    fields = {"adapter_dir": str(oracle.adapters["some"].parent), "kv_order": "heads", "max_adapter_rank": 64}
    fields |= {"kv_memory": 1 << 20, "dtype": "float32", "max_model_len": 256}
    prefill, decode = ({**fields, "tensor_parallel_size": size} for size in sizes)
    async with Cluster.start(
        oracle.directory, own_backend=True, prefill_config=prefill, decode_config={**decode, "local_prefill": "off"}
    ) as cluster:
        entries = {entry.name: entry.digest for entry in cluster.decode.runtime.adapters.entries()[0]}
        assert entries == {entry.name: entry.digest for entry in cluster.prefill.runtime.adapters.entries()[0]}
        for name in ("some", "patterns"):
            prompt = [t % 150 + 3 for t in prompt_of(37)]
            asked = dataclasses.replace(request(prompt, 6), adapter=entries[name])
            for hits in (0, 36):
                answer = await cluster.generate(asked, remote_only=True)
                assert answer.cached_tokens == hits
                with torch.inference_mode():
                    logits = oracle.models[name](torch.tensor([[*prompt, *answer.ids]])).logits
                assert answer.ids == logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
                asked = dataclasses.replace(asked, request_id=f"{asked.request_id}-again")
        for pod in (cluster.prefill, cluster.decode):
            entry = await load(pod, AdapterEntry("new", "", path="all", version=1 << 62))
            assert entry.digest == entries["all"]
