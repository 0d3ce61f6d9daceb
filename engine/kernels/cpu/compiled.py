"""Compilation of the kernels of this package.

Numba compiles a function for the types of its signature when its module is imported, and keeps the code on disk beside
the module, or in the user's cache directory. If neither can be written or read, each process compiles again.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from common.errors import describe

_log = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

#: Sums may have any order, as in torch. NaN and infinity keep their meaning.
_FAST_MATH = {"reassoc", "contract", "nsz", "arcp"}


@functools.cache
def is_available() -> bool:
    """Returns whether numba is installed and works with the installed numpy. Imports it, which takes half a second."""
    if importlib.util.find_spec("numba") is None:
        return False
    try:
        import numba  # noqa: F401
    except Exception as error:  # numba refuses a numpy that is too new, a broken installation raises anything
        _log.warning("numba cannot be used, so decode steps are slower: %s", describe(error))
        return False
    return True


def compiled(*signatures: str) -> Callable[[Function], Function]:
    """Compiles a function for argument types in numba's notation. It runs without Python's global lock."""
    import numba

    def compile_function(function: Function) -> Function:
        options = {"fastmath": _FAST_MATH, "nogil": True, "error_model": "numpy"}
        try:
            result: Function = numba.njit(list(signatures), cache=True, **options)(function)
        except Exception as error:  # numba found no directory, the disk is full, or a file of the code is damaged
            _log.info("the code of %s is not kept on disk: %s", function.__name__, describe(error))
            result = numba.njit(list(signatures), **options)(function)
        return result

    return compile_function
