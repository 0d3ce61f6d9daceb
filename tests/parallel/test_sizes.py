"""Tokens do not depend on the number of ranks: in one engine, and when KV moves between pods of different sizes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import BatonError, LayoutMismatch
from common.kv_layout import FP8_DTYPE, KVLayout
from common.kv_slices import checked_parts, rank_slices
from common.types import Role, SamplingParams
from engine.kv.kv_pool import KVPool
from engine.llm import LLM, Completion
from engine.speculation.controller import AlwaysDraft
from kv_transfer.backend.loopback import LoopbackFabric
from tests.rigs.engine.draft_models import draft_settings, tiny_target
from tests.rigs.parallel.sharded_models import FAMILIES, sharded_model
from tests.rigs.parallel.thread_ranks import thread_ranks
from tests.rigs.pods.harness import BLOCK, CHUNK, MAX_LEN, Cluster, prompt_of, request

torch.set_num_threads(1)
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PAIRS = [(1, 2), (2, 1), (1, 4), (4, 2)]
LONG = pytest.mark.long


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[LoopbackFabric]:
    """The ranks of this file's engines and pods are threads."""
    fabric = LoopbackFabric()
    with thread_ranks(fabric) as started:
        yield fabric
    started.join()


def sizes_of(name: str) -> list[int]:
    case, _ = FAMILIES[name]
    return [2, 3, 4] if case["model_type"] == "llama" and case.get("num_key_value_heads", 12) != 2 else [2, 4]


def cases(values: dict[str, list[Any]], short: dict[str, list[Any]]) -> list[Any]:
    """Returns (family, value) for all `values`; those that are not in `short` run with the long tests."""
    return [
        pytest.param(name, value, marks=() if value in short[name] else LONG, id=f"{name}-{_text(value)}")
        for name in FAMILIES
        for value in values[name]
    ]


def _text(value: Any) -> str:
    return "to".join(map(str, value)) if isinstance(value, tuple) else str(value)


#: torch's product with int8 weights rounds the sum of each rank to bfloat16, so its tokens may differ between sizes.
SIZES = {name: sizes_of(name) if name != "llama-int8" else [] for name in FAMILIES}
SHORT_SIZES: dict[str, list[int]] = {name: [] for name in FAMILIES} | {
    "llama": [2, 3],
    "llama-shared-heads": [4],
    "qwen2": [2],
    "deepseek-v3": [2],
}
#: Families whose KV is that of another family; tests/models/test_moe_shards.py compares their experts.
SAME_KV = ("mixtral", "olmoe", "granite-moe", "deepseek-v2")
#: One pair of each other family, and all of Llama.
SHORT_PAIRS: dict[str, list[tuple[int, int]]] = {
    name: [PAIRS[i % len(PAIRS)]] if name not in SAME_KV else [] for i, name in enumerate(FAMILIES)
} | {"llama": PAIRS}


def engine(model_dir: Path, size: int, **options: Any) -> LLM:
    options = {"num_blocks": 256, **options}
    return oracle_of(model_dir, tensor_parallel_size=size, **options)


def oracle_of(model_dir: Path, **options: Any) -> LLM:
    fields = {"device": "cpu", "block_size": BLOCK, "max_model_len": MAX_LEN, "chunk_tokens": CHUNK, "threads": 1}
    return LLM(model_dir, **{"num_blocks": 256, **fields, **options})


def ids(completions: list[Completion]) -> list[list[int]]:
    assert [completion.error for completion in completions] == [None] * len(completions)
    return [completion.ids for completion in completions]


