"""Trains a byte-level tokenizer on invented words, for models with random weights that follow grammars."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

SYLLABLES = [a + b for a in ("b", "ch", "d", "f", "gr", "k", "l", "m", "n", "p", "st", "t", "v", "z") for b in "aeiou"]
SIGNS = ['{"', '": ', '", "', "[", "]", ", ", "\n", ". "]
LINES = 4000


def train_tokenizer(directory: Path, vocab_size: int, seed: int = 0) -> None:
    """Writes a tokenizer.json with at most `vocab_size` tokens. It takes some seconds; the same seed gives the same."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(random.Random(seed)), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))


def _lines(rng: random.Random) -> Iterator[str]:
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 5))) for _ in range(20_000)]
    for _ in range(LINES):
        parts = [rng.choice(words) + (rng.choice(SIGNS) if rng.random() < 0.3 else " ") for _ in range(20)]
        yield "".join(parts) + str(rng.randint(0, 10**6))
