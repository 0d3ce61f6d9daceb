"""Which tokens of a verify step have KV that counts, found where they are: on the device."""

from __future__ import annotations

from torch import Tensor


def kept(sampled: Tensor, inputs: Tensor, offsets: Tensor, query: int) -> tuple[Tensor, Tensor]:
    """bool [T] twice, of rows of up to `query` tokens that follow each other: the token is its row's first, or a draft
    that was accepted; and it is the last such token of its row.

    inputs: the tokens, int64 [T]; offsets: the place of each in its row, int [T]; sampled: what was drawn after it. A
    draft is accepted while it equals what was sampled before it, see `accepted_run`.
    """
    first = offsets == 0
    right = (inputs == sampled.roll(1)) & ~first
    counts = first
    for _ in range(query - 1):
        counts = first | (right & counts.roll(1))
    goes_on = (counts & ~first).roll(-1)
    return counts, counts & ~goes_on
