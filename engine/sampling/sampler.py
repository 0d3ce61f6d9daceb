"""Sampling in torch, for all rows of a step at once. The token of a row depends on that row alone.

The order is as in transformers: penalties and bias, temperature, top-k, top-p, min-p. The token is drawn by
Gumbel-max (argmax of logits + noise, Gumbel 1954) with noise keyed by (seed, child, position). So a request samples the
same tokens in any batch, on any pod, and after a preemption. Penalties are recomputed from the token ids, so no state
remains. Masks (constraint.py) apply before temperature. Log-probabilities are computed from the raw logits. Operations
that no row needs are skipped.

top-k, top-p and min-p are thresholds on the logit: all tokens exactly at the threshold stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.types import SamplingParams

CANDIDATES = 1024  # Most likely tokens to try before the whole vocabulary of a row is sorted
MIN_TEMPERATURE = 1e-5  # Lower values overflow the division, and sampling is greedy here already
NEG_INF = float("-inf")
_WORD = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LARGEST = 1.0 - 2.0**-24  # The largest float32 below 1


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Sampling state of one row of logits."""

    params: SamplingParams
    tokens: Sequence[int]  # Prompt and output so far
    prompt_len: int
    child: int = 0  # Number of the child among the n samples of the request
    drafts: Sequence[int] = ()  # Drafts that are assumed to follow `tokens`
    allowed_mask: np.ndarray | None = None  # See constraint.Mask; None: all tokens are allowed

    @property
    def position(self) -> int:
        """Position of the token that is sampled."""
        return len(self.tokens) + len(self.drafts)


class Sampled(NamedTuple):
    """Sampled tokens of R rows."""

    tokens: Tensor  # int64 [R]
    finite: Tensor  # bool [R]; False where the logits had NaN or infinity, and the token is meaningless


class NoiseKeys(NamedTuple):
    """Keys of the noise of R rows, int64 [R] each."""

    seed: Tensor
    child: Tensor
    position: Tensor

    @classmethod
    def for_rows(cls, rows: Sequence[SampleRow], like: Tensor) -> NoiseKeys:
        return cls(
            _longs([_signed(row.params.seed) for row in rows], like),
            _longs([row.child for row in rows], like),
            _longs([row.position for row in rows], like),
        )

    def rows(self, rows: Sequence[int]) -> NoiseKeys:
        return NoiseKeys(self.seed[rows], self.child[rows], self.position[rows])


def sample(raw: Tensor, rows: Sequence[SampleRow]) -> Sampled:
    """Samples one token per row from float32 [R, vocab] logits, which stay unchanged."""
    finite = torch.isfinite(raw.sum(dim=-1))
    logits = _apply_penalties(raw, rows)
    drawn = [r for r, row in enumerate(rows) if not row.params.greedy]
    if len(drawn) == len(rows):
        tokens = _gumbel_max(logits, rows)
    else:
        tokens = logits.argmax(dim=-1)
        if drawn:
            tokens[drawn] = _gumbel_max(logits[drawn], [rows[r] for r in drawn])
    return Sampled(tokens, finite)