@pytest.mark.parametrize(("name", "size"), cases(SIZES, SHORT_SIZES))
def test_one_engine(name: str, size: int, tmp_path: Path) -> None:
    """Prefix hits, preemption, samples, drafts of the prompt, and blocks that return from host memory."""
    model_dir, options = sharded_model(tmp_path / "model", name)
    prompts = [prompt_of(n, seed=n) for n in (1, 17, 40)] + [prompt_of(5, seed=1) * 4]
    sampled = SamplingParams(seed=5, max_tokens=6, n=2)
    alone = oracle_of(model_dir, **options)
    options |= {"host_cache": 1 << 22, "checksums": True, "speculation": "ngram", "num_blocks": 24}
    group = engine(model_dir, size, **options)
    try:
        for turn in range(2):
            longer = [[*prompt, *[7] * turn] for prompt in prompts]
            found = group.generate(longer, GREEDY, ignore_eos=True)
            assert ids(found) == ids(alone.generate(longer, GREEDY, ignore_eos=True))
        assert found[2].cached_tokens >= 36
        assert ids(group.generate([prompts[2]], sampled)) == ids(alone.generate([prompts[2]], sampled))
        many = [prompt_of(20, seed=n) for n in range(4)]
        long = SamplingParams(temperature=0.0, max_tokens=12)
        expected = ids(alone.generate(many, long, ignore_eos=True))
        assert ids(group.generate(many, long, ignore_eos=True)) == expected
        assert group.engine.scheduler.stats().preemptions
        assert ids(group.generate(many, long, ignore_eos=True)) == expected
        host = group.engine.pool.host_stats()
        assert host is not None
        assert host.loaded
        assert not host.damaged
        group.engine.pool.check_integrity()
    finally:
        group.engine.close()


@pytest.mark.parametrize("kind", ["draft_model", "eagle", pytest.param("eagle3", marks=LONG)])
def test_drafts(kind: str, tmp_path: Path) -> None:
    """Rank 0 alone drafts: tokens and accepted drafts are those of one rank."""
    target = tiny_target(tmp_path / "target")
    options = {**draft_settings(target, tmp_path)[kind], "speculation_tokens": 3}
    prompts = [[t % 48 for t in prompt_of(n, seed=n)] for n in (5, 30)]
    alone, group = oracle_of(target, **options), engine(target, 2, **options)
    for one in (alone.engine, group.engine):
        one.set_proposer(one.configured_proposer(), AlwaysDraft(3))
    try:
        for _ in range(2):
            assert ids(group.generate(prompts, GREEDY)) == ids(alone.generate(prompts, GREEDY))
        ours, theirs = group.engine.speculator, alone.engine.speculator
        assert ours is not None
        assert theirs is not None
        assert ours.stats.proposed == theirs.stats.proposed > 0
        assert ours.stats.accepted == theirs.stats.accepted
    finally:
        group.engine.close()


async def check_hand_off(model_dir: Path, prefill: int, decode: int, options: dict[str, Any]) -> Cluster:
    """A conversation of two turns whose KV goes between the sizes, and an answer that another pod continues."""
    alone = oracle_of(model_dir, **{k: v for k, v in options.items() if k not in ("kv_memory", "host_cache")})
    options = {**options, "kv_order": "heads", "kv_memory": 1 << 20}
    sizes = [{**options, "tensor_parallel_size": size} for size in (prefill, decode)]
    async with Cluster.start(
        model_dir, own_backend=True, prefill_config=sizes[0], decode_config={**sizes[1], "local_prefill": "off"}
    ) as cluster:
        r = request(prompt_of(3 * CHUNK + 1, seed=prefill), 6)
        answer = await cluster.generate(r, remote_only=True)
        assert answer.ids == alone.generate([r.prompt_ids], r.sampling, ignore_eos=True)[0].ids
        longer = request([*r.prompt_ids, *answer.ids, 5, 6, 7], 6)
        again = await cluster.generate(longer, remote_only=True)
        wanted = alone.generate([longer.prompt_ids], longer.sampling, ignore_eos=True)[0].ids
        assert again.ids == wanted
        assert again.target is not None
        assert again.target.first_block > 0
        moved = dataclasses.replace(request(longer.prompt_ids, 6), output_ids=tuple(wanted[:3]))
        continued = await cluster.generate(moved, remote_only=True)
        assert [token.id for token in continued.tokens] == wanted[3:]
        assert (await cluster.decode.info()).computed.local == 0
        assert cluster.prefill.runtime.engine.layout.fingerprint == cluster.decode.runtime.engine.layout.fingerprint
    return cluster


