"""Finds and checks the model directory for a value of --model.

Directories are only read. OWNER/NAME[@REVISION] is a model of the hub (hub.py), unless a directory of this name exists.
The name `smollm2` stands for a directory in the user's cache, made by the `baton` command (cli/demo/model.py).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError, describe
from common.model.hub import fetch, hub_name, pin, snapshot_dir, snapshot_name

_log = logging.getLogger(__name__)

#: Suffixes of the architectures that are decoders. Whether the engine supports one is known when it is loaded.
DECODERS = ("ForCausalLM", "LMHeadModel")
#: Multimodal architectures of which the text part is served, and the decoder of that part.
TEXT_TOWERS = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
SMOLLM2 = "smollm2"
SMOLLM2_DIR = "SmolLM2-135M-Instruct-0.1.2"


def cache_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Returns the directory in BATON_CACHE, else ~/.cache/baton."""
    root = env.get("BATON_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "baton"


def smollm2_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Returns the directory of the converted demo model; it may not exist yet."""
    return cache_dir(env) / "models" / SMOLLM2_DIR


def directory_name(path: Path) -> str:
    """Returns the name of a model directory: OWNER/NAME for one in the hub's cache, else the last part of the path."""
    return snapshot_name(path.resolve()) or path.resolve().name


def default_served_name(model: str) -> str:
    """Returns the model's name for clients if none is configured: smollm2, the hub's name, or the directory's."""
    name = hub_name(model)
    return model if model == SMOLLM2 else directory_name(Path(model)) if name is None else name.repo


def decoder_architecture(config: Mapping[str, Any]) -> str:
    """Returns the architecture in a config.json, of a multimodal model that of its text part.

    Raises ConfigError (field "model") if it is not a decoder.
    """
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else f"(none; model_type {config.get('model_type')!r})"
    name = TEXT_TOWERS.get(name, name)
    if not name.endswith(DECODERS):
        raise ConfigError(f"model architecture {name} is not supported: only text decoders are", field="model")
    return name


def expected_model_path(model: str) -> Path:
    """Returns the directory of `model`: smollm2, a path or a model of the hub. It may not exist yet.

    Asks the hub for the commit of a branch or tag. Raises ConfigError (field "model").
    """
    if (name := hub_name(model)) is not None:
        return snapshot_dir(pin(name))
    return smollm2_dir().resolve() if model == SMOLLM2 else Path(model).resolve()


def pinned_model(model: str) -> str:
    """Returns the value of --model with the commit of a hub's model, so that all processes use the same files."""
    name = hub_name(model)
    return model if name is None else str(pin(name))


def resolve_model(
    model: str,
    *,
    tokenizer: bool = True,
    weights: bool = True,
    check: Callable[[Path], object] = lambda _: None,
    say: Callable[[str], None] = _log.info,
) -> Path:
    """Returns the directory of `model`: smollm2, a path, or a model of the hub; its missing files are downloaded.

    It must have tokenizer.json if `tokenizer` is true, and weights if `weights` is. `check` and `say` are as for
    hub.fetch; an architecture that is not a decoder is refused before weights are downloaded. Raises ConfigError (field
    "model").
    """
    if (name := hub_name(model)) is not None:

        def check_first(directory: Path) -> None:
            check_model_dir(directory, tokenizer=tokenizer, weights=False)
            check(directory)

        directory = fetch(name, weights=weights, check=check_first, say=say)
        return check_model_dir(directory, tokenizer=tokenizer, weights=weights)
    if model != SMOLLM2:
        return check_model_dir(Path(model), tokenizer=tokenizer, weights=weights)
    directory = smollm2_dir()
    if not (directory / "config.json").is_file():
        missing = f"model {SMOLLM2} is not in {directory} yet; `baton up` or `python -m cli.demo.model` converts it"
        raise ConfigError(missing, field="model")
    return check_model_dir(directory)


def resolve_eagle_head(model: str, *, weights: bool = True, say: Callable[[str], None] = _log.info) -> Path:
    """Returns the directory of an EAGLE head: a path, or a model of the hub, which is downloaded."""
    name = hub_name(model)
    return Path(model).resolve() if name is None else fetch(name, weights=weights, say=say).resolve()


def check_model_dir(path: Path, *, tokenizer: bool = True, weights: bool = True) -> Path:
    """Returns the absolute path of a directory that has what resolve_model requires; else raises ConfigError."""
    if not path.is_dir():
        hint = f"a model of the hub is named OWNER/NAME[@REVISION], and {SMOLLM2} is the demo's"
        raise ConfigError(f"model {str(path)!r} is not a directory; {hint}", field="model")
    found: dict[str, Any] = {}
    for name in ("config.json", "tokenizer.json") if tokenizer else ("config.json",):
        try:
            found[name] = json.loads((path / name).read_bytes())
        except FileNotFoundError:
            raise ConfigError(f"model directory {path} has no {name}", field="model") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"model directory {path}: {name} is not readable: {describe(error)}", field="model"
            ) from error
    if weights and not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
        raise ConfigError(f"model directory {path} has no *.safetensors, and no pytorch_model*.bin", field="model")
    config = found["config.json"]
    if not isinstance(config, dict):
        raise ConfigError(f"model directory {path}: config.json is not a JSON object", field="model")
    decoder_architecture(config)
    return path.resolve()
