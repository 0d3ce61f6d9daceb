"""ClientLimits: bounds on the connections and the slow inputs of one client."""

from __future__ import annotations

import pytest

from gateway.admission.api_keys import client_of
from gateway.admission.client_limits import ClientLimits, SlowInput
from gateway.telemetry.metrics import GatewayMetrics


class Inputs:
    """Slow inputs by name, and the names of those that were ended, in order."""

    def __init__(self, limits: ClientLimits) -> None:
        self.limits = limits
        self.ended: list[str] = []
        self.by_name: dict[str, SlowInput] = {}

    def add(self, name: str, *owners: str) -> None:
        self.by_name[name] = slow = SlowInput(owners, lambda: self.ended.append(name))
        self.limits.add_slow(slow)

    def remove(self, name: str) -> None:
        self.limits.remove_slow(self.by_name[name])


def limits_of(*, connections: int = 0, slow: int = 0, all_connections: int = 100, all_slow: int = 100) -> ClientLimits:
    return ClientLimits(
        GatewayMetrics(), connections=connections, slow=slow, all_connections=all_connections, all_slow=all_slow
    )


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"),
        ("", ""),
    ],
)
def test_an_ipv6_network_is_one_client(host: str, client: str) -> None:
    assert client_of(host) == client


def test_the_oldest_slow_input_of_a_client_goes_first() -> None:
    inputs = Inputs(limits_of(slow=2))
    for name in ("a", "b", "c", "d"):
        inputs.add(name, "attacker")
    inputs.add("other", "somebody else")
    assert inputs.ended == ["a", "b"]
    inputs.remove("c")  # it is complete
    inputs.remove("c")
    inputs.add("e", "attacker")
    assert inputs.ended == ["a", "b"]


def test_a_key_is_bounded_over_all_addresses() -> None:
    inputs = Inputs(limits_of(slow=2))
    inputs.add("a", "address 1", "key")
    inputs.add("b", "address 2", "key")
    inputs.add("c", "address 3")
    assert inputs.ended == []
    inputs.add("d", "address 3", "key")
    assert inputs.ended == ["a"]
    inputs.add("e", "address 1")  # `a` does not count any more
    inputs.add("f", "address 1")
    assert inputs.ended == ["a"]


def test_beyond_the_bound_of_all_clients_the_largest_client_loses() -> None:
    inputs = Inputs(limits_of(all_slow=4))
    inputs.add("first", "somebody else")
    for name in ("a", "b", "c", "d", "e"):
        inputs.add(name, "attacker")
    assert inputs.ended == ["a", "b"]


def test_connections_of_a_client_are_bounded() -> None:
    limits = limits_of(connections=2)
    assert [limits.connect("a") for _ in range(3)] == [True, True, False]
    assert limits.connect("b")
    limits.disconnect("a")
    assert [limits.connect("a") for _ in range(2)] == [True, False]


def test_one_client_cannot_take_all_connections(caplog: pytest.LogCaptureFixture) -> None:
    limits = limits_of(all_connections=8)
    assert [limits.connect("a") for _ in range(8)].count(True) == 6
    assert [limits.connect("b") for _ in range(8)].count(True) == 2
    assert [record.message for record in caplog.records] == [
        "8 connections are open, which the limit of open files allows"
    ]
    assert limits._rejections._value.get() == 8


def test_nothing_is_kept_of_clients_that_left() -> None:
    limits = limits_of()
    inputs = Inputs(limits)
    for i in range(10):
        limits.connect(f"client {i}")
        inputs.add(f"{i}", f"client {i}", "key")
    for i in range(10):
        limits.disconnect(f"client {i}")
        inputs.remove(f"{i}")
    assert not any((limits._connections, limits._inputs, limits._by_owner))
