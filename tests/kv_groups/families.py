"""Tiny random models with windows in a part of their layers, and the comparison of their answers with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.types import Token
from engine.llm import Completion
from tests.rigs.engine.foreign_models import FOREIGN_CASES, GROUPED, LOCAL_GLOBAL, VOCAB, save_foreign
from tests.rigs.engine.tiny_models import MOE_CASES, TINY

BLOCK, CHUNK = 4, 16
NATIVE: dict[str, dict[str, Any]] = {
    "qwen2-window": TINY
    | {
        "model_type": "qwen2",
        "vocab_size": 256,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "gpt-oss": TINY | MOE_CASES["gpt-oss"] | {"sliding_window": 9},
}
FOREIGN: dict[str, dict[str, Any]] = {
    **{family: FOREIGN_CASES[family] for family in ("gemma2", "gemma3_text", "cohere2", "exaone4")},
    "ministral": GROUPED | LOCAL_GLOBAL,
}
FAMILIES = [*FOREIGN, *NATIVE]


def save(path: Path, family: str) -> Any:
    """Saves a tiny model; returns that of transformers."""
    if family in FOREIGN:
        return save_foreign(path, family, **FOREIGN[family])
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**NATIVE[family]), attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.eval().save_pretrained(path)
    return model


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, min(VOCAB, 150), (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_tokens(reference: Any, prompt_ids: Sequence[int], tokens: Sequence[Token], *, greedy: bool = True) -> None:
    """Checks tokens and log-probabilities of an answer."""
    ids = [token.id for token in tokens]
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt_ids, *ids]])).logits[0, len(prompt_ids) - 1 : -1]
    logprobs = logits.log_softmax(-1)
    if greedy:
        assert ids == logprobs.argmax(-1).tolist()
    chosen = [float(row[token.id]) for row, token in zip(logprobs, tokens, strict=True)]
    assert [token.logprob for token in tokens] == pytest.approx(chosen, abs=2e-4)


def check(reference: Any, completions: Sequence[Completion]) -> None:
    for completion in completions:
        check_tokens(reference, completion.prompt_ids, completion.tokens)
