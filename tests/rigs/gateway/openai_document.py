"""Checks answers against OpenAI's published OpenAPI document. Tests that use it are skipped if the file is missing."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.protocols import Validator

PATH = Path(os.environ.get("OPENAI_DOCUMENT", Path(__file__).parents[4] / "shared" / "openai" / "openapi.json"))


def nullable(schema: Any) -> Any:
    """Converts OpenAPI 3.0's `nullable` to JSON Schema."""
    if isinstance(schema, list):
        return [nullable(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    out = {k: nullable(v) for k, v in schema.items() if k != "nullable"}
    return {"anyOf": [out, {"type": "null"}]} if schema.get("nullable") is True else out


@functools.cache
def components() -> dict[str, Any]:
    """Returns `components` of the document."""
    if not PATH.is_file():
        pytest.skip("OpenAI's OpenAPI document is not on this machine (OPENAI_DOCUMENT names it)")
    found: dict[str, Any] = nullable(json.loads(PATH.read_text("utf-8"))["components"])
    return found


@functools.cache
def validator(name: str) -> Validator:
    """Returns the validator of a schema."""
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": components()})


def check(name: str, value: Any) -> None:
    """Raises if the value does not match the schema."""
    validator(name).validate(value)


def property_names(name: str) -> set[str]:
    """Returns the members of a schema, with those of the schemas that it is composed of."""
    schemas = components()["schemas"]

    def names(schema: dict[str, Any]) -> set[str]:
        found = set(schema.get("properties", {}))
        for part in schema.get("allOf", []):
            found |= names(schemas[part["$ref"].rpartition("/")[2]] if "$ref" in part else part)
        return found

    return names(schemas[name])
