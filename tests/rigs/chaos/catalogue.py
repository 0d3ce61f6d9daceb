"""Requests with known answers, computed by one engine in one process before any fault.

Random weights repeat nothing of a prompt, so a secret inside it could not show up in an answer. In its place every
answer is a secret: all answers differ in their first SECRET_TOKENS tokens. A text that equals the beginning of the
answer to its own prompt can then come from no other request.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.support.shapes import llama

MODEL = "chaos"
BLOCK, CHUNK, MAX_LEN, VOCAB = 16, 64, 512, 512
CASES = 40
SECRET_TOKENS = 6
#: Lengths of prompts: parts of a block, whole blocks, and several chunks.
LENGTHS = (3, 15, 16, 17, 33, 64, 100, 150, 260)
MAX_TOKENS = (8, 16, 24, 48)


@dataclass(frozen=True, slots=True)
class Case:
    """One request and the texts of its choices."""

    body: dict[str, Any]
    texts: tuple[str, ...]

    def agrees(self, texts: Sequence[str], *, whole: bool) -> bool:
        """Whether these texts of the choices are right: equal, or a beginning if the answer is not whole."""
        pairs = zip(texts, self.texts, strict=True)
        return all(right == text if whole else right.startswith(text) for text, right in pairs)


def write_model(directory: Path) -> None:
    """Writes config.json and a tokenizer in which every token is a word. Pods make the weights: load_format dummy."""
    config = llama(VOCAB, 64, 128, layers=2, heads=4, kv_heads=2, context=MAX_LEN, torch_dtype="float32")
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE(vocab={f"Ġ{_word(i)}": i for i in range(VOCAB)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")


def _word(number: int) -> str:
    """Three letters for every number, so that no word begins with another."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return letters[number // 676] + letters[number // 26 % 26] + letters[number % 26]


def _bodies() -> list[dict[str, Any]]:
    """Greedy and seeded requests; two of three prompts begin like others, as the turns of a conversation."""
    rng = random.Random(22)
    histories = [rng.choices(range(2, VOCAB), k=96) for _ in range(3)]
    bodies: list[dict[str, Any]] = []
    for i in range(CASES):
        length = LENGTHS[i % len(LENGTHS)]
        prompt = rng.choices(range(2, VOCAB), k=length)
        if i % 3:
            prompt = (histories[i % len(histories)][: 16 * rng.randrange(1, 6)] + prompt)[: MAX_LEN - 64]
        drawn = {"temperature": 1.0, "top_p": 0.95, "seed": 1000 + i} if i % 2 else {"temperature": 0.0}
        n = {"n": 2} if i % 10 == 9 else {}
        bodies.append({"prompt": prompt, "max_tokens": MAX_TOKENS[i % len(MAX_TOKENS)], **drawn, **n})
    return bodies


def catalogue(model_dir: Path) -> list[Case]:
    """Computes the answers. Fails if two answers begin alike."""
    from common.types import SamplingParams
    from engine.llm import LLM

    bodies = _bodies()
    sampling = [SamplingParams(**{key: value for key, value in body.items() if key != "prompt"}) for body in bodies]
    llm = LLM(
        model_dir,
        load_format="dummy",
        device="cpu",
        dtype="float32",
        threads=1,
        block_size=BLOCK,
        num_blocks=1024,
        max_model_len=MAX_LEN,
        chunk_tokens=CHUNK,
    )
    try:
        prompts = [body["prompt"] for body in bodies]
        completions = iter(llm.generate(prompts, sampling, ignore_eos=True, show_progress=False))
        cases, secrets = [], list[tuple[int, ...]]()
        for body, params in zip(bodies, sampling, strict=True):
            answers = [next(completions) for _ in range(params.n)]
            secrets += [tuple(answer.ids[:SECRET_TOKENS]) for answer in answers]
            extra = {"model": MODEL, "ignore_eos": True}
            cases.append(Case({**body, **extra}, tuple(answer.text for answer in answers)))
    finally:
        llm.engine.close()
    assert len(set(secrets)) == len(secrets), "two answers begin alike"
    return cases
