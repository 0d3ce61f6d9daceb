"""A model's own defaults for generation: its end-of-sequence tokens, and the values in generation_config.json.

Gateways, pods and the in-process LLM read them with these functions, so they agree on every model directory.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from common.errors import ConfigError, describe
from common.types import SamplingParams

CONFIG, GENERATION = "config.json", "generation_config.json"
_log = logging.getLogger(__name__)

#: Values of generation_config.json that are defaults of requests, with the range that requests allow.
_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("from 0 to 2", lambda x: 0 <= x <= 2),
    "top_p": ("over 0 and at most 1", lambda x: 0 < x <= 1),
    "top_k": ("an integer of at least 0", lambda x: x >= 0 and x == int(x)),
    "min_p": ("from 0 to 1", lambda x: 0 <= x <= 1),
    "repetition_penalty": ("over 0 and at most 2", lambda x: 0 < x <= 2),
    "max_new_tokens": ("an integer of at least 1", lambda x: x >= 1 and x == int(x)),
}


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; {} if there is no file. Raises ConfigError (field "model")."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"model: {path.name} is not valid JSON: {describe(e)}", field="model") from e
    if not isinstance(value, dict):
        raise ConfigError(f"model: {path.name} is not a JSON object", field="model")
    return value


def special_token_text(config: Mapping[str, Any], name: str) -> str:
    """Returns the text of a special token (bos_token, ...) in a tokenizer_config.json; "" if it has none."""
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def eos_ids_of(config: Mapping[str, Any], name: str) -> list[int]:
    """Returns `eos_token_id` of a parsed file; negative ids mean none. `name` is the file's name in ConfigError."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        problem = f"eos_token_id is {value!r}, a token id or a list of token ids is needed"
        raise ConfigError(f"model: {name}: {problem}", field="model")
    return [i for i in ids if i >= 0]


def end_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Returns all end-of-sequence tokens of a model directory, each once; empty if no file names one.

    In this order: generation_config.json, config.json, its text_config, and the tokenizer's eos_token. Files may name
    different tokens: a model's chat often ends with another token than its training texts. Raises ConfigError.
    """
    config = read_json(model_dir / CONFIG)
    text = config.get("text_config")
    found = eos_ids_of(read_json(model_dir / GENERATION), GENERATION) + eos_ids_of(config, CONFIG)
    found += eos_ids_of(text, f"{CONFIG}: text_config") if isinstance(text, dict) else []
    return tuple(dict.fromkeys((*found, *_tokenizer_eos(model_dir))))


def _tokenizer_eos(model_dir: Path) -> list[int]:
    """Returns the id of the tokenizer's eos_token, if tokenizer.json has that token."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if token := special_token_text(read_json(model_dir / name), "eos_token"):
            id = _token_id(model_dir / "tokenizer.json", token)
            return [] if id is None else [id]
    return []


def _token_id(path: Path, token: str) -> int | None:
    """Returns a token's id, as the `tokenizers` library finds it: added tokens first, then the model's vocabulary."""
    if not path.is_file():
        return None
    try:
        parsed = orjson.loads(path.read_bytes())
        for added in parsed.get("added_tokens") or ():
            if added["content"] == token:
                return int(added["id"])
        vocab = parsed["model"]["vocab"]
        if isinstance(vocab, dict):
            found = vocab.get(token)
            return None if found is None else int(found)
        return next((i for i, entry in enumerate(vocab) if entry[0] == token), None)  # Unigram: pairs with a score
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as e:
        raise ConfigError(f"model: {path} is not a tokenizer: {describe(e)}", field="model") from e


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The values that apply to a request that does not set them."""

    sampling: Mapping[str, Any] = field(default_factory=dict)  #: By name of a field of SamplingParams.
    max_tokens: int | None = None  #: Max tokens of an answer to a chat; None: the rest of the context.

    def fill(self, sampling: SamplingParams, given: Collection[str]) -> SamplingParams:
        """Returns the parameters with the model's values in place of those that are not `given`."""
        own = {name: value for name, value in self.sampling.items() if name not in given}
        return replace(sampling, **own) if own else sampling

    def as_json(self) -> dict[str, Any]:
        """Returns all values by the name of the request's field."""
        return {**self.sampling, **({} if self.max_tokens is None else {"max_tokens": self.max_tokens})}


def generation_defaults(model_dir: Path) -> GenerationDefaults:
    """Reads generation_config.json; without a file there are no defaults.

    A value that no request may have is left out, with a warning. Raises ConfigError for a file that is no JSON object.
    """
    values: dict[str, Any] = {}
    config = read_json(model_dir / GENERATION)
    for name, (expected, accepts) in _RANGES.items():
        value = config.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if number and accepts(value):
            values[name] = int(value) if expected.startswith("an integer") else float(value)
        else:
            _log.warning("%s: %s is %r and has no effect; expected %s", GENERATION, name, value, expected)
    return GenerationDefaults(max_tokens=values.pop("max_new_tokens", None), sampling=values)
