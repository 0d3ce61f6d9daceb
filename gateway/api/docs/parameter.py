"""One parameter of the API as users know it: what it means, what it may be, and whether it has an effect."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.api.http.json_fields import Json


class Support(enum.StrEnum):
    """What a parameter does.

    LIMITED: known, and every value that its schema does not have is refused by name, because it is not served.
    IGNORED: taken whatever it is, without effect. REFUSED: refused by name unless null.
    """

    SUPPORTED = "supported"
    LIMITED = "limited"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Parameter:
    """schema: JSON Schema of the values that are taken (null, which means absent, apart).

    default: what an absent one means, in words, where the schema's `default` does not say it. grpc: the field of
    GenerateRequest that says the same; None: the one of that name, if there is one.
    """

    name: str
    meaning: str
    schema: Mapping[str, Any]
    support: Support = Support.SUPPORTED
    required: bool = False
    default: str = ""
    grpc: str | None = None

    @property
    def nullable(self) -> Json:
        """The schema with null, for a document."""
        if self.support is Support.IGNORED:
            return {"description": f"Ignored. {self.meaning}"}
        if self.support is Support.REFUSED:
            return {"type": "null", "description": f"Not supported. {self.meaning}"}
        if self.required:
            return {**self.schema, "description": self.meaning}
        return {"anyOf": [dict(self.schema), {"type": "null"}], "description": self.meaning}


def integer(name: str, low: int, high: int, meaning: str, **rest: Any) -> Parameter:
    """An integer in [low, high]."""
    return Parameter(name, meaning, {"type": "integer", "minimum": low, "maximum": high}, **rest)


def number(name: str, low: float, high: float, meaning: str, *, default: float, open_low: bool = False) -> Parameter:
    """A number in [low, high], or in (low, high]."""
    bound = "exclusiveMinimum" if open_low else "minimum"
    return Parameter(name, meaning, {"type": "number", bound: low, "maximum": high, "default": default})


def boolean(name: str, meaning: str, **rest: Any) -> Parameter:
    """true or false, false when absent."""
    return Parameter(name, meaning, {"type": "boolean", "default": False}, **rest)


def text(name: str, most: int, meaning: str, **rest: Any) -> Parameter:
    """A string of at most so many characters."""
    return Parameter(name, meaning, {"type": "string", "maxLength": most}, **rest)


def limited(name: str, values: Sequence[object], meaning: str) -> Parameter:
    """Only these values are taken."""
    return Parameter(name, meaning, {"enum": list(values)}, Support.LIMITED)


def ignored(name: str, meaning: str) -> Parameter:
    """Any value, no effect."""
    return Parameter(name, meaning, {}, Support.IGNORED)


def refused(name: str, meaning: str) -> Parameter:
    """Only null is taken."""
    return Parameter(name, meaning, {"type": "null"}, Support.REFUSED)
