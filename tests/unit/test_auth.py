"""Signatures of calls and KV targets: accepted and refused ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from common.auth import ALLOWED_ROLES, GATEWAY, MAX_SKEW_S, OPEN_METHODS, SIGNATURE_KEY, CallerIdentity, Signer
from common.errors import ConfigError, Unauthenticated, UnknownTransfer
from common.pb import (
    control_pb2,
    decode_pb2,
    embedding_pb2,
    prefill_pb2,
    transfer_pb2,
)
from common.types import KvTarget, TransferId
from common.wire import kv_target_from_pb, kv_target_to_pb

METHOD = "/baton.v1.Transfer/Open"
BODY = transfer_pb2.OpenRequest(request_id="r", pod="p").SerializeToString()
TARGET = KvTarget(TransferId(7, 1), "decode-0", "10.0.0.1:1", 2, (5, 3, 9), "f")


def signer(secret: bytes = b"s3cret", role: str = "prefill", name: str = "decode-0") -> Signer:
    return Signer(secret, role, name, 41)


def signed(receiver: str = "decode-0", method: str = METHOD, **of: Any) -> list[tuple[str, str | bytes]]:
    return [signer(**of).sign(method, BODY, receiver)]


def test_the_caller_of_a_signed_call_is_known() -> None:
    receiver = signer()
    metadata = [("other", "x"), *signed(role="both", name="prefill-ü")]
    assert receiver.verify(METHOD, BODY, metadata) == CallerIdentity("both", "prefill-ü", 41)


def test_a_wrong_secret_method_or_message_is_refused() -> None:
    receiver = signer()
    for method, body, metadata in (
        (METHOD, BODY, signed(secret=b"other")),
        ("/baton.v1.Transfer/Commit", BODY, signed()),
        (METHOD, BODY + b"x", signed()),
        (METHOD, b"", signed()),
    ):
        with pytest.raises(Unauthenticated, match="wrong signature; do both processes have the same secret"):
            receiver.verify(method, body, metadata)
    assert receiver.refused == 4


def test_a_call_for_another_receiver_is_refused() -> None:
    """A process that gets a signed call cannot relay it to another pod."""
    with pytest.raises(Unauthenticated, match="is signed for 'decode-1', but this is 'decode-0'"):
        signer().verify(METHOD, BODY, signed("decode-1"))


@pytest.mark.parametrize("role", [GATEWAY, "worker", "prefill", "decode", "both", "", "Prefill"])
def test_only_the_allowed_roles_may_call_a_method(role: str) -> None:
    for method, allowed in {**ALLOWED_ROLES, "/baton.v1.Decode/Unknown": frozenset[str]()}.items():
        receiver, metadata = signer(), signed(method=method, role=role)
        if role in allowed:
            assert receiver.verify(method, BODY, metadata).role == role
        else:
            with pytest.raises(Unauthenticated, match="may call it"):
                receiver.verify(method, BODY, metadata)


def test_the_table_has_every_method_between_services() -> None:
    files = (control_pb2, decode_pb2, embedding_pb2, prefill_pb2, transfer_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert {method for method in methods if not method.startswith(OPEN_METHODS)} == ALLOWED_ROLES.keys()
    assert not any(method.startswith(OPEN_METHODS) for method in ALLOWED_ROLES)


def test_every_flipped_byte_is_refused() -> None:
    receiver = signer()
    ((key, value),) = signed()
    assert isinstance(value, bytes)
    for i in range(len(value)):
        bad = value[:i] + bytes([value[i] ^ 1]) + value[i + 1 :]
        with pytest.raises(Unauthenticated):
            receiver.verify(METHOD, BODY, [(key, bad)])
    assert receiver.verify(METHOD, BODY, [(key, value)])


@pytest.mark.parametrize(
    "metadata", [None, (), ((SIGNATURE_KEY, b""),), ((SIGNATURE_KEY, b"x" * 65),), ((SIGNATURE_KEY, "text"),)]
)
def test_an_unsigned_message_is_refused(metadata: tuple[tuple[str, str | bytes], ...] | None) -> None:
    with pytest.raises(Unauthenticated, match="not signed: upgrade the caller to this version of Baton"):
        signer().verify(METHOD, BODY, metadata)


def test_a_caller_of_another_version_is_asked_to_upgrade() -> None:
    with pytest.raises(Unauthenticated, match="not signed by this version's rules: upgrade the caller"):
        signer().verify(METHOD, BODY, [("baton-auth-bin", b"x" * 80)])
    ((key, value),) = signed()
    assert isinstance(value, bytes)
    newer = value[:32] + bytes([value[32] + 1]) + value[33:]
    with pytest.raises(Unauthenticated, match="version 3, this process verifies version 2: upgrade the older"):
        signer().verify(METHOD, BODY, [(key, newer)])


def test_a_replay_is_refused_and_another_message_is_not() -> None:
    receiver, first = signer(), signed()
    receiver.verify(METHOD, BODY, first)
    with pytest.raises(Unauthenticated, match="replayed"):
        receiver.verify(METHOD, BODY, first)
    receiver.verify(METHOD, BODY, signed())


@pytest.mark.parametrize("shift", [MAX_SKEW_S + 2, -MAX_SKEW_S - 2])
def test_old_and_future_messages_are_refused(shift: float) -> None:
    with pytest.raises(Unauthenticated, match="signed"):
        signer().verify(METHOD, BODY, signed(), time.time() + shift)


def test_a_replay_is_refused_while_its_timestamp_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    start = 1_000_000.0
    monkeypatch.setattr("common.auth.time.time", lambda: start)
    receiver = signer()
    sent: list[list[tuple[str, str | bytes]]] = []
    for step in range(400):
        now = start + step
        monkeypatch.setattr("common.auth.time.time", lambda now=now: now)
        sent.append(signed())
        receiver.verify(METHOD, BODY, sent[-1], now)
        for old in sent[-70:]:
            with pytest.raises(Unauthenticated):
                receiver.verify(METHOD, BODY, old, now)
        assert sum(map(len, receiver._seen.values())) <= 4 * MAX_SKEW_S


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(ConfigError):
        signer(secret=b"")


def test_a_signed_target_is_accepted_by_every_process_with_the_secret_until_it_expires(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = signer().sign_target(TARGET, "r", 5.0)
    prefill = signer(name="prefill-0")
    prefill.verify_target(kv_target_from_pb(kv_target_to_pb(target)), "r")
    with pytest.raises(Unauthenticated):
        signer(b"other").verify_target(target, "r")
    late = time.time() + 5.0 + MAX_SKEW_S
    monkeypatch.setattr("common.auth.time.time", lambda: late - 0.5)
    prefill.verify_target(target, "r")
    monkeypatch.setattr("common.auth.time.time", lambda: late + 0.5)
    with pytest.raises(UnknownTransfer, match="expired"):
        prefill.verify_target(target, "r")


@pytest.mark.parametrize(
    "change",
    [
        lambda target: replace(target, blocks=(5, 4, 9)),
        lambda target: replace(target, blocks=(5, 3)),
        lambda target: replace(target, blocks=()),
        lambda target: replace(target, first_block=1),
        lambda target: replace(target, address="10.0.0.2:1"),
        lambda target: replace(target, pod="decode-00", address="10.0.0.1:1"),
        lambda target: replace(target, pod="decode-", address="010.0.0.1:1"),
        lambda target: replace(target, transfer_id=TransferId(7, 2)),
        lambda target: replace(target, transfer_id=TransferId(8, 1)),
        lambda target: replace(target, fingerprint="g"),
        lambda target: replace(target, expires_at=target.expires_at + 1),
        lambda target: replace(target, signature=target.signature[:-1]),
        lambda target: replace(target, signature=b""),
    ],
)
def test_a_changed_target_is_refused(change: Callable[[KvTarget], KvTarget]) -> None:
    target = signer().sign_target(TARGET, "r", 5.0)
    with pytest.raises(Unauthenticated):
        signer().verify_target(change(target), "r")
    with pytest.raises(Unauthenticated):
        signer().verify_target(target, "another request")
    with pytest.raises(Unauthenticated, match="wrong signature"):
        signer().verify_target(target, "r", "1" * 32)


def test_a_call_from_before_the_receivers_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that restarts has lost its nonces, so a call that the process before it served is not served again."""
    metadata, sent = signed(), time.time()
    monkeypatch.setattr("common.auth.time.time", lambda: sent + 5.0)
    restarted = signer()
    with pytest.raises(Unauthenticated, match="signed before decode-0 started"):
        restarted.verify(METHOD, BODY, metadata)
    assert restarted.verify(METHOD, BODY, signed()).name == "decode-0"
