"""Requests with known answers. One engine in one process computes the answers before any fault.

A client must not get a part of another client's answer. A secret inside a prompt could not show that, because a model
with random weights repeats nothing of its prompt. So the answers themselves are the secrets: all of them differ in
their first SECRET_TOKENS tokens. A text that begins like the answer to its own prompt comes from no other request.
"""

from __future__ import annotations

import enum
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.support.shapes import llama

MODEL = "chaos"
BLOCK, CHUNK, MAX_LEN, VOCAB = 16, 64, 512, 512  #: In tokens.
CASES = 40  #: Number of requests.
SECRET_TOKENS = 6  #: Answers differ in this many first tokens.
#: Lengths of prompts: parts of a block, whole blocks, and several chunks.
LENGTHS = (3, 15, 16, 17, 33, 64, 100, 150, 260)
MAX_TOKENS = (8, 16, 24, 48)  #: Lengths of answers.


@dataclass(frozen=True, slots=True)
class Case:
    """One request with its known answer."""

    body: dict[str, Any]  #: Of /v1/completions, without `stream`.
    texts: tuple[str, ...]  #: By choice.

    def agrees(self, texts: Sequence[str], *, whole: bool) -> bool:
        """Returns whether the texts of the choices are right. If the answer is not `whole`, a beginning is right."""
        pairs = zip(texts, self.texts, strict=True)
        return all(right == text if whole else right.startswith(text) for text, right in pairs)


class ModelKind(enum.StrEnum):
    """What the layers of the model keep of a sequence."""

    PLAIN = "plain"  #: Keys and values of all tokens.
    WINDOWS = "windows"  #: The second of two layers has a window, so the model has KV groups.
    STATES = "states"  #: The first of two layers has a recurrent state.


def write_model(directory: Path, kind: ModelKind = ModelKind.PLAIN) -> None:
    """Writes config.json and a tokenizer in which every token is a word. For load_format dummy: no weights."""
    config = llama(VOCAB, 64, 128, layers=2, heads=4, kv_heads=2, context=MAX_LEN, torch_dtype="float32")
    if kind is ModelKind.WINDOWS:
        config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
        config |= {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
    elif kind is ModelKind.STATES:
        config |= {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "head_dim": 16}
        config |= {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
        config |= {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8}
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE(vocab={f"Ġ{_word(i)}": i for i in range(VOCAB)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")


def _word(number: int) -> str:
    """Returns a word of three letters. No word begins with another one, because all have the same length."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return letters[number // 676] + letters[number // 26 % 26] + letters[number % 26]


def _bodies() -> list[dict[str, Any]]:
    """Returns greedy and seeded requests. Two of three prompts share a prefix with others, like turns of a chat."""
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
    """Computes the answers with one engine. Raises AssertionError if two answers begin alike."""
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
