"""Prompts of exact token lengths from the standard library's own prose, so that nothing has to be downloaded."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from pydoc_data import topics

from tokenizers import Tokenizer


@cache
def _corpus(model_dir: Path) -> list[int]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return list(tokenizer.encode(text[:200_000], add_special_tokens=False).ids)


def prompt_of(model_dir: Path, length: int, seed: int) -> list[int]:
    """`length` token ids of prose, from a start that `seed` selects."""
    corpus = _corpus(model_dir)
    start = random.Random(seed).randrange(len(corpus) - length)
    return corpus[start : start + length]
