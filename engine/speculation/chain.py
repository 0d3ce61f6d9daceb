"""Drafts of one sequence on their way from a proposer to the step that verifies them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Chain(NamedTuple):
    """tokens: each a guess for the case that those before it are right. probs: float32 [len(tokens) or more, vocab],
    what each was drawn from; None where nothing was drawn.
    """

    tokens: tuple[int, ...]
    probs: Tensor | None = None
