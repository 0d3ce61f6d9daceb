"""Reads single fields of a config.json. A field of a wrong type or size raises ConfigError with its name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError, describe

MAX_SIZE = 2**31 - 1  #: Largest integer of a config.json.


class NotNative(ConfigError):
    """The configuration is valid, but our decoder does not support it. transformers may support it."""


def number(config: Mapping[str, Any], key: str, default: float, *, above: float = 0.0) -> float:
    """Returns a finite number above `above`, or `default` if the field is missing or null."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not above < value < math.inf:
        raise ConfigError(f"config.json: {key} is {value!r}, a {'positive ' * (above == 0.0)}number is needed")
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Returns true or false, or `default` if the field is missing or null."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {key} is {value!r}, true or false is needed")
    return value


def integer(config: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    """Returns an integer from `least` to MAX_SIZE, or `default` if the field is missing or null; None: no default."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, float) and value.is_integer():  # 2048.0, as some tools write it
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_SIZE:
        raise ConfigError(f"config.json: {key} is {value!r}, an integer from {least} to {MAX_SIZE} is needed")
    return value


def read_json(path: Path, *, required: bool) -> dict[str, Any]:
    """Reads a JSON object; {} if the file is missing and not required. Raises ConfigError for every other failure."""
    if not path.is_file():
        if required:
            raise ConfigError(f"{path} does not exist: {path.parent} is not a model directory", field="model")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {describe(error)}", field="model") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object", field="model")
    return value


def uses_mxfp4(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json says that the experts are in MXFP4."""
    raw = config.get("quantization_config")
    return isinstance(raw, Mapping) and raw.get("quant_method") == "mxfp4"
