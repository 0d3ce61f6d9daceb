"""An absent parameter and one that is null give the same request, for every parameter."""

from __future__ import annotations

import pytest

from gateway.api.docs.tables import CHAT, COMMON, COMPLETION
from gateway.api.openai.requests import parse_chat, parse_completion

NEEDED = {"model", "messages", "prompt"}
CHATS = sorted({p.name for p in (*COMMON, *CHAT)} - NEEDED)
COMPLETIONS = sorted({p.name for p in (*COMMON, *COMPLETION)} - NEEDED)


@pytest.mark.parametrize("name", CHATS)
def test_null_equals_absent_in_a_chat(name: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    assert parse_chat({**body, name: None}) == parse_chat(body)


@pytest.mark.parametrize("name", COMPLETIONS)
def test_null_equals_absent_in_a_completion(name: str) -> None:
    body = {"model": "m", "prompt": "x"}
    assert parse_completion({**body, name: None}) == parse_completion(body)
