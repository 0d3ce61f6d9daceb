"""Validates objects: Kubernetes' own kinds with kubernetes-validate, custom resources with crds.yaml."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import yaml

from tests.k8s.manifests import Object, group_parts, pod_spec

VERSIONS = ("1.31", "1.37")  # the oldest that is promised, and the newest that there are schemas of
FIELDS = ("apiVersion", "kind", "metadata", "spec")


@functools.cache
def _custom() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "crds.yaml").read_text())
    return found


def schemas(objects: list[Object]) -> Iterator[str]:
    """One line per object that its schema refuses; unknown fields are refused."""
    for found in objects:
        yield from _refusals(json.dumps(found, sort_keys=True))
    for part in group_parts(objects):  # pods of a custom resource are pods
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": part["metadata"], "spec": pod_spec(part)}
        yield from _refusals(json.dumps(pod, sort_keys=True))


@functools.cache  # most of what overlays and components render is the same
def _refusals(text: str) -> tuple[str, ...]:
    found = json.loads(text)
    kind = f"{found['apiVersion']}/{found['kind']}"
    where = f"{kind} {found['metadata'].get('name')}"
    if kind in _custom():
        definitions = _custom()["$defs"]
        parts = ((found["metadata"], definitions["metadata"]), (found.get("spec", {}), _custom()[kind]))
        errors = [f"{where}: unknown field {name}" for name in found.keys() - set(FIELDS)]
        for value, schema in parts:
            validator = jsonschema.Draft202012Validator({**schema, "$defs": definitions})
            errors += [f"{where}: {error.message}" for error in validator.iter_errors(value)]
        return tuple(errors)
    errors = []
    for version in VERSIONS:
        try:
            with mock.patch("kubernetes_validate.utils.schema_contents", _contents):
                kubernetes_validate.validate(found, version, strict=True)
        except kubernetes_validate.ValidationError as e:
            errors.append(f"{where}: {version}: {e.message}")
        except (kubernetes_validate.SchemaNotFoundError, kubernetes_validate.InvalidSchemaError) as e:
            errors.append(f"{where}: {version}: {e.message}")
    return tuple(errors)


_contents = functools.cache(kubernetes_validate.utils.schema_contents)
