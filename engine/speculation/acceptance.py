"""Which drafts stand: pure, shared by everything that collects a step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def accepted_tokens(drafts: Sequence[int], sampled: Sequence[int]) -> Sequence[int]:
    """What a verify step gives: the lead of sampled[len(drafts) + 1] that follows accepted drafts, one token at least.

    sampled[i] was drawn as if drafts[:i] were right. It is part of the output while they are, so a draft is accepted
    while it equals what was drawn in its place, and the first token that differs is the output's own. With noise keyed
    by position this is the output without drafts, token for token. Rejection sampling follows the same rule: where it
    accepts a draft it draws that draft, where it does not it draws from a distribution without it.
    """
    accepted_mask = 0
    while accepted_mask < len(drafts) and sampled[accepted_mask] == drafts[accepted_mask]:
        accepted_mask += 1
    return sampled[: accepted_mask + 1]


def accepted_mask(sampled: Tensor, inputs: Tensor, offsets: Tensor, query: int) -> tuple[Tensor, Tensor]:
    """bool [T] twice, of rows of up to `query` tokens that follow each other: the token is its row's first, or a draft
    that was accepted; and it is the last such token of its row.

    inputs: the tokens, int64 [T]; offsets: the place of each in its row, int [T]; sampled: what was drawn after it. A
    draft is accepted while it equals what was sampled before it, see `accepted_tokens`.
    """
    first = offsets == 0
    right = (inputs == sampled.roll(1)) & ~first
    counts = first
    for _ in range(query - 1):
        counts = first | (right & counts.roll(1))
    goes_on = (counts & ~first).roll(-1)
    return counts, counts & ~goes_on
