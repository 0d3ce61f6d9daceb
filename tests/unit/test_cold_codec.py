"""The 4-bit codec of cold blocks: a value is off by at most half a step, and files of another codec are not used."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from common import wire
from common.errors import ConfigError, LayoutMismatch
from common.kv_layout import DTYPE_BYTES, KVLayout, LayerGroup
from engine.config import EngineConfig
from engine.kv.tiers.block_store import StoredBlock
from engine.kv.tiers.cold_codec import BlockCodec, check_codec, codec_of
from engine.kv.tiers.segment_store import SegmentStore

Floats = NDArray[np.float64]
LAYOUT = KVLayout("m", "r", 2, 2, 16, 16, "bfloat16", disk_codec="int4")
#: Half of the distance between 1 and the next number: what the rounding to the pool's dtype adds.
HALF_ULP = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def to_bytes(values: Floats, dtype: str) -> memoryview:
    """Returns the numbers in the pool's dtype."""
    if dtype == "bfloat16":
        return memoryview((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8))
    return memoryview(values.astype(dtype).view(np.uint8))


def to_floats(block: memoryview, dtype: str) -> Floats:
    if dtype == "bfloat16":
        wide = np.frombuffer(block, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64)
    return np.frombuffer(block, dtype).astype(np.float64)


def random_block(layout: KVLayout, seed: int, scale: float = 1.0, offset: float = 0.0) -> memoryview:
    """Returns a block of normal numbers; its padding has numbers too."""
    numbers = np.random.default_rng(seed).standard_normal(layout.block_bytes // DTYPE_BYTES[layout.dtype])
    return to_bytes(numbers * scale + offset, layout.dtype)


def codec_for(layout: KVLayout) -> BlockCodec:
    codec = codec_of(layout)
    assert codec is not None
    return codec


def encoded(layout: KVLayout, block: memoryview) -> memoryview:
    content = codec_for(layout).encode(block)
    assert content is not None
    return content


def decoded(layout: KVLayout, content: memoryview) -> memoryview:
    block = memoryview(bytearray(layout.block_bytes))
    codec_for(layout).decode(content, block)
    return block


def kv_of(layout: KVLayout, block: memoryview) -> Floats:
    """Returns the first segment [layers, 2, heads, block_size, head_dim] of a layout of the order "layers"."""
    shape = layout.segments[0].shape
    return to_floats(block, layout.dtype)[: int(np.prod(shape))].reshape(shape)


layouts = st.builds(
    KVLayout,
    model=st.just("m"),
    revision=st.just("r"),
    num_layers=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 5, 16, 40, 64, 80]),
    block_size=st.sampled_from([8, 9, 16, 32]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    draft_layers=st.integers(0, 1),
    draft_kv_heads=st.just(2),
    draft_head_dim=st.just(8),
    draft_state=st.sampled_from([0, 24]),
    kv_order=st.sampled_from(["layers", "heads"]),
    disk_codec=st.just("int4"),
).map(lambda layout: layout if layout.draft_layers else replace(layout, draft_state=0))


@settings(max_examples=150, deadline=None)
@given(
    layouts,
    st.integers(0, 1 << 20),
    st.sampled_from([0.0, 1e-30, 1e-4, 1.0, 300.0]),
    st.sampled_from([0.0, -7.0, 1000.0]),
)
def test_a_decoded_number_is_off_by_at_most_half_a_step_of_its_group(
    layout: KVLayout, seed: int, scale: float, offset: float
) -> None:
    block = random_block(layout, seed, scale, offset)
    content = encoded(layout, block)
    assert len(content) == codec_for(layout).encoded_bytes
    got, exact = (to_floats(b, layout.dtype) for b in (decoded(layout, content), block))
    bounds = codec_for(layout).error_bounds(content).astype(np.float64)
    covered = np.zeros(len(exact), bool)
    itemsize = DTYPE_BYTES[layout.dtype]
    for segment in layout.segments:
        index = np.ndarray(
            segment.shape,
            np.int64,
            np.arange(len(exact)),
            8 * segment.offset // itemsize,
            tuple(8 * stride for stride in segment.strides),
        )
        covered[index] = True
        if segment.name == "draft_state":
            assert (got[index] == exact[index]).all(), "the state is stored as it is"
    tiny = 2.0**-24 if layout.dtype == "float16" else 1e-38  # Numbers without full precision
    slack = HALF_ULP[layout.dtype] * (np.abs(exact) + bounds) + 2.0**-22 * (np.abs(exact) + 16 * bounds) + tiny
    assert (np.abs(got - exact)[covered] <= (bounds + slack)[covered]).all()
    assert (got[~covered] == 0).all(), "padding is left alone"


