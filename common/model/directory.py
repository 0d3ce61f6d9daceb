"""Finds and checks the model directory for a value of --model.

Directories are only read. The name `smollm2` stands for a directory in the user's cache, made by the `baton` command
(cli/demo/model.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError

#: Suffixes of the architectures that are decoders. Whether the engine supports one is known when it is loaded.
DECODERS = ("ForCausalLM", "LMHeadModel")
SMOLLM2 = "smollm2"
SMOLLM2_DIR = "SmolLM2-135M-Instruct-0.1.2"


def cache_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Returns the directory in BATON_CACHE, else ~/.cache/baton."""
    root = env.get("BATON_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "baton"


def smollm2_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Returns the directory of the converted demo model; it may not exist yet."""
    return cache_dir(env) / "models" / SMOLLM2_DIR


def default_served_name(model: str) -> str:
    """Returns the model's name for clients if none is configured: the known name, or the directory's name."""
    return model if model == SMOLLM2 else Path(model).resolve().name


def decoder_architecture(config: Mapping[str, Any]) -> str:
    """Returns the architecture in a config.json. Raises ConfigError (field "model") if it is not a decoder."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else f"(none; model_type {config.get('model_type')!r})"
    if not name.endswith(DECODERS):
        raise ConfigError(f"model architecture {name} is not supported: only text decoders are", field="model")
    return name


def expected_model_path(model: str) -> Path:
    """Returns the directory of `model` (smollm2 or a path). The directory of smollm2 may not exist yet."""
    return smollm2_dir().resolve() if model == SMOLLM2 else Path(model).resolve()


def resolve_model(model: str, *, tokenizer: bool = True, weights: bool = True) -> Path:
    """Returns the directory of `model`, which is smollm2 or a path. Raises ConfigError (field "model") without it.

    It must have tokenizer.json if `tokenizer` is true, and *.safetensors if `weights` is.
    """
    if model != SMOLLM2:
        return check_model_dir(Path(model), tokenizer=tokenizer, weights=weights)
    directory = smollm2_dir()
    if not (directory / "config.json").is_file():
        missing = f"model {SMOLLM2} is not in {directory} yet; `baton up` or `python -m cli.demo.model` converts it"
        raise ConfigError(missing, field="model")
    return check_model_dir(directory)


def check_model_dir(path: Path, *, tokenizer: bool = True, weights: bool = True) -> Path:
    """Returns the absolute path of a directory that has what resolve_model requires; else raises ConfigError."""
    if not path.is_dir():
        hint = "" if os.sep in str(path) else f" (known by name: {SMOLLM2})"
        raise ConfigError(f"model {str(path)!r} is not a directory{hint}", field="model")
    found: dict[str, Any] = {}
    for name in ("config.json", "tokenizer.json") if tokenizer else ("config.json",):
        try:
            found[name] = json.loads((path / name).read_bytes())
        except FileNotFoundError:
            raise ConfigError(f"model directory {path} has no {name}", field="model") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"model directory {path}: {name} is not readable: {error}", field="model") from error
    if weights and not any(path.glob("*.safetensors")):
        raise ConfigError(f"model directory {path} has no *.safetensors", field="model")
    config = found["config.json"]
    if not isinstance(config, dict):
        raise ConfigError(f"model directory {path}: config.json is not a JSON object", field="model")
    decoder_architecture(config)
    return path.resolve()
