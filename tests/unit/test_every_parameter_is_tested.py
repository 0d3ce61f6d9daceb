"""Every parameter has an effect in tests/e2e/effects.py, over REST and over gRPC; the e2e tests fail if one is ignored.

To add a parameter: add its effect there, or its name to ELSEWHERE there if a small model cannot show it.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gateway.api.docs.document import Parameter
from gateway.api.docs.tables import CHAT, COMMON, COMPLETION, grpc_fields
from tests.e2e.effects import CHATS, COMPLETIONS, ELSEWHERE, Effect


def shown(effects: Iterable[Effect], *, over_grpc: bool = False) -> set[str]:
    return {effect.name for effect in effects if not (over_grpc and effect.rest_only)}


@pytest.mark.parametrize(
    ("parameters", "effects"),
    [((*COMMON, *COMPLETION), COMPLETIONS), (CHAT, CHATS)],
    ids=["completions", "chats"],
)
def test_every_parameter_changes_an_answer_in_a_test(
    parameters: tuple[Parameter, ...], effects: tuple[Effect, ...]
) -> None:
    for p in parameters:
        if p.support != "supported" or p.name in ELSEWHERE or p.name == "stream_options":  # its members are parameters
            continue
        assert p.name in shown(effects), p.name
        if grpc_fields(p) not in ((), ("structured_output",)):
            assert p.name in shown(effects, over_grpc=True), f"{p.name}, over gRPC"