@settings(max_examples=40, deadline=None)
@given(layouts, st.integers(0, 1 << 20))
def test_a_block_that_goes_to_the_disk_again_stays_where_it_was(layout: KVLayout, seed: int) -> None:
    content = encoded(layout, random_block(layout, seed))
    once = decoded(layout, content)
    twice = decoded(layout, encoded(layout, once))
    a, b = to_floats(once, layout.dtype), to_floats(twice, layout.dtype)
    # The codes are equal; the step may round to a neighbour, which moves the largest numbers by an ulp of 16 bits.
    assert np.abs(a - b).max() <= 2.0**-6 * max(1.0, np.abs(a).max())


def test_a_channel_of_large_keys_and_a_token_of_large_values_do_not_harm_the_others() -> None:
    values = kv_of(LAYOUT, random_block(LAYOUT, 1)).copy()
    values[:, 0, :, :, 3] *= 1000
    values[:, 1, :, 5, :] *= 1000
    raw = np.zeros(LAYOUT.block_bytes // 2)
    raw[: values.size] = values.ravel()
    block = to_bytes(raw, LAYOUT.dtype)
    exact, got = (kv_of(LAYOUT, b) for b in (block, decoded(LAYOUT, encoded(LAYOUT, block))))
    error = np.abs(got - exact)
    assert np.delete(error[:, 0], 3, axis=-1).max() < 0.3
    assert np.delete(error[:, 1], 5, axis=-2).max() < 0.3
    assert error.max() > 10, "the large ones have large steps"


def test_an_encoded_block_takes_a_third_of_its_bytes() -> None:
    shape = KVLayout("m", "r", 32, 8, 128, 16, "bfloat16", disk_codec="int4")
    assert shape.block_bytes / codec_for(shape).encoded_bytes > 2.9
    long = replace(shape, block_size=64)
    assert long.block_bytes / codec_for(long).encoded_bytes > 3.3


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_block_with_a_number_that_is_not_finite_is_not_stored(tmp_path: Path, number: float, dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    raw = to_floats(random_block(layout, 2), dtype)
    raw[7] = number
    bad, good = to_bytes(raw, dtype), random_block(layout, 3)
    assert codec_for(layout).encode(bad) is None
    store = open_store(tmp_path, layout)
    first, second, third = (bytes([n]) * 16 for n in (1, 2, 3))
    blocks = [StoredBlock(first, b"", good), StoredBlock(second, first, bad), StoredBlock(third, second, good)]
    assert store.append(blocks) == 1
    assert set(store.hashes()) == {first}
    store.close()


@pytest.mark.parametrize(
    ("dtype", "largest"), [("float32", 3.4028e38), ("bfloat16", 255 * 2.0**120), ("float16", 65504.0)]
)
@pytest.mark.parametrize("lowest", [0.0, 0.5, -0.0625])
def test_a_finite_block_near_the_limit_of_its_dtype_never_decodes_to_infinity(
    dtype: str, largest: float, lowest: float
) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    for share in (1.0, 0.999, 0.99, 0.9):
        raw = to_floats(random_block(layout, 2), dtype)
        raw[::2], raw[1::2] = largest * lowest, largest * share
        content = codec_for(layout).encode(to_bytes(raw, dtype))
        assert (content is not None) or share > 0.9, "far from the limit a block is encoded"
        if content is not None:
            assert np.isfinite(to_floats(decoded(layout, content), dtype)).all()


# -- files ------------------------------------------------------------------------------------------------------------


def open_store(directory: Path, layout: KVLayout, fingerprint: str = "ab" * 16) -> SegmentStore:
    store = SegmentStore(directory, fingerprint, layout.block_bytes, 1 << 22, codec=codec_of(layout))
    store.scan()
    return store


def fill(directory: Path, layout: KVLayout, count: int = 4) -> list[memoryview]:
    """Writes a chain of blocks and returns them."""
    store, blocks = open_store(directory, layout), [random_block(layout, seed) for seed in range(count)]
    chain = [StoredBlock(key(n), key(n - 1) if n else b"", block) for n, block in enumerate(blocks)]
    assert store.append(chain) == count
    store.close()
    return blocks


def key(number: int) -> bytes:
    return bytes([number + 1]) * 16


def read(store: SegmentStore, count: int) -> list[memoryview]:
    targets = [memoryview(bytearray(store.block_bytes)) for _ in range(count)]
    return targets[: store.read([key(number) for number in range(count)], targets)]


def test_a_reopened_file_gives_decoded_blocks_and_is_smaller(tmp_path: Path) -> None:
    blocks = fill(tmp_path, LAYOUT)
    (path,) = tmp_path.glob("*.kv")
    assert path.stat().st_size < sum(map(len, blocks)) / 2
    store = open_store(tmp_path, LAYOUT)
    got = read(store, len(blocks))
    assert len(got) == len(blocks)
    for block, target in zip(blocks, got, strict=True):
        assert target == decoded(LAYOUT, encoded(LAYOUT, block))
        assert target != block
    store.close()


@pytest.mark.parametrize(("ours", "theirs"), [("", "int4"), ("int4", "")])
def test_a_file_of_another_codec_is_not_used_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ours: str, theirs: str
) -> None:
    fill(tmp_path, replace(LAYOUT, disk_codec=theirs))
    with caplog.at_level(logging.WARNING):
        store = open_store(tmp_path, replace(LAYOUT, disk_codec=ours))
    assert len(store) == 0
    names = {"": "none", "int4": "int4-1"}
    assert f"its blocks have the codec {names[theirs]}, those of this pod {names[ours]}: not used" in caplog.text
    store.close()


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255), st.booleans())
def test_damage_costs_blocks_and_never_gives_a_wrong_one(at: float, flip: int, reopened: bool) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        blocks = fill(Path(name), LAYOUT)
        store = None if reopened else open_store(Path(name), LAYOUT)
        (path,) = Path(name).glob("*.kv")
        raw = bytearray(path.read_bytes())
        raw[int(at * len(raw))] ^= flip
        path.write_bytes(raw)
        store = store or open_store(Path(name), LAYOUT)
        got = read(store, store.match([key(number) for number in range(len(blocks))]))
        for block, target in zip(blocks, got, strict=False):
            assert target == decoded(LAYOUT, encoded(LAYOUT, block))
        store.close()


