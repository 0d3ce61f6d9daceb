"""Sender, receiver, block pools and a faulty network, in every order of steps within small bounds."""

from __future__ import annotations

import pytest

from tests.modelcheck.explorer import explore
from tests.modelcheck.pods import Bounds
from tests.modelcheck.product import Removal, load
from tests.modelcheck.seeded_bugs import MORE_BUGS, SEEDED_BUGS, SMALL
from tests.modelcheck.sender_pod import SenderPod
from tests.modelcheck.snapshot import clone
from tests.modelcheck.world import World

#: Bounds of `make test`. benchmarks/reliability/modelcheck.py explores the whole ones.
EVERY_RUN = {
    "one request": SMALL,
    "two requests for one block": Bounds(
        receiver_restarts=0, blocks=1, blocks_per_request=1, message_faults=0, failed_writes=0, coarse=True
    ),
}


@pytest.mark.parametrize("name", EVERY_RUN)
def test_every_state_keeps_the_invariants_and_every_request_ends(name: str) -> None:
    result = explore(World(load(), EVERY_RUN[name]))
    assert result.violation is None, result.violation
    assert result.complete
    assert result.ends > 1
    assert result.states > 1000


@pytest.mark.parametrize("name", [*SEEDED_BUGS, *MORE_BUGS])
def test_a_removed_line_is_found(name: str) -> None:
    bug = (SEEDED_BUGS | MORE_BUGS)[name]
    result = bug.explore()
    assert bug.is_found(result), result.violation


def test_a_counterexample_is_a_schedule_that_ends_with_the_violation() -> None:
    result = SEEDED_BUGS["quarantine skipped"].explore()
    assert result.violation is not None
    lines = str(result.violation).splitlines()
    assert "request A" in lines[0]
    assert "write lands: late write" in lines[-1]
    assert lines[1].strip().startswith("1. reserve, request A")


def test_a_line_that_does_not_exist_cannot_be_removed() -> None:
    with pytest.raises(ValueError, match="has no line"):
        load(Removal("engine.kv.ledger", "_release", "no such line"))


def test_a_copy_of_a_pod_changes_alone() -> None:
    pod = SenderPod(load(), Bounds(), 1)
    for event in (("start", 0, 1, (0, 1)), ("connected", 0, 1), ("opened", 0, 1, ""), ("push", 0), ("post",)):
        pod.apply(event)
        assert not pod.faults
    before, copy = pod.state(), clone(pod)
    assert copy.state() == before
    copy.apply(("write_failed", 0, 1, 0))
    assert not copy.faults
    assert copy.state() != before
    assert pod.state() == before
    pod.apply(("write_done", 0, 1, 0))
    assert not pod.faults