def token_probs(raw: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Returns the distribution that `sample` draws the token of each row from, float32 [R, vocab]."""
    logits = _apply_penalties(raw, rows)
    temperature = _floats([max(row.params.temperature, MIN_TEMPERATURE) for row in rows], logits)
    scaled = logits / temperature[:, None]
    cut = [r for r, row in enumerate(rows) if _truncates(row.params)]
    if cut:
        ordered = scaled[cut].sort(dim=-1, descending=True).values
        threshold, _ = _threshold(scaled[cut], ordered, [rows[r].params for r in cut])
        scaled[cut] = _cut(scaled[cut], threshold)
    probs = scaled.softmax(dim=-1)
    greedy = [r for r, row in enumerate(rows) if row.params.greedy]
    if greedy:
        best = logits[greedy].argmax(dim=-1, keepdim=True)
        probs[greedy] = torch.zeros_like(probs[greedy]).scatter_(1, best, 1.0)
    return probs


def token_logprobs(
    raw: Tensor, tokens: Tensor, num_top: int, masks: np.ndarray | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns log-probabilities of the tokens, and values and ids (None for 0) of the num_top most likely ones.

    `masks`, int32 [R, words], bound the most likely ones: tokens that a mask forbids have the value -inf.
    """
    logprobs = raw.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    if masks is not None:
        logprobs = logprobs.masked_fill_(_forbidden(masks, raw), NEG_INF)
    top = logprobs.topk(min(num_top, raw.shape[1]), dim=-1) if num_top else None
    return chosen, top and top.values, top and top.indices


def _forbidden(masks: np.ndarray, like: Tensor) -> Tensor:
    """Returns bool [R, vocab] of masks int32 [R, words]: True where a mask forbids the token."""
    bits = np.unpackbits(masks.view(np.uint8), axis=1, count=like.shape[1], bitorder="little")
    return torch.from_numpy(bits == 0).to(like.device)


def _apply_penalties(raw: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Applies penalties, bias, the ban of stop tokens before min_tokens, and masks, to a copy if there are any."""
    penalised = [r for r, row in enumerate(rows) if has_penalties(row.params)]
    biased = [r for r, row in enumerate(rows) if row.params.logit_bias]
    before_min_tokens = [r for r, row in enumerate(rows) if row.position - row.prompt_len < row.params.min_tokens]
    masked = [r for r, row in enumerate(rows) if row.allowed_mask is not None]
    if not (penalised or biased or before_min_tokens or masked):
        return raw
    logits = raw.clone()
    if penalised:
        logits[penalised] = _penalise(logits[penalised], [rows[r] for r in penalised])
    if biased:
        biases = [(r, token, bias) for r in biased for token, bias in rows[r].params.logit_bias]
        indices = (_longs([r for r, _, _ in biases], raw), _longs([t for _, t, _ in biases], raw))
        logits.index_put_(indices, _floats([b for _, _, b in biases], raw), accumulate=True)
    if before_min_tokens:
        stops = [(r, token) for r in before_min_tokens for token in rows[r].params.stop_token_ids]
        logits[_longs([r for r, _ in stops], raw), _longs([t for _, t in stops], raw)] = NEG_INF
    if masked:
        words = np.stack([rows[r].allowed_mask for r in masked])  # type: ignore[misc]
        forbidden = _forbidden(words, raw)
        if len(masked) == len(rows):
            logits.masked_fill_(forbidden, NEG_INF)
        else:
            logits[masked] = logits[masked].masked_fill_(forbidden, NEG_INF)
    return logits


def has_penalties(params: SamplingParams) -> bool:
    """Returns whether the logits depend on the tokens so far."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _penalise(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Applies the repetition penalty (Keskar et al. 2019) to prompt and output, the other two to the output."""
    seen = _counts(logits, [[*row.tokens, *row.drafts] for row in rows]) > 0
    repetition = _floats([row.params.repetition_penalty for row in rows], logits)[:, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    counts = _counts(logits, [[*row.tokens[row.prompt_len :], *row.drafts] for row in rows])
    presence = _floats([row.params.presence_penalty for row in rows], logits)[:, None]
    frequency = _floats([row.params.frequency_penalty for row in rows], logits)[:, None]
    return logits - frequency * counts - presence * (counts > 0)


def _counts(logits: Tensor, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Returns the occurrences of each token, float32 [R, vocab]."""
    counts = torch.zeros_like(logits)
    row_of = torch.repeat_interleave(torch.tensor([len(t) for t in tokens])).to(logits.device)
    flat = _longs([token for row in tokens for token in row], logits)
    counts.index_put_((row_of, flat), torch.ones((), device=logits.device), accumulate=True)
    return counts


def _gumbel_max(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Samples rows with temperature > 0 by Gumbel-max."""
    noise = NoiseKeys.for_rows(rows, logits)
    temperature = _floats([max(row.params.temperature, MIN_TEMPERATURE) for row in rows], logits)
    logits = logits / temperature[:, None]
    cut = [r for r, row in enumerate(rows) if _truncates(row.params)]
    if not cut:
        return (logits + gumbel(*noise, logits.shape[1])).argmax(dim=-1)
    params = [rows[r].params for r in cut]
    if len(cut) == len(rows):
        return _draw_cut(logits, params, noise)
    cut_set = set(cut)
    whole = [r for r in range(len(rows)) if r not in cut_set]
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    tokens[whole] = (logits[whole] + gumbel(*noise.rows(whole), logits.shape[1])).argmax(dim=-1)
    tokens[cut] = _draw_cut(logits[cut], params, noise.rows(cut))
    return tokens


def _draw_cut(logits: Tensor, params: Sequence[SamplingParams], noise: NoiseKeys) -> Tensor:
    """Samples rows with top-k, top-p or min-p. Noise is computed only for the few tokens that remain."""
    vocab = logits.shape[1]
    values, indices = logits.topk(min(CANDIDATES, vocab), dim=-1)
    threshold, complete = _threshold(logits, values, params)
    tokens = _draw_among(values, indices, threshold, noise)
    wide = [] if values.shape[1] == vocab else (~complete).nonzero().squeeze(1).tolist()
    if wide:
        values, indices = logits[wide].sort(dim=-1, descending=True)
        threshold, _ = _threshold(logits[wide], values, [params[r] for r in wide])
        tokens[wide] = _draw_among(values, indices, threshold, noise.rows(wide))
    return tokens


def _draw_among(values: Tensor, indices: Tensor, threshold: Tensor, noise: NoiseKeys) -> Tensor:
    """Samples by Gumbel-max among the candidates [R, K], descending by value, at or above the threshold of the row."""
    kept = max(int((values >= threshold).sum(dim=-1).max()), 1)
    values, indices = values[:, :kept], indices[:, :kept]
    best = (_cut(values, threshold) + gumbel_at(*noise, indices)).argmax(dim=-1)
    return indices.gather(1, best[:, None]).squeeze(1)


def _truncates(params: SamplingParams) -> bool:
    """Returns whether the request uses top-k, top-p or min-p."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _cut(values: Tensor, threshold: Tensor) -> Tensor:
    return values.masked_fill(values < threshold, NEG_INF)


def _threshold(logits: Tensor, ordered: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Returns the smallest logit that stays, [R, 1], and whether no token outside `ordered` can reach it, bool [R].

    `ordered` has the largest logits of each row, descending; possibly not all.
    """
    size, vocab = ordered.shape[1], logits.shape[1]
    ks = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    k = _longs(ks, logits)[:, None]
    # top-k: the k-th value. If k is beyond `ordered`, all of `ordered` stays.
    kth = ordered.gather(1, (k - 1).clamp(max=size - 1))
    threshold = torch.where(k <= size, kth, NEG_INF)
    if any(p.top_p < 1.0 for p in params):
        # top-p (Holtzman et al. 2020) after top-k: the fewest tokens with a total probability of at least p.
        top_p = _floats([p.top_p for p in params], logits)[:, None]
        kept = _cut(ordered, threshold)
        total_mass = torch.where(k <= size, kept.logsumexp(-1, keepdim=True), logits.logsumexp(-1, keepdim=True))
        mass = (kept - total_mass).exp()
        before = mass.cumsum(dim=-1) - mass
        inside = (before < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
        nucleus = ordered.gather(1, inside - 1)
        reaches = (inside < size) | (k <= size)
        threshold = torch.where((top_p < 1.0) & reaches, torch.maximum(threshold, nucleus), threshold)
    if any(p.min_p > 0.0 for p in params):
        # min-p (Nguyen et al. 2024): at least min_p times the probability of the most likely token.
        min_p = _floats([p.min_p for p in params], logits)[:, None]
        threshold = torch.maximum(threshold, ordered[:, :1] + min_p.log())
    complete = ordered[:, -1:] < threshold
    return threshold, (complete | (size == vocab)).squeeze(1)


def _signed(seed: int) -> int:
    """Returns the int64 with the bits of an unsigned 64-bit seed."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def _longs(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def _floats(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Returns the four output words as int64 tensors of 32-bit words. Counter and key words broadcast.

    Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011) in int64 arithmetic.

        key        seed of the request: low word, high word
        counter    vocabulary index // 4, position, child, stream
        output     four words; word `index % 4` belongs to vocabulary index `index`

    Stream 0 draws the tokens. A kernel that follows this layout gives the same bits.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The products wrap in int64, but their low and high words are correct.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c2 = (p1 >> 32).bitwise_and_(_WORD) ^ (c1 ^ k0), (p0 >> 32).bitwise_and_(_WORD) ^ (c3 ^ k1)
        c1, c3 = p1.bitwise_and_(_WORD), p0.bitwise_and_(_WORD)
        k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
    return c0, c1, c2, c3


def _words(seed: Tensor, child: Tensor, position: Tensor, group: Tensor, stream: int = 0) -> Tensor:
    """Returns the output words, int64 [R, G, 4], for counter words `group` [R or 1, G]."""
    counter = (group, position[:, None], child[:, None], torch.full_like(position, stream)[:, None])
    key = ((seed & _WORD)[:, None], ((seed >> 32) & _WORD)[:, None])
    return torch.stack(philox(counter, key), dim=-1)


def _gumbel(word: Tensor) -> Tensor:
    """Returns standard Gumbel noise from 32-bit words."""
    uniform = (word.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.clamp_(max=_LARGEST)))


def uniform(seed: Tensor, child: Tensor, position: Tensor, *, stream: int) -> Tensor:
    """Returns one number in [0, 1) per row, float32 [R]."""
    words = _words(seed, child, position, torch.zeros(1, 1, dtype=torch.int64, device=seed.device), stream)
    return (words[:, 0, 0] >> 8).to(torch.float32) * 2.0**-24


def gumbel(seed: Tensor, child: Tensor, position: Tensor, vocab_size: int, *, stream: int = 0) -> Tensor:
    """Returns standard Gumbel noise, float32 [R, vocab_size], for int64 [R] seeds, children and positions."""
    group = torch.arange(-(-vocab_size // 4), device=seed.device)[None]
    return _gumbel(_words(seed, child, position, group, stream).flatten(1)[:, :vocab_size])


def gumbel_at(seed: Tensor, child: Tensor, position: Tensor, index: Tensor) -> Tensor:
    """Returns `gumbel(...).gather(1, index)` for vocabulary indices [R, K]; computes no other noise."""
    words = _words(seed, child, position, index // 4)
    return _gumbel(words.gather(2, (index % 4)[..., None]).squeeze(2))
