"""Reads and writes the documents of runs (figures.build_document) as JSON files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from common.errors import ConfigError
from loadtest.report.figures import FORMAT


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a document. Raises ConfigError if the file cannot be written."""
    write_text(path, dumps(document) + "\n")


def dumps(document: Mapping[str, Any]) -> str:
    """Returns the document as JSON. NaN becomes null."""
    return orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()


def write_text(path: Path, text: str) -> None:
    """Writes a text file and creates its folder. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path} cannot be written: {e.strerror}") from e


def read(path: Path) -> dict[str, Any]:
    """Reads a document. Raises ConfigError if the file is unreadable, not a document or of another format version."""
    try:
        document = orjson.loads(path.read_bytes())
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise ConfigError(f"{path} is not JSON: {e}") from e
    if not isinstance(document, dict) or document.get("kind") != "baton loadtest":
        raise ConfigError(f"{path} is not the result of a load test")
    if document.get("format") != FORMAT:
        raise ConfigError(
            f"{path} has format {document.get('format')}, expected {FORMAT}: another version of Baton wrote it"
        )
    return document
