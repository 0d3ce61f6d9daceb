"""Makes Triton's interpreter take half the time with the same results.

The interpreter replaces the functions of `triton.language` before it runs a kernel. It does so again for each call of
a function by a kernel, and that takes 5 ms. It also computes whether a sum of integers overflows, and uses the result
only in debug mode. A version of Triton without these names runs as it is.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class _Patches:
    """Replaces `_patch_lang`: functions that a kernel calls find the language as the kernel's launch left it."""

    def __init__(self) -> None:
        self.patch = interpreter._patch_lang
        #: The language modules that are patched until the kernel ends.
        self.patched: frozenset[str] = frozenset()

    def __call__(self, fn: Any) -> Any:
        modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        names = {module.__name__ for module in modules if module in (tl, tl.core)}
        if names and names <= self.patched:
            return interpreter._LangPatchScope()  # it restores nothing
        scope, before = self.patch(fn), self.patched
        self.patched |= names
        restore = scope.restore

        def restored() -> None:
            restore()
            self.patched = before

        scope.restore = restored
        return scope


def quicken() -> None:
    """Changes the interpreter of this process; a second call changes nothing."""
    if hasattr(interpreter, "_LangPatchScope") and not isinstance(interpreter._patch_lang, _Patches):
        interpreter._patch_lang = _Patches()
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
