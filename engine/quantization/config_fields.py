"""Reads the fields of a quantisation config. Every error names the format, the file and the field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import ConfigError

#: A regular expression of a checkpoint may not make the match of a layer's name slow: its length, its repetitions and
#: its alternatives are bounded, and no group is repeated. These are counted without escaped characters.
_MAX_PATTERN = 256
_MAX_CHOICES = 6
_MAX_ALTERNATIVES = 40
_MAX_GROUP = 1 << 20
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_CHOICE = re.compile(r"[*+{]|(?<![(*+?}])\?|[()](?=[^()]*\|)")  # a repetition, or a group that has alternatives
_REPEATED_GROUP = re.compile(r"\)[*+{]|\(\?[a-zA-Z]*x")  # (?x) allows blanks between a group and its repetition


class Fields:
    """A JSON object of a quantisation config."""

    def __init__(self, raw: Any, file: str, method: str) -> None:
        self.file, self.method = file, method
        if not isinstance(raw, Mapping):
            raise self.refused(f"the config is {raw!r}, an object is needed")
        self.raw = raw

    def refused(self, why: str) -> ConfigError:
        """Returns the error of a checkpoint that is not supported."""
        return ConfigError(
            f"{self.file}: weights of the format {self.method!r} are not supported: {why}", field="model"
        )

    def inner(self, key: str) -> Fields:
        """Returns the object under a key."""
        return Fields(self.raw.get(key), self.file, self.method)

    def require(self, key: str, allowed: Sequence[Any]) -> Any:
        """Returns the value of a field, which must be one of `allowed`. None stands for a missing field."""
        value = self.raw.get(key)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            wanted = " or ".join("nothing" if one is None else repr(one) for one in allowed)
            raise self.refused(f"{key} is {value!r}, {wanted} is supported")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Returns a field that is true or false."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refused(f"{key} is {value!r}, true or false is needed")
        return value

    def group(self, key: str) -> int:
        """Returns a field that is the size of a group: a multiple of 16."""
        value = self.raw.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 16 <= value <= _MAX_GROUP or value % 16:
            raise self.refused(f"{key} is {value!r}, a multiple of 16 is supported")
        return value

    def names(self, key: str) -> list[str]:
        """Returns a field that is a list of names; [] without the field."""
        value = self.raw.get(key) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.refused(f"{key} is {value!r}, a list of names is needed")
        return value

    def pattern(self, text: str, key: str) -> str:
        """Returns a regular expression of the config, if it is valid and its match is fast on a layer's name."""
        bare = _ESCAPED.sub("x", text)
        slow = len(_CHOICE.findall(bare)) > _MAX_CHOICES or bare.count("|") > _MAX_ALTERNATIVES
        if len(text) > _MAX_PATTERN or slow or _REPEATED_GROUP.search(bare):
            raise self.refused(f"{key} has the pattern {text[:_MAX_PATTERN]!r}, which is too complex")
        try:
            re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise self.refused(f"{key} has the pattern {text!r}, which is not valid: {error}") from error
        return text
