"""Which drafts of a verify step are accepted, computed on the host and on the device by the same rule."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def accepted_tokens(drafts: Sequence[int], sampled: Sequence[int]) -> Sequence[int]:
    """Returns the tokens that a verify step adds to a sequence: the accepted drafts and one more token.

    sampled[i] of `len(drafts) + 1` tokens was sampled as if drafts[:i] were right. A draft is accepted if all drafts
    before it are accepted and it equals the token sampled in its place. The first sampled token that differs from its
    draft is still a valid token of the output:

        drafts     5  8  2  4
        sampled    5  8  7  1  3
        accepted   5  8  7

    With noise keyed by position the output equals the output without drafts. Rejection sampling uses the same rule: it
    samples an accepted draft itself, and replaces a rejected draft by a different token.
    """
    count = 0
    while count < len(drafts) and sampled[count] == drafts[count]:
        count += 1
    return sampled[: count + 1]


def accepted_mask(sampled: Tensor, inputs: Tensor, offsets: Tensor, query: int) -> tuple[Tensor, Tensor]:
    """Returns which input tokens of a verify step are accepted, and which are the last of their row; both bool [T].

    The first token of a row is always accepted. The others are drafts, accepted by the rule of `accepted_tokens`.

    Args:
        sampled: int64 [T], the token sampled after each input token.
        inputs: int64 [T], input tokens of the rows in order.
        offsets: integer [T], place of each input token in its row.
        query: most tokens of a row.
    """
    first = offsets == 0
    right = (inputs == sampled.roll(1)) & ~first
    accepted = first
    for _ in range(query - 1):
        accepted = first | (right & accepted.roll(1))
    has_next = (accepted & ~first).roll(-1)
    return accepted, accepted & ~has_next