# -- layouts and settings ---------------------------------------------------------------------------------------------


def test_pods_with_another_codec_refuse_each_other() -> None:
    exact = replace(LAYOUT, disk_codec="")
    assert LAYOUT.fingerprint != exact.fingerprint
    assert exact.fingerprint == KVLayout("m", "r", 2, 2, 16, 16, "bfloat16").fingerprint
    assert wire.layout_from_pb(wire.layout_to_pb(LAYOUT)) == LAYOUT
    with pytest.raises(LayoutMismatch, match="disk_codec: '' on this pod, 'int4' on the peer") as refused:
        exact.require_equal(LAYOUT)
    assert refused.value.field == "disk_codec"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtype": "float8_e4m3"}, "kv_dtype fp8_e4m3"),
        ({"num_kv_heads": 1, "latent_dim": 8}, "latent"),
        ({"groups": (LayerGroup(0, (0,)), LayerGroup(32, (1,)))}, "kv_groups"),
        ({"block_size": 4}, "block_size 4"),
        ({"disk_codec": "int3"}, "expected int4"),
    ],
)
def test_layouts_without_a_stated_bound_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        check_codec(replace(LAYOUT, **changes))
    assert refused.value.field == "disk_cache_codec"
    check_codec(replace(LAYOUT, **{**changes, "disk_codec": ""}))


def test_the_deterministic_mode_refuses_the_codec() -> None:
    with pytest.raises(ConfigError, match="disk_cache_codec int4 cannot be combined with deterministic") as refused:
        EngineConfig(model_dir=Path("m"), deterministic=True, disk_cache_codec="int4")
    assert refused.value.field == "disk_cache_codec"
    EngineConfig(model_dir=Path("m"), disk_cache_codec="int4")
