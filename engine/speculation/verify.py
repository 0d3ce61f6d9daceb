"""Which drafts stand: pure, shared by everything that collects a step."""

from __future__ import annotations

from collections.abc import Sequence


def accepted_run(drafts: Sequence[int], sampled: Sequence[int]) -> Sequence[int]:
    """What a verify step gives: the lead of sampled[len(drafts) + 1] that follows accepted drafts, one token at least.

    sampled[i] was drawn as if drafts[:i] were right. It is part of the output while they are, so a draft is accepted
    while it equals what was drawn in its place, and the first token that differs is the output's own. With noise keyed
    by position this is the output without drafts, token for token. Rejection sampling follows the same rule: where it
    accepts a draft it draws that draft, where it does not it draws from a distribution without it.
    """
    kept = 0
    while kept < len(drafts) and sampled[kept] == drafts[kept]:
        kept += 1
    return sampled[: kept + 1]
