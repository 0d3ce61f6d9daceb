"""When a posted write counts as one that will not end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kv_transfer.sender.write_limits import SLOWEST_LINK, STOOD_STILL_S, WRITE_SILENCE_S, WriteSilence


def connection(block_at: float = 0.0) -> Any:
    return SimpleNamespace(pod="decode-0", block_at=block_at)


def looked(silence: WriteSilence, until: float, since: float = 0.0) -> WriteSilence:
    """Looks every half STOOD_STILL_S, as a process that runs."""
    for i in range(int((until - since) / STOOD_STILL_S * 2) + 1):
        silence.look(since + i * STOOD_STILL_S / 2)
    return silence


def test_a_write_is_silent_after_the_limit_and_names_the_peer() -> None:
    silence = looked(WriteSilence(0), WRITE_SILENCE_S)
    assert silence.trouble(connection(), 0.0, WRITE_SILENCE_S - 0.1) == ""
    assert "decode-0" in silence.trouble(connection(), 0.0, WRITE_SILENCE_S)


def test_an_end_of_any_write_of_the_connection_or_a_newer_write_begins_the_time_again() -> None:
    silence = looked(WriteSilence(0), WRITE_SILENCE_S)
    assert silence.trouble(connection(block_at=1.0), 0.0, WRITE_SILENCE_S) == ""
    assert silence.trouble(connection(), 1.0, WRITE_SILENCE_S) == ""


def test_a_large_write_has_the_time_of_a_slow_network() -> None:
    assert WriteSilence(100_000_000).limit_s == WRITE_SILENCE_S + 100_000_000 / SLOWEST_LINK


def test_a_process_that_stood_still_waits_once_more() -> None:
    silence = looked(WriteSilence(0), 1.0)
    silence.look(30.0)
    assert silence.trouble(connection(), 0.0, 30.0) == ""
    looked(silence, 30.0 + WRITE_SILENCE_S, since=30.0)
    assert silence.trouble(connection(), 0.0, 30.0 + WRITE_SILENCE_S)
