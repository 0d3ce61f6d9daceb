"""The 4-bit codec of cold KV blocks: the only place that encodes and decodes a block.

The scheme is that of KIVI (Liu et al. 2024, arXiv:2402.02750): asymmetric 4-bit integers, keys per channel over the
tokens of the block, values per token over groups of at most VALUE_GROUP channels. KIVI's reason: keys have a few
channels with large values, values do not. A group stores its smallest value `low` and its `step`:

    code = round((x - low) / step), 0 to 15        decoded = low + code * step        |decoded - x| <= step / 2

`low` is rounded down and `step` up to 16 bits, so the bound holds for the stored numbers. Only the rounding to the
pool's dtype adds to it. An encoded block has, for each KV segment, and then for `draft_state` as it is:

    codes          uint8 [layers, heads, block_size, head_dim], the key in the low 4 bits, the value in the high ones
    key_scales     16 bits [2 (low, step), layers, heads, 1, head_dim]
    value_scales   16 bits [2 (low, step), layers, heads, block_size, groups]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from common.kv_layout import DTYPE_BYTES, FP8_DTYPE, KVLayout, Segment

INT4 = "int4"
FORMAT = "int4-1"  #: Name in the header of a file. A change of the encoded bytes needs another name.
VALUE_GROUP = 32  #: Most channels of a group of values; KIVI's size.
MIN_BLOCK_SIZE = 8  #: Tokens; with fewer of them the scales of a key need more room than its codes.
LEVELS = 15  #: Largest code.
SLAB = 1 << 17  #: Numbers that are encoded or decoded at once, so that float32 copies stay in a core's cache.
#: Largest finite number of each dtype.
_LARGEST = {"float32": float(np.finfo(np.float32).max), "float16": 65504.0, "bfloat16": 255 * 2.0**120}

Floats = NDArray[np.float32]
Array = NDArray[Any]


def check_codec(layout: KVLayout) -> None:
    """Raises ConfigError if the layout names a codec that cannot encode its blocks."""
    if not layout.disk_codec:
        return
    for unfit, why in (
        (layout.disk_codec != INT4, f"expected {INT4}"),
        (layout.dtype == FP8_DTYPE, "kv_dtype fp8_e4m3 has rounded keys and values to 8 bits already"),
        (layout.latent_dim > 0, "one latent vector (MLA) is the key and the value of all heads; no bound is measured"),
        (bool(layout.groups), "the disk tier keeps whole blocks, and kv_groups cuts them into pages"),
        (layout.block_size < MIN_BLOCK_SIZE, f"block_size {layout.block_size} is less than {MIN_BLOCK_SIZE} tokens"),
    ):
        if unfit:
            problem = f"disk_cache_codec {layout.disk_codec} is not supported here: {why}"
            raise ConfigError(problem, field="disk_cache_codec")


def codec_of(layout: KVLayout) -> BlockCodec | None:
    """Returns the codec of a layout's cold blocks; None if they are stored as they are. Raises ConfigError."""
    check_codec(layout)
    return BlockCodec(layout) if layout.disk_codec else None


