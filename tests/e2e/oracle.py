"""The correctness oracle: `transformers` greedy tokens and log-probabilities in fp32, computed once per prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NEAR_TIE = 1e-4  # logits closer than this may be ordered either way by a correct implementation


@dataclass(frozen=True, slots=True)
class Reference:
    """tokens[i] is the greedy token, logprobs[i] its log-probability, gaps[i] the distance of the top two logits."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


class Oracle:
    """Greedy references of one model directory; answers are cached by prompt."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        eos = self._model.generation_config.eos_token_id
        self.eos = set(eos if isinstance(eos, list) else [eos])
        self._known: dict[tuple[tuple[int, ...], int], Reference] = {}

    @torch.inference_mode()
    def reference(self, prompt: list[int], max_tokens: int) -> Reference:
        """Greedy continuation of at most max_tokens tokens, ended by the model's end-of-sequence token."""
        key = (tuple(prompt), max_tokens)
        if key in self._known:
            return self._known[key]
        tokens: list[int] = []
        logprobs: list[float] = []
        gaps: list[float] = []
        feed, cache = torch.tensor([prompt]), None
        while len(tokens) < max_tokens and not (tokens and tokens[-1] in self.eos):
            out = self._model(input_ids=feed, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            logits = out.logits[0, -1].float()
            best = logits.topk(2)
            token = int(best.indices[0])
            tokens.append(token)
            logprobs.append(float(logits.log_softmax(-1)[token]))
            gaps.append(float(best.values[0] - best.values[1]))
            feed = torch.tensor([[token]])
        self._known[key] = Reference(tokens, logprobs, gaps)
        return self._known[key]


def assert_same(got: list[int], expected: Reference, what: str) -> None:
    """Equal tokens, or a first difference where the oracle's own top two logits are a near tie."""
    for i, (a, b) in enumerate(zip(got, expected.tokens, strict=False)):
        if a != b:
            assert expected.gaps[i] < NEAR_TIE, f"{what}: token {i} is {a}, expected {b} (gap {expected.gaps[i]:.2e})"
            return
    assert len(got) == len(expected.tokens), f"{what}: {len(got)} tokens, expected {len(expected.tokens)}"
