"""Changes of inputs: of bytes, of JSON values, and of protobuf messages. All are functions of a random generator."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

MAX_BYTES = 1 << 16
_MessageT = TypeVar("_MessageT", bound=Message)

#: Values that a JSON field does not expect.
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 1e308, -0.0, 1.5),
    *("", "x", "\0", "\ud800", "9" * 400, "ü" * 70, "<|im_end|>", "</tool_call>", "{{ 1 }}", "{% for"),
    *([], [None], [[]], [[1], "x"], [1, "x"], [-1], [2**40], {}, {"": None}, {"a": {"a": {"a": []}}}),
    *({"type": "object"}, {"type": "json_schema"}, {"json": {"type": 5}}, {"regex": "("}, {"grammar": "start: ("}),
    *([{"role": "user"}], [{"role": 5, "content": {}}], [{"role": "tool", "content": [{"type": "image_url"}]}]),
    [{"role": "user", "content": "Hi"}],
]
_NUMBERS = (b"0", b"-1", b"1e999", b"65536", b"4294967296", b"18446744073709551616", b"1" * 5000, b"nan", b"0x10")
_DEEP = (b"[" * 3000, b'{"a":' * 3000, b"(" * 3000, b"{{" * 500, b"\\u", b"\xff", b"\xed\xa0\x80", b"\0", b"\r\n")


def words(name: str) -> tuple[bytes, ...]:
    """Returns the lines of a file in words/: pieces of a language that mutations insert."""
    return tuple((Path(__file__).parent / "words" / f"{name}.txt").read_bytes().splitlines())


def mutate(
    data: bytes, rng: Random, pieces: Sequence[bytes] = (), others: Sequence[bytes] = (), usual: int = 1024
) -> bytes:
    """Returns the bytes with one to six changes. One in a hundred is longer than `usual`, up to MAX_BYTES."""
    out = bytearray(data)
    for _ in range(1 + min(rng.randrange(6), rng.randrange(6))):
        at, end = sorted(rng.randrange(len(out) + 1) for _ in range(2))
        end = min(end, at + rng.choice((1, 4, 64, len(out))))
        kind = rng.randrange(10)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 2:
            del out[at:end]
        elif kind == 3:
            out[at:at] = out[at:end] * rng.choice((1, 1, 2, 30))
        elif kind == 4:
            del out[at if rng.random() < 0.3 else end :]
        elif kind == 5:
            out[at:end] = rng.choice(_NUMBERS)
        elif kind == 6 and others:
            other = rng.choice(others)
            out[at:] = other[rng.randrange(len(other) + 1) :]
        elif kind == 7 and rng.random() < 0.1:
            out[at:at] = rng.choice(_DEEP)
        elif pieces:
            out[at : at if rng.random() < 0.7 else end] = rng.choice(pieces)
    return bytes(out[: MAX_BYTES if rng.random() < 0.01 else max(usual, len(data))])


def bend(value: Any, rng: Random, odd: Sequence[Any] = ODD) -> Any:
    """Returns a changed copy of a JSON value, or an unrelated one."""
    if isinstance(value, dict) and value and rng.random() < 0.7:
        out = dict(value)
        key = rng.choice(list(out))
        change = rng.random()
        if change < 0.1:
            del out[key]
        elif change < 0.15:
            out[rng.choice(("", "x", "type", "name", "$ref"))] = copy.deepcopy(rng.choice(odd))
        else:
            out[key] = bend(out[key], rng, odd)
        return out
    if isinstance(value, list) and value and rng.random() < 0.7:
        out_list = list(value)
        at = rng.randrange(len(out_list))
        out_list[at] = bend(out_list[at], rng, odd)
        return out_list
    return copy.deepcopy(rng.choice(odd))


def bent_message(message: _MessageT, rng: Random) -> _MessageT:
    """Returns a copy of a message with one to four changed fields."""
    out = copy.deepcopy(message)
    for _ in range(rng.randrange(1, 5)):
        _bend_field(out, rng, depth=4)
    return out


def _bend_field(message: Message, rng: Random, depth: int) -> None:
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field = rng.choice(fields)
    if rng.random() < 0.15:
        message.ClearField(field.name)
    elif field.is_repeated:
        _bend_repeated(message, field, rng, depth)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        inner.SetInParent()
        if depth:
            _bend_field(inner, rng, depth - 1)
    else:
        setattr(message, field.name, _scalar(field, rng))


def _bend_repeated(message: Message, field: Field, rng: Random, depth: int) -> None:
    values = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return
    if field.message_type is not None:
        inner = rng.choice(values) if len(values) and rng.random() < 0.5 else values.add()
        if depth:
            _bend_field(inner, rng, depth - 1)
    elif len(values) and rng.random() < 0.6:
        values[rng.randrange(len(values))] = _scalar(field, rng)
    else:
        values.extend(_scalar(field, rng) for _ in range(rng.choice((1, 2, 200))))


def _scalar(field: Field, rng: Random) -> Any:
    if field.cpp_type in (Field.CPPTYPE_FLOAT, Field.CPPTYPE_DOUBLE):
        return rng.choice((0.0, -1.0, 1e30, float("nan"), float("inf"), float("-inf"), 0.5, rng.uniform(-2, 2)))
    if field.cpp_type == Field.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.cpp_type == Field.CPPTYPE_STRING:
        if field.type == Field.TYPE_BYTES:
            return rng.choice((b"", b"\xff" * 16, rng.randbytes(rng.randrange(40))))
        return rng.choice(("", "x", "\0", "tiny", "{}", "[", "127.0.0.1:1", "localhost:0", "ü" * 70, "9" * 400))
    bits = 32 if field.cpp_type in (Field.CPPTYPE_INT32, Field.CPPTYPE_UINT32, Field.CPPTYPE_ENUM) else 64
    signed = field.cpp_type in (Field.CPPTYPE_INT32, Field.CPPTYPE_INT64, Field.CPPTYPE_ENUM)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return rng.choice((low, high, 0, 1, 2, 7, rng.randrange(300), rng.randint(low, high)))
