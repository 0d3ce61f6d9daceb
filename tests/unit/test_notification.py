"""Binary notifications between transfer threads: round trip, and payloads that are not notifications."""

from __future__ import annotations

import pytest

from common.types import FinishReason, TransferId
from kv_transfer.messages import (
    Commit,
    CommitNotification,
    CommittedNotification,
    RangeWritten,
    TransferNotification,
    is_sealed,
    parse_notification,
)

SIGNATURE = b"signature of the KV target"
ID = TransferId(5, 1)
LAST = TransferId(2**63, 2**64 - 1)
TOLD: list[TransferNotification] = [
    RangeWritten(LAST, 0, 17),
    CommitNotification(LAST, Commit((2**32 - 1, 0, 7), (None, FinishReason.LENGTH, FinishReason.STOP))),
    CommitNotification(ID, Commit((), ())),
    CommittedNotification(LAST, 1234),
]


@pytest.mark.parametrize("message", TOLD)
def test_notification_round_trip(message: TransferNotification) -> None:
    packed = message.pack(SIGNATURE)
    assert parse_notification(packed) == message
    assert is_sealed(packed, SIGNATURE)
    for damaged in (packed + b"x", packed[:-1], packed[:4], b"", b"XXXX" + packed[4:], packed + bytes(5)):
        assert parse_notification(damaged) is None


@pytest.mark.parametrize("message", TOLD)
def test_a_notification_is_sealed_only_by_the_signature(message: TransferNotification) -> None:
    packed = message.pack(SIGNATURE)
    for i in range(len(packed)):
        assert not is_sealed(packed[:i] + bytes([packed[i] ^ 1]) + packed[i + 1 :], SIGNATURE)
    assert not is_sealed(packed, b"another signature")
    assert not is_sealed(message.pack(b""), b"")
    assert not is_sealed(b"", SIGNATURE)


def test_malformed_notifications_are_rejected() -> None:
    assert parse_notification(RangeWritten(ID, 0, 0).pack(SIGNATURE)) is None
    assert parse_notification(CommittedNotification(ID, 2**40).pack(SIGNATURE)) == CommittedNotification(ID, 2**32 - 1)
