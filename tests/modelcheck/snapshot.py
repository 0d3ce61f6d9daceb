"""Copies live objects (`clone`) and turns their states into hashable values (`freeze`).

Both functions walk over all fields of an object, so a new field of a product class needs no change here.
"""

from __future__ import annotations

import enum
import itertools
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import is_dataclass
from functools import cache, partial
from operator import itemgetter
from typing import Any

from google.protobuf.message import Message

#: Classes of objects that do not change. A copy may share an itertools.count, because no state contains its numbers.
_ATOMS = (str, bytes, int, float, enum.Enum, type, types.BuiltinFunctionType, BaseException, Message, itertools.count)


@cache
def _is_atom(kind: type) -> bool:
    """Returns whether copies may share objects of this class: they do not change, or the class has `SHARED`."""
    frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return kind is type(None) or issubclass(kind, _ATOMS) or frozen or hasattr(kind, "SHARED")


@cache
def _slots(kind: type) -> tuple[str, ...]:
    """Returns the names of the slots of a class and its bases."""
    named = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    return tuple(name for slots in named for name in ((slots,) if isinstance(slots, str) else slots))


def _fields(thing: object) -> dict[str, Any]:
    """Returns the fields of an object."""
    found = {name: getattr(thing, name) for name in _slots(type(thing)) if hasattr(thing, name)}
    return found | getattr(thing, "__dict__", {})


def clone(thing: Any, memo: dict[int, Any] | None = None) -> Any:
    """Returns a deep copy that shares only atoms with `thing`. It also copies futures, closures and bound methods.

    memo: copies so far, by the id of the original.
    Raises TypeError for an object without fields that is of no known class.
    """
    memo = {} if memo is None else memo
    kind = type(thing)
    if _is_atom(kind):
        return thing
    if (known := memo.get(id(thing))) is not None:
        return known
    copy: Any
    if kind is tuple:
        copy = tuple([clone(part, memo) for part in thing])
    elif kind is partial:
        named = {name: clone(value, memo) for name, value in thing.keywords.items()}
        copy = partial(clone(thing.func, memo), *[clone(argument, memo) for argument in thing.args], **named)
    elif kind is types.MethodType:
        copy = types.MethodType(thing.__func__, clone(thing.__self__, memo))
    elif kind is types.FunctionType:
        copy = _clone_function(thing, memo)
    else:
        copy = memo[id(thing)] = kind.__new__(kind)
        if kind in (dict, OrderedDict):
            copy.update([(clone(key, memo), clone(value, memo)) for key, value in thing.items()])
        elif kind is set:
            copy.update([clone(part, memo) for part in thing])
        elif kind is bytearray:
            copy.extend(thing)
        elif kind in (list, deque):
            copy.extend([clone(part, memo) for part in thing])
        elif kind is Future:
            _copy_outcome(thing, copy)
        else:
            if not _slots(kind) and not hasattr(thing, "__dict__"):
                raise TypeError(f"objects of {kind} cannot be copied: add a case")
            for name, value in _fields(thing).items():
                object.__setattr__(copy, name, clone(value, memo))
    memo[id(thing)] = copy
    return copy


def _clone_function(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    if not function.__closure__:
        return function
    cells = tuple(types.CellType(clone(cell.cell_contents, memo)) for cell in function.__closure__)
    defaults = function.__defaults__
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _copy_outcome(source: Future[Any], target: Future[Any]) -> None:
    Future.__init__(target)
    if not source.done():
        return
    if (error := source.exception()) is None:
        target.set_result(source.result())
    else:
        target.set_exception(error)


def freeze(thing: Any, special: Mapping[str, Callable[[Any], Hashable]]) -> Hashable:
    """Returns the state of an object as a hashable value.

    The order of sets and dicts does not count. A future counts as pending, done or failed.
    special: functions that freeze objects of one class, by the name of the class.
    """
    kind = type(thing)
    if kind in (tuple, list, deque):
        return tuple([freeze(part, special) for part in thing])
    if kind in (set, frozenset):
        return frozenset(Counter([freeze(part, special) for part in thing]).items())
    if kind in (dict, OrderedDict):
        return frozenset([(freeze(key, special), freeze(value, special)) for key, value in thing.items()])
    if kind is Future:
        if not thing.done():
            return "pending"
        return "failed" if thing.exception() else "done"
    if _is_atom(kind):
        return thing  # type: ignore[no-any-return]
    if (own := special.get(kind.__name__)) is not None:
        return own(thing)
    fields = [(name, freeze(value, special)) for name, value in _fields(thing).items()]
    return (kind.__name__, *sorted(fields, key=itemgetter(0)))
