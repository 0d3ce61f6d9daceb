"""The correctness oracle: `transformers` greedy tokens and log-probabilities in fp32."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NEAR_TIE = 1e-4  # logits closer than this may be ordered either way by a correct implementation


@dataclass(frozen=True, slots=True)
class Reference:
    """A greedy continuation: by position the token, its log-probability, and the gap between the top two logits."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


class Oracle:
    """Computes greedy references with the model of one directory."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoModelForCausalLM, DynamicCache

        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        eos = self.model.generation_config.eos_token_id
        self.eos = set(eos if isinstance(eos, list) else [eos])
        self._new_cache: Any = DynamicCache

    @torch.inference_mode()
    def references(self, text: list[int], lengths: Iterable[int], max_tokens: int) -> dict[int, Reference]:
        """Returns greedy continuations of at most max_tokens tokens for prefixes of the text with these lengths.

        The text is computed once: the longest beginning leaves the KV of all shorter ones in its cache.
        """
        descending = sorted(set(lengths), reverse=True)
        cache = self._new_cache(config=self.model.config)
        logits = self._forward(text[: descending[0]], cache, torch.tensor([n - 1 for n in descending]))
        found: dict[int, Reference] = {}
        for length, row in zip(descending, logits, strict=True):
            cache.crop(length - cache.get_seq_length())
            found[length] = self._continue(row, cache, max_tokens)
        return found

    def _continue(self, logits: Tensor, cache: Any, max_tokens: int) -> Reference:
        reference = Reference([], [], [])
        while True:
            best = logits.topk(2)
            token = int(best.indices[0])
            reference.tokens.append(token)
            reference.logprobs.append(float(logits.log_softmax(-1)[token]))
            reference.gaps.append(float(best.values[0] - best.values[1]))
            if len(reference.tokens) == max_tokens or token in self.eos:
                return reference
            logits = self._forward([token], cache, 1)[0]

    def _forward(self, tokens: list[int], cache: Any, rows: Tensor | int) -> Tensor:
        """Returns logits [rows, vocabulary] and appends the tokens to the cache."""
        out = self.model(torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=rows)
        return out.logits[0].float()  # type: ignore[no-any-return]


def assert_same(got: list[int], expected: Reference, what: str) -> None:
    """Asserts equal tokens up to the first near tie of the reference's top two logits."""
    for i, (a, b) in enumerate(zip(got, expected.tokens, strict=False)):
        if a != b:
            assert expected.gaps[i] < NEAR_TIE, f"{what}: token {i} is {a}, expected {b} (gap {expected.gaps[i]:.2e})"
            return
    assert len(got) == len(expected.tokens), f"{what}: {len(got)} tokens, expected {len(expected.tokens)}"
