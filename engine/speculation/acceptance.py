"""Which drafts of a verify step are accepted. `accepted_tokens` (host) and `accepted_mask` (device) apply one rule.

Rejection sampling (Leviathan et al. 2023; Chen et al. 2023): the output has the target's distribution.

p is the distribution that the target samples from, after penalties, temperature and truncation. q is the distribution
that the draft d was drawn from; q(d) = 1 if the draft was not drawn.

    accept d    with probability min(1, p(d) / q(d))
    else        sample from norm(max(0, p - q)), which never gives d

So `accepted_tokens` finds the first rejection as the first token that differs from its draft. The token after the last
draft is sampled from the target alone. Noise is keyed as in all sampling, in streams of its own: the output of a
request depends on its drafts, and not on other requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from engine.sampling.sampler import NoiseKeys, Sampled, SampleRow, gumbel, sample, token_probs, uniform
from engine.schedule.sequence import DraftTokens

T = TypeVar("T")

ACCEPT_STREAM, RESIDUAL_STREAM = 1, 2  # Noise streams of accept decisions and replacements; 0 is the target's.
LOGITS_AT_ONCE = 8 << 20  # Max logits processed at a time. The noise of one takes about 50 bytes while it is made.


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
        query: max tokens of a row.
    """
    first = offsets == 0
    right = (inputs == sampled.roll(1)) & ~first
    accepted = first
    for _ in range(query - 1):
        accepted = first | (right & accepted.roll(1))
    has_next = (accepted & ~first).roll(-1)
    return accepted, accepted & ~has_next


def rejection_sample(raw: Tensor, rows: Sequence[SampleRow], draft_tokens: Sequence[DraftTokens]) -> Sampled:
    """Samples every row; the token of a row is its draft if the draft is accepted.

    Args:
        raw: float32 [R, vocab] logits. A sequence with k drafts has k + 1 rows, and the sequences follow each other.
        rows: sampling state of each row.
        draft_tokens: drafts of each sequence.
    """
    counts = [len(drafts.tokens) + 1 for drafts in draft_tokens]
    assert sum(counts) == len(rows)
    parts: list[Sampled] = []
    first = 0
    for part in split_by_weight(draft_tokens, counts, LOGITS_AT_ONCE // raw.shape[1]):
        end = first + sum(len(drafts.tokens) + 1 for drafts in part)
        parts.append(_sample_part(raw[first:end], rows[first:end], part))
        first = end
    return Sampled(torch.cat([part.tokens for part in parts]), torch.cat([part.finite for part in parts]))


def split_by_weight(items: Sequence[T], weights: Sequence[int], most: int) -> list[list[T]]:
    """Splits the items into parts of at most this total weight. A heavier item is a part of its own."""
    parts: list[list[T]] = []
    total = 0
    for item, weight in zip(items, weights, strict=True):
        total += weight
        if not parts or total > most:
            parts.append([])
            total = weight
        parts[-1].append(item)
    return parts


def _sample_part(raw: Tensor, rows: Sequence[SampleRow], draft_tokens: Sequence[DraftTokens]) -> Sampled:
    sampled = sample(raw, rows)
    draft_rows: list[int] = []  # rows that verify a draft
    first = 0
    for drafts in draft_tokens:
        draft_rows += range(first, first + len(drafts.tokens))
        first += len(drafts.tokens) + 1
    if not draft_rows:
        return sampled
    tested = [rows[r] for r in draft_rows]
    target = token_probs(raw[draft_rows], tested)
    drafted = torch.tensor([t for drafts in draft_tokens for t in drafts.tokens], dtype=torch.int64, device=raw.device)
    proposed = torch.cat([_draft_probs(drafts, raw) for drafts in draft_tokens if drafts.tokens])
    noise = NoiseKeys.for_rows(tested, raw)
    draws = uniform(*noise, stream=ACCEPT_STREAM)
    ratio = target.gather(1, drafted[:, None]) / proposed.gather(1, drafted[:, None])
    # The residual is empty where p equals q; then every draft is accepted.
    residual = _residual(target, proposed)
    replacements = (residual.log() + gumbel(*noise, raw.shape[1], stream=RESIDUAL_STREAM)).argmax(dim=-1)
    tokens = sampled.tokens.clone()
    tokens[draft_rows] = torch.where(draws < ratio.squeeze(1), drafted, replacements)
    return Sampled(tokens, sampled.finite)


def _residual(target: Tensor, proposed: Tensor) -> Tensor:
    """Returns the distribution of the token that replaces a rejected draft, not normalised."""
    return (target - proposed).clamp_(min=0)


def _draft_probs(drafts: DraftTokens, like: Tensor) -> Tensor:
    """Returns the distribution that each draft was drawn from, float32 [drafts, vocab]."""
    if drafts.probs is not None:
        return drafts.probs[: len(drafts.tokens)]
    tokens = torch.tensor(drafts.tokens, dtype=torch.int64, device=like.device)
    return torch.zeros(len(tokens), like.shape[1], device=like.device).scatter_(1, tokens[:, None], 1.0)
