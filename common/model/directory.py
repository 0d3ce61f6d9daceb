"""From what a person writes after --model to a directory that an engine and a tokenizer can read.

A directory is checked, never changed. The name `smollm2` stands for a directory in the user's cache. The `baton`
command makes it (cli/demo/model.py); here it is only looked up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError

# Ends of the names of decoders: of architectures that an engine may be able to serve. Only loading one tells.
DECODERS = ("ForCausalLM", "LMHeadModel")
SMOLLM2 = "smollm2"
SMOLLM2_DIR = "SmolLM2-135M-Instruct-0.1.2"


def cache_dir(env: Mapping[str, str] = os.environ) -> Path:
    """BATON_CACHE, else ~/.cache/baton."""
    root = env.get("BATON_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "baton"


def smollm2_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Where the converted demo model lies, or will lie."""
    return cache_dir(env) / "models" / SMOLLM2_DIR


def default_served_name(model: str) -> str:
    """The name clients use when none is configured: the short name, or the directory's own."""
    return model if model == SMOLLM2 else Path(model).resolve().name


def decoder_architecture(config: Mapping[str, Any]) -> str:
    """The architecture that a config.json names; ConfigError, with field "model", when it is no decoder."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else f"(none; model_type {config.get('model_type')!r})"
    if not name.endswith(DECODERS):
        raise ConfigError(f"model architecture {name} is not served: only decoders of text are", field="model")
    return name


def expected_model_path(model: str) -> Path:
    """Where `model` (smollm2 or a path) lies, or will lie once the demo's model is converted."""
    return smollm2_dir().resolve() if model == SMOLLM2 else Path(model).resolve()


def resolve_model(model: str, *, tokenizer: bool = True, weights: bool = True) -> Path:
    """The directory of `model`, which is smollm2 or a path.

    tokenizer, weights: what it must hold beside config.json.
    ConfigError, with field "model", when there is no such model or a file is missing.
    """
    if model != SMOLLM2:
        return check_model_dir(Path(model), tokenizer=tokenizer, weights=weights)
    directory = smollm2_dir()
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"model {SMOLLM2} is not in {directory} yet; `baton up` or `python -m cli.demo.model` converts it",
            field="model",
        )
    return check_model_dir(directory)


def check_model_dir(path: Path, *, tokenizer: bool = True, weights: bool = True) -> Path:
    """The absolute path, once it is known to hold config.json of a decoder and, where they are asked for,
    tokenizer.json and *.safetensors.
    """
    if not path.is_dir():
        hint = "" if os.sep in str(path) else f" (known by name: {SMOLLM2})"
        raise ConfigError(f"model {str(path)!r} is not a directory{hint}", field="model")
    found: dict[str, Any] = {}
    for name in ("config.json", "tokenizer.json") if tokenizer else ("config.json",):
        try:
            found[name] = json.loads((path / name).read_bytes())
        except FileNotFoundError:
            raise ConfigError(f"model directory {path} has no {name}", field="model") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"model directory {path}: {name} is not readable: {error}", field="model") from error
    if weights and not any(path.glob("*.safetensors")):
        raise ConfigError(f"model directory {path} has no *.safetensors", field="model")
    config = found["config.json"]
    if not isinstance(config, dict):
        raise ConfigError(f"model directory {path}: config.json is not a JSON object", field="model")
    decoder_architecture(config)
    return path.resolve()
