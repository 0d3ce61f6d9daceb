"""Rerankers: models that judge whether a document answers a query by the logits of two tokens, like "yes" and "no".

    (instruction, query, document) -> prompt -> logits after it -> score = sigmoid(logit of yes - logit of no)

Two kinds of model directories are known:

- sentence-transformers' files: modules.json has the module LogitScore, 1_LogitScore/config.json has the ids of the
  tokens, and the chat template takes messages of the roles system (the instruction), query and document
  (https://sbert.net/docs/package_reference/cross_encoder/modules.html).
- Qwen3-Reranker without these files. The wording is that of its model card
  (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from common.errors import ConfigError, InvalidRequest
from common.model.generation import read_json
from gateway.text.chat_format import ChatFormat
from gateway.text.placeholders import Placeholders
from gateway.text.tokenizer import ChatPrompt, TextTokenizer, json_text

QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


@dataclass(frozen=True, slots=True)
class Reranker:
    """The way in which one model judges a pair."""

    yes_id: int
    no_id: int | None  #: None: the logit of `yes_id` alone is the verdict.
    uses_template: bool = False  #: The model's chat template takes query and document; else Qwen3-Reranker's wording.

    @property
    def logit_ids(self) -> tuple[int, ...]:
        """The tokens of the logits that `score` needs."""
        return (self.yes_id,) if self.no_id is None else (self.yes_id, self.no_id)

    def score(self, logits: Sequence[float]) -> float:
        """Returns the score of a pair, 0 to 1, from the logits of `logit_ids`."""
        margin = logits[0] - logits[1] if self.no_id is not None else logits[0]
        return 1.0 / (1.0 + math.exp(-margin)) if margin > -700 else 0.0

    async def prompt(
        self, tokenizer: TextTokenizer, chat_format: ChatFormat, query: str, document: str, instruction: str | None
    ) -> ChatPrompt:
        """Returns the prompt of a pair; control tokens that the texts spell are text. Raises InvalidRequest."""
        if self.uses_template:
            system = [] if instruction is None else [{"role": "system", "content": instruction}]
            pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            return await chat_format.render([*system, *pair], {})
        texts = (QWEN3_INSTRUCTION if instruction is None else instruction, query, document)
        body = json_text(texts)
        if not tokenizer.control_tokens.may_be_in(body):
            return ChatPrompt(_qwen3_prompt(*texts))
        placeholders = Placeholders(tokenizer.control_tokens, body)
        return placeholders.restore(_qwen3_prompt(*placeholders.put(texts)))


def _qwen3_prompt(instruction: str, query: str, document: str) -> str:
    return (
        f"<|im_start|>system\n{_QWEN3_JUDGE}<|im_end|>\n<|im_start|>user\n"
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@dataclass(frozen=True, slots=True)
class TextPrefixes:
    """The texts that an embedding model expects before queries and before documents."""

    query: str = ""
    document: str = ""

    @classmethod
    def of_directory(cls, model_dir: Path) -> TextPrefixes:
        """Reads `prompts` of config_sentence_transformers.json; a model without it has no prefixes."""
        prompts = read_json(model_dir / "config_sentence_transformers.json").get("prompts")
        named = {name: text for name, text in prompts.items() if isinstance(text, str)} if prompts else {}
        return cls(named.get("query", ""), named.get("document", named.get("passage", "")))


def choose_reranker(setting: str, name: str, model_dir: Path, tokenizer: TextTokenizer) -> Reranker | None:
    """Returns the reranker of a model, None if pairs are compared by their embeddings.

    `setting` is the value of --reranker (auto, qwen3 or embeddings), `name` the model's name for clients. Raises
    ConfigError.
    """
    if setting == "embeddings":
        return None
    if setting == "auto":
        if (files := _logit_score(model_dir)) is not None:
            return _of_files(files, tokenizer)
        named = "/".join((name, *model_dir.parts[-3:])).lower()  # a hub's cache has the name above the snapshot
        if "reranker" not in named or read_json(model_dir / "config.json").get("model_type") != "qwen3":
            return None
    yes, no = (tokenizer.raw.token_to_id(word) for word in ("yes", "no"))
    if yes is None or no is None:
        problem = "the vocabulary has no tokens yes and no, by which a Qwen3-Reranker judges"
        raise ConfigError(f"reranker: {problem}", field="reranker")
    return Reranker(yes, no)


def _logit_score(model_dir: Path) -> dict[str, Any] | None:
    """Returns the config of the module LogitScore, None without one. Raises ConfigError."""
    path = model_dir / "modules.json"
    if not path.is_file():
        return None
    try:
        modules = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as e:
        raise ConfigError(f"model: modules.json is not valid JSON: {e}", field="model") from e
    for module in modules if isinstance(modules, list) else ():
        if isinstance(module, dict) and str(module.get("type", "")).endswith(".LogitScore"):
            return read_json(model_dir / str(module.get("path", "")) / "config.json")
    return None


def _of_files(files: dict[str, Any], tokenizer: TextTokenizer) -> Reranker:
    yes, no = files.get("true_token_id"), files.get("false_token_id")
    if not _is_token(yes, tokenizer) or not (no is None or _is_token(no, tokenizer)):
        problem = f"LogitScore has the tokens {yes!r} and {no!r}; expected ids of the vocabulary"
        raise ConfigError(f"model: {problem}", field="model")
    return Reranker(int(yes or 0), None if no is None else int(no), uses_template=True)


def _is_token(value: object, tokenizer: TextTokenizer) -> bool:
    return type(value) is int and 0 <= value < tokenizer.vocab_size


def require_no_instruction(instruction: str | None) -> None:
    """Raises InvalidRequest for an instruction to a model that compares embeddings."""
    if instruction is not None:
        text = "instruction is only for models that judge pairs, see --reranker; this model compares embeddings"
        raise InvalidRequest(text, field="instruction")
