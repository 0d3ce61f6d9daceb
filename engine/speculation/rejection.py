"""Rejection sampling of drafts (Leviathan et al. 2023; Chen et al. 2023): the output has the target's distribution.

A draft d that was drawn from q is accepted with probability min(1, p(d) / q(d)), where p is what the target samples
from: penalties, temperature and cuts included. One that is rejected is replaced by a draw from norm(max(0, p - q)),
which never gives d again, so `accepted_run` finds the first rejection. After the last draft the target draws by itself.
A proposer that does not draw has all of q at its draft. Noise is keyed like all sampling, in streams of its own: a
request's output depends on its drafts, but not on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampling.philox import uniform
from engine.sampling.sampler import NoiseKeys, Sampled, SampleRow, sample, token_probs
from engine.schedule.drafts import DraftTokens

ACCEPT_STREAM, RESIDUAL_STREAM = 1, 2  # streams of noise beside the target's own
LOGITS_AT_ONCE = 8 << 20  # logits; noise for each takes some 50 bytes while it is made


def rejection_sample(raw: Tensor, rows: Sequence[SampleRow], chains: Sequence[DraftTokens]) -> Sampled:
    """`sample` of float32[R, vocab] logits, where the rows of each chain, one more than it has drafts, follow another.

    tokens[row] is the row's draft where that is accepted.
    """
    assert sum(len(chain.tokens) + 1 for chain in chains) == len(rows)
    parts: list[Sampled] = []
    first = 0
    for some in _parts(chains, LOGITS_AT_ONCE // raw.shape[1]):
        end = first + sum(len(chain.tokens) + 1 for chain in some)
        parts.append(_sample_part(raw[first:end], rows[first:end], some))
        first = end
    return Sampled(torch.cat([part.tokens for part in parts]), torch.cat([part.finite for part in parts]))


def _parts(chains: Sequence[DraftTokens], most: int) -> list[list[DraftTokens]]:
    """Chains that have no more than `most` rows together, or more alone."""
    parts: list[list[DraftTokens]] = []
    rows = 0
    for chain in chains:
        rows += len(chain.tokens) + 1
        if not parts or rows > most:
            parts.append([])
            rows = len(chain.tokens) + 1
        parts[-1].append(chain)
    return parts


def _sample_part(raw: Tensor, rows: Sequence[SampleRow], chains: Sequence[DraftTokens]) -> Sampled:
    sampled = sample(raw, rows)
    at: list[int] = []  # rows that test a draft
    first = 0
    for chain in chains:
        at += range(first, first + len(chain.tokens))
        first += len(chain.tokens) + 1
    if not at:
        return sampled
    tested = [rows[r] for r in at]
    target = token_probs(raw[at], tested)
    drafts = torch.tensor([t for chain in chains for t in chain.tokens], dtype=torch.int64, device=raw.device)
    proposed = torch.cat([_draft_probs(chain, raw) for chain in chains if chain.tokens])
    noise = NoiseKeys.for_rows(tested, raw)
    luck = uniform(noise.seed, noise.child, noise.position, stream=ACCEPT_STREAM)
    chance = target.gather(1, drafts[:, None]) / proposed.gather(1, drafts[:, None])
    # Nothing is left where p equals q, and then every draft is accepted.
    instead = (_residual(target, proposed).log() + noise.for_vocab(raw.shape[1], stream=RESIDUAL_STREAM)).argmax(dim=-1)
    tokens = sampled.tokens.clone()
    tokens[at] = torch.where(luck < chance.squeeze(1), drafts, instead)
    return Sampled(tokens, sampled.finite)


def _residual(target: Tensor, proposed: Tensor) -> Tensor:
    """What a rejected draft is replaced from, not normalised."""
    return (target - proposed).clamp_(min=0)


def _draft_probs(chain: DraftTokens, like: Tensor) -> Tensor:
    """float32 [drafts, vocab]: what each draft was drawn from."""
    if chain.probs is not None:
        return chain.probs[: len(chain.tokens)]
    at = torch.tensor(chain.tokens, dtype=torch.int64, device=like.device)
    return torch.zeros(len(at), like.shape[1], device=like.device).scatter_(1, at[:, None], 1.0)
