"""Static steps over KV groups: the tokens of plain CPU steps, while pages leave windows and are used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from common.types import SamplingParams, Token
from engine.kv.groups.grouped_blocks import GroupedBlockPool
from engine.models.spec import parse_spec
from engine.schedule.sequence import Sequence
from engine.step.prompt_step import PromptBucket

from .test_decode_step import VOCAB, Rig

#: Two layers, one with a window of five tokens: a full group and a window group. Blocks have four tokens.
SPEC = parse_spec(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    }
)


@torch.inference_mode()
def test_static_steps_over_groups_give_the_tokens_of_plain_ones(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks beside rows that decode, and a prompt that begins with a cached prefix."""
    monkeypatch.setattr(Sequence, "CHECKS", True)
    answers, buckets = [], list[PromptBucket]()
    for fused in (False, True):
        rig = Rig(device if fused else torch.device("cpu"), fused=fused, overlap=True, blocks=26, spec=SPEC)
        assert isinstance(rig.pool, GroupedBlockPool)
        if (prompt_step := rig.runner.prompt_step) is not None:

            def run(bucket: PromptBucket, run: Callable[[PromptBucket], Any] = prompt_step.run) -> Any:
                buckets.append(bucket)
                return run(bucket)

            monkeypatch.setattr(prompt_step, "run", run)
            monkeypatch.setattr(rig.runner, "_forward", None)  # no step runs layer by layer
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=3)
        tokens = list[dict[str, list[Token]]]()
        for names in ("a", "bc"):
            for i, name in enumerate(names):
                rig.add(name, tuple((5 * j + 7 * i) % VOCAB for j in range(11 + 4 * i)), params)
            tokens.append(rig.run())
        answers.append([{name: [t.id for t in ids] for name, ids in each.items()} for each in tokens])
    assert answers[0] == answers[1]
    assert {bucket.decodes for bucket in buckets} == {False, True}
