"""Inputs that crashed once. Each line is an input of a target, shortened."""

from __future__ import annotations

import pytest

from tests.fuzz.targets import TARGETS
from tests.fuzz.worker import Crash, replay

_DEEP = b"[" * 3000
FOUND = [
    ("model-files", b"\0" + _DEEP),
    ("model-files", b"\2" + (3000).to_bytes(8, "little") + _DEEP),
    ("model-files", b'\3{"weight_map": {"": null}}'),
    ("model-files", b'\3{"weight_map": {"a": "%b"}}' % (b"9" * 400)),
    ("records", b'\0["d", "5", "1", "", ["block_size", "0"]]'),
    ("records", b'\0["\\ud800", "5", "1", "", ["pod", "\\ud800"]]'),
    ("records", b'\0["d", "5", "1", "{\\"queued_tokens\\": \\"x\\"}", []]'),
    ("records", b"\1" + _DEEP),
    ("records", b"\2keys = " + _DEEP),
    ("records", b'\4[[1], "x"]'),
    ("records", b"\4{"),
    ("settings", b"\0\0a = " + _DEEP),
    ("settings", b"\0\0a = " + b"1" * 5000),
    ("templates", b'{"template": "{{ %b }}", "messages": [], "tools": null, "kwargs": {}}' % (b"1" * 5000)),
    ("tokenizer-files", b'\2{"eos_token_id": ["x"]}'),
    ("tokenizer-files", b"\3\xa8"),
    ("tokenizer-files", b"\1" + _DEEP),
]


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in FOUND))
def test_an_input_that_crashed_once_gets_its_documented_error(name: str) -> None:
    inputs = [data for found, data in FOUND if found == name]
    for data, outcome in zip(inputs, replay(TARGETS[name].make(), inputs), strict=True):
        assert not isinstance(outcome, Crash), f"{data!r}: {outcome.text}"
