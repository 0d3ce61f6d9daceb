"""Documents of runs (figures.document) as files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from common.errors import ConfigError
from loadtest.report.figures import FORMAT


def write(path: Path, told: Mapping[str, Any]) -> None:
    """Raises ConfigError where the file cannot be written."""
    write_text(path, dumps(told) + "\n")


def dumps(told: Mapping[str, Any]) -> str:
    """As JSON; what is not a number is null."""
    return orjson.dumps(told, option=orjson.OPT_INDENT_2).decode()


def write_text(path: Path, text: str) -> None:
    """Makes the folder too. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path} cannot be written: {e.strerror}") from e


def read(path: Path) -> dict[str, Any]:
    """Raises ConfigError that says what is wrong with the file."""
    try:
        told = orjson.loads(path.read_bytes())
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise ConfigError(f"{path} is not JSON: {e}") from e
    if not isinstance(told, dict) or told.get("kind") != "baton loadtest":
        raise ConfigError(f"{path} is not the result of a load test")
    if told.get("format") != FORMAT:
        raise ConfigError(f"{path} has format {told.get('format')}, not {FORMAT}: it is of another version")
    return told