@pytest.mark.parametrize(("name", "pair"), cases(dict.fromkeys(FAMILIES, PAIRS), SHORT_PAIRS))
async def test_hand_off(name: str, pair: tuple[int, int], tmp_path: Path) -> None:
    model_dir, options = sharded_model(tmp_path / "model", name)
    await check_hand_off(model_dir, *pair, options)


@pytest.mark.parametrize("pair", [(1, 2), pytest.param((2, 1), marks=LONG)])
async def test_hand_off_with_an_eagle_head(pair: tuple[int, int], tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", vocab=256)
    await check_hand_off(target, *pair, draft_settings(target, tmp_path, vocab=256)["eagle"])


async def test_a_pull_between_sizes(tmp_path: Path) -> None:
    model_dir, options = sharded_model(tmp_path / "model", "llama")
    options |= {"kv_order": "heads", "kv_memory": 1 << 20}
    async with Cluster.start(
        model_dir, own_backend=True, prefill_config=options, decode_config={**options, "tensor_parallel_size": 2}
    ) as cluster:
        second = await cluster.add(Role.PREFILL, **options, tensor_parallel_size=4)
        r = request(prompt_of(3 * CHUNK + 1, seed=2), 6)
        first = await cluster.generate(r, prefill=cluster.prefills[0], remote_only=True)
        again = request([*r.prompt_ids, 9], 6)
        holder = cluster.prefills[0].holds(3 * CHUNK // BLOCK)
        answer = await cluster.generate(again, prefill=second, remote_only=True, pull=holder)
        alone = oracle_of(model_dir, load_format="dummy", dtype="float32")
        assert answer.ids == alone.generate([again.prompt_ids], again.sampling, ignore_eos=True)[0].ids
        assert first.ids
        assert cluster.prefills[0].runtime.transfer_node.stats().sent_blocks >= 2 * (3 * CHUNK // BLOCK)


async def test_damage_on_one_rank_is_found(ranks: LoopbackFabric, tmp_path: Path) -> None:
    model_dir, options = sharded_model(tmp_path / "model", "llama-shared-heads")
    options |= {"kv_order": "heads", "kv_memory": 1 << 20}
    async with Cluster.start(
        model_dir, own_backend=True, prefill_config=options, decode_config={**options, "tensor_parallel_size": 4}
    ) as cluster:
        land = ranks._land

        def damage(write: Any, failure: str | None) -> None:
            land(write, failure)
            if write.notification == b"" and write.peer.endswith("rank3"):
                memory, block = ranks._agents[write.peer].memory, write.remote_blocks[0]
                content = bytearray(memory.read_block(block))
                content[5] ^= 1
                memory.write_block(block, bytes(content))

        ranks._land = damage  # type: ignore[method-assign]
        try:
            with pytest.raises(BatonError, match="arrived damaged"):
                await cluster.generate(request(prompt_of(2 * CHUNK), 4), remote_only=True)
        finally:
            ranks._land = land  # type: ignore[method-assign]
        await cluster.abort(next(iter(cluster.decode.runtime.requests), ""))


LAYOUTS = st.builds(
    lambda heads, dtype, dim, draft: KVLayout(
        "m",
        "r",
        num_layers=3,
        num_kv_heads=heads,
        head_dim=dim,
        block_size=5,
        dtype=dtype,
        kv_order="heads" if heads > 1 else "layers",
        **({"draft_layers": 1, "draft_kv_heads": 3, "draft_head_dim": 7, "draft_state": 9} if draft else {}),
    ),
    st.sampled_from([1, 2, 4, 6, 12]),
    st.sampled_from(["float32", FP8_DTYPE]),
    st.integers(1, 20),
    st.booleans(),
)


@settings(max_examples=8, deadline=None)
@given(LAYOUTS)
def test_slices_move_every_number_once(layout: KVLayout) -> None:
    """Slices of all pairs of sizes: the numbers arrive where the target's views have them, one range for each pair."""
    heads = layout.num_kv_heads
    sizes = [size for size in range(1, 9) if heads % size == 0 or size % heads == 0]
    for a, b in itertools.product(sizes, sizes):
        source, target = (dataclasses.replace(layout, tensor_parallel=size) for size in (a, b))
        source.require_equal(target)
        assert source.fingerprint == target.fingerprint
        slices = rank_slices(source, b)
        assert len({(s.source_rank, s.target_rank) for s in slices}) == len(slices)
        mine, theirs = (
            [KVPool(one.of_rank(r), 1, CPU) for r in range(one.tensor_parallel)] for one in (source, target)
        )
        for one, pools in ((source, mine), (target, theirs)):
            fill(one, pools, zero=one is target and a != b)
        expected = [KVPool(target.of_rank(rank), 1, CPU) for rank in range(b)]
        fill(target, expected)
        for part in slices:
            content = mine[part.source_rank].data[0, part.span.source : part.span.source + part.span.nbytes]
            theirs[part.target_rank].data[0, part.span.target : part.span.target + part.span.nbytes] = content
        for got, want in zip(theirs, expected, strict=True):
            for segment in want.layout.segments:
                assert torch.equal(got.segment_view(segment.name)[0], want.segment_view(segment.name)[0])
        parts = [checked_parts(one, rank) for one in (source, target) for rank in range(one.tensor_parallel)]
        assert {number for numbers in parts[:a] for number in numbers} == {n for p in parts[a:] for n in p}


def fill(layout: KVLayout, pools: list[KVPool], *, zero: bool = False) -> None:
    """Writes to block 0 of each rank the numbers that follow from part, head and place, whatever the rank is."""
    for rank, pool in enumerate(pools):
        for segment in pool.layout.segments:
            view = pool.segment_view(segment.name)[0]
            if segment.name not in ("kv", "scales"):
                view.copy_(torch.arange(view.numel()).view(view.shape) % 97)
                continue
            heads = 2 if segment.name == "kv" else 1
            for head in range(layout.rank_heads):
                whole = rank * layout.num_kv_heads // layout.tensor_parallel + head
                place = view.select(heads, head)
                place.copy_(
                    torch.zeros(place.shape)
                    if zero
                    else (torch.arange(place.numel()) + 7 * whole).view(place.shape) % 101
                )


@pytest.mark.parametrize("draft_layers", [0, 2])
def test_pods_of_all_sizes_count_the_same_bytes(draft_layers: int) -> None:
    drafts = {"draft_layers": draft_layers, "draft_kv_heads": 4, "draft_head_dim": 8}
    one = KVLayout("m", "r", 3, 4, 16, 4, "bfloat16", kv_order="heads", **(drafts if draft_layers else {}))
    sizes = [dataclasses.replace(one, tensor_parallel=size) for size in (1, 2, 4, 8)]
    assert {layout.all_ranks_bytes for layout in sizes} == {one.block_bytes}


def test_an_impossible_pair_names_both_sizes() -> None:
    one = KVLayout("m", "r", num_layers=1, num_kv_heads=4, head_dim=8, block_size=4, dtype="float32")
    four = dataclasses.replace(one, tensor_parallel=4, kv_order="heads")
    with pytest.raises(
        LayoutMismatch, match=r"tensor_parallel_size 1 with kv_order layers .* tensor_parallel_size 4 with"
    ):
        one.require_equal(four)
    one.require_equal(dataclasses.replace(one, tensor_parallel=1))
    three = dataclasses.replace(one, tensor_parallel=3, kv_order="heads")
    with pytest.raises(
        LayoutMismatch, match="3 ranks cannot share 4 KV heads: tensor_parallel_size 4 on this pod, 3 on the peer"
    ):
        four.require_equal(three)
    with pytest.raises(LayoutMismatch, match="kv_order: 'layers' on this pod, 'heads' on the peer"):
        one.require_equal(dataclasses.replace(one, kv_order="heads"))
