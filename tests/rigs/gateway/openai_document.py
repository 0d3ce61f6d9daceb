"""OpenAI's published OpenAPI document as a judge of answers; whoever asks it is skipped where the file is not there."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.protocols import Validator

PATH = Path(os.environ.get("OPENAI_DOCUMENT", Path(__file__).parents[1].parent / "shared" / "openai" / "openapi.json"))


def nullable(schema: Any) -> Any:
    """JSON Schema for what OpenAPI 3.0 calls nullable."""
    if isinstance(schema, list):
        return [nullable(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    out = {k: nullable(v) for k, v in schema.items() if k != "nullable"}
    return {"anyOf": [out, {"type": "null"}]} if schema.get("nullable") is True else out


@functools.cache
def components() -> dict[str, Any]:
    """`components` of the document."""
    if not PATH.is_file():
        pytest.skip("OpenAI's OpenAPI document is not on this machine (OPENAI_DOCUMENT names it)")
    found: dict[str, Any] = nullable(json.loads(PATH.read_text("utf-8"))["components"])
    return found


@functools.cache
def validator(name: str) -> Validator:
    """Of one of its schemas."""
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": components()})


def check(name: str, value: Any) -> None:
    """Fails when the value does not fit that schema."""
    validator(name).validate(value)


def property_names(name: str) -> set[str]:
    """Members that a schema, or one that it is composed of, defines."""
    schemas = components()["schemas"]

    def names(schema: dict[str, Any]) -> set[str]:
        found = set(schema.get("properties", {}))
        for part in schema.get("allOf", []):
            found |= names(schemas[part["$ref"].rpartition("/")[2]] if "$ref" in part else part)
        return found

    return names(schemas[name])
