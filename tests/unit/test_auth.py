"""Signatures of messages between pods: accepted and refused ones."""

from __future__ import annotations

import time

import pytest

from common.auth import AUTH_KEY, MAX_SKEW_S, Signer
from common.errors import ConfigError, Unauthenticated
from common.pb import transfer_pb2, types_pb2

METHOD = "/baton.v1.Transfer/Open"
MESSAGE = transfer_pb2.OpenRequest(transfer_id=types_pb2.TransferId(generation=7, number=1), request_id="r", pod="p")


def signer(secret: bytes = b"s3cret", pod: str = "prefill-0") -> Signer:
    return Signer(secret, pod, 41)


def test_verify_returns_the_pod_and_generation_of_a_peer_with_the_secret() -> None:
    assert signer(pod="d").verify(METHOD, MESSAGE, signer(pod="prefill-ü").sign(METHOD, MESSAGE)) == (
        "prefill-ü",
        41,
    )


def test_a_message_that_was_serialized_and_parsed_is_accepted() -> None:
    parsed = transfer_pb2.OpenRequest.FromString(MESSAGE.SerializeToString())
    metadata = signer(pod="p").sign(METHOD, MESSAGE)
    assert signer().verify(METHOD, parsed, [("other", "x"), *metadata]) == ("p", 41)


def test_a_wrong_secret_method_or_message_is_refused() -> None:
    good = signer().sign(METHOD, MESSAGE)
    other = transfer_pb2.OpenRequest(transfer_id=types_pb2.TransferId(generation=7, number=2), request_id="r", pod="p")
    with pytest.raises(Unauthenticated):
        signer(b"other").verify(METHOD, MESSAGE, good)
    with pytest.raises(Unauthenticated):
        signer().verify("/baton.v1.Transfer/Commit", MESSAGE, good)
    with pytest.raises(Unauthenticated):
        signer().verify(METHOD, other, good)


def test_every_flipped_byte_is_refused() -> None:
    ((key, value),) = signer().sign(METHOD, MESSAGE)
    assert isinstance(value, bytes)
    receiver = signer()
    for i in range(len(value)):
        bad = value[:i] + bytes([value[i] ^ 1]) + value[i + 1 :]
        with pytest.raises(Unauthenticated):
            receiver.verify(METHOD, MESSAGE, [(key, bad)])


@pytest.mark.parametrize("metadata", [None, (), ((AUTH_KEY, b""),), ((AUTH_KEY, b"x" * 63),), ((AUTH_KEY, "text"),)])
def test_an_unsigned_message_is_refused(metadata: tuple[tuple[str, str | bytes], ...] | None) -> None:
    with pytest.raises(Unauthenticated):
        signer().verify(METHOD, MESSAGE, metadata)


def test_a_replay_is_refused_and_another_message_is_not() -> None:
    sender, receiver = signer(), signer()
    first = sender.sign(METHOD, MESSAGE)
    receiver.verify(METHOD, MESSAGE, first)
    with pytest.raises(Unauthenticated, match="replayed"):
        receiver.verify(METHOD, MESSAGE, first)
    receiver.verify(METHOD, MESSAGE, sender.sign(METHOD, MESSAGE))


@pytest.mark.parametrize("shift", [MAX_SKEW_S + 2, -MAX_SKEW_S - 2])
def test_old_and_future_messages_are_refused(shift: float) -> None:
    with pytest.raises(Unauthenticated, match="signed"):
        signer().verify(METHOD, MESSAGE, signer().sign(METHOD, MESSAGE), time.time() + shift)


def test_a_replay_is_refused_while_its_timestamp_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, sender, start = signer(), signer(), 1_000_000.0
    sent: list[tuple[float, tuple[tuple[str, str | bytes], ...]]] = []
    for step in range(400):
        now = start + step
        monkeypatch.setattr("common.auth.time.time", lambda now=now: now)
        sent.append((now, sender.sign(METHOD, MESSAGE)))
        receiver.verify(METHOD, MESSAGE, sent[-1][1], now)
        for _, old in sent[-70:]:
            with pytest.raises(Unauthenticated):
                receiver.verify(METHOD, MESSAGE, old, now)
        assert sum(map(len, receiver._seen.values())) <= 4 * MAX_SKEW_S


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(ConfigError):
        Signer(b"", "p", 1)
