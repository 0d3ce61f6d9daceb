"""Models of every family behind prefill and decode pods over NIXL: hand-off, prefix hits, and a migration.

Greedy tokens equal transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_transfer.backend.nixl import NixlBackend
from tests.rigs.engine.foreign_models import FOREIGN_CASES, save_foreign
from tests.rigs.engine.tiny_models import MOE_CASES, assert_greedy, save_reference, tiny_prompt
from tests.rigs.pods.harness import Cluster, request

torch.set_num_threads(1)
SHORT = ("gemma2", "gpt2", "gpt-oss", "qwen3-moe", "deepseek-v2")  # The other families are marked long.
NO_EOS = {"eos_token_id": None}

SAVE: dict[str, Callable[[Path], Any]] = {
    **{
        name: lambda directory, name=name: save_foreign(directory, name, **FOREIGN_CASES[name], **NO_EOS)  # type: ignore[misc]
        for name in FOREIGN_CASES
    },
    **{
        name: lambda directory, case=case: save_reference(directory, case | NO_EOS)  # type: ignore[misc]
        for name, case in MOE_CASES.items()
    },
}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in SAVE]
)
async def test_a_family_is_handed_over(family: str, tmp_path: Path) -> None:
    reference = SAVE[family](tmp_path)
    room = {"kv_memory": 4 << 20}
    async with Cluster.start(
        tmp_path, decode=2, backend=lambda _role: NixlBackend(), prefill_config=room, decode_config=room
    ) as cluster:
        first = request(tiny_prompt(37, seed=1), 10)
        answer = await cluster.generate(first, remote_only=True)
        assert answer.handed_off is not None
        assert answer.cached_tokens == 0
        assert len(answer.ids) == 10
        assert_greedy(reference, first.prompt_ids, answer.tokens)

        longer = request([*first.prompt_ids, 7, 8, 9], 6)
        hit = await cluster.generate(longer, remote_only=True)
        assert hit.cached_tokens == 36
        assert_greedy(reference, longer.prompt_ids, hit.tokens)

        # The decode pod is lost after four tokens: the answer continues on the other one, with the same tokens.
        rest = replace(first.resumed(0, answer.ids[:4]), request_id=request([1]).request_id)
        moved = await cluster.generate(rest, decode=cluster.decodes[1], remote_only=True)
        assert moved.handed_off is not None
        assert [(t.index, t.id) for t in moved.tokens] == list(enumerate(answer.ids))[4:]
        for pod in cluster.decodes:
            computed = (await pod.info()).computed
            assert (computed.prefill, computed.local, computed.recompute) == (0, 0, 0)
