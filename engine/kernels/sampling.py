"""Sampling without a sort, inside a captured graph: penalties, bias, temperature, top-k, top-p, min-p, Gumbel-max.

Two launches. The first shapes the logits tile by tile, adds noise and keeps each tile's best. The second takes a
row's best token, and if the row cuts its distribution, asks whether that token survives: how many tokens are
likelier, and what mass they have. If it does not, no token at or below its logit survives either (all three cuts are
thresholds on the logit), so the best of the tokens above it is asked next. A token that is accepted has the best
score of all survivors, because it has the best score of a superset: the result is exactly that of sorting. Each
refusal halves what is left, on average (the rejection of FlashInfer, Ye et al. 2025, with the noise fixed instead of
redrawn). top-k with top-p needs the mass of the top k first: the k-th logit is found by bisection.

Noise is Philox4x32-10 with the words of `engine/philox.py`, bit for bit; its logarithms may differ in the last bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TILE = 2048
SCAN = 8192
IN_PROMPT = 1 << 30  # bit of a count: the token occurs in the prompt
MIN_TEMPERATURE = 1e-5

TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, NUM_FLOATS = range(7)
TOP_K, SEED, CHILD, POSITION, COUNT_ROW, NUM_INTS = range(6)


@dataclass(frozen=True)
class SamplingTensors:
    """Parameters of R rows on the device.

    floats: fp32 [R, 6], temperature (0: greedy), top_p, min_p, repetition, presence, frequency penalty; ints: int64
    [R, 5], top_k (0: off), seed, child, position, row of `counts` (-1: no penalties). counts: int32 [N, vocab],
    occurrences in the output, plus IN_PROMPT. Bias: tokens and values (-inf bans) of row r at
    bias_ends[r]..bias_ends[r + 1], int32 and fp32.
    """

    floats: torch.Tensor
    ints: torch.Tensor
    counts: torch.Tensor
    bias_ends: torch.Tensor
    bias_tokens: torch.Tensor
    bias_values: torch.Tensor


@triton.jit
def _gumbel(word):
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    # -log1p(-u); the series where 1 - u would lose the bits that decide the largest noise
    u = uniform
    series = u * (1 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * (0.2 + u * (0.16666667 + u * 0.14285715))))))
    return -tl.log(tl.where(u < 0.06, series, -tl.log(1.0 - u)))


@triton.jit
def _noise(seed, child, position, first, BV: tl.constexpr):
    """Gumbel noise at vocabulary indices first .. first + BV; first is a multiple of 4."""
    group = (first // 4 + tl.arange(0, BV // 4)).to(tl.uint32)
    zero = group * 0
    w0, w1, w2, w3 = tl.philox(
        seed, group, zero + position.to(tl.uint32), zero + child.to(tl.uint32), zero, n_rounds=10
    )
    return _gumbel(tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BV))


@triton.jit
def _cuts(floats, ints, vocab):
    k = tl.load(ints)
    k = tl.where((k > 0) & (k < vocab), k, vocab).to(tl.int32)
    return k, tl.load(floats + 1), tl.load(floats + 2)


@triton.jit
def _score_kernel(
    logits, floats, ints, counts, bias_ends, bias_tokens, bias_values, shaped, scores, best_score, best_token,
    best_logit,
    tile_max, tile_sum, tile_finite, logits_row, counts_row, vocab, num_tiles,
    BV: tl.constexpr, NF: tl.constexpr, NI: tl.constexpr, PROMPT: tl.constexpr, MIN_T: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    floats += row * NF
    ints += row * NI
    first = tile * BV
    i = first + tl.arange(0, BV)
    ok = i < vocab
    x = tl.load(logits + row * logits_row + i, mask=ok, other=0.0).to(tl.float32)
    finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), 0)

    slot = tl.load(ints + 4)
    if slot >= 0:
        count = tl.load(counts + slot * counts_row + i, mask=ok, other=0)
        repetition = tl.load(floats + 3)
        x = tl.where(count > 0, tl.where(x > 0, x / repetition, x * repetition), x)
        said = count & (PROMPT - 1)
        x -= tl.load(floats + 5) * said.to(tl.float32) + tl.where(said > 0, tl.load(floats + 4), 0.0)
    for j in range(tl.load(bias_ends + row), tl.load(bias_ends + row + 1)):
        x += tl.where(i == tl.load(bias_tokens + j), tl.load(bias_values + j), 0.0)

    temperature = tl.load(floats)
    drawn = temperature > 0
    if drawn:
        x = x / tl.maximum(temperature, MIN_T)
    x = tl.where(ok, x, -float("inf"))
    score = x
    if drawn:
        score = x + _noise(tl.load(ints + 1), tl.load(ints + 2), tl.load(ints + 3), first, BV)

    top = tl.max(x, 0)
    at = row * num_tiles + tile
    best, where = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_score + at, best)
    tl.store(best_token + at, first + where)
    tl.store(best_logit + at, tl.max(tl.where(i == first + where, x, -float("inf")), 0))
    tl.store(tile_max + at, top)
    tl.store(tile_sum + at, tl.sum(tl.exp(x - tl.where(top == -float("inf"), 0.0, top)), 0))
    tl.store(tile_finite + at, finite)
    k, top_p, min_p = _cuts(floats, ints, vocab)
    if drawn & ((k < vocab) | (top_p < 1.0) | (min_p > 0.0)):
        tl.store(shaped + row * vocab + i, x, mask=ok)
        tl.store(scores + row * vocab + i, score, mask=ok)


@triton.jit
def _mass_from(shaped, vocab, top, threshold, SCAN: tl.constexpr):
    """Number of logits at or above the threshold, and their mass relative to the largest logit."""
    count = tl.zeros([SCAN], tl.int32)
    mass = tl.zeros([SCAN], tl.float32)
    for first in range(0, vocab, SCAN):
        i = first + tl.arange(0, SCAN)
        x = tl.load(shaped + i, mask=i < vocab, other=-float("inf"))
        inside = x >= threshold
        count += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp(x - top), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _pick_kernel(
    floats, ints, shaped, scores, best_score, best_token, best_logit, tile_max, tile_sum, tile_finite, tokens, finite,
    vocab, num_tiles, TILES: tl.constexpr, SCAN: tl.constexpr, NF: tl.constexpr, NI: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    floats += row * NF
    ints += row * NI
    shaped += row * vocab
    scores += row * vocab
    t = tl.arange(0, TILES)
    at = row * num_tiles + t
    ok = t < num_tiles
    tops = tl.load(tile_max + at, mask=ok, other=-float("inf"))
    top = tl.max(tops, 0)
    total = tl.sum(tl.load(tile_sum + at, mask=ok, other=0.0) * tl.exp(tops - top), 0)
    all_finite = tl.min(tl.load(tile_finite + at, mask=ok, other=1), 0)
    _, winner = tl.max(
        tl.load(best_score + at, mask=ok, other=-float("inf")), 0,
        return_indices=True, return_indices_tie_break_left=True,
    )  # fmt: skip
    token = tl.load(best_token + row * num_tiles + winner)
    logit = tl.load(best_logit + row * num_tiles + winner)

    k, top_p, min_p = _cuts(floats, ints, vocab)
    if (tl.load(floats) > 0) & (all_finite > 0) & ((k < vocab) | (top_p < 1.0) | (min_p > 0.0)):
        floor = tl.where(min_p > 0.0, top + tl.log(tl.maximum(min_p, 1e-30)), -float("inf"))
        if (k < vocab) & (top_p < 1.0):
            # Invariant: at least k logits are >= low, fewer than k are >= high.
            low = top - 64.0
            high = tl.where(top > 0, top * 1.0001 + 1e-30, top * 0.9999 + 1e-30)
            count, mass = _mass_from(shaped, vocab, top, low, SCAN)
            if count < k:
                high = low
                low = tl.full([], -3.0e38, tl.float32)
                count, mass = _mass_from(shaped, vocab, top, low, SCAN)
            total = mass
            middle = low + (high - low) * 0.5
            while (count != k) & (middle > low) & (middle < high):
                inside, part = _mass_from(shaped, vocab, top, middle, SCAN)
                if inside >= k:
                    low = middle
                    count = inside
                    total = part
                else:
                    high = middle
                middle = low + (high - low) * 0.5
        limit = tl.where(top_p < 1.0, top_p * total, float("inf"))

        accepted = tl.full([], 0, tl.int32)
        while accepted == 0:
            count = tl.zeros([SCAN], tl.int32)
            mass = tl.zeros([SCAN], tl.float32)
            best = tl.full([SCAN], -float("inf"), tl.float32)
            where = tl.zeros([SCAN], tl.int32)
            for first in range(0, vocab, SCAN):
                i = first + tl.arange(0, SCAN)
                x = tl.load(shaped + i, mask=i < vocab, other=-float("inf"))
                above = x > logit
                count += above.to(tl.int32)
                mass += tl.where(above, tl.exp(x - top), 0.0)
                score = tl.load(scores + i, mask=above, other=-float("inf"))
                better = score > best
                best = tl.where(better, score, best)
                where = tl.where(better, i, where)
            above_count = tl.sum(count, 0)
            inside = (logit >= floor) & (above_count < k) & (tl.sum(mass, 0) < limit)
            accepted = (inside | (above_count == 0)).to(tl.int32)
            if accepted == 0:
                leader = tl.max(best, 0)
                token = tl.min(tl.where(best == leader, where, vocab - 1), 0)
                logit = tl.load(shaped + token)
    tl.store(tokens + row, tl.minimum(token, vocab - 1).to(tl.int64))
    tl.store(finite + row, all_finite.to(tl.int8))


class Sampler:
    """Scratch of the two launches for up to max_rows rows; one per captured graph or stream that samples."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._tiles = triton.cdiv(vocab, TILE)
        self._shaped, self._scores = torch.empty(2, max_rows, vocab, dtype=torch.float32, device=device).unbind(0)
        self._partial = torch.empty(4, max_rows, self._tiles, dtype=torch.float32, device=device).unbind(0)
        self._partial_ints = torch.empty(2, max_rows, self._tiles, dtype=torch.int32, device=device).unbind(0)

    def sample(self, logits: torch.Tensor, params: SamplingTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """One token a row, int64 [R], and bool [R]: False where a logit was NaN or infinite and the token means
        nothing.

        logits: [R, vocab] of any float dtype, row stride free; not changed.
        """
        rows = logits.shape[0]
        assert logits.shape[1] == self._vocab
        assert logits.stride(1) == 1
        assert params.floats.shape == (rows, NUM_FLOATS)
        assert params.ints.shape == (rows, NUM_INTS)
        assert params.floats.is_contiguous()
        assert params.ints.is_contiguous()
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        finite = torch.empty(rows, dtype=torch.int8, device=logits.device)
        score, logit, top, total = self._partial
        token, tile_finite = self._partial_ints
        _score_kernel[(self._tiles, rows)](
            logits, params.floats, params.ints, params.counts, params.bias_ends, params.bias_tokens, params.bias_values,
            self._shaped, self._scores, score, token, logit, top, total, tile_finite,
            logits.stride(0), params.counts.stride(0), self._vocab, self._tiles,
            BV=TILE, NF=NUM_FLOATS, NI=NUM_INTS, PROMPT=IN_PROMPT, MIN_T=MIN_TEMPERATURE, num_warps=4,
        )  # fmt: skip
        scan = min(SCAN, triton.next_power_of_2(self._vocab))
        _pick_kernel[(rows,)](
            params.floats, params.ints, self._shaped, self._scores, score, token, logit, top, total, tile_finite,
            tokens, finite, self._vocab, self._tiles,
            TILES=triton.next_power_of_2(self._tiles), SCAN=scan, NF=NUM_FLOATS, NI=NUM_INTS,
            num_warps=scan // 256 or 1,
        )  # fmt: skip
        return tokens, finite.view(torch.bool)


@triton.jit
def _count_kernel(counts, rows, tokens, counts_row, n, ADD: tl.constexpr, PROMPT: tl.constexpr, BN: tl.constexpr):
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.load(rows + i, mask=i < n, other=-1).to(tl.int64)
    token = tl.load(tokens + i, mask=i < n, other=0)
    if ADD:
        tl.atomic_add(counts + row * counts_row + token, 1, mask=row >= 0)
    else:
        tl.atomic_or(counts + row * counts_row + token, PROMPT, mask=row >= 0)


def count_tokens(counts: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, *, prompt: bool) -> None:
    """Notes tokens[i] in counts[rows[i]] (row -1: skip), as part of the prompt or as one more of the output."""
    n = tokens.shape[0]
    if n:
        _count_kernel[(triton.cdiv(n, 128),)](
            counts, rows, tokens, counts.stride(0), n, ADD=not prompt, PROMPT=IN_PROMPT, BN=128, num_warps=4
        )
