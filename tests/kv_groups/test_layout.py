"""How layers are cut into KV groups, and what that does to the layout."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.kv_groups import MAX_SHORT_OVERHEAD, first_live_block, split_layers, tail_blocks
from common.kv_layout import KVLayout, LayerGroup
from engine.kv.groups.grouped_blocks import GroupedBlockPool
from engine.kv.kv_pool import KVPool

Windows = tuple[int | None, ...]
GEMMA3_27B: Windows = tuple(None if i % 6 == 5 else 1024 for i in range(62))
GPT_OSS_20B: Windows = (128, None) * 12


def layout(windows: Windows, **options: object) -> KVLayout:
    fields: dict[str, object] = {"groups": split_layers(windows)} | options
    return KVLayout("m", "r", len(windows), 2, 8, 4, "float32", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        (GEMMA3_27B, [10, 8, 9, 9, 8, 9, 9]),
        (GPT_OSS_20B, [12, 12]),
        ((4096,) * 32, []),  # all layers have one window
        ((None,) * 32, []),
        ((None,) * 21 + (4096,) * 7, []),  # a page of 21 layers would waste too much for 7
        ((8, 16, None, None), []),
        ((8, 16, None), [1, 1, 1]),
    ],
)
def test_groups_of_models(windows: Windows, sizes: list[int]) -> None:
    assert [len(group.layers) for group in split_layers(windows)] == sizes


@given(st.lists(st.sampled_from([None, None, 8, 16]), min_size=1, max_size=70))
def test_every_layer_is_in_one_group_of_its_window(windows: list[int | None]) -> None:
    groups = split_layers(windows)
    if not groups:
        return
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert groups[0].window == 0
    for group in groups:
        assert {windows[layer] for layer in group.layers} == {group.window or None}
        assert 0 < len(group.layers) <= len(groups[0].layers)
    assert len(groups) * len(groups[0].layers) <= MAX_SHORT_OVERHEAD * len(windows)


@given(st.integers(0, 500), st.integers(1, 80), st.integers(1, 20))
def test_blocks_before_the_first_live_one_are_not_seen(start: int, window: int, size: int) -> None:
    first = first_live_block(start, window, size)
    assert first * size <= max(0, start - window + 1)
    boundary = start // size * size
    assert boundary - window + 1 < (first + 1) * size, "the newest boundary needs the first live block"
    assert first == max(0, start // size - tail_blocks(window, size))


def test_a_layout_without_groups_keeps_its_fingerprint_and_bytes() -> None:
    plain = KVLayout("m", "r", 4, 2, 8, 4, "float32")
    assert plain.fingerprint == "0e7f22009540b06b7379462bf4d58956"
    grouped = layout((8, None, 8, None))
    assert grouped.fingerprint != plain.fingerprint
    assert grouped.block_bytes * 2 == plain.block_bytes


def test_layers_of_a_group_are_the_layers_of_a_page() -> None:
    kv = KVPool(layout((8, None, 8, None)), 3, torch.device("cpu"))
    layers = kv.layers()
    assert [layer.group for layer in layers] == [1, 0, 1, 0]
    assert kv.layout.groups == (LayerGroup(0, (1, 3)), LayerGroup(8, (0, 2)))
    assert layers[0].kv.data_ptr() == layers[1].kv.data_ptr() != layers[2].kv.data_ptr()


def test_gemma3_27b_needs_a_sixth_of_the_bytes_at_128k_tokens() -> None:
    made = dataclasses.replace(layout(GEMMA3_27B), num_kv_heads=16, head_dim=128, block_size=16, dtype="bfloat16")
    one_group = dataclasses.replace(made, groups=())
    tokens = 128 << 10
    pool = GroupedBlockPool(20_000, 16, [group.window for group in made.groups[1:]])
    pages = pool.pages_for(tokens)
    assert pages * made.block_bytes <= 0.18 * one_group.blocks_for(tokens) * one_group.block_bytes