class BlockCodec:
    """Encodes and decodes blocks of one layout. Has no state besides the layout, so any thread may use it."""

    name, format = INT4, FORMAT

    def __init__(self, layout: KVLayout) -> None:
        self.block_bytes = layout.block_bytes
        self._plain: list[tuple[int, int]] = []  # Offset and bytes of segments that are stored as they are
        self._parts: list[_KVPart] = []
        offset = 0
        for segment in layout.segments:
            if segment.name.endswith("kv"):
                self._parts.append(part := _KVPart(segment, offset))
                offset = part.end
            else:
                self._plain.append((segment.offset, segment.nbytes))
        self._plain_start = offset
        self.encoded_bytes = offset + sum(size for _, size in self._plain)

    def encode(self, block: memoryview) -> memoryview | None:
        """Returns uint8 [encoded_bytes] for uint8 [block_bytes]; None if a number is or would become inf or NaN."""
        encoded = bytearray(self.encoded_bytes)
        with np.errstate(over="ignore", invalid="ignore"):  # `_KVPart._encode` finds what is not finite
            if not all(part.encode(block, encoded) for part in self._parts):
                return None
        start = self._plain_start
        for offset, size in self._plain:
            encoded[start : start + size] = block[offset : offset + size]
            start += size
        return memoryview(encoded)

    def decode(self, encoded: memoryview | bytearray, block: memoryview) -> None:
        """Writes the block of `encoded`, as `encode` returned it, to uint8 [block_bytes]; the padding stays."""
        for part in self._parts:
            part.decode(encoded, block)
        start = self._plain_start
        for offset, size in self._plain:
            block[offset : offset + size] = encoded[start : start + size]
            start += size

    def error_bounds(self, encoded: memoryview | bytearray) -> Floats:
        """Returns half the step of each number, float32 [block_bytes / itemsize]; 0 for what is stored as it is."""
        (itemsize,) = {part.number.itemsize for part in self._parts}
        bounds = np.zeros(self.block_bytes // itemsize, np.float32)
        for part in self._parts:
            part.write_bounds(encoded, bounds)
        return bounds


class _KVPart:
    """One KV segment of a block: [layers, 2 (K, V), heads, block_size, head_dim]."""

    def __init__(self, segment: Segment, start: int) -> None:
        self._segment = segment
        self._layers, _, heads, tokens, dim = segment.shape
        self._half = segment.dtype == "float16"
        #: Of a number in the block; bfloat16 as uint16.
        self.number = np.dtype({"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[segment.dtype])
        self._largest = np.float32(_LARGEST[segment.dtype])
        self._group = max(size for size in range(1, VALUE_GROUP + 1) if dim % size == 0)
        self._codes = (self._layers, heads, tokens, dim)
        self._key_scales = (2, self._layers, heads, 1, dim)
        self._value_scales = (2, self._layers, heads, tokens, dim // self._group)
        self._starts = start, start + math.prod(self._codes)
        self._value_start = self._starts[1] + 2 * math.prod(self._key_scales)
        self.end = self._value_start + 2 * math.prod(self._value_scales)
        self._slab = max(1, SLAB // (heads * tokens * dim))  # Layers

    def _views(self, encoded: memoryview | bytearray) -> tuple[Array, Array, Array]:
        """Returns codes, scales of the keys and scales of the values."""
        scale = np.float16 if self._half else np.uint16
        codes, keys = self._starts
        return (
            np.ndarray(self._codes, np.uint8, encoded, codes),
            np.ndarray(self._key_scales, scale, encoded, keys),
            np.ndarray(self._value_scales, scale, encoded, self._value_start),
        )

    def _of_block(self, block: memoryview | Array) -> Array:
        """Returns the numbers of the segment, in place, in the shape of the segment."""
        segment, itemsize = self._segment, DTYPE_BYTES[self._segment.dtype]
        strides = tuple(itemsize * stride for stride in segment.strides)
        return np.ndarray(segment.shape, self.number, block, segment.offset, strides)

    def _slabs(self) -> Iterator[slice]:
        for first in range(0, self._layers, self._slab):
            yield slice(first, first + self._slab)

    def encode(self, block: memoryview, encoded: bytearray) -> bool:
        """Fills this part of `encoded`. Returns False if a number is or would become inf or NaN."""
        source = self._of_block(block)
        codes, key_scales, value_scales = self._views(encoded)
        for layers in self._slabs():
            keys = self._encode(_to_float(source[layers, 0]), -2, key_scales[:, layers])
            values = self._encode(self._grouped(_to_float(source[layers, 1])), -1, value_scales[:, layers])
            if keys is None or values is None:
                return False
            np.left_shift(values, 4, out=values)
            np.bitwise_or(keys, values.reshape(keys.shape), out=codes[layers])
        return True

    def _encode(self, x: Floats, axis: int, scales: Array) -> NDArray[np.uint8] | None:
        """Returns the codes of groups along `axis`, and fills their scales. Overwrites x."""
        smallest, largest = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
        shape = scales.shape[1:]
        scales[0] = _rounded_down(smallest, half=self._half).reshape(shape)
        low = _to_float(scales[0]).reshape(smallest.shape)
        scales[1] = _rounded_up((largest - low) / LEVELS, half=self._half).reshape(shape)
        step = _to_float(scales[1]).reshape(smallest.shape)
        # The step is rounded up, so numbers near the dtype's limit may decode to more than the dtype holds.
        if not (np.isfinite(low).all() and (low + LEVELS * step <= self._largest).all()):
            return None
        x -= low
        x /= np.where(step > 0, step, np.float32(1))
        x += np.float32(0.5)
        return x.astype(np.uint8)

    def decode(self, encoded: memoryview | bytearray, block: memoryview) -> None:
        target = self._of_block(block)
        codes, key_scales, value_scales = self._views(encoded)
        for layers in self._slabs():
            part = codes[layers]
            keys = (part & np.uint8(LEVELS)).astype(np.float32)
            keys *= _to_float(key_scales[1, layers])
            keys += _to_float(key_scales[0, layers])
            _from_float(keys, target[layers, 0])
            values = self._grouped((part >> np.uint8(4)).astype(np.float32))
            values *= _to_float(value_scales[1, layers])[..., None]
            values += _to_float(value_scales[0, layers])[..., None]
            _from_float(values.reshape(part.shape), target[layers, 1])

    def write_bounds(self, encoded: memoryview | bytearray, bounds: Floats) -> None:
        """Writes half of each number's step to its place in `bounds`."""
        segment = self._segment
        offset, strides = 4 * segment.offset // self.number.itemsize, tuple(4 * stride for stride in segment.strides)
        target = np.ndarray(segment.shape, np.float32, bounds, offset, strides)
        _, key_scales, value_scales = self._views(encoded)
        target[:, 0] = _to_float(key_scales[1]) / 2
        target[:, 1] = np.repeat(_to_float(value_scales[1]) / 2, self._group, axis=-1)

    def _grouped(self, x: Floats) -> Floats:
        return x.reshape(*x.shape[:-1], -1, self._group)


def _to_float(x: Array) -> Floats:
    """Returns a new float32 array of the numbers; uint16 stands for bfloat16."""
    if x.dtype != np.uint16:
        return x.astype(np.float32, order="C")
    wide = np.zeros(x.shape, np.float32)
    _high_halves(wide)[...] = x
    return wide


def _from_float(x: Floats, target: Array) -> None:
    """Rounds to nearest into `target`; halves of bfloat16 are rounded away from zero. Overwrites x."""
    if target.dtype == np.uint16:
        bits = x.view(np.uint32)
        bits += np.uint32(0x8000)
        target[...] = _high_halves(x)
    else:
        target[...] = x


def _high_halves(x: Floats) -> Array:
    """Returns the bfloat16 parts of a contiguous array, in place."""
    return x.view(np.uint16).reshape(*x.shape, 2)[..., 1]


def _rounded_down(x: Floats, *, half: bool) -> Array:
    """Returns the largest float16 (`half`) or bfloat16 numbers that are at most x."""
    if half:
        near = x.astype(np.float16)
        return np.where(near.astype(np.float32) > x, np.nextafter(near, np.float16(-np.inf)), near)
    bits = x.view(np.uint32)
    carry = np.where(np.isfinite(x), bits >> np.uint32(31), np.uint32(0)).astype(np.uint32) * np.uint32(0xFFFF)
    return ((bits + carry) >> np.uint32(16)).astype(np.uint16)


def _rounded_up(x: Floats, *, half: bool) -> Array:
    """Returns the smallest float16 (`half`) or bfloat16 numbers that are at least x, which is not negative."""
    if half:
        near = x.astype(np.float16)
        return np.where(near.astype(np.float32) < x, np.nextafter(near, np.float16(np.inf)), near)
    carry = np.isfinite(x).astype(np.uint32) * np.uint32(0xFFFF)
    return ((x.view(np.uint32) + carry) >> np.uint32(16)).astype(np.uint16)
