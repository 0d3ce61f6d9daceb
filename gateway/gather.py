"""Works side by side, of which all have to succeed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from common.errors import BatonError

T = TypeVar("T")


async def gather(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first failure cancels the rest and is raised."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except* BatonError as e:
        raise _first(e) from e
    return [task.result() for task in tasks]


def _first(group: BaseExceptionGroup[BatonError]) -> BatonError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, BatonError)
    return error
