"""One parameter of the API for the documentation: its meaning, its values, and whether it has an effect."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.api.http.json_fields import Json


class Support(enum.StrEnum):
    """What a parameter does."""

    SUPPORTED = "supported"
    #: Values outside of the schema are known but not served, and are rejected by name.
    LIMITED = "limited"
    #: Every value is accepted and has no effect.
    IGNORED = "ignored"
    #: Every value but null is rejected by name.
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a body."""

    name: str
    meaning: str
    #: JSON Schema of the accepted values. null counts as absent and is not part of the schema.
    schema: Mapping[str, Any]
    support: Support = Support.SUPPORTED
    required: bool = False
    #: Meaning of an absent parameter in words, if the schema's `default` does not express it.
    default: str = ""
    #: Fields of GenerateRequest with the same meaning, separated by ", "; None: the field of the same name, if any.
    grpc: str | None = None

    @property
    def nullable(self) -> Json:
        """The schema with null, for the document."""
        if self.support is Support.IGNORED:
            return {"description": f"Ignored. {self.meaning}"}
        if self.support is Support.REFUSED:
            return {"type": "null", "description": f"Not supported. {self.meaning}"}
        if self.required:
            return {**self.schema, "description": self.meaning}
        return {"anyOf": [dict(self.schema), {"type": "null"}], "description": self.meaning}


def integer(name: str, low: int, high: int, meaning: str, **rest: Any) -> Parameter:
    """Returns the parameter of an integer in [low, high]."""
    return Parameter(name, meaning, {"type": "integer", "minimum": low, "maximum": high}, **rest)


def number(name: str, low: float, high: float, meaning: str, *, default: float, open_low: bool = False) -> Parameter:
    """Returns the parameter of a number in [low, high], or in (low, high] with open_low."""
    bound = "exclusiveMinimum" if open_low else "minimum"
    return Parameter(name, meaning, {"type": "number", bound: low, "maximum": high, "default": default})


def boolean(name: str, meaning: str, **rest: Any) -> Parameter:
    """Returns the parameter of a boolean; false if absent."""
    return Parameter(name, meaning, {"type": "boolean", "default": False}, **rest)


def text(name: str, most: int, meaning: str, **rest: Any) -> Parameter:
    """Returns the parameter of a string of at most `most` characters."""
    return Parameter(name, meaning, {"type": "string", "maxLength": most}, **rest)


def limited(name: str, values: Sequence[object], meaning: str) -> Parameter:
    """Returns a parameter that accepts only these values."""
    return Parameter(name, meaning, {"enum": list(values)}, Support.LIMITED)


def ignored(name: str, meaning: str) -> Parameter:
    """Returns a parameter that accepts any value and has no effect."""
    return Parameter(name, meaning, {}, Support.IGNORED)


def refused(name: str, meaning: str) -> Parameter:
    """Returns a parameter that accepts only null."""
    return Parameter(name, meaning, {"type": "null"}, Support.REFUSED)
