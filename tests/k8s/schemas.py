"""Schemas of what is rendered: Kubernetes' own from kubernetes-validate, those of custom resources from crds.yaml."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.k8s.manifests import Object

VERSIONS = ("1.31", "1.37")  # the oldest that is promised, and the newest that there are schemas of
FIELDS = ("apiVersion", "kind", "metadata", "spec")


@functools.cache
def _custom() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "crds.yaml").read_text())
    return found


def schemas(objects: list[Object]) -> Iterator[str]:
    """A line for each object that its schema refuses, an unknown field included."""
    for found in objects:
        kind = f"{found['apiVersion']}/{found['kind']}"
        where = f"{kind} {found['metadata'].get('name')}"
        if kind in _custom():
            definitions = _custom()["$defs"]
            parts = ((found["metadata"], definitions["metadata"]), (found.get("spec", {}), _custom()[kind]))
            for value, schema in parts:
                validator = jsonschema.Draft202012Validator({**schema, "$defs": definitions})
                yield from (f"{where}: {error.message}" for error in validator.iter_errors(value))
            yield from (f"{where}: unknown field {name}" for name in found.keys() - set(FIELDS))
            continue
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(found, version, strict=True)
            except kubernetes_validate.ValidationError as e:
                yield f"{where}: {version}: {e.message}"
            except (kubernetes_validate.SchemaNotFoundError, kubernetes_validate.InvalidSchemaError) as e:
                yield f"{where}: {version}: there is no schema: {e}"
